"""Shared parts of the benchmarks: interleaved timing of competitors and one table at the end.

A benchmark first asserts that its competitors agree, then calls `race`: no speed is printed for a case whose results
are wrong. With `--smoke` each case runs once on small inputs, which checks the benchmark and measures nothing.
"""

import statistics
import time
from collections.abc import Callable

import pytest

PAIRS = 9

_rows = pytest.StashKey[list[tuple[str, ...]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="one small round a benchmark: checks them, measures nothing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_rows] = []


@pytest.fixture
def smoke(request: pytest.FixtureRequest) -> bool:
    """Whether inputs should be small."""
    return request.config.getoption("--smoke")


@pytest.fixture
def race(request: pytest.FixtureRequest, smoke: bool) -> Callable[..., dict[str, float]]:
    """`race(case, competitors, elements=..., bytes_moved=...) -> {name: median seconds}`.

    The competitors take turns, so that whatever slows the machine slows them alike. The first one is the baseline of
    the speed-ups. GB/s is printed where the bytes that a case has to move are given.
    """

    def run(
        case: str, competitors: dict[str, Callable[[], object]], *, elements: int = 0, bytes_moved: int = 0
    ) -> dict[str, float]:
        seconds: dict[str, list[float]] = {name: [] for name in competitors}
        for round_index in range(1 if smoke else PAIRS + 1):
            for name, call in competitors.items():
                start = time.perf_counter()
                call()
                if smoke or round_index > 0:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        baseline = next(iter(medians.values()))
        for name, median in medians.items():
            spread = f"{min(seconds[name]) * 1e3:.2f}-{max(seconds[name]) * 1e3:.2f}"
            per_second = f"{elements / median / 1e6:.0f}" if elements else ""
            bandwidth = f"{bytes_moved / median / 1e9:.1f}" if bytes_moved else ""
            request.config.stash[_rows].append(
                (case, name, f"{median * 1e3:.2f}", spread, f"{baseline / median:.2f}x", per_second, bandwidth)
            )
        return medians

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_rows]
    if not rows:
        return
    if config.getoption("--smoke"):
        terminalreporter.write_line("smoke run: every benchmark ran once on small inputs, timings mean nothing")
        return
    table = [("case", "competitor", "median ms", "min-max ms", "speed-up", "M elements/s", "GB/s"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    terminalreporter.section(f"medians of {PAIRS} interleaved rounds")
    for row in table:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
