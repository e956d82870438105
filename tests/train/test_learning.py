"""The main job learns, and what it learns comes from the advantages. Minutes a run."""

import dataclasses

import pytest
import torch

from tpgrpo_fast import train
from tpgrpo_fast.metrics import read_metrics

pytestmark = pytest.mark.slow


def gain_of(folder) -> float:
    rewards = [record["eval/reward"] for record in read_metrics(folder) if "eval/reward" in record]
    return rewards[-1] - rewards[0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_heldout_reward_rises(tmp_path, seed):
    train.main(["--run.dir", str(tmp_path), "--run.seed", str(seed), "--run.loggers", "[jsonl]"])
    assert gain_of(tmp_path / "shapes") >= 0.05


def test_shuffled_advantages_teach_nothing(tmp_path, monkeypatch):
    """The same run with every group's advantages handed to its samples at random."""
    assign_credit = train.assign_credit
    generator = torch.Generator().manual_seed(0)

    def shuffled(rewards, groups, *arguments, **options):
        credit = assign_credit(rewards, groups, *arguments, **options)
        advantages = credit.advantages.clone()
        for group in groups.unique():
            rows = (groups == group).nonzero().squeeze(1)
            advantages[rows] = credit.advantages[rows[torch.randperm(len(rows), generator=generator)]]
        return dataclasses.replace(credit, advantages=advantages)

    monkeypatch.setattr(train, "assign_credit", shuffled)
    train.main(["--run.dir", str(tmp_path), "--run.loggers", "[jsonl]"])
    assert gain_of(tmp_path / "shapes") < 0.02
