"""Correctness and speed of the Triton kernels on the GPU at hand: one command, one JSON file, one table.

    python -m benchmarks.gpu [--out gpu.json]

Needs torch, Triton and numpy, and takes a few minutes, most of which is compilation. For each case it prints

* whether the result's error against float64 is at most twice that of the torch reference (no speed without it);
* the device time of the kernels alone, and what it makes in GB/s and as a fraction of this device's copy rate;
* the device time of a well-written eager version, and the speed-up;
* the wall time of the public call, host work included, when called back to back.

Device times are medians over launches queued behind a busy device, so the host's pace is not in them, and cycle
through enough copies of the inputs that no cache holds them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from benchmarks import eager
from tpgrpo_fast import noise, ops, transitions
from tpgrpo_fast.credit import CreditConfig, assign_credit

GRID = [1.0, 0.9, 0.75, 0.5, 0.2, 0.05, 0.0]
GUIDANCE = 4.5
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much a run measures."""

    shapes: tuple[tuple[int, ...], ...] = ((48, 16, 64, 64), (96, 16, 128, 128), (24, 4096, 64))
    groups: tuple[int, ...] = (1, 48, 4096)
    copy_bytes: int = 1 << 30
    uncached_bytes: int = 512 << 20
    launches: int = 16
    rounds: int = 7


