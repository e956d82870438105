"""The Triton step kernels against float64 and against the torch reference, interpreted or on the device."""

import itertools
import math

import pytest
import torch

from tpgrpo_fast import noise, ops
from tpgrpo_fast.transitions import concat, make

GRID = [1.0, 0.9, 0.75, 0.5, 0.2, 0.05, 0.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(4,), (4, 2, 3, 5), (4, 16), (4, 1031)]
everywhere = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))


def randn(device, *shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def mixed():
    """Two SDE rows of different steps, an ODE row, another SDE row."""
    return concat(
        [
            (make("sde", GRID, torch.tensor([0, 4]), 0.7), 2),
            (make("ode", GRID, 1, 0.0), 1),
            (make("sde", GRID, 2, 0.7), 1),
        ]
    )


def inputs(device, shape, dtype):
    names = ("velocity", "velocity_uncond", "sample", "next_sample", "velocity_ref", "noise")
    return {name: randn(device, *shape, seed=seed, dtype=dtype) for seed, name in enumerate(names)}


def doubled(tensors):
    return {name: x.double() for name, x in tensors.items()}


# --- sde_step -------------------------------------------------------------------------------------------------------


@everywhere
@every_dtype
@pytest.mark.parametrize(("guided", "reduction"), [(True, "mean"), (False, "sum")])
def test_sde_step(device, shape, dtype, guided, reduction, check_error):
    x = inputs(device, shape, dtype)

    def step(backend, x, out_dtype):
        guidance = {"velocity_uncond": x["velocity_uncond"], "guidance_scale": 4.5} if guided else {}
        return ops.sde_step(
            x["velocity"], x["sample"], mixed(), noise=x["noise"], log_prob=reduction, return_mean=True,
            out_dtype=out_dtype, backend=backend, **guidance,
        )  # fmt: skip

    actual, expected = step("triton", x, dtype), step("torch", x, dtype)
    truth = step("torch", doubled(x), torch.float64)
    check_error(actual.mean, expected.mean, truth.mean, "mean")
    check_error(actual.next_sample, expected.next_sample, truth.next_sample, "next_sample")
    # The score is that of the state as stored.
    scored = ops.step_log_prob(
        x["velocity"].double(), x["sample"].double(), actual.next_sample.double(), mixed(), log_prob=reduction,
        **({"velocity_uncond": x["velocity_uncond"].double(), "guidance_scale": 4.5} if guided else {}),
    )  # fmt: skip
    check_error(actual.log_prob, expected.log_prob, scored, "log_prob")
    assert actual.log_prob[2] == 0


@every_dtype
def test_rounding_is_to_the_nearest_even(device, dtype):
    # a = 1, b = 0 and no noise leave the float32 state as it is: storing it is all that happens.
    ties = torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-11, 1.0 + 3 * 2**-11, -(1.0 + 2**-8), 65504.0])
    state = torch.cat([ties, ties * (1 + 2**-20), ties * 2**-13, torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    state = state.to(device)[None]
    copy = concat([(make("ode", GRID, 0, 0.0), 1)])
    result = ops.sde_step(torch.zeros_like(state), state, copy, out_dtype=dtype, backend="triton")
    assert torch.equal(result.next_sample, state.to(dtype))


@everywhere
@every_dtype
def test_the_stored_state_is_what_is_scored_bit_for_bit(device, shape, dtype):
    x = inputs(device, shape, dtype)
    kwargs = {"velocity_uncond": x["velocity_uncond"], "guidance_scale": 4.5, "backend": "triton"}
    for transition in (mixed(), make("cps", GRID, 2, 0.8), make("dance", GRID, 3, 0.3)):
        step = ops.sde_step(x["velocity"], x["sample"], transition, noise=x["noise"], **kwargs)
        again = ops.step_log_prob(x["velocity"], x["sample"], step.next_sample, transition, **kwargs)
        # A device may add a block in another order in the two kernels.
        tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(again, step.log_prob, **tolerance)


@everywhere
@every_dtype
def test_counted_noise_is_the_reference_noise(device, shape, dtype):
    x = inputs(device, shape, dtype)
    uid, steps = torch.tensor([7, 0, 1, 2**32 - 1]), torch.tensor([0, 3, 1, 2])
    counter = {"seed": 2**63 + 5, "iteration": 2**32 - 1, "row_uid": uid, "step": steps}
    eps = noise.normal(shape, **counter).to(device)
    counted = ops.sde_step(
        x["velocity"], x["sample"], mixed(), out_dtype=torch.float32, return_mean=True, backend="triton", **counter
    )
    deviation = mixed().c.to(device, torch.float32).reshape(-1, *[1] * (len(shape) - 1))
    torch.testing.assert_close(counted.next_sample, counted.mean + deviation * eps, rtol=1e-6, atol=2e-6)
    assert torch.equal(counted.next_sample[2], counted.mean[2])


def test_a_row_does_not_depend_on_its_batch(device):
    velocity, sample = randn(device, 4, 2100, seed=1), randn(device, 4, 2100, seed=2)
    uid, steps = torch.tensor([9, 4, 1, 30]), torch.tensor([0, 4, 1, 2])
    counter = {"seed": 5, "iteration": 2, "backend": "triton"}
    whole = ops.sde_step(velocity, sample, mixed(), row_uid=uid, step=steps, **counter)
    for row, step in enumerate(steps.tolist()):
        part = slice(row, row + 1)
        transition = make("ode" if row == 2 else "sde", GRID, step, 0.7)
        alone = ops.sde_step(velocity[part], sample[part], transition, row_uid=uid[part], step=step, **counter)
        assert torch.equal(alone.next_sample, whole.next_sample[part])
        assert torch.equal(alone.log_prob, whole.log_prob[part])


@every_dtype
@pytest.mark.parametrize("rows", [1, 3, None])
def test_first_ode_states_come_from_the_same_loads(device, dtype, rows):
    x = inputs(device, (4, 3, 7), dtype)
    euler = make("ode", GRID, 2, 0.0)
    kwargs = {"velocity_uncond": x["velocity_uncond"], "guidance_scale": 3.0, "backend": "triton"}
    step = ops.sde_step(
        x["velocity"], x["sample"], mixed(), noise=x["noise"], ode_first=euler if rows is None else euler.rows(rows),
        **kwargs,
    )  # fmt: skip
    alone = ops.sde_step(x["velocity"], x["sample"], euler, **kwargs)
    assert torch.equal(step.ode_first, alone.next_sample[:rows])
    without = ops.sde_step(x["velocity"], x["sample"], mixed(), noise=x["noise"], **kwargs)
    assert without.ode_first is None
    assert torch.equal(without.next_sample, step.next_sample)


@pytest.mark.parametrize("backend", ["torch", "triton", "auto"])
def test_first_ode_states_of_every_backend_agree(device, backend):
    x = inputs(device, (4, 3, 7), torch.float32)
    step = ops.sde_step(
        x["velocity"], x["sample"], mixed(), noise=x["noise"], ode_first=make("ode", GRID, torch.tensor([0, 3]), 0.0),
        backend=backend,
    )  # fmt: skip
    dt = torch.tensor([GRID[1] - GRID[0], GRID[4] - GRID[3]], device=device).reshape(2, 1, 1)
    torch.testing.assert_close(step.ode_first, x["sample"][:2] + dt * x["velocity"][:2])
    assert len(step) == 3


def test_ode_first_refuses_other_transitions_and_too_many_rows():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"ode_first.*'sde'"):
        ops.sde_step(x, x, make("ode", GRID, 0, 0.0), ode_first=make("sde", GRID, 0, 0.7))
    with pytest.raises(ValueError, match="ode_first holds 3 rows"):
        ops.sde_step(x, x, make("ode", GRID, 0, 0.0), ode_first=make("ode", GRID, 0, 0.0).rows(3), backend="torch")


# --- noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 2, 3, 4, 5, 1023, 1025, 3000])
@pytest.mark.parametrize("stream", [noise.Stream.STEP, noise.Stream.REPLAY])
def test_philox_normal(device, elements, stream):
    counter = {
        "seed": 2**64 - 1,
        "iteration": 2**32 - 1,
        "row_uid": torch.tensor([0, 1, 2**31, 2**32 - 1]),
        "step": torch.tensor([0, 2**28 - 1, 5, 5]),
        "stream": stream,
    }
    expected = noise.normal((4, elements), **counter)
    actual = ops.philox_normal((4, elements), **counter, device=device, backend="triton")
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=1e-6)


