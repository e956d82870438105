"""Step kernels: values against float64 arithmetic, gradients, precision contract, invariances and errors.

`backend` runs each property on the torch reference and on whatever `auto` picks for CPU tensors.
"""

import math

import pytest
import torch

from tpgrpo_fast import noise, ops
from tpgrpo_fast.transitions import concat, make

GRID = [1.0, 0.9, 0.75, 0.5, 0.2, 0.05, 0.0]
NOISY = [("sde", 0.7), ("cps", 0.8), ("dance", 0.3), ("dance_euler", 0.3)]
SHAPES = [(3,), (3, 7), (3, 5, 2), (3, 2, 3, 5), (3, 1, 2, 1, 3), (1, 1)]
CONVENTIONS = [
    ("sde", 0.7, "gaussian"),
    ("cps", 0.8, "gaussian"),
    ("cps", 0.8, "flow_grpo"),
    ("dance", 0.3, "gaussian"),
]
everywhere = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(params=["torch", "auto"])
def backend(request):
    return request.param


def randn(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(actual, expected, *, atol=2e-6, rtol=2e-6):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, check_dtype=False)


def row_mean(x):
    return x.reshape(len(x), -1).mean(1)


def batch(*shape, sde_type="sde", noise_level=0.7, step=2, dtype=torch.float32, convention=None):
    """A stored step: transition, velocity, state before and after."""
    transition = make(sde_type, GRID, step, noise_level, log_prob_convention=convention)
    velocity, sample = randn(*shape, seed=1, dtype=dtype), randn(*shape, seed=2, dtype=dtype)
    following = ops.sde_step(velocity, sample, transition, noise=randn(*shape, seed=3), backend="torch").next_sample
    return transition, velocity, sample, following


# --- sde_step against float64 ---------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(("sde_type", "noise_level"), NOISY)
def test_step_is_the_affine_map_and_its_score_the_gaussian_density(shape, sde_type, noise_level, backend):
    transition = make(sde_type, GRID, 2, noise_level, log_prob_convention="gaussian")
    velocity, sample, eps = (randn(*shape, seed=s) for s in (1, 2, 3))
    result = ops.sde_step(velocity, sample, transition, noise=eps, return_mean=True, backend=backend)
    mean = transition.a * sample.double() + transition.b * velocity.double()
    close(result.mean, mean)
    close(result.next_sample, mean + transition.c * eps.double())
    density = torch.distributions.Normal(mean, transition.c).log_prob(result.next_sample.double())
    close(result.log_prob, row_mean(density), atol=1e-5)
    assert result.next_sample.shape == shape
    assert result.log_prob.shape == shape[:1]
    assert result.log_prob.dtype == result.mean.dtype == torch.float32

    summed = ops.sde_step(velocity, sample, transition, noise=eps, log_prob="sum", backend=backend)
    close(summed.log_prob, density.reshape(shape[0], -1).sum(1), atol=1e-4)
    assert summed.mean is None


def test_flow_grpo_convention_of_cps_is_the_squared_error_alone(backend):
    transition, velocity, sample, following = batch(3, 4, 5, sde_type="cps", noise_level=0.8)
    mean = transition.a * sample.double() + transition.b * velocity.double()
    error = (following.double() - mean).square()
    close(ops.step_log_prob(velocity, sample, following, transition, backend=backend), -row_mean(error))
    summed = ops.step_log_prob(velocity, sample, following, transition, log_prob="sum", backend=backend)
    close(summed, -error.flatten(1).sum(1), atol=1e-5)


def test_the_gaussian_log_prob_is_a_normalized_density(backend):
    # One element a row, rows over a fine line of next states: the density integrates to 1.
    transition = make("sde", GRID, 2, 0.7)
    line = torch.linspace(-12, 12, 4001, dtype=torch.float64)[:, None]
    velocity, sample = torch.full_like(line, 0.4), torch.full_like(line, -0.3)
    score = ops.step_log_prob(velocity, sample, line, transition, backend=backend)
    density = score.exp()
    mean = transition.a * -0.3 + transition.b * 0.4
    assert torch.trapezoid(density, line[:, 0]).item() == pytest.approx(1.0, abs=1e-9)
    assert torch.trapezoid(density * line[:, 0], line[:, 0]).item() == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.5])
def test_guidance(scale, backend):
    transition, velocity, sample, following = batch(3, 4, 5)
    uncond = randn(3, 4, 5, seed=9)
    combined = uncond + scale * (velocity - uncond)
    kwargs = {"velocity_uncond": uncond, "guidance_scale": scale, "backend": backend}
    eps = randn(3, 4, 5, seed=3)
    guided = ops.sde_step(velocity, sample, transition, noise=eps, **kwargs)
    plain = ops.sde_step(combined, sample, transition, noise=eps, backend=backend)
    close(guided.next_sample, plain.next_sample)
    close(guided.log_prob, plain.log_prob)
    score = ops.step_log_prob(velocity, sample, following, transition, **kwargs)
    close(score, ops.step_log_prob(combined, sample, following, transition, backend=backend), atol=1e-5)
    # Without an unconditional velocity the scale has nothing to act on.
    alone = ops.step_log_prob(velocity, sample, following, transition, guidance_scale=scale, backend=backend)
    assert torch.equal(alone, ops.step_log_prob(velocity, sample, following, transition, backend=backend))


