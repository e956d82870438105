"""Checks a finished run of the README's train command: `python check_training.py RUNS_DIR`.

The held-out reward has to rise by at least 0.05 between the first and the last evaluation (same prompts, same noise),
and ratios before the first update have to be 1 to 1e-5.
"""

import json
import sys
from pathlib import Path

LEAST_GAIN = 0.05
LARGEST_RATIO_DEVIATION = 1e-5


def check(runs: Path) -> None:
    """Exits with a message unless the only run under `runs` has gained enough."""
    files = sorted(runs.rglob("metrics.jsonl"))
    if len(files) != 1:
        sys.exit(f"expected one metrics.jsonl under {runs}, found {len(files)}")
    records = [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()]
    rewards = [(record["iteration"], record["eval/reward"]) for record in records if "eval/reward" in record]
    if len(rewards) < 2 or rewards[0][0] != 0:
        sys.exit(f"{files[0]}: expected eval/reward at iteration 0 and later, found it at {[i for i, _ in rewards]}")
    gain = rewards[-1][1] - rewards[0][1]
    print("eval/reward: " + ", ".join(f"{reward:.4f} (iteration {i})" for i, reward in rewards) + f"; gain {gain:+.4f}")
    if not gain >= LEAST_GAIN:
        sys.exit(f"eval/reward rose by {gain:+.4f}, less than {LEAST_GAIN}")
    deviations = [record["ratio/max_dev"] for record in records if "ratio/max_dev" in record]
    if not deviations or not deviations[0] <= LARGEST_RATIO_DEVIATION:
        sys.exit(f"ratio/max_dev at the first update is {deviations[:1]}, expected at most {LARGEST_RATIO_DEVIATION}")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