def test_random_words_are_exact(device):
    if device != "cpu":
        pytest.skip("a device's words are covered through its normals; here the interpreter runs `philox` by itself")
    import triton
    import triton.language as tl

    from tpgrpo_fast.kernels import _common

    philox = _common.philox

    @triton.jit
    def kernel(p_out, k0, k1, uid, step, iteration, BLOCK: tl.constexpr):
        o_block = tl.arange(0, BLOCK)
        counter = (o_block.to(tl.uint32), step.to(tl.uint32), uid.to(tl.uint32), iteration.to(tl.uint32))
        words = philox(counter[0], counter[1], counter[2], counter[3], k0.to(tl.uint32), k1.to(tl.uint32))
        for word in tl.static_range(4):
            tl.store(p_out + 4 * o_block + word, words[word].to(tl.int64))

    kernel.fn.__globals__.update(philox=philox, tl=tl)  # where the interpreter looks names up
    seed, uid, step, iteration = 0x9E3779B97F4A7C15, 0xFFFFFFF0, 0x10000003, 0x89ABCDEF
    expected = noise.philox_bits(512, seed=seed, iteration=iteration, row_uid=torch.tensor([uid]), stream_step=step)
    out = torch.empty(512, 4, dtype=torch.int64)
    kernel[(1,)](out, *_common.words(seed), uid - 2**32, step, iteration - 2**32, BLOCK=512)
    assert torch.equal(out, expected[0])


