"""The C++ step kernels against float64: errors, rounding, padding, order of summation, recorded cases, bad arguments.

A kernel passes where its error is at most twice that of the torch reference in float32, plus a few roundings: on few
elements the reference may be exact by luck.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tpgrpo_fast import _cpp, ops, transitions

pytestmark = pytest.mark.skipif(not _cpp.available(), reason="the C++ library is not built here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ELEMENTS = [1, 3, 255, 256, 257, 4097, 9001]
SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.1, 0.0]
SEED, ITERATION = 0x9E3779B97F4A7C15, 11
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def _poisoned_outputs():
    """New tensors start as NaN, so that an element left unwritten fails its test."""
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(previous)


class Case:
    """Random inputs of three rows at different steps, and the arguments of the kernels made from them."""

    def __init__(self, dtype=torch.float32, elements=257, sde_type="sde", cfg=True, reduction="mean", steps=(0, 2, 3)):
        rows = len(steps)
        self.shape = (rows, elements)
        self.velocity, self.uncond, self.sample, self.ref = (torch.randn(self.shape).to(dtype) for _ in range(4))
        self.noise = torch.randn(self.shape)
        self.uncond = self.uncond if cfg else None
        self.scale = 3.5
        self.transition = transitions.make(sde_type, SIGMAS, torch.tensor(steps, dtype=torch.int64), 0.7)
        self.reduction = reduction
        self.uid, self.words = torch.arange(rows) + 2**31, torch.tensor(steps, dtype=torch.int64)
        self.a, self.b, self.c = (getattr(self.transition, name) for name in "abc")
        self.flags = (self.transition.unscaled_log_prob, reduction == "sum")
        mean = ops.sde_step(*self.reference(torch.float32), **self.keywords(torch.float32), noise=self.noise)
        self.next_sample = mean.next_sample.to(dtype)

    def reference(self, dtype):
        return self.velocity.to(dtype), self.sample.to(dtype), self.transition

    def keywords(self, dtype):
        uncond = None if self.uncond is None else self.uncond.to(dtype)
        return {
            "velocity_uncond": uncond, "guidance_scale": self.scale, "log_prob": self.reduction, "backend": "torch",
        }  # fmt: skip

    def step(self, noise, out_dtype=torch.float32, want_mean=True, b_ode=None, **options):
        return _cpp.sde_step(
            self.velocity, self.uncond, self.scale, self.sample, self.a, self.b, self.c, noise, SEED, ITERATION,
            self.uid, self.words, out_dtype, *self.flags, want_mean, b_ode, **options,
        )  # fmt: skip

    @property
    def scored(self):
        return (
            self.velocity, self.uncond, self.scale, self.sample, self.next_sample, self.a, self.b, self.c, *self.flags,
        )  # fmt: skip

    def log_prob(self, **options):
        return _cpp.step_log_prob_forward(*self.scored, **options)

    def loss(self, old_log_prob, advantage, weight, clip_range=0.2, with_ref=True, **options):
        inv = self.inv_two_var if with_ref else None
        return _cpp.grpo_loss_forward(
            *self.scored[:5], self.ref if with_ref else None, self.a, self.b, self.c, inv, old_log_prob, advantage,
            weight, clip_range, 5.0, *self.flags, **options,
        )  # fmt: skip

    def gradients(self, grad_log_prob, grad_kl, **options):
        return _cpp.grpo_loss_backward(
            grad_log_prob, grad_kl, *self.scored[:5], self.ref, self.a, self.b, self.c, self.inv_two_var, *self.flags,
            **options,
        )  # fmt: skip

    @property
    def inv_two_var(self):
        return 0.5 / self.transition.c**2


def check_error(actual, reference, truth, *, roundings=4.0):
    """At most twice the reference's largest error, plus some roundings of float32 at the largest value."""
    actual, reference = actual.double(), reference.double()
    assert not actual.isnan().any()
    allowed = 2 * (reference - truth).abs().amax() + roundings * 2.0**-24 * truth.abs().amax()
    error = (actual - truth).abs()
    worst = int(error.argmax())
    assert error.amax() <= allowed, (
        f"worst index {worst}: {actual.flatten()[worst]} instead of {truth.flatten()[worst]}, error {error.amax():.3g} "
        f"> {allowed:.3g}; {100 * (error > allowed).double().mean():.1f} % of the elements are off"
    )


@pytest.fixture(params=["mean", "sum"])
def reduction(request):
    return request.param