TINY = Size(shapes=((2, 5, 7),), groups=(1,), copy_bytes=1 << 16, uncached_bytes=0, launches=1, rounds=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One operation: the public call, its eager counterpart, and the bytes an element has to move."""

    name: str
    call: Callable[[Inputs, str], dict[str, torch.Tensor]]
    """(inputs, backend) -> named results; float64 inputs with backend `torch` give the truth."""
    eager: Callable[[Inputs], object] | None
    tables: int
    """Big tensors in the storage dtype that a pass has to touch."""
    kernels: tuple[str, ...]
    """The launches that are timed; the call may make others, such as a forward before its backward."""


# ------------------------------------------------------------------------------------------------------------- cases


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    names = ("velocity", "velocity_uncond", "sample", "velocity_ref", "noise")
    x = {name: torch.randn(shape, generator=generator, device=device).to(dtype) for name in names}
    x["velocity_uncond"] = (x["velocity"].float() + 0.1 * x["velocity_uncond"].float()).to(dtype)
    x["velocity_ref"] = (x["velocity"].float() + 0.1 * x["velocity_ref"].float()).to(dtype)
    step = ops.sde_step(x["velocity"], x["sample"], transition(), noise=x["noise"], backend="torch", **guidance(x))
    x["next_sample"], x["old_log_prob"] = step.next_sample, step.log_prob
    x["advantage"] = torch.randn(shape[0], generator=generator, device=device)
    return x


def transition() -> transitions.Transition:
    return transitions.make("sde", GRID, 2, 0.7)


def guidance(x: Inputs) -> dict[str, Any]:
    return {"velocity_uncond": x["velocity_uncond"], "guidance_scale": GUIDANCE}


def columns(x: Inputs) -> tuple[torch.Tensor, ...]:
    """a, b, c as the eager versions take them."""
    t, like = transition(), x["sample"]
    shape = (len(like), *[1] * (like.dim() - 1))
    return tuple(torch.full(shape, value, device=like.device, dtype=torch.float32) for value in (t.a, t.b, t.c))


def counter(x: Inputs) -> dict[str, Any]:
    return {"seed": 1, "iteration": 2, "row_uid": torch.arange(len(x["sample"])), "step": 2}


def step_given(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    step = ops.sde_step(x["velocity"], x["sample"], transition(), noise=x["noise"], backend=backend, **guidance(x))
    return {"next_sample": step.next_sample, "log_prob": step.log_prob}


def step_counted(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    step = ops.sde_step(x["velocity"], x["sample"], transition(), backend=backend, **counter(x), **guidance(x))
    return {"next_sample": step.next_sample, "log_prob": step.log_prob}


def step_and_first(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    step = ops.sde_step(
        x["velocity"], x["sample"], transition(), backend=backend, ode_first=transitions.make("ode", GRID, 2, 0.0),
        **counter(x), **guidance(x),
    )  # fmt: skip
    return {"next_sample": step.next_sample, "log_prob": step.log_prob, "ode_first": step.ode_first}


def log_prob(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        score = ops.step_log_prob(
            x["velocity"], x["sample"], x["next_sample"], transition(), backend=backend, **guidance(x)
        )
    return {"log_prob": score}


def log_prob_gradients(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    leaves = {name: x[name].detach().requires_grad_() for name in ("velocity", "velocity_uncond")}
    score = ops.step_log_prob(
        leaves["velocity"], x["sample"], x["next_sample"], transition(), backend=backend, **guidance(x | leaves)
    )
    grads = torch.autograd.grad((score * x["advantage"].to(score.dtype)).sum(), list(leaves.values()))
    return {"grad_velocity": grads[0], "grad_velocity_uncond": grads[1]}


def loss(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        result = loss_of(x, backend)
    return {"policy_loss": result.policy_loss, "kl": result.kl, "ratio": result.ratio}


def loss_gradients(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    leaves = {name: x[name].detach().requires_grad_() for name in ("velocity", "velocity_uncond")}
    grads = torch.autograd.grad(loss_of(x | leaves, backend).loss, list(leaves.values()))
    return {"grad_velocity": grads[0], "grad_velocity_uncond": grads[1]}


def loss_of(x: Inputs, backend: str) -> ops.GrpoLoss:
    return ops.grpo_loss(
        x["velocity"], x["sample"], x["next_sample"], transition(), x["old_log_prob"], x["advantage"],
        velocity_ref=x["velocity_ref"], beta=0.1, clip_range=1e-3, backend=backend, **guidance(x),
    )  # fmt: skip


def normals(x: Inputs, backend: str) -> dict[str, torch.Tensor]:
    like = x["sample"]
    eps = ops.philox_normal(tuple(like.shape), device=like.device, backend=backend, **counter(x))
    return {"normals": eps}


def eager_loss(x: Inputs, *, backward: bool) -> object:
    leaves = [x[name].detach().requires_grad_(backward) for name in ("velocity", "velocity_uncond")]
    wide = [leaf.float() for leaf in leaves]
    states = [x[name].float() for name in ("sample", "next_sample", "velocity_ref")]
    value = eager.grpo_loss(
        wide[0], wide[1], GUIDANCE, *states, *columns(x), x["old_log_prob"], x["advantage"], 1e-3, 5.0, 0.1
    )
    return torch.autograd.grad(value, leaves) if backward else value


def eager_step(x: Inputs, eps: torch.Tensor | None) -> object:
    state, score = eager.sde_step(
        x["velocity"].float(), x["velocity_uncond"].float(), GUIDANCE, x["sample"].float(), *columns(x), eps
    )
    return state.to(x["sample"].dtype), score


CASES = (
    Case(
        name="sde_step, noise in the kernel",
        call=step_counted,
        eager=lambda x: eager_step(x, None),
        tables=4,
        kernels=("sde_step_fwd_kernel", "log_prob_kernel"),
    ),
    Case(
        name="sde_step, and first ODE state",
        call=step_and_first,
        eager=None,
        tables=5,
        kernels=("sde_step_fwd_kernel", "log_prob_kernel"),
    ),
    Case(
        name="sde_step, given noise",
        call=step_given,
        eager=lambda x: eager_step(x, x["noise"].float()),
        tables=5,
        kernels=("sde_step_fwd_kernel", "log_prob_kernel"),
    ),
    Case(
        name="step_log_prob forward",
        call=log_prob,
        eager=None,
        tables=4,
        kernels=("step_log_prob_fwd_kernel", "log_prob_kernel"),
    ),
    Case(
        name="step_log_prob backward",
        call=log_prob_gradients,
        eager=None,
        tables=6,
        kernels=("step_log_prob_bwd_kernel",),
    ),
    Case(
        name="grpo_loss forward",
        call=loss,
        eager=lambda x: eager_loss(x, backward=False),
        tables=5,
        kernels=("grpo_loss_fwd_kernel", "grpo_loss_rows_kernel"),
    ),
    Case(
        name="grpo_loss forward + backward",
        call=loss_gradients,
        eager=lambda x: eager_loss(x, backward=True),
        tables=12,
        kernels=("grpo_loss_fwd_kernel", "grpo_loss_rows_kernel", "grpo_loss_bwd_kernel"),
    ),
)


# -------------------------------------------------------------------------------------------------------- correctness


def check(case: Case, x: Inputs) -> float:
    """The largest error as a multiple of what is allowed.

    Raises:
        AssertionError: it is above 1.
    """
    wide = {name: value.double() for name, value in x.items()}
    actual, expected, truth = case.call(x, "triton"), case.call(x, "torch"), case.call(wide, "torch")
    worst = 0.0
    for name, value in truth.items():
        # Four last places of the largest value, and what Box-Muller's float32 arithmetic may be off by.
        slack = 2.0**-21 * value.abs().max() + 2e-6
        allowed = 2 * (expected[name].double() - value).abs().max() + slack
        error = (actual[name].double() - value).abs().max()
        assert error.isfinite() and error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        worst = max(worst, (error / allowed).item())
    return worst


# ------------------------------------------------------------------------------------------------------------- timing


def record(call: Callable[[], object], names: tuple[str, ...]) -> Callable[[], None]:
    """Runs `call` once and returns a function that repeats its launches of the named kernels, and nothing else."""
    launches: list[Callable[[], object]] = []
    for kind in (JITFunction, InterpretedFunction):
        launch = kind.run

        def run(function: Any, *args: Any, launch: Any = launch, **kwargs: Any) -> Any:
            name = getattr(function, "__name__", None) or function.fn.__name__
            if name in names:
                launches.append(lambda: launch(function, *args, **kwargs))
            return launch(function, *args, **kwargs)

        with mock.patch.object(kind, "run", run):
            call()
    assert launches, f"no launch of {names}"

    def replay() -> None:
        for launch in launches:
            launch()

    return replay


def device_seconds(calls: list[Callable[[], object]], size: Size, device: str) -> tuple[float, float, float]:
    """(median, fastest, slowest) seconds of one call; the calls take turns."""
    for call in calls[:2]:
        call()
    samples = []
    for _ in range(size.rounds):
        if device == "cpu":
            start = time.perf_counter()
            for index in range(size.launches):
                calls[index % len(calls)]()
            samples.append((time.perf_counter() - start) / size.launches)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # Some 20 ms of spinning, while the host queues everything that is measured.
        torch.cuda._sleep(40_000_000)
        begin.record()
        for index in range(size.launches):
            calls[index % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e-3 / size.launches)
    return statistics.median(samples), min(samples), max(samples)


def wall_seconds(call: Callable[[], object], size: Size, device: str) -> float:
    """Median seconds of a public call among calls back to back, the host's work included."""
    call()
    samples = []
    for _ in range(size.rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(size.launches):
            call()
        synchronize(device)
        samples.append((time.perf_counter() - start) / size.launches)
    return statistics.median(samples)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def copy_rate(size: Size, device: str) -> float:
    """Bytes per second of a device-to-device copy, reads and writes counted."""
    source = torch.ones(size.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    median, _, _ = device_seconds([lambda: target.copy_(source)], size, device)
    return 2 * size.copy_bytes / median


# -------------------------------------------------------------------------------------------------------------- report


def measure(case: Case, shape: tuple[int, ...], dtype: torch.dtype, rate: float, size: Size, device: str) -> dict:
    """One row of the table."""
    x = make_inputs(shape, dtype, device)
    row: dict[str, Any] = {"case": case.name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
    row["error_of_allowed"] = check(case, x)
    moved = case.tables * dtype.itemsize * math.prod(shape)
    copies = [x] + [{n: v.clone() for n, v in x.items()} for _ in range(min(15, size.uncached_bytes // moved))]
    replays = [record(lambda x=x: case.call(x, "triton"), case.kernels) for x in copies]
    median, fastest, slowest = device_seconds(replays, size, device)
    row |= {
        "microseconds": 1e6 * median,
        "spread": [1e6 * fastest, 1e6 * slowest],
        "gigabytes_per_second": moved / median / 1e9,
        "of_copy_rate": moved / median / rate,
        "wall_microseconds": 1e6 * wall_seconds(lambda: case.call(x, "triton"), size, device),
        "torch_wall_microseconds": 1e6 * wall_seconds(lambda: case.call(x, "torch"), size, device),
    }
    if case.eager is not None:
        baseline, _, _ = device_seconds([lambda x=x: case.eager(x) for x in copies], size, device)
        row |= {"eager_microseconds": 1e6 * baseline, "speed_up": baseline / median}
    return row


def measure_noise(shape: tuple[int, ...], rate: float, size: Size, device: str) -> dict:
    x = {"sample": torch.empty(shape, device=device)}
    actual = normals(x, "triton")["normals"]
    part = slice(0, 2)
    expected = noise.normal((2, *shape[1:]), **(counter(x) | {"row_uid": torch.arange(len(actual))[part].to(device)}))
    error = (actual[part] - expected).abs().max().item()
    assert error <= 2e-6, f"normals are off by {error:.3g}"
    assert abs(actual.double().mean().item()) < 5 / math.sqrt(actual.numel()), "normals have a mean"
    median, fastest, slowest = device_seconds(
        [record(lambda: normals(x, "triton"), ("philox_normal_fwd_kernel",)) for _ in range(4)], size, device
    )
    baseline, _, _ = device_seconds([lambda: torch.randn(shape, device=device)], size, device)
    moved = 4 * math.prod(shape)
    return {
        "case": "philox_normal (eager: torch.randn)",
        "shape": list(shape),
        "dtype": "float32",
        "error_of_allowed": error / 2e-6,
        "microseconds": 1e6 * median,
        "spread": [1e6 * fastest, 1e6 * slowest],
        "gigabytes_per_second": moved / median / 1e9,
        "of_copy_rate": moved / median / rate,
        "eager_microseconds": 1e6 * baseline,
        "speed_up": baseline / median,
    }


def measure_credit(groups: int, balance: str | None, size: Size, device: str) -> dict:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(groups * 24, 9, generator=generator).to(device)
    members = torch.arange(groups).repeat_interleave(24).to(device)
    config = CreditConfig(balance=balance)

    def assign(backend: str) -> Any:
        return assign_credit(rewards, members, config, backend=backend)

    actual, expected = assign("triton"), assign("torch")
    for name in ("step_rewards", "turning_points"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    error = (actual.advantages - expected.advantages).abs().max().item()
    assert error < 2e-6, f"advantages are off by {error:.3g}"
    median, fastest, slowest = device_seconds([record(lambda: assign("triton"), ("credit_fwd_kernel",))], size, device)
    return {
        "case": f"credit{', balanced' if balance else ''}, {groups} groups of 24 (eager: torch backend)",
        "shape": [groups * 24, 8],
        "dtype": "float32",
        "error_of_allowed": error / 2e-6,
        "microseconds": 1e6 * median,
        "spread": [1e6 * fastest, 1e6 * slowest],
        "wall_microseconds": 1e6 * wall_seconds(lambda: assign("triton"), size, device),
        "torch_wall_microseconds": 1e6 * wall_seconds(lambda: assign("torch"), size, device),
    }


def run(size: Size, device: str) -> dict[str, Any]:
    """Everything; a case that fails is reported and does not stop the others."""
    started = time.perf_counter()
    rate = copy_rate(size, device)
    tasks: list[tuple[str, Callable[[], dict]]] = []
    for shape in size.shapes:
        for dtype in (torch.float32, torch.bfloat16):
            for case in CASES:
                label = f"{case.name} {list(shape)} {dtype}"
                tasks.append((label, lambda c=case, s=shape, d=dtype: measure(c, s, d, rate, size, device)))
        tasks.append((f"philox_normal {list(shape)}", lambda s=shape: measure_noise(s, rate, size, device)))
    for groups in size.groups:
        for balance in (None, "group"):
            tasks.append((f"credit {groups} {balance}", lambda g=groups, b=balance: measure_credit(g, b, size, device)))
    rows, failures = [], []
    for label, task in tasks:
        try:
            rows.append(task())
        except Exception as error:  # a broken case must not cost the others their numbers
            failures.append({"case": label, "error": str(error), "traceback": traceback.format_exc()})
        print(".", end="", flush=True)
    print()
    return {
        "device": torch.cuda.get_device_name() if device != "cpu" else platform.processor() or "cpu",
        "capability": list(torch.cuda.get_device_capability()) if device != "cpu" else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gigabytes_per_second": rate / 1e9,
        "seconds": time.perf_counter() - started,
        "cases": rows,
        "failures": failures,
    }


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    head = ("case", "shape", "dtype", "us", "min-max", "GB/s", "of copy", "eager us", "speed-up", "call us", "torch us")
    keys = ("gigabytes_per_second", "of_copy_rate", "eager_microseconds", "speed_up", "wall_microseconds")
    lines = [head]
    for row in report["cases"]:
        numbers = [f"{row[key]:.3g}" if key in row else "" for key in (*keys, "torch_wall_microseconds")]
        spread = "-".join(f"{value:.3g}" for value in row["spread"])
        shape = "x".join(map(str, row["shape"]))
        lines.append((row["case"], shape, row["dtype"], f"{row['microseconds']:.4g}", spread, *numbers))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    title = (
        f"{report['device']}, torch {report['torch']}, triton {report['triton']}, "
        f"copy {report['copy_gigabytes_per_second']:.0f} GB/s, {report['seconds']:.0f} s"
    )
    failed = [f"FAILED {failure['case']}: {failure['error']}" for failure in report["failures"]]
    return "\n".join([title, *text, *failed])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="where the JSON goes")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # checks the program on any machine
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("no CUDA or ROCm device: torch.cuda.is_available() is False")
    report = run(TINY if options.tiny else Size(), device)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