# --- precision contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("sde_type", "noise_level"), NOISY)
@pytest.mark.parametrize("step", [0, 2, 4])
def test_the_stored_state_is_what_is_scored_bit_for_bit(dtype, reduction, sde_type, noise_level, step, backend):
    transition = make(sde_type, GRID, step, noise_level)
    velocity, uncond, sample, eps = (randn(3, 4, 3, 5, seed=s, dtype=dtype) for s in (1, 9, 2, 3))
    kwargs = {"velocity_uncond": uncond, "guidance_scale": 4.5, "log_prob": reduction, "backend": backend}
    result = ops.sde_step(velocity, sample, transition, noise=eps, **kwargs)
    assert result.next_sample.dtype == dtype
    assert result.log_prob.dtype == torch.float32
    again = ops.step_log_prob(velocity, sample, result.next_sample, transition, **kwargs)
    assert torch.equal(again, result.log_prob)


def test_near_the_image_rounding_matters_and_is_scored(backend):
    # c = 0.02 next to states of size 1: bf16 rounds by up to 0.004, which the score has to see.
    transition = make("dance", [0.06, 0.05, 0.0], 0, 0.2)
    velocity, sample, eps = (randn(2, 4096, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3))
    result = ops.sde_step(velocity, sample, transition, noise=eps, return_mean=True, backend=backend)
    stored = torch.distributions.Normal(result.mean, transition.c).log_prob(result.next_sample.float()).mean(1)
    unrounded = torch.distributions.Normal(torch.zeros(2, 4096), 1.0).log_prob(eps.float()).mean(1) - math.log(
        transition.c
    )
    close(result.log_prob, stored, atol=1e-5)
    assert (result.log_prob - unrounded).abs().min() > 1e-3


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_out_dtype_is_the_storage_dtype(out_dtype, backend):
    transition, velocity, sample, _ = batch(3, 4, 5)
    eps = randn(3, 4, 5, seed=3)
    full = ops.sde_step(velocity, sample, transition, noise=eps, backend=backend)
    stored = ops.sde_step(velocity, sample, transition, noise=eps, out_dtype=out_dtype, backend=backend)
    assert torch.equal(stored.next_sample, full.next_sample.to(out_dtype))
    score = ops.step_log_prob(velocity, sample, stored.next_sample, transition, backend=backend)
    assert torch.equal(stored.log_prob, score)


def test_low_precision_inputs_are_computed_in_float32(backend):
    transition, velocity, sample, _ = batch(3, 64, dtype=torch.bfloat16)
    eps = randn(3, 64, seed=3)
    kwargs = {"noise": eps, "return_mean": True, "out_dtype": torch.float32, "backend": backend}
    low = ops.sde_step(velocity, sample, transition, **kwargs)
    full = ops.sde_step(velocity.float(), sample.float(), transition, **kwargs)
    for actual, expected in zip(low, full, strict=True):
        assert torch.equal(actual, expected)


@everywhere
def test_non_contiguous_inputs(shape, backend):
    def scattered(x):
        wide = torch.full((*x.shape, 2), math.nan)
        wide[..., 0] = x
        return wide[..., 0]

    transition, velocity, sample, following = batch(*shape)
    uncond, eps = randn(*shape, seed=9), randn(*shape, seed=3)
    kwargs = {"guidance_scale": 3.0, "backend": backend}
    plain = ops.sde_step(velocity, sample, transition, noise=eps, velocity_uncond=uncond, **kwargs)
    views = [scattered(x) for x in (velocity, sample, eps, uncond, following)]
    if math.prod(shape) > 1:
        assert not any(view.is_contiguous() for view in views)
    velocity_view, sample_view, eps_view, uncond_view, following_view = views
    strided = ops.sde_step(
        velocity_view, sample_view, transition, noise=eps_view, velocity_uncond=uncond_view, **kwargs
    )
    close(strided.next_sample, plain.next_sample, atol=0, rtol=0)
    close(strided.log_prob, plain.log_prob, atol=1e-6)
    score = ops.step_log_prob(velocity, sample, following, transition, backend=backend)
    close(ops.step_log_prob(velocity_view, sample_view, following_view, transition, backend=backend), score)