@pytest.mark.parametrize("cfg", [True, False])
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance"])
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sde_step_against_float64(dtype, elements, sde_type, cfg, reduction):
    case = Case(dtype, elements, sde_type, cfg, reduction)
    next_sample, log_prob, mean, ode_first = case.step(case.noise, out_dtype=dtype, b_ode=case.b * 0.5)
    truth = ops.sde_step(
        *case.reference(torch.float64), **case.keywords(torch.float64), noise=case.noise, return_mean=True
    )
    reference = ops.sde_step(*case.reference(dtype), **case.keywords(dtype), noise=case.noise, return_mean=True)
    assert next_sample.dtype == dtype
    check_error(mean, reference.mean, truth.mean)
    check_error(next_sample, reference.next_sample, truth.next_sample)
    # What is scored is the state as stored, so the truth of the log-prob starts from there.
    scored = [
        ops.step_log_prob(*case.reference(d)[:2], next_sample.to(d), case.transition, **case.keywords(d)).double()
        for d in (torch.float32, torch.float64)
    ]
    check_error(log_prob, *scored, roundings=8)
    v = case.velocity.double()
    v = v if case.uncond is None else case.uncond.double() + case.scale * (v - case.uncond.double())
    exact = case.sample.double() + 0.5 * case.b.double()[:, None] * v
    check_error(ode_first, exact.float().to(dtype), exact)