# --- log-probs and loss ---------------------------------------------------------------------------------------------


def log_prob_and_gradients(backend, x, reduction, guided):
    velocity, uncond = (x[name].detach().clone().requires_grad_() for name in ("velocity", "velocity_uncond"))
    score = ops.step_log_prob(
        velocity, x["sample"], x["next_sample"], mixed(), log_prob=reduction, backend=backend,
        **({"velocity_uncond": uncond, "guidance_scale": 4.5} if guided else {}),
    )  # fmt: skip
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5], device=score.device, dtype=score.dtype)
    gradients = torch.autograd.grad((weights * score).sum(), [velocity, uncond][: 2 if guided else 1])
    return {"log_prob": score, "grad": gradients[0]} | ({"grad_uncond": gradients[1]} if guided else {})


@everywhere
@every_dtype
@pytest.mark.parametrize(("guided", "reduction"), [(True, "mean"), (False, "sum")])
def test_step_log_prob(device, shape, dtype, guided, reduction, check_error):
    x = inputs(device, shape, dtype)
    actual = log_prob_and_gradients("triton", x, reduction, guided)
    expected = log_prob_and_gradients("torch", x, reduction, guided)
    truth = log_prob_and_gradients("torch", doubled(x), reduction, guided)
    for name in truth:
        check_error(actual[name], expected[name], truth[name], name)
    assert not actual["grad"][2].any()
    assert actual["log_prob"][2] == 0


def drawn(x, kind, guided):
    """The inputs with a next state that the policy may have drawn: ratios of order-1 log-probs lose few digits."""
    transition = make(kind[0], GRID, torch.tensor([0, 4, 2, 3]), kind[1])
    guidance = {"velocity_uncond": x["velocity_uncond"], "guidance_scale": 4.5} if guided else {}
    step = ops.sde_step(x["velocity"], x["sample"], transition, noise=x["noise"], backend="torch", **guidance)
    return x | {"next_sample": step.next_sample}


