"""Shared parts of the benchmarks: interleaved timing of competitors and one table at the end.

A benchmark first asserts that its competitors agree, then calls `race`: no speed is printed for a case whose results
are wrong. With `--smoke` each case runs once on small inputs, which checks the benchmark and measures nothing.
"""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROUNDS = 9

_rows = pytest.StashKey[list[tuple[str, ...]]]()
_notes = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="one small round a benchmark: checks them, measures nothing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []
    config.stash[_notes] = []


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    """Whether inputs should be small."""
    return request.config.getoption("--smoke")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Adds a line below the table."""
    return request.config.stash[_notes].append


@pytest.fixture(scope="session")
def bandwidth(request: pytest.FixtureRequest, smoke: bool) -> float:
    """Memory bandwidth of this machine in bytes per second: c = a + b on arrays that no cache holds."""
    elements = 1 << 10 if smoke else 1 << 26
    a, b, c = (torch.ones(elements) for _ in range(3))
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        torch.add(a, b, out=c)
        seconds.append(time.perf_counter() - start)
    rate = 3 * a.nbytes / statistics.median(seconds)
    request.config.stash[_notes].append(
        f"memory bandwidth {rate / 1e9:.1f} GB/s: c = a + b on 3 x {a.nbytes >> 20} MiB, "
        f"{torch.get_num_threads()} threads"
    )
    return rate


@pytest.fixture
def race(request: pytest.FixtureRequest, smoke: bool, bandwidth: float) -> Callable[..., dict[str, float]]:
    """`race(case, competitors, elements=..., bytes_moved=..., calls=...) -> {name: speed-up over the first}`.

    The competitors take turns, so that whatever slows the machine slows them alike; a speed-up is the median over
    rounds. Where the bytes that a case has to move are given, the rate is printed and its share of the bandwidth.
    Short cases are called several times a round.
    """

    def run(
        case: str,
        competitors: dict[str, Callable[[], object]],
        *,
        elements: int = 0,
        bytes_moved: int = 0,
        calls: int = 1,
    ) -> dict[str, float]:
        seconds: dict[str, list[float]] = {name: [] for name in competitors}
        for round_index in range(1 if smoke else ROUNDS + 1):
            for name, call in competitors.items():
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                if smoke or round_index > 0:  # the first round warms up
                    seconds[name].append((time.perf_counter() - start) / calls)
        baseline = next(iter(seconds.values()))
        speedups = {}
        for name, times in seconds.items():
            ratios = [slow / fast for slow, fast in zip(baseline, times, strict=True)]
            median, speedups[name] = statistics.median(times), statistics.median(ratios)
            request.config.stash[_rows].append(
                (
                    case,
                    name,
                    f"{median * 1e3:.3f}",
                    f"{min(times) * 1e3:.3f}-{max(times) * 1e3:.3f}",
                    f"{speedups[name]:.2f}x",
                    f"{min(ratios):.2f}-{max(ratios):.2f}",
                    f"{elements / median / 1e6:.0f}" if elements else "",
                    f"{bytes_moved / median / 1e9:.2f}" if bytes_moved else "",
                    f"{bytes_moved / median / bandwidth:.1%}" if bytes_moved else "",
                )
            )
        return speedups

    return run


@pytest.fixture
def peak_memory() -> Callable[[Callable[[], object]], int]:
    """`peak_memory(call) -> bytes` that the process held at most above what it held before, the result included."""
    release = ctypes.CDLL(None).malloc_trim  # gives freed memory back, so that using it again counts
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def kilobytes(key: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key))

    def measure(call: Callable[[], object]) -> int:
        call()  # whatever a first call sets up is not its memory
        gc.collect()
        release(0)
        reset.write_text("5")  # the peak starts again from here
        before = kilobytes("VmRSS:")
        result = call()
        peak = kilobytes("VmHWM:") - before
        del result
        return 1024 * peak

    return measure


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_rows]
    if not rows:
        return
    if config.getoption("--smoke"):
        terminalreporter.write_line("smoke run: every benchmark ran once on small inputs, timings mean nothing")
        return
    heads = (
        "case",
        "competitor",
        "median ms",
        "min-max ms",
        "speed-up",
        "min-max",
        "M elements/s",
        "GB/s",
        "of bandwidth",
    )
    table = [heads, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    terminalreporter.section(f"medians of {ROUNDS} interleaved rounds")
    for row in table:
        terminalreporter.write_line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    for line in config.stash[_notes]:
        terminalreporter.write_line(line)
