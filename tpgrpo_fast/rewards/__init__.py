"""Rewards: functions of images and prompts, and the weighted set of them that a run uses."""

from tpgrpo_fast.rewards.base import Reward, RewardError, RewardSet, Scores
from tpgrpo_fast.rewards.registry import BUILTIN

__all__ = ["BUILTIN", "Reward", "RewardError", "RewardSet", "Scores"]