def test_inputs_stay_as_they_were(backend):
    transition, velocity, sample, following = batch(3, 4)
    uncond, eps, old, advantage = randn(3, 4, seed=9), randn(3, 4, seed=3), randn(3, seed=4), randn(3, seed=5)
    tensors = [velocity, sample, following, uncond, eps, old, advantage]
    copies = [x.clone() for x in tensors]
    ops.sde_step(velocity, sample, transition, noise=eps, velocity_uncond=uncond, guidance_scale=2.0, backend=backend)
    ops.grpo_loss(velocity, sample, following, transition, old, advantage, velocity_ref=uncond, backend=backend)
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))


# --- noise by counter -----------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("step", [5, torch.tensor(5)], ids=["int", "tensor"])
def test_noise_by_counter_equals_explicit_noise(shape, step, backend):
    transition, velocity, sample, _ = batch(*shape)
    uid = torch.tensor([7, 0, 12])[: shape[0]]
    eps = ops.philox_normal(shape, seed=3, iteration=8, row_uid=uid, step=5, backend=backend)
    explicit = ops.sde_step(velocity, sample, transition, noise=eps, backend=backend)
    for row_uid in (uid, uid.tolist()):
        counted = ops.sde_step(
            velocity, sample, transition, seed=3, iteration=8, row_uid=row_uid, step=step, backend=backend
        )
        close(counted.next_sample, explicit.next_sample)
        close(counted.log_prob, explicit.log_prob, atol=1e-5)
        if backend == "torch":
            assert torch.equal(counted.next_sample, explicit.next_sample)


def test_philox_normal_of_each_backend_is_the_reference_to_1e_6(backend):
    actual = ops.philox_normal((4, 1001), seed=1 << 40, iteration=8, row_uid=[7, 0, 12, 1], step=2, backend=backend)
    close(actual, noise.normal((4, 1001), seed=1 << 40, iteration=8, row_uid=[7, 0, 12, 1], step=2), atol=2e-6, rtol=0)


def test_a_row_does_not_depend_on_its_batch(backend):
    # Rows at several steps, ODE rows among them, in one launch and one by one: the same bits.
    steps = torch.tensor([0, 3, 1, 4])
    mixed = concat(
        [(make("sde", GRID, steps[:2], 0.7), 2), (make("ode", GRID, 1, 0.0), 1), (make("sde", GRID, 4, 0.7), 1)]
    )
    velocity, sample, uid = randn(4, 6, seed=1), randn(4, 6, seed=2), torch.tensor([9, 4, 1, 30])
    whole = ops.sde_step(velocity, sample, mixed, seed=5, iteration=2, row_uid=uid, step=steps, backend=backend)
    for row, step in enumerate(steps.tolist()):
        transition = make("ode" if row == 2 else "sde", GRID, step, 0.7)
        part = slice(row, row + 1)
        alone = ops.sde_step(
            velocity[part], sample[part], transition, seed=5, iteration=2, row_uid=uid[part], step=step, backend=backend
        )
        assert torch.equal(alone.next_sample, whole.next_sample[part])
        close(alone.log_prob, whole.log_prob[part])


# --- rows without noise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sde_type", "noise_level", "convention"), CONVENTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_rows_without_noise_score_exactly_zero(sde_type, noise_level, convention, reduction, backend):
    ode = make("ode", GRID, 3, 0.0)
    transition = concat([(make(sde_type, GRID, 2, noise_level, log_prob_convention=convention), 1), (ode, 2)])
    velocity = randn(3, 4, 5, seed=1).requires_grad_()
    sample, following = randn(3, 4, 5, seed=2), randn(3, 4, 5, seed=3)
    score = ops.step_log_prob(velocity, sample, following, transition, log_prob=reduction, backend=backend)
    assert score[1:].tolist() == [0.0, 0.0]
    assert score[0] != 0
    score.sum().backward()
    assert torch.isfinite(velocity.grad).all()
    assert not velocity.grad[1:].any()
    assert velocity.grad[0].all()


@pytest.mark.parametrize("kind", ["ode", "cps"])
def test_a_step_without_noise_needs_no_seed_and_is_its_mean(kind, backend):
    # cps has c = 0 in the last step, whatever its noise level.
    transition = make(kind, GRID, 5, 0.8)
    velocity, sample = randn(3, 4, 5, seed=1), randn(3, 4, 5, seed=2)
    result = ops.sde_step(velocity, sample, transition, return_mean=True, backend=backend)
    assert torch.equal(result.next_sample, result.mean)
    assert result.log_prob.tolist() == [0.0, 0.0, 0.0]
    if kind == "ode":
        close(result.next_sample, sample + (GRID[6] - GRID[5]) * velocity, atol=1e-7, rtol=1e-6)
    given = ops.sde_step(velocity, sample, transition, noise=torch.ones_like(sample), backend=backend)
    assert torch.equal(given.next_sample, result.next_sample)


