"""Rewards by JPEG file size, as in Black et al., arXiv 2305.13301."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from PIL import Image


def jpeg_kilobytes(images: torch.Tensor, quality: int = 95) -> torch.Tensor:
    """Return the size of each image as a JPEG file, in kB (1000 bytes).

    Args:
        images: [N, 3, H, W] float in [0, 1]; values outside are clipped, pixels are rounded to 8 bits.
        quality: JPEG quality, 1 to 95.

    Returns:
        [N] float32 on the CPU; NaN for an image with a non-finite pixel.
    """
    pixels = (images.float().clamp(0, 1) * 255).round()
    finite = torch.isfinite(images).flatten(1).all(dim=1).tolist()
    arrays = pixels.nan_to_num(0.0).to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    sizes = []
    for array, good in zip(arrays, finite, strict=True):
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, format="JPEG", quality=quality)
        sizes.append(buffer.tell() / 1000 if good else float("nan"))
    return torch.tensor(sizes, dtype=torch.float32)


class JpegIncompressibility:
    """Larger JPEG files are better: the size in kB (1000 bytes).

    Args:
        quality: JPEG quality, 1 to 95.

    Raises:
        ValueError: the quality is outside 1 to 95.
    """

    sign = 1.0

    def __init__(self, quality: int = 95) -> None:
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 95:
            raise ValueError(f"quality = {quality!r} is not an integer from 1 to 95")
        self.quality = quality

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Score images [N, 3, H, W] in [0, 1]; the prompts are not read."""
        return self.sign * jpeg_kilobytes(images, self.quality)


class JpegCompressibility(JpegIncompressibility):
    """Smaller JPEG files are better: minus the size in kB (1000 bytes)."""

    sign = -1.0