@pytest.mark.parametrize("isa", _cpp.ISA_NAMES)
@pytest.mark.parametrize("elements", ELEMENTS)
def test_drawn_noise_is_philox_normal(elements, isa):
    case = Case(elements=elements)
    noise = torch.empty(case.shape)
    _cpp.philox_normal(noise, SEED, case.uid, ITERATION, case.words, max_isa=isa)
    drawn, given = case.step(None, max_isa=isa), case.step(noise, max_isa=isa)
    assert torch.equal(drawn[0], given[0])
    assert torch.equal(drawn[1], given[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_noise(dtype):
    case = Case(dtype, elements=300, sde_type="cps", steps=(1, 4, 2))  # c = 0 in the last step
    noise = case.noise.clone()
    noise[1] = torch.nan
    next_sample, log_prob, mean, _ = case.step(noise, out_dtype=dtype)
    assert torch.equal(next_sample[1], mean[1].to(dtype))
    assert log_prob[1] == 0
    assert log_prob[[0, 2]].ne(0).all()
    assert not next_sample.isnan().any()
    case.next_sample = next_sample
    assert case.log_prob()[1] == 0
    grad, grad_uncond = _cpp.step_log_prob_backward(torch.ones(3), *case.scored)
    assert grad[1].eq(0).all()
    assert grad_uncond[1].eq(0).all()
    assert grad[[0, 2]].ne(0).any(dim=1).all()


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_the_first_rows_start_ode_completions(rows):
    case = Case(torch.bfloat16)
    some, every = case.step(case.noise, b_ode=case.b[:rows])[3], case.step(case.noise, b_ode=case.b)[3]
    assert some.shape == (rows, 257)
    assert torch.equal(some, every[:rows])


def test_ode_rows_need_no_counters():
    case = Case(sde_type="ode")
    drawn = _cpp.sde_step(
        *case.scored[:4], case.a, case.b, case.c, None, 0, 0, None, None, torch.float32, False, False
    )  # fmt: skip
    assert torch.equal(drawn[0], case.step(None)[2])
    assert drawn[2] is None
    assert drawn[3] is None


@pytest.mark.parametrize("cfg", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_replay_scores_the_stored_state_to_the_last_bit(dtype, cfg, reduction):
    case = Case(dtype, 9001, cfg=cfg, reduction=reduction)
    case.next_sample, log_prob, _, _ = case.step(None, out_dtype=dtype)
    assert torch.equal(case.log_prob(), log_prob)
    ratio, policy, _, grad = case.loss(log_prob, torch.tensor([1.0, -2.0, 7.0]), torch.tensor([1.0, 0.5, 1.0]), 1e-4)
    assert torch.equal(ratio, torch.ones(3))
    assert policy.tolist() == grad.tolist() == [-1.0, 1.0, -5.0]  # the advantage 7 is clipped to 5


@pytest.mark.parametrize("cfg", [True, False])
@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_prob_gradient_against_float64(dtype, elements, cfg, reduction):
    for sde_type in ("sde", "cps"):
        case = Case(dtype, elements, sde_type, cfg, reduction)
        upstream = torch.tensor([1.0, -0.5, 3.0])
        truth, reference = ([], [])
        for precision, grads in ((torch.float64, truth), (torch.float32, reference)):
            keywords = case.keywords(precision)
            leaves = [t.to(precision).requires_grad_() for t in (case.velocity, case.uncond) if t is not None]
            if cfg:
                keywords["velocity_uncond"] = leaves[1]
            score = ops.step_log_prob(
                leaves[0], case.sample.to(precision), case.next_sample.to(precision), case.transition, **keywords
            )
            grads += torch.autograd.grad(score, leaves, upstream.to(precision))
        actual = _cpp.step_log_prob_backward(upstream, *case.scored)
        assert (actual[1] is None) == (not cfg)
        for got, ref, exact in zip(actual, reference, truth, strict=False):
            assert got.dtype == dtype
            for row in range(3):  # rows at different steps have gradients of different size
                check_error(got[row], ref[row].to(dtype), exact[row], roundings=32)


@pytest.mark.parametrize("elements", [3, 257, 9001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_and_its_gradient_against_float64(dtype, elements, reduction):
    case = Case(dtype, elements, reduction=reduction)
    # Ratios below, inside and above the clip range.
    old = case.log_prob() + torch.tensor([0.5, 0.01, -0.4])
    advantage, weight, beta = torch.tensor([1.5, -0.7, -9.0]), torch.tensor([1.0, 0.25, 2.0]), 0.3
    ratio, policy, kl, grad_log_prob = case.loss(old, advantage, weight)

    def autograd(precision):
        leaves = [t.to(precision).requires_grad_() for t in (case.velocity, case.uncond)]
        results = [
            ops.grpo_loss(
                leaves[0][row : row + 1],
                case.sample[row : row + 1].to(precision),
                case.next_sample[row : row + 1].to(precision),
                transitions.make("sde", SIGMAS, int(case.words[row]), 0.7),
                old[row : row + 1].to(precision),
                advantage[row : row + 1].to(precision),
                weight=weight[row : row + 1].to(precision),
                velocity_ref=case.ref[row : row + 1].to(precision),
                clip_range=0.2,
                beta=beta,
                **case.keywords(precision) | {"velocity_uncond": leaves[1][row : row + 1]},
            )
            for row in range(3)
        ]
        grads = torch.autograd.grad(sum(r.loss for r in results), leaves)
        return [torch.stack([getattr(r, n) for r in results]).flatten() for n in ("ratio", "policy_loss", "kl")], grads

    truth, reference = autograd(torch.float64), autograd(torch.float32)
    # exp turns one rounding of a log-prob of size L into L roundings of the ratio.
    roundings = 32 + 2 * case.log_prob().abs().max().item()
    for got, ref, exact in zip((ratio, policy, kl), reference[0], truth[0], strict=True):
        check_error(got, ref, exact, roundings=roundings)
    assert grad_log_prob.ne(0).tolist() == [True, True, True]
    grads = case.gradients(grad_log_prob, beta * weight)
    for got, ref, exact in zip(grads, reference[1], truth[1], strict=True):
        assert got.dtype == dtype
        for row in range(3):
            check_error(got[row], ref[row].to(dtype), exact[row], roundings=roundings)


def test_clipped_rows_have_no_policy_gradient():
    case = Case()
    old = case.log_prob() - torch.tensor([0.5, 0.5, -0.5])
    ratio, policy, kl, grad = case.loss(
        old, torch.tensor([2.0, -2.0, -2.0]), torch.ones(3), clip_range=0.1, with_ref=False
    )
    assert (ratio > 1.1).tolist() == [True, True, False]
    assert policy.tolist() == pytest.approx([-2.2, 2 * ratio[1].item(), 1.8], rel=1e-6)
    assert grad.tolist() == pytest.approx([0.0, 2 * ratio[1].item(), 0.0], rel=1e-6)
    assert kl.tolist() == [0.0, 0.0, 0.0]
    velocity_grad, _ = _cpp.step_log_prob_backward(grad, *case.scored)
    assert velocity_grad.ne(0).any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_batch_do_not_change_a_bit(dtype):
    case = Case(dtype, 100_003)
    results = []
    for threads in (1, 2, 5):
        step = case.step(None, out_dtype=dtype, b_ode=case.b, num_threads=threads)
        loss = case.loss(torch.zeros(3), torch.ones(3), torch.ones(3), num_threads=threads)
        grads = case.gradients(torch.ones(3), torch.ones(3), num_threads=threads)
        results.append([*step, case.log_prob(num_threads=threads), *loss, *grads])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)
    for name in ("velocity", "uncond", "sample", "a", "b", "c", "uid", "words", "noise"):
        setattr(case, name, getattr(case, name)[1:2])
    case.shape = (1, 100_003)
    alone = case.step(None, out_dtype=dtype)
    for one, two in zip(alone[:3], results[0][:3], strict=True):
        assert torch.equal(one[0], two[1])


@pytest.mark.parametrize("isa", _cpp.ISA_NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree(dtype, isa):
    case = Case(dtype, 9001)
    best, other = (case.step(case.noise, b_ode=case.b, **o) for o in ({}, {"max_isa": isa}))
    for one, two in zip(best, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=4e-6)
    for one, two in zip(
        case.gradients(torch.ones(3), torch.ones(3)),
        case.gradients(torch.ones(3), torch.ones(3), max_isa=isa),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def copy_through_step(x, out_dtype, isa):
    """x as the state of a step that changes nothing."""
    one, zero = torch.ones(len(x)), torch.zeros(len(x))
    still = torch.zeros_like(x)
    return _cpp.sde_step(
        still, None, 1.0, x, one, zero, zero, None, 0, 0, None, None, out_dtype, False, False, max_isa=isa
    )[0]  # fmt: skip


@pytest.mark.parametrize("isa", _cpp.ISA_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_right(dtype, isa):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(1, -1)
    torch.testing.assert_close(copy_through_step(x, torch.float32, isa), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", _cpp.ISA_NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_that_of_torch(dtype, isa):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    finite = numbers[numbers.isfinite()].sort().values
    halfway = (finite[1:].double() + finite[:-1].double()).div(2).float()
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    beside = [torch.nextafter(halfway, torch.tensor(direction)) for direction in (-torch.inf, torch.inf)]
    extreme = torch.tensor([65504.0, 65519.996, 65520.0, 3.4e38, 2.0**-24, 2.0**-25, 1e-45, torch.inf, torch.nan])
    x = torch.cat([halfway, *beside, bits, extreme, -extreme]).reshape(1, -1)
    torch.testing.assert_close(copy_through_step(x, dtype, isa), x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_extreme_values_end_as_in_torch():
    huge, tiny = 3e38, 1e-42
    for value in (huge, -huge, tiny, torch.inf, torch.nan):
        case = Case(elements=300)
        case.velocity[1, 7] = value
        noise = case.noise
        actual = case.step(noise)
        expected = ops.sde_step(
            *case.reference(torch.float32), **case.keywords(torch.float32), noise=noise, return_mean=True
        )
        for one, two in zip(actual, (expected.next_sample, expected.log_prob, expected.mean), strict=False):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, equal_nan=True)
        score = ops.step_log_prob(
            *case.reference(torch.float32)[:2], case.next_sample, case.transition, **case.keywords(torch.float32)
        )
        expected_ratio = score.exp()
        expected_policy = torch.maximum(-expected_ratio, -expected_ratio.clamp(0.8, 1.2))
        ratio, policy, _, grad = case.loss(torch.zeros(3), torch.ones(3), torch.ones(3), clip_range=0.2)
        torch.testing.assert_close(ratio, expected_ratio, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(policy, expected_policy, rtol=1e-5, atol=0, equal_nan=True)
        assert torch.equal(grad.isnan(), expected_ratio.isnan())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_batches(shape):
    rows = torch.ones(shape[0])
    big, words = torch.ones(shape), torch.zeros(shape[0], dtype=torch.int64)
    result = _cpp.sde_step(
        big, big, 2.0, big, rows, rows, rows, None, 0, 0, words, words, torch.bfloat16, False, True, True, rows
    )  # fmt: skip
    assert [tuple(t.shape) for t in result] == [shape, shape[:1], shape, shape]
    assert result[1].eq(0).all()
    scored = (big, big, 2.0, big, big, rows, rows, rows, False, True)
    assert _cpp.step_log_prob_forward(*scored).tolist() == [0.0] * shape[0]
    assert [t.shape for t in _cpp.step_log_prob_backward(rows, *scored)] == [shape, shape]


# The recorded outputs of the reference implementations, see tests/ops/test_steps_golden.py.
GOLDEN = json.loads((DATA / "steps.json").read_text())


@pytest.fixture(scope="module")
def recording():
    with np.load(DATA / "steps.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.mark.parametrize("golden", GOLDEN, ids=[f"{g['case']}-{g['kind']}-{g['i']}" for g in GOLDEN])
def test_recorded_steps(golden, recording):
    t = {
        k.removeprefix(f"{golden['case']}_"): v.flatten(1) if v.dim() > 1 else v
        for k, v in recording.items()
        if k.startswith(f"{golden['case']}_")
    }
    transition = transitions.make(golden["kind"], golden["sigmas"], golden["i"], golden["noise_level"])
    rows = transition.rows(len(t["x"]))
    a, b, c = rows.a, rows.b, rows.c
    unscaled = transition.unscaled_log_prob
    next_sample, log_prob, mean, _ = _cpp.sde_step(
        t["v"], None, 1.0, t["x"], a, b, c, t["eps"], 0, 0, None, None, torch.float32, unscaled, False, True
    )  # fmt: skip
    torch.testing.assert_close(mean, t["mean"], atol=1e-6, rtol=0)
    torch.testing.assert_close(next_sample, t["next"], atol=1e-6, rtol=0)
    atol, rtol = (1e-9, 1e-6) if golden["kind"] == "cps" else (2e-6, 0.0)
    torch.testing.assert_close(log_prob, t["logp"], atol=atol, rtol=rtol)
    if golden["kind"] != "sde":
        return
    inputs = (t["vnew"], None, 1.0, t["x"], t["next"], t["vref"], a, b, c, 0.5 / rows.std_dev_t**2)
    ones = torch.ones(len(a))
    _, policy, kl, grad = _cpp.grpo_loss_forward(
        *inputs, t["logp"], t["adv"], ones, golden["clip"], golden["adv_clip"], False, False
    )
    assert policy.mean().item() == pytest.approx(golden["policy_loss"], abs=3e-6)
    # The recorded KL comes from the difference of two close float32 means: near the image it is off by 1.2e-5.
    assert kl.mean().item() == pytest.approx(golden["kl_flow_grpo"], rel=2e-5)
    actual, _ = _cpp.grpo_loss_backward(
        grad / len(grad), golden["beta"] * ones / len(grad), *inputs, False, False
    )  # fmt: skip
    for row, (got, expected) in enumerate(zip(actual, t["grad"], strict=True)):
        scale = expected.abs().max().item()
        assert scale > 0, row
        torch.testing.assert_close(got, expected, atol=2e-4 * scale, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"velocity": torch.ones(2, 3, dtype=torch.float64)}, "velocity must be a contiguous float32, bfloat16"),
        ({"velocity_uncond": torch.ones(3, 2).T}, "velocity_uncond must be a contiguous"),
        ({"sample": torch.ones(6)}, "sample must have shape"),
        ({"noise": torch.ones(2, 4)}, "noise has shape"),
        ({"a": torch.ones(3)}, "a must be a CPU tensor with one entry for each of the 2 rows"),
        ({"b_ode": torch.ones(3)}, "b_ode has 3 rows, but sample has 2"),
        ({"row_uid": None}, "rows with c != 0 need noise"),
        ({"seed": -1}, "seed must be in"),
        ({"iteration": 2**32}, "iteration must be in"),
        ({"max_isa": "sse9"}, "max_isa must be one of"),
    ],
)
def test_bad_arguments_are_named(change, message):
    big, rows, words = torch.ones(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int64)
    arguments = {
        "velocity": big, "velocity_uncond": big, "guidance_scale": 2.0, "sample": big, "a": rows, "b": rows, "c": rows,
        "noise": None, "seed": 0, "iteration": 0, "row_uid": words, "stream_step": words, "out_dtype": torch.float32,
        "unscaled": False, "reduce_sum": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        _cpp.sde_step(**(arguments | change))


def test_a_reference_velocity_needs_its_variance():
    case = Case()
    with pytest.raises(ValueError, match="velocity_ref needs inv_two_var_kl"):
        _cpp.grpo_loss_forward(
            *case.scored[:5], case.ref, case.a, case.b, case.c, None, case.a, case.a, case.a, 0.1, 5.0, False, False
        )
    with pytest.raises(ValueError, match="velocity_ref needs grad_kl"):
        case.gradients(torch.ones(3), None)