def loss_and_gradients(backend, x, kind, *, guided, kl, reduction="mean", clip_range=0.1):
    sde_type, noise_level = kind
    velocity, uncond = (x[name].detach().clone().requires_grad_() for name in ("velocity", "velocity_uncond"))
    transition = make(sde_type, GRID, torch.tensor([0, 4, 2, 3]), noise_level)
    extra = {"velocity_uncond": uncond, "guidance_scale": 4.5} if guided else {}
    common = (x["sample"], x["next_sample"], transition)
    with torch.no_grad():
        # Ratios of 0.8, 1.02 (inside), 1.3, 1: clipped and unclipped rows of both signs.
        near = {name: t.double() for name, t in extra.items() if name != "guidance_scale"}
        truth = ops.step_log_prob(
            velocity.double(), *(t.double() for t in common[:2]), transition, log_prob=reduction,
            guidance_scale=4.5 if guided else 1.0, **near,
        )  # fmt: skip
        old = truth - torch.tensor([0.8, 1.02, 1.3, 1.0], dtype=torch.float64, device=truth.device).log()
    advantage = torch.tensor([1.5, -0.7, 0.9, 7.0], device=old.device)
    weight = torch.tensor([1.0, 2.0, 0.5, 0.3], device=old.device)
    dtype = torch.float64 if velocity.dtype == torch.float64 else torch.float32
    result = ops.grpo_loss(
        velocity, *common, old.to(dtype), advantage, velocity_ref=x["velocity_ref"] if kl else None,
        beta=0.3 if kl else 0.0, kl=kl or "gaussian", clip_range=clip_range, weight=weight, normalizer=7,
        log_prob=reduction, backend=backend, **extra,
    )  # fmt: skip
    gradients = torch.autograd.grad(result.loss, [velocity, uncond][: 2 if guided else 1])
    return result._asdict() | {"grad": gradients[0]} | ({"grad_uncond": gradients[1]} if guided else {})


@everywhere
@every_dtype
@pytest.mark.parametrize(
    ("kind", "guided", "kl"),
    [(("sde", 0.7), True, "flow_grpo"), (("cps", 0.8), False, "gaussian"), (("dance", 0.3), True, None)],
)
def test_grpo_loss(device, shape, dtype, kind, guided, kl, check_error):
    x = drawn(inputs(device, shape, dtype), kind, guided)
    actual = loss_and_gradients("triton", x, kind, guided=guided, kl=kl)
    expected = loss_and_gradients("torch", x, kind, guided=guided, kl=kl)
    truth = loss_and_gradients("torch", doubled(x), kind, guided=guided, kl=kl)
    assert actual["clip_fraction"] == expected["clip_fraction"]
    for name in ("grad", "grad_uncond") if guided else ("grad",):
        # Rows differ in size by orders of magnitude: each is held to its own.
        for row in range(shape[0]):
            check_error(actual[name][row], expected[name][row], truth[name][row], f"{name}, row {row}", slack=4)
    for name in ("loss", "policy_loss", "kl", "ratio"):
        check_error(actual[name], expected[name], truth[name], name, slack=4)


def test_loss_of_sums_and_of_a_nan(device):
    x = drawn(inputs(device, (4, 5), torch.float32), ("sde", 0.7), True)
    actual = loss_and_gradients("triton", x, ("sde", 0.7), guided=True, kl="gaussian", reduction="sum")
    expected = loss_and_gradients("torch", x, ("sde", 0.7), guided=True, kl="gaussian", reduction="sum")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)
    x["sample"][1, 3] = math.nan
    for backend in ("triton", "torch"):
        result = loss_and_gradients(backend, x, ("sde", 0.7), guided=True, kl="gaussian")
        assert result["loss"].isnan()
        assert result["ratio"].isnan().tolist() == [False, True, False, False]


