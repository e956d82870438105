"""Images on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tpgrpo_fast.files import replace_file


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """`[N, H, W, 3]` bytes of images `[N, 3, H, W]` in [0, 1]."""
    scaled = (images.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).cpu().numpy()


def save_grid(images: torch.Tensor, path: Path, *, columns: int = 8, gap: int = 2) -> None:
    """Write images `[N, 3, H, W]` in [0, 1] as one PNG, row by row, `columns` a row."""
    tiles = to_uint8(images)
    count, height, width, _ = tiles.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    canvas = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, dtype=np.uint8)
    for place, tile in enumerate(tiles):
        top, left = place // columns * (height + gap), place % columns * (width + gap)
        canvas[top : top + height, left : left + width] = tile
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary:
        Image.fromarray(canvas).save(temporary, format="PNG")
