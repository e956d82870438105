"""The step operations on the CPU: C++ kernels against eager torch and against torch.compile of it."""

import math

import pytest
import torch

from benchmarks import eager
from tpgrpo_fast import _cpp, ops, transitions

pytestmark = pytest.mark.skipif(not _cpp.available(), reason="the C++ library is not built here")

SIGMAS = [1.0, 0.9, 0.75, 0.5, 0.25, 0.0]
GUIDANCE, BETA, CLIP_RANGE, ADV_CLIP, SEED = 4.5, 0.04, 1e-4, 5.0, 1
SPEEDUP, MEMORY_SHARE = 4.0, 1 / 3


class Batch:
    """Rows at different steps of one rollout: velocities, states, and the coefficients in both notations."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype, self.elements = shape, dtype, math.prod(shape)
        self.velocity, self.uncond, self.ref, self.sample = (torch.randn(shape).to(dtype) for _ in range(4))
        self.uid, self.step = torch.arange(shape[0]), torch.arange(shape[0]) % (len(SIGMAS) - 1)
        self.transition = transitions.make("sde", SIGMAS, self.step, 0.7)
        columns = (shape[0],) + (1,) * (len(shape) - 1)
        self.a, self.b, self.c = (getattr(self.transition, name).float().reshape(columns) for name in "abc")
        self.advantage = torch.randn(shape[0])
        self.guided = {"velocity_uncond": self.uncond, "guidance_scale": GUIDANCE}
        self.counters = {"seed": SEED, "row_uid": self.uid, "step": self.step}


@pytest.fixture
def shape(smoke):
    return (3, 4, 8, 9) if smoke else (48, 16, 64, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sde_step(race, smoke, shape, dtype):
    batch = Batch(shape, dtype)
    arguments = (batch.velocity, batch.uncond, GUIDANCE, batch.sample, batch.a, batch.b, batch.c)
    compiled = torch.compile(eager.sde_step)

    def cpp(**noise: object) -> ops.SdeStep:
        return ops.sde_step(batch.velocity, batch.sample, batch.transition, **batch.guided, **noise, backend="cpp")

    # Same noise, same step; and the noise that the kernel draws is that of the reference.
    noise = torch.randn(shape)
    exact = ops.sde_step(
        batch.velocity.double(), batch.sample.double(), batch.transition,
        velocity_uncond=batch.uncond.double(), guidance_scale=GUIDANCE, noise=noise,
    )  # fmt: skip
    precision = {"rtol": 2.0**-8, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-5}
    score = {"rtol": 0, "atol": 1e-2 if dtype == torch.bfloat16 else 1e-4}
    for next_sample, log_prob in (
        cpp(noise=noise)[:2],
        *([eager.sde_step(*arguments, noise)] if dtype == torch.float32 else []),
    ):
        torch.testing.assert_close(next_sample.double(), exact.next_sample, **precision)
        torch.testing.assert_close(log_prob.double(), exact.log_prob, **score)
    reference = ops.sde_step(
        batch.velocity, batch.sample, batch.transition, **batch.guided, **batch.counters, backend="torch"
    )
    drawn = cpp(**batch.counters)
    torch.testing.assert_close(drawn.next_sample.double(), reference.next_sample.double(), **precision)
    torch.testing.assert_close(drawn.log_prob, reference.log_prob, **score)
    competitors = {
        "eager, torch.randn": lambda: eager.sde_step(*arguments),
        "torch.compile of it": lambda: compiled(*arguments),
        "cpp": lambda: cpp(**batch.counters),
    }
    speedups = race(
        f"sde_step {list(shape)} {str(dtype).removeprefix('torch.')}",
        competitors,
        elements=batch.elements,
        bytes_moved=4 * batch.sample.nbytes,  # both velocities and the state in, the state out
    )
    assert smoke or dtype != torch.float32 or speedups["cpp"] >= SPEEDUP


def test_grpo_loss_forward_and_backward(race, smoke, shape, note, peak_memory):
    batch = Batch(shape)
    velocities = [t.requires_grad_() for t in (batch.velocity, batch.uncond)]
    arguments = (GUIDANCE, batch.sample)
    with torch.no_grad():
        next_sample, old_log_prob = ops.sde_step(
            batch.velocity, batch.sample, batch.transition, **batch.guided, **batch.counters, backend="cpp"
        )[:2]
    arguments = (
        GUIDANCE, batch.sample, next_sample, batch.ref, batch.a, batch.b, batch.c, old_log_prob, batch.advantage,
        CLIP_RANGE, ADV_CLIP, BETA,
    )  # fmt: skip
    compiled_loss = torch.compile(eager.grpo_loss)

    def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    def plain() -> list[torch.Tensor]:
        return gradients(eager.grpo_loss(*velocities, *arguments), velocities)

    def compiled() -> list[torch.Tensor]:
        return gradients(compiled_loss(*velocities, *arguments), velocities)

    def by_ops(dtype: torch.dtype, backend: str) -> list[torch.Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in velocities] if dtype != batch.dtype else velocities
        result = ops.grpo_loss(
            leaves[0], batch.sample.to(dtype), next_sample.to(dtype), batch.transition, old_log_prob.to(dtype),
            batch.advantage.to(dtype), velocity_uncond=leaves[1], guidance_scale=GUIDANCE,
            velocity_ref=batch.ref.to(dtype), clip_range=CLIP_RANGE, adv_clip=ADV_CLIP, beta=BETA, backend=backend,
        )  # fmt: skip
        return gradients(result.loss, leaves)

    def cpp() -> list[torch.Tensor]:
        return by_ops(torch.float32, "cpp")

    # The ratios are 1 to rounding: inside the clip range of every competitor, so that all rows have a gradient.
    exact = by_ops(torch.float64, "torch")
    for results in (plain(), compiled(), cpp()):
        torch.testing.assert_close(results[0].double(), exact[0], rtol=1e-5, atol=1e-5)
        for got, expected in zip(results[1:], exact[1:], strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-5 * expected.abs().max().item())
    del exact
    name = f"grpo_loss forward and backward {list(shape)} float32"
    # Forward: both velocities, the reference, both states. Backward: the same, and both gradients.
    speedups = race(
        name,
        {"eager autograd": plain, "torch.compile of it": compiled, "cpp": cpp},
        elements=batch.elements,
        bytes_moved=12 * batch.sample.nbytes,
    )
    memory = {label: peak_memory(call) for label, call in (("eager", plain), ("compiled", compiled), ("cpp", cpp))}
    inherent = 2 * batch.sample.nbytes
    note(
        f"{name}, peak memory with the two gradients of {inherent / 2**20:.0f} MiB: "
        + ", ".join(f"{label} {peak / 2**20:.0f} MiB" for label, peak in memory.items())
        + f"; cpp / eager {memory['cpp'] / max(memory['eager'], 1):.2f}"
    )
    assert smoke or speedups["cpp"] >= SPEEDUP
    assert smoke or memory["cpp"] <= MEMORY_SHARE * memory["eager"]