def test_training_on_a_row_without_noise_is_refused(backend):
    transition = concat([(make("sde", GRID, 2, 0.7), 2), (make("ode", GRID, 2, 0.0), 1)])
    x = randn(3, 4)
    with pytest.raises(ValueError, match=r"row 2 .*c = 0"):
        ops.grpo_loss(x, x, x, transition, torch.zeros(3), torch.ones(3), backend=backend)
    with pytest.raises(ValueError, match=r"row 0 .*c = 0"):
        ops.grpo_loss(x, x, x, make("cps", GRID, 5, 0.8), torch.zeros(3), torch.ones(3), backend=backend)


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sde_type", "noise_level", "convention"), CONVENTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradcheck_of_the_log_prob(sde_type, noise_level, convention, reduction, backend):
    transition, velocity, sample, following = batch(
        2, 3, 2, sde_type=sde_type, noise_level=noise_level, convention=convention, dtype=torch.float64
    )

    def score(cond, uncond):
        return ops.step_log_prob(
            cond, sample, following, transition, velocity_uncond=uncond, guidance_scale=3.0, log_prob=reduction,
            backend=backend,
        )  # fmt: skip

    uncond = randn(2, 3, 2, seed=9, dtype=torch.float64)
    assert torch.autograd.gradcheck(score, (velocity.requires_grad_(), uncond.requires_grad_()))


@pytest.mark.parametrize(
    ("sde_type", "noise_level", "convention", "kl"),
    [(*case, kl) for case in CONVENTIONS for kl in ("gaussian", "flow_grpo")[: 1 if case[0] == "dance" else 2]],
)
@pytest.mark.parametrize("guided", [True, False])
def test_gradcheck_of_the_loss(sde_type, noise_level, convention, kl, guided, backend):
    transition, velocity, sample, following = batch(
        3, 2, 2, sde_type=sde_type, noise_level=noise_level, convention=convention, dtype=torch.float64
    )
    uncond, reference = (randn(3, 2, 2, seed=s, dtype=torch.float64) for s in (9, 10))
    extra = {"velocity_uncond": uncond, "guidance_scale": 1.5} if guided else {}
    # Ratios of about 0.8, 1 and 1.3 with a clip range of 0.1: beyond the range but, by the sign of its
    # advantage, not clipped; inside; clipped, so moved by the KL alone. No finite difference reaches a kink.
    old = ops.step_log_prob(velocity, sample, following, transition, **extra) - torch.tensor([0.8, 1.02, 1.3]).log()
    advantage, weight = torch.tensor([1.5, -0.7, 0.9]).double(), torch.tensor([0.5, 2.0, 1.0]).double()

    def loss(cond, unconditional):
        return ops.grpo_loss(
            cond, sample, following, transition, old, advantage, velocity_ref=reference, clip_range=0.1, beta=0.3,
            kl=kl, weight=weight, normalizer=5, backend=backend,
            **({"velocity_uncond": unconditional, "guidance_scale": 1.5} if guided else {}),
        ).loss  # fmt: skip

    assert torch.autograd.gradcheck(loss, (velocity.requires_grad_(), uncond.requires_grad_(guided)))