def test_equal_velocities_have_ratio_one(device):
    for dtype in DTYPES:
        x = inputs(device, (4, 3, 11), dtype)
        transition = make("sde", GRID, torch.tensor([0, 4, 2, 3]), 0.7)
        kwargs = {"velocity_uncond": x["velocity_uncond"], "guidance_scale": 4.5, "backend": "triton"}
        step = ops.sde_step(x["velocity"], x["sample"], transition, noise=x["noise"], **kwargs)
        advantage = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device)
        result = ops.grpo_loss(
            x["velocity"], x["sample"], step.next_sample, transition, step.log_prob, advantage, **kwargs
        )
        assert (result.ratio - 1).abs().max() <= (0 if device == "cpu" else 1e-5)
        assert result.clip_fraction == 0


# --- shapes, layouts, values ----------------------------------------------------------------------------------------


def test_non_contiguous_inputs(device):
    def scattered(x):
        wide = torch.full((*x.shape, 2), math.nan, device=x.device)
        wide[..., 0] = x
        return wide[..., 0]

    x = inputs(device, (4, 2, 3, 5), torch.float32)
    views = {name: scattered(value) for name, value in x.items()}
    assert not any(view.is_contiguous() for view in views.values())
    for op in (
        lambda x: ops.sde_step(x["velocity"], x["sample"], mixed(), noise=x["noise"], backend="triton").next_sample,
        lambda x: log_prob_and_gradients("triton", x, "mean", True)["grad_uncond"],
        lambda x: loss_and_gradients("triton", x, ("sde", 0.7), guided=True, kl="gaussian")["grad"],
    ):
        assert torch.equal(op(views), op(x))
    transposed = {name: value.mT.contiguous().mT for name, value in x.items()}
    assert torch.equal(
        ops.step_log_prob(*(transposed[n] for n in ("velocity", "sample", "next_sample")), mixed(), backend="triton"),
        ops.step_log_prob(*(x[n] for n in ("velocity", "sample", "next_sample")), mixed(), backend="triton"),
    )


@pytest.mark.parametrize("trailing", [(), (7,), (2, 3, 5)])
def test_no_rows(device, trailing):
    transition, empty = make("sde", GRID, 2, 0.7), torch.zeros(0, *trailing, device=device)
    none = torch.zeros(0, device=device)
    step = ops.sde_step(empty, empty, transition, seed=0, row_uid=[], backend="triton")
    assert step.next_sample.shape == (0, *trailing)
    assert ops.philox_normal((0, 4), seed=0, iteration=0, row_uid=[], step=0, device=device).shape == (0, 4)
    velocity = empty.clone().requires_grad_()
    result = ops.grpo_loss(velocity, empty, empty, transition, none, none, backend="triton")
    result.loss.backward()
    assert result.loss == 0


def test_extreme_values_stay_in_their_rows(device):
    x = inputs(device, (4, 1500), torch.float32)
    for name in ("velocity", "sample"):
        x[name][0] = 3e38
        x[name][1, 7] = math.inf
        x[name][3] = 1e-40
    for backend in ("triton", "torch"):
        step = ops.sde_step(x["velocity"], x["sample"], mixed(), noise=x["noise"], backend=backend)
        assert step.log_prob[1].isnan()
        assert step.log_prob[2] == 0
        assert step.log_prob[3].isfinite()
        assert step.next_sample[2:].isfinite().all()
    plain = inputs(device, (4, 1500), torch.float32)
    expected = ops.sde_step(plain["velocity"], plain["sample"], mixed(), noise=x["noise"], backend="triton")
    assert torch.equal(step.next_sample[2].cpu(), expected.next_sample[2].cpu())
    half = ops.sde_step(
        x["velocity"], x["sample"], mixed(), noise=x["noise"], out_dtype=torch.float16, backend="triton"
    )
    assert half.next_sample[0].isinf().all()


