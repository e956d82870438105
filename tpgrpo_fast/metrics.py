"""What a run records: metrics.jsonl always, TensorBoard and W&B on request, a line on the screen for each iteration."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpgrpo_fast.config import Config
from tpgrpo_fast.files import write_text

METRICS_FILE = "metrics.jsonl"


class Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` towards `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def finish(self) -> dict[str, float]:
        """Seconds of every phase as `seconds/NAME`, with `seconds/total` since the last call; then starts anew."""
        now = time.perf_counter()
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        seconds["seconds/total"] = now - self._started
        self._seconds, self._started = {}, now
        return seconds


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a run folder, in order.

    Raises:
        ValueError: there are none; the message names the file.
    """
    file = folder / METRICS_FILE
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give the folder of a run (runs/NAME)")
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # a process that was killed leaves its last line unfinished
            raise ValueError(f"{file}, line {number} is not JSON ({error}): remove that line") from error
    if not records:
        raise ValueError(f"{file} is empty: the run has not finished its first evaluation")
    return records


class MetricsLog:
    """Writes one record an iteration to every logger of the configuration; main process only.

    Args:
        folder: the run folder, which exists.
        config: the whole configuration.
        resumed_at: keep the records up to this iteration and go on after it; None starts an empty log.
    """

    def __init__(self, folder: Path, config: Config, *, resumed_at: int | None = None) -> None:
        self._file = folder / METRICS_FILE
        kept = []
        if resumed_at is not None and self._file.is_file():
            kept = [record for record in read_metrics(folder) if record["iteration"] <= resumed_at]
        write_text(self._file, "".join(json.dumps(record) + "\n" for record in kept))
        self._tensorboard = self._wandb = None
        if "tensorboard" in config.run.loggers:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resumed_at is None else resumed_at + 1
            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        if "wandb" in config.run.loggers:
            import wandb

            self._wandb = wandb.init(
                project="tpgrpo_fast", name=config.run.name, dir=str(folder), config=config.to_dict(), resume="allow"
            )

    def write(self, record: dict[str, float | int]) -> None:
        """Append one record; `iteration` must be among its keys. Values that are not finite become null in the file."""
        plain = {key: _plain(value) for key, value in record.items()}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
        step = int(record["iteration"])
        scalars = {key: float(value) for key, value in record.items() if key != "iteration"}
        if self._tensorboard is not None:
            for key, value in scalars.items():
                self._tensorboard.add_scalar(key, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def images(self, name: str, images: Any, iteration: int) -> None:
        """Show images `[N, 3, H, W]` in [0, 1] in the loggers that can."""
        if self._tensorboard is not None:
            self._tensorboard.add_images(name, images, iteration)
        if self._wandb is not None:
            import wandb

            from tpgrpo_fast.images import to_uint8

            self._wandb.log({name: [wandb.Image(image) for image in to_uint8(images)]}, step=iteration)

    def close(self) -> None:
        """Flush and close."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def check_loggers(config: Config) -> None:
    """Refuse loggers whose package is missing, before any long work.

    Raises:
        ValueError: with the command that installs it.
    """
    import importlib.util

    for logger, package, command in (
        ("tensorboard", "tensorboard", "pip install tensorboard"),
        ("wandb", "wandb", 'pip install "tpgrpo-fast[wandb]"'),
    ):
        if logger in config.run.loggers and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"run.loggers names {logger}, but the package {package} is not installed: run `{command}`, or take "
                f"{logger} out of run.loggers"
            )


def line(record: dict[str, float | int], iterations: int) -> str:
    """One line for the screen."""
    parts = [f"iteration {record['iteration']:>{len(str(iterations))}}/{iterations}"]
    if "reward/mean" in record:
        parts.append(f"reward {record['reward/mean']:.4f} ± {record['reward/std']:.4f}")
    if "eval/reward" in record:
        parts.append(f"held-out {record['eval/reward']:.4f}")
    if "credit/turning_point_fraction" in record:
        parts.append(f"turning points {100 * record['credit/turning_point_fraction']:.1f} %")
    if "ratio/max_dev" in record:
        parts.append(f"max|ratio-1| {record['ratio/max_dev']:.1e}")
    if record.get("kl"):
        parts.append(f"KL {record['kl']:.2e}")
    timed = [
        (name, record[f"seconds/{name}"])
        for name in ("rollout", "reward", "update", "eval")
        if f"seconds/{name}" in record
    ]
    parts.append(", ".join(f"{name} {seconds:.1f} s" for name, seconds in timed))
    return "  ".join(part for part in parts if part)


def _plain(value: float | int) -> float | int | None:
    return value if isinstance(value, int) or math.isfinite(value) else None