def test_at_ratio_one_the_gradient_is_the_policy_gradient(backend):
    transition, velocity, sample, following = batch(3, 4, 5)
    advantage = torch.tensor([1.0, -2.0, 0.5])
    velocity.requires_grad_()
    score = ops.step_log_prob(velocity, sample, following, transition, backend=backend)
    (expected,) = torch.autograd.grad(-(advantage * score).sum() / 3, velocity)
    result = ops.grpo_loss(velocity, sample, following, transition, score.detach(), advantage, backend=backend)
    (actual,) = torch.autograd.grad(result.loss, velocity)
    close(actual, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_come_in_the_dtype_of_the_velocity(dtype, backend):
    transition, velocity, sample, following = batch(3, 4, 5, dtype=dtype)
    uncond = randn(3, 4, 5, seed=9, dtype=dtype)
    gradients = []
    for cast in (dtype, torch.float32):
        leaves = [x.detach().to(cast, copy=True).requires_grad_() for x in (velocity, uncond)]
        score = ops.step_log_prob(
            leaves[0], sample, following, transition, velocity_uncond=leaves[1], guidance_scale=2.0, backend=backend
        )
        score.sum().backward()
        assert all(leaf.grad.dtype == cast for leaf in leaves)
        gradients.append([leaf.grad for leaf in leaves])
    for low, full in zip(*gradients, strict=True):
        close(low, full, rtol=1e-2, atol=1e-3)


# --- the loss -------------------------------------------------------------------------------------------------------


def loss_with_ratios(ratios, advantages, *, backend, shape=(4, 5), **kwargs):
    """The loss on rows whose probability ratios are given."""
    transition, velocity, sample, following = batch(len(ratios), *shape)
    velocity.requires_grad_()
    new = ops.step_log_prob(velocity, sample, following, transition, backend=backend).detach()
    old = new - torch.tensor(ratios).log()
    result = ops.grpo_loss(
        velocity, sample, following, transition, old, torch.tensor(advantages), backend=backend, **kwargs
    )
    return result, velocity


@pytest.mark.parametrize(("sde_type", "noise_level"), NOISY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_velocities_have_ratio_exactly_one(sde_type, noise_level, dtype, backend):
    transition = make(sde_type, GRID, 4, noise_level)
    velocity, uncond, sample, eps = (randn(5, 4, 3, 3, seed=s, dtype=dtype) for s in (1, 9, 2, 3))
    kwargs = {"velocity_uncond": uncond, "guidance_scale": 4.5, "backend": backend}
    step = ops.sde_step(velocity, sample, transition, noise=eps, **kwargs)
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    result = ops.grpo_loss(velocity, sample, step.next_sample, transition, step.log_prob, advantage, **kwargs)
    assert result.ratio.tolist() == [1.0] * 5
    assert result.clip_fraction.item() == 0.0
    assert result.loss.item() == pytest.approx(-advantage.mean().item(), abs=1e-6)
    assert result.loss.item() == result.policy_loss.item()
    assert result.kl.item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "moves"),
    [
        (1.05, 2.0, -2.1, True),  # inside the clip range
        (1.05, -2.0, 2.1, True),
        (1.5, 2.0, -2.0 * 1.1, False),  # a good sample is not pushed beyond 1 + clip_range
        (1.5, -2.0, 2.0 * 1.5, True),  # a bad one that became likelier still is pushed down
        (0.5, 2.0, -2.0 * 0.5, True),
        (0.5, -2.0, 2.0 * 0.9, False),
        (1.05, 7.0, -5.0 * 1.05, True),  # advantages are clamped to ±adv_clip
        (1.05, -7.0, 5.0 * 1.05, True),
        (0.5, 0.0, 0.0, False),
    ],
)
def test_surrogate_by_hand(ratio, advantage, surrogate, moves, backend):
    result, velocity = loss_with_ratios([ratio, 1.0], [advantage, 0.0], clip_range=0.1, adv_clip=5.0, backend=backend)
    assert result.policy_loss.item() == pytest.approx(surrogate / 2, rel=1e-5, abs=1e-7)
    result.loss.backward()
    assert bool(velocity.grad[0].any()) is moves
    assert not velocity.grad[1].any()
    close(result.ratio, torch.tensor([ratio, 1.0]), rtol=1e-5)


def test_a_gradient_step_moves_the_log_prob_along_the_advantage(backend):
    transition, velocity, sample, following = batch(2, 4, 5)
    velocity.requires_grad_()
    old = ops.step_log_prob(velocity, sample, following, transition, backend=backend).detach()
    ops.grpo_loss(
        velocity, sample, following, transition, old, torch.tensor([1.0, -1.0]), backend=backend
    ).loss.backward()
    moved = ops.step_log_prob((velocity - 0.1 * velocity.grad).detach(), sample, following, transition, backend=backend)
    assert moved[0] > old[0]
    assert moved[1] < old[1]


def test_clip_fraction_counts_rows_beyond_the_range(backend):
    result, _ = loss_with_ratios([0.8, 0.95, 1.0, 1.05, 1.2], [1.0] * 5, clip_range=0.1, backend=backend)
    assert result.clip_fraction.item() == pytest.approx(2 / 5)


def test_only_the_loss_carries_a_gradient(backend):
    result, _ = loss_with_ratios([1.0, 1.0], [1.0, -1.0], velocity_ref=randn(2, 4, 5), beta=0.1, backend=backend)
    assert result.loss.requires_grad
    assert result.loss.shape == result.policy_loss.shape == result.kl.shape == result.clip_fraction.shape == ()
    assert not any(x.requires_grad for x in (result.policy_loss, result.kl, result.ratio, result.clip_fraction))
    assert result.loss.item() == pytest.approx(result.policy_loss.item() + 0.1 * result.kl.item(), rel=1e-6)


@pytest.mark.parametrize(("sde_type", "noise_level"), NOISY)
def test_gaussian_kl_is_the_kl_of_the_two_steps(sde_type, noise_level, backend):
    transition, velocity, sample, following = batch(3, 4, 5, sde_type=sde_type, noise_level=noise_level)
    reference = randn(3, 4, 5, seed=10)
    result = ops.grpo_loss(
        velocity, sample, following, transition, torch.zeros(3), torch.zeros(3), velocity_ref=reference, beta=0.5,
        backend=backend,
    )  # fmt: skip
    means = [transition.a * sample.double() + transition.b * v.double() for v in (velocity, reference)]
    policies = [torch.distributions.Normal(mean, transition.c) for mean in means]
    expected = torch.distributions.kl_divergence(*policies).mean().item()
    assert result.kl.item() == pytest.approx(expected, rel=1e-5)
    assert result.loss.item() == pytest.approx(0.5 * expected, rel=1e-5)