def test_mixed_dtypes(device):
    x = inputs(device, (4, 3, 7), torch.float32)
    dtypes = dict(zip(x, itertools.cycle(DTYPES), strict=False))
    x = {name: value.to(dtypes[name]) for name, value in x.items()}
    for backend in ("triton", "torch"):
        step = ops.sde_step(
            x["velocity"], x["sample"], mixed(), velocity_uncond=x["velocity_uncond"], guidance_scale=2.0,
            noise=x["noise"], out_dtype=torch.bfloat16, backend=backend,
        )  # fmt: skip
        assert step.next_sample.dtype == torch.bfloat16
        gradients = log_prob_and_gradients(backend, x, "mean", True)
        assert gradients["grad"].dtype == x["velocity"].dtype
        assert gradients["grad_uncond"].dtype == x["velocity_uncond"].dtype


# --- torch.compile, autocast, torch.library -------------------------------------------------------------------------


SHARED = make("sde", GRID, 2, 0.7)


def everything(velocity, uncond, sample, following, advantage, backend):
    guidance = {"velocity_uncond": uncond, "guidance_scale": 3.0}
    with torch.no_grad():
        step = ops.sde_step(
            velocity, sample, SHARED, seed=1, row_uid=torch.arange(4), step=2, backend=backend, **guidance
        )
    loss = ops.grpo_loss(
        velocity, sample, step.next_sample, SHARED, step.log_prob, advantage, velocity_ref=following, beta=0.2,
        backend=backend, **guidance,
    ).loss  # fmt: skip
    return loss, step.next_sample, ops.step_log_prob(velocity, sample, following, SHARED, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_compiled_whole_graphs_give_the_eager_results(device, backend):
    torch.compiler.reset()
    x = inputs(device, (4, 3, 8), torch.float32)
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.3], device=device)
    results = []
    for function in (everything, torch.compile(everything, fullgraph=True, backend="aot_eager")):
        leaves = [x[name].clone().requires_grad_() for name in ("velocity", "velocity_uncond")]
        loss, state, score = function(*leaves, x["sample"], x["next_sample"], advantage, backend)
        gradients = torch.autograd.grad(loss + score.sum(), leaves)
        results.append((loss, state, score, *gradients))
    for compiled, eager in zip(results[1], results[0], strict=True):
        assert torch.equal(compiled, eager)


def test_autocast_changes_nothing(device):
    x = inputs(device, (4, 3, 8), torch.float32)
    plain = loss_and_gradients("triton", x, ("sde", 0.7), guided=True, kl="gaussian")
    with torch.autocast(device, torch.bfloat16):
        cast = loss_and_gradients("triton", x, ("sde", 0.7), guided=True, kl="gaussian")
    for name, value in plain.items():
        assert torch.equal(cast[name], value), name


def test_the_operations_pass_the_checks_of_torch_library(device, monkeypatch):
    monkeypatch.undo()  # opcheck compares two runs, and poisoned memory is not its subject
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = inputs(device, (4, 12), torch.float32)
    velocity, uncond = (x[name].requires_grad_() for name in ("velocity", "velocity_uncond"))
    coefficients = torch.stack(
        [*(torch.as_tensor(v) for v in (mixed().a, mixed().b)), torch.ones(4).double(), torch.ones(4).double()]
    )
    vector, uid = torch.ones(4, device=device), torch.arange(4)
    states = (x["sample"], x["next_sample"])
    calls = [
        (ops._sde_step, (velocity.detach(), uncond.detach(), 3.0, x["sample"], coefficients, None, 1, 2, uid, uid,
                         torch.bfloat16, False, False, True, torch.ones(2).double(), "triton")),
        (ops._step_log_prob, (velocity, uncond, 3.0, *states, coefficients, False, False, "triton")),
        (ops._step_log_prob, (velocity, None, 3.0, *states, coefficients, True, True, "triton")),
        (ops._grpo_loss, (velocity, uncond, 3.0, *states, x["velocity_ref"], coefficients, vector, vector, vector, 0.1,
                          5.0, False, False, "triton")),
        (ops._philox_normal, (x["sample"], 1, 2, uid, uid, "triton")),
    ]  # fmt: skip
    for op, arguments in calls:
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, arguments, test_utils=checks)


# --- which backend --------------------------------------------------------------------------------------------------


