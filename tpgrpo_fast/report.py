"""Plots of a run: `python -m tpgrpo_fast.report RUN_DIR [RUN_DIR …]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpgrpo_fast.files import replace_file
from tpgrpo_fast.metrics import read_metrics

PANELS = (
    ("held-out reward", ("eval/reward",)),
    ("reward of rollouts", ("reward/mean",)),
    ("turning points, share of steps", ("credit/turning_point_fraction",)),
    ("max |ratio - 1| before the update", ("ratio/max_dev",)),
)


def plot(folders: Sequence[Path], output: Path) -> None:
    """Write one PNG with the curves of some runs, and for the first its evaluation images before and after.

    Raises:
        ValueError: a folder holds no metrics.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [(folder.name, read_metrics(folder)) for folder in folders]
    pictures = sorted((folders[0] / "images").glob("iteration-*.png"))
    before_after = [pictures[0], pictures[-1]] if len(pictures) > 1 else []
    rows = 2 + len(before_after)
    figure = pyplot.figure(figsize=(10, 6 + 3 * len(before_after)), layout="constrained")
    layout = figure.add_gridspec(rows, 2)
    for place, (title, keys) in enumerate(PANELS):
        axes = figure.add_subplot(layout[place // 2, place % 2])
        for name, records in runs:
            for key in keys:
                iterations, values = _curve(records, key)
                axes.plot(iterations, values, marker="o", markersize=3, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
        if title.startswith("max"):
            axes.set_yscale("symlog", linthresh=1e-7)  # often exactly 0
    figure.axes[0].legend(fontsize=8)
    for place, picture in enumerate(before_after):
        axes = figure.add_subplot(layout[2 + place, :])
        axes.imshow(pyplot.imread(picture), interpolation="nearest")
        axes.set_title(f"same prompts, same noise: iteration {int(picture.stem.rpartition('-')[2])}", fontsize=10)
        axes.axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(output) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    pyplot.close(figure)


def _curve(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(record["iteration"], record[key]) for record in records if record.get(key) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the report."""
    parser = argparse.ArgumentParser(prog="python -m tpgrpo_fast.report", allow_abbrev=False, description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders; several are overlaid")
    parser.add_argument("--output", type=Path, help="PNG file; by default report.png in the first folder")
    options = parser.parse_args(arguments)
    output = options.output or options.runs[0] / "report.png"
    plot(options.runs, output)
    first, last = (lambda rewards: (rewards[0], rewards[-1]))(_curve(read_metrics(options.runs[0]), "eval/reward")[1])
    print(f"held-out reward {first:.4f} -> {last:.4f} ({last - first:+.4f}); plots: {output}")


if __name__ == "__main__":
    from tpgrpo_fast.cli import run

    run(main)