def test_flow_grpo_kl_uses_the_std_without_dt(backend):
    for sde_type, noise_level in NOISY[:2]:
        transition, velocity, sample, following = batch(3, 4, 5, sde_type=sde_type, noise_level=noise_level)
        arguments = (velocity, sample, following, transition, torch.zeros(3), torch.zeros(3))
        kwargs = {"velocity_ref": randn(3, 4, 5, seed=10), "backend": backend}
        flow = ops.grpo_loss(*arguments, kl="flow_grpo", **kwargs).kl.item()
        gaussian = ops.grpo_loss(*arguments, kl="gaussian", **kwargs).kl.item()
        factor = GRID[2] - GRID[3] if sde_type == "sde" else 1.0
        assert flow == pytest.approx(gaussian * factor, rel=1e-5)


def test_kl_of_mixed_steps_uses_each_rows_variance(backend):
    steps = torch.tensor([0, 2, 4])
    velocity, sample, following, reference = (randn(3, 4, seed=s) for s in (1, 2, 3, 10))
    for kl in ("gaussian", "flow_grpo"):

        def kl_of(rows, transition, kl=kl):
            n = len(velocity[rows])
            return ops.grpo_loss(
                velocity[rows], sample[rows], following[rows], transition, torch.zeros(n), torch.zeros(n),
                velocity_ref=reference[rows], kl=kl, backend=backend,
            ).kl.item()  # fmt: skip

        singles = [kl_of(slice(i, i + 1), make("sde", GRID, int(s), 0.7)) for i, s in enumerate(steps)]
        assert kl_of(slice(None), make("sde", GRID, steps, 0.7)) == pytest.approx(sum(singles) / 3, rel=1e-5)


def test_kl_pulls_towards_the_reference_and_never_moves_it(backend):
    transition, velocity, sample, following = batch(3, 4)
    reference = randn(3, 4, seed=10).requires_grad_()
    velocity.requires_grad_()
    arguments = (sample, following, transition, torch.zeros(3), torch.zeros(3))
    ops.grpo_loss(velocity, *arguments, velocity_ref=reference, beta=1.0, backend=backend).loss.backward()
    assert reference.grad is None
    assert ((velocity - reference) * velocity.grad).sum() > 0
    nearer = ops.grpo_loss(velocity - 0.1 * velocity.grad, *arguments, velocity_ref=reference, backend=backend)
    assert nearer.kl < ops.grpo_loss(velocity, *arguments, velocity_ref=reference, backend=backend).kl
    at_reference = ops.grpo_loss(velocity, *arguments, velocity_ref=velocity, beta=1.0, backend=backend)
    assert at_reference.kl.item() == 0.0


def test_beta_zero_logs_the_kl_without_a_gradient(backend):
    transition, velocity, sample, following = batch(3, 4)
    velocity.requires_grad_()
    arguments = (velocity, sample, following, transition, torch.zeros(3), torch.zeros(3))
    result = ops.grpo_loss(*arguments, velocity_ref=randn(3, 4, seed=10), beta=0.0, backend=backend)
    assert result.kl.item() > 0
    result.loss.backward()
    assert not velocity.grad.any()


# --- weights, normalizer, micro-batches -----------------------------------------------------------------------------


def weighted_batch(count=7):
    steps = torch.arange(count) % 5
    transition = make("sde", GRID, steps, 0.7)
    velocity, sample, following, reference = (randn(count, 4, 3, seed=s) for s in (1, 2, 3, 10))
    old = ops.step_log_prob(velocity, sample, following, transition) - 0.2 * randn(count, seed=4)
    return steps, velocity, sample, following, reference, old, randn(count, seed=5), randn(count, seed=6).abs()