def test_what_the_kernels_do_not_do_is_refused_by_name_and_done_by_auto(device):
    x = inputs(device, (4, 3), torch.float64)
    transition = make("sde", GRID, 2, 0.7)
    with pytest.raises(ValueError, match=r"backend = 'triton' takes float32, bfloat16 and float16, not torch\.float64"):
        ops.step_log_prob(x["velocity"], x["sample"], x["next_sample"], transition, backend="triton")
    x = inputs(device, (4, 3), torch.float32)
    sample = x["sample"].requires_grad_()
    with pytest.raises(ValueError, match="in the velocities only"):
        ops.step_log_prob(x["velocity"], sample, x["next_sample"], transition, backend="triton")
    ops.step_log_prob(x["velocity"], sample, x["next_sample"], transition).sum().backward()
    assert sample.grad.any()
    with pytest.raises(ValueError, match="c = 0"):
        ops.grpo_loss(
            x["velocity"], x["noise"], x["next_sample"], mixed(), torch.zeros(4), torch.ones(4), backend="triton"
        )
    with pytest.raises(ValueError, match="needs noise"):
        ops.sde_step(x["velocity"], x["noise"], transition, backend="triton")


def test_a_missing_triton_is_named_with_its_remedy(monkeypatch):
    x = torch.zeros(2, 3)
    monkeypatch.setitem(ops.INSTALLED, "triton", False)
    with pytest.raises(RuntimeError, match=r"backend = 'triton' is missing: pip install 'triton>=3\.6'"):
        ops.sde_step(x, x, make("ode", GRID, 0, 0.0), backend="triton")


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    x = torch.zeros(2, 3)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        ops.sde_step(x, x, make("ode", GRID, 0, 0.0), backend="triton")


def test_auto_says_once_what_is_live(device, monkeypatch, caplog):
    monkeypatch.setattr(ops, "_logged", set())
    x = inputs(device, (4, 3), torch.float32)
    with caplog.at_level("INFO", logger="tpgrpo_fast"):
        for _ in range(3):
            ops.step_log_prob(x["velocity"], x["sample"], x["next_sample"], mixed())
    live = {"cpu": "cpp" if ops.INSTALLED["cpp"] else "torch", "cuda": "triton"}[device]
    assert [record.message for record in caplog.records] == [f"step kernels of {device} tensors: backend {live}"]


# --- addresses ------------------------------------------------------------------------------------------------------


def test_addresses_are_64_bit_wide(device):
    if device != "cpu":
        pytest.skip("covered by test_more_than_2_to_31_elements")
    import triton
    import triton.language as tl

    from tpgrpo_fast.kernels import _common

    place = _common.place

    @triton.jit
    def kernel(p_out, pid, elements, chunks, BLOCK: tl.constexpr):
        _row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
        tl.store(p_out + tl.arange(0, BLOCK), base + o_row, mask=m_x)

    kernel.fn.__globals__.update(place=place, tl=tl)
    elements = 2**31 + 100
    chunks = triton.cdiv(elements, 1024)
    out = torch.zeros(1024, dtype=torch.int64)
    kernel[(1,)](out, 3 * chunks - 1, elements, chunks, BLOCK=1024)
    first = 2 * elements + (chunks - 1) * 1024
    assert out[:100].tolist() == list(range(first, first + 100))
    assert not out[100:].any()


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    free = torch.cuda.mem_get_info()[0]
    shape = (2, 2**30 + 2**20)
    if free < 5 * 2 * math.prod(shape):
        pytest.skip(f"needs {5 * 2 * math.prod(shape) >> 30} GiB of device memory")
    sample = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    velocity = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    counter = {"seed": 1, "row_uid": [0, 1], "step": 0}
    step = ops.sde_step(velocity, sample, make("sde", GRID, 2, 0.7), backend="triton", **counter)
    tail = ops.sde_step(velocity, sample, make("ode", GRID, 2, 0.7), backend="triton").next_sample
    assert (tail[1, -4096:] == tail[0, 0]).all()
    assert step.next_sample[1, -4096:].float().std() > 0.1
    assert step.log_prob.isfinite().all()
