"""Reward of the embedded shapes task."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpgrpo_fast.shapes import shapes_reward


class ShapesReward:
    """How well an image shows the coloured shapes its prompt names, in [0, 1]; see :mod:`tpgrpo_fast.shapes`.

    Parts logged alone, each in [0, 1]: count, color, shape, position.
    """

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Score images [N, 3, H, W] in [0, 1]; raises ValueError for a prompt outside the task's grammar."""
        return shapes_reward(images, prompts)