def weighted_loss(rows, normalizer, backend, *, weight=True):
    steps, velocity, sample, following, reference, old, advantage, weights = (x[rows] for x in weighted_batch())
    velocity.requires_grad_()
    result = ops.grpo_loss(
        velocity, sample, following, make("sde", GRID, steps, 0.7), old, advantage, velocity_ref=reference,
        clip_range=0.1, beta=0.3, weight=weights if weight else None, normalizer=normalizer, backend=backend,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(result.loss, velocity)
    return result, gradient


@pytest.mark.parametrize("weight", [True, False])
def test_micro_batches_with_one_normalizer_sum_to_the_whole(weight, backend):
    whole, gradient = weighted_loss(slice(None), None, backend, weight=weight)
    parts = [weighted_loss(rows, 7, backend, weight=weight) for rows in (slice(0, 3), slice(3, 3), slice(3, 7))]
    for name in ("loss", "policy_loss", "kl"):
        total = sum(getattr(part, name) for part, _ in parts)
        close(total.detach(), getattr(whole, name).detach())
    close(torch.cat([g for _, g in parts]), gradient)
    close(torch.cat([part.ratio for part, _ in parts]), whole.ratio)


def test_weight_multiplies_each_pair_and_a_zero_one_counts_in_the_mean(backend):
    transition, velocity, sample, following = batch(3, 4, 5)
    old = ops.step_log_prob(velocity, sample, following, transition, backend=backend)
    result = ops.grpo_loss(
        velocity, sample, following, transition, old, torch.tensor([1.0, 2.0, 4.0]),
        weight=torch.tensor([2.0, 0.0, 0.5]), backend=backend,
    )  # fmt: skip
    assert result.policy_loss.item() == pytest.approx(-(2.0 * 1.0 + 0.0 + 0.5 * 4.0) / 3, rel=1e-6)


def test_weight_multiplies_the_kl_too(backend):
    transition, velocity, sample, following = batch(3, 4, 5)
    weight, reference = torch.tensor([2.0, 0.0, 0.5]), randn(3, 4, 5, seed=10)
    result = ops.grpo_loss(
        velocity, sample, following, transition, torch.zeros(3), torch.zeros(3), velocity_ref=reference, beta=0.3,
        weight=weight, backend=backend,
    )  # fmt: skip
    per_row = row_mean((transition.b * (velocity - reference).double()).square()) / (2 * transition.c**2)
    assert result.kl.item() == pytest.approx((weight * per_row).sum().item() / 3, rel=1e-5)
    assert result.loss.item() == pytest.approx(0.3 * result.kl.item(), rel=1e-6)


def test_normalizer_lets_skipped_pairs_count(backend):
    whole, gradient = weighted_loss(slice(0, 3), None, backend)
    skipped, smaller = weighted_loss(slice(0, 3), 12, backend)
    close(skipped.loss.detach() * 4, whole.loss.detach())
    close(smaller * 4, gradient)


# --- shapes ---------------------------------------------------------------------------------------------------------


@everywhere
def test_the_trailing_shape_only_arranges_elements(shape, backend):
    transition, velocity, sample, following = batch(*shape)
    reference, eps = randn(*shape, seed=10), randn(*shape, seed=3)
    old, advantage = randn(shape[0], seed=4), randn(shape[0], seed=5)

    def everything(arrange):
        v = arrange(velocity).clone().requires_grad_()
        step = ops.sde_step(arrange(velocity), arrange(sample), transition, noise=arrange(eps), backend=backend)
        loss = ops.grpo_loss(
            v, arrange(sample), arrange(following), transition, old, advantage, velocity_ref=arrange(reference),
            clip_range=0.1, beta=0.3, backend=backend,
        )  # fmt: skip
        loss.loss.backward()
        assert step.next_sample.shape == v.grad.shape == arrange(velocity).shape
        return step.next_sample.flatten(), step.log_prob, loss.loss.detach(), loss.kl, loss.ratio, v.grad.flatten()

    for actual, expected in zip(everything(lambda x: x), everything(lambda x: x.reshape(shape[0], -1)), strict=True):
        close(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("trailing", [(), (7,), (2, 3, 5)])
def test_no_rows(trailing, backend):
    transition, empty, none = make("sde", GRID, 2, 0.7), torch.zeros(0, *trailing), torch.zeros(0)
    step = ops.sde_step(empty, empty, transition, seed=0, row_uid=[], backend=backend)
    assert step.next_sample.shape == (0, *trailing)
    assert step.log_prob.shape == (0,)
    assert ops.step_log_prob(empty, empty, empty, transition, backend=backend).shape == (0,)
    velocity = empty.clone().requires_grad_()
    for normalizer in (None, 5):
        result = ops.grpo_loss(
            velocity, empty, empty, transition, none, none, velocity_ref=empty, beta=0.1, normalizer=normalizer,
            backend=backend,
        )  # fmt: skip
        assert result.loss.item() == result.policy_loss.item() == result.kl.item() == result.clip_fraction.item() == 0.0
        assert result.ratio.shape == (0,)
        result.loss.backward()


def test_float64_stays_float64(backend):
    transition, velocity, sample, following = batch(3, 4, dtype=torch.float64)
    step = ops.sde_step(velocity, sample, transition, noise=randn(3, 4, seed=3, dtype=torch.float64), backend=backend)
    assert step.next_sample.dtype == step.log_prob.dtype == torch.float64
    mean = transition.a * sample + transition.b * velocity
    expected = torch.distributions.Normal(mean, transition.c).log_prob(following).mean(1)
    score = ops.step_log_prob(velocity, sample, following, transition, backend=backend)
    close(score, expected, atol=1e-12, rtol=1e-12)


# --- errors ---------------------------------------------------------------------------------------------------------

X = torch.zeros(3, 4)
ROWS = torch.zeros(3)
STEP = {"velocity": X, "sample": X, "transition": make("sde", GRID, 2, 0.7), "noise": X}
SCORE = {"velocity": X, "sample": X, "next_sample": X, "transition": STEP["transition"]}
LOSS = SCORE | {"old_log_prob": ROWS, "advantage": ROWS}
COUNTED = {k: v for k, v in STEP.items() if k != "noise"} | {"seed": 0, "row_uid": [0, 1, 2]}


def cases(*rows):
    return [pytest.param(op, good, bad, message, id=f"{op.__name__}-{message[:40]}") for op, good, bad, message in rows]


@pytest.mark.parametrize(
    ("op", "good", "bad", "message"),
    cases(
        *[
            (op, good, {name: value}, name)
            for op, good, names in (
                (ops.sde_step, STEP, ("velocity", "noise", "velocity_uncond")),
                (ops.step_log_prob, SCORE, ("velocity", "next_sample", "velocity_uncond")),
                (ops.grpo_loss, LOSS, ("velocity", "next_sample", "velocity_uncond", "velocity_ref")),
            )
            for name in names
            # Shapes that torch would broadcast in silence, one that it would not, another device, integers.
            for value in (X[:1], X[0], torch.zeros(3, 5), X.to("meta"), X.long())
        ],
        *[
            (op, good, {"sample": X.long()}, "sample")
            for op, good in ((ops.sde_step, STEP), (ops.step_log_prob, SCORE), (ops.grpo_loss, LOSS))
        ],
        *[
            (ops.grpo_loss, LOSS, {name: value}, name)
            for name in ("old_log_prob", "advantage", "weight")
            for value in (ROWS[:1], torch.zeros(3, 1), torch.zeros(4), torch.tensor(0.0))
        ],
        (ops.sde_step, STEP, {"transition": STEP["transition"].rows(2)}, "transition"),
        (ops.step_log_prob, SCORE, {"transition": STEP["transition"].rows(4)}, "transition"),
        (ops.grpo_loss, LOSS, {"transition": STEP["transition"].rows(4)}, "transition"),
        (ops.sde_step, STEP, {"out_dtype": torch.int32}, "out_dtype"),
        (ops.sde_step, STEP, {"noise": None}, "noise.*seed.*row_uid"),
        (ops.sde_step, COUNTED, {"seed": None}, "seed"),
        (ops.sde_step, COUNTED, {"row_uid": None}, "row_uid"),
        (ops.sde_step, COUNTED, {"row_uid": [0, 1]}, "row_uid"),
        (ops.sde_step, COUNTED, {"seed": -1}, "seed = -1"),
        (ops.sde_step, COUNTED, {"step": torch.zeros(5, dtype=torch.int64)}, "step"),
        (ops.sde_step, COUNTED, {"step": torch.zeros(2, dtype=torch.int64)}, "step"),
        (ops.sde_step, STEP, {"log_prob": "max"}, "log_prob = 'max'"),
        (ops.step_log_prob, SCORE, {"log_prob": "max"}, "log_prob = 'max'"),
        (ops.grpo_loss, LOSS, {"log_prob": "max"}, "log_prob = 'max'"),
        (ops.grpo_loss, LOSS, {"kl": "k3"}, "kl = 'k3'.*gaussian"),
        (ops.grpo_loss, LOSS, {"beta": 0.1}, "velocity_ref"),
        (
            ops.grpo_loss,
            LOSS,
            {"kl": "flow_grpo", "velocity_ref": X, "transition": make("dance", GRID, 2, 0.3)},
            "kl = 'flow_grpo'.*gaussian",
        ),
        (ops.sde_step, STEP, {"backend": "cuda"}, "backend = 'cuda'"),
        (ops.step_log_prob, SCORE, {"backend": "cuda"}, "backend = 'cuda'"),
        (ops.grpo_loss, LOSS, {"backend": "cuda"}, "backend = 'cuda'"),
    ),
)
def test_bad_arguments_are_named(op, good, bad, message):
    op(**good)
    with pytest.raises(ValueError, match=message):
        op(**good | bad)


def test_scalars_are_refused():
    scalar = torch.tensor(0.0)
    with pytest.raises(ValueError, match="row dimension"):
        ops.sde_step(scalar, scalar, STEP["transition"], noise=scalar)


def test_an_unknown_backend_of_philox_normal_is_named():
    with pytest.raises(ValueError, match="backend = 'cuda'"):
        ops.philox_normal((3, 4), seed=0, iteration=0, row_uid=[0, 1, 2], step=0, backend="cuda")


@pytest.mark.parametrize(("op", "good"), [(ops.sde_step, STEP), (ops.step_log_prob, SCORE), (ops.grpo_loss, LOSS)])
def test_triton_on_cpu_tensors_is_refused_by_name_unless_interpreted(op, good, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="backend = 'triton'"):
        op(**good, backend="triton")
