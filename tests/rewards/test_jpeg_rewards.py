"""Rewards by JPEG file size."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tpgrpo_fast.rewards.jpeg import JpegCompressibility, JpegIncompressibility, jpeg_kilobytes


@pytest.fixture
def images():
    noise = torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.full_like(noise, 0.5), noise])


def test_size_is_that_of_the_file_in_kilobytes(images):
    pixels = np.round(images[1].permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)
    assert jpeg_kilobytes(images)[1].item() == pytest.approx(len(buffer.getvalue()) / 1000)


def test_noise_is_larger_and_the_signs_are_opposite(images):
    large, small = JpegIncompressibility()(images, ["", ""]), JpegCompressibility()(images, ["", ""])
    assert large[1] > 3 * large[0] > 0
    assert torch.equal(small, -large)


def test_quality_matters(images):
    assert jpeg_kilobytes(images, 50)[1] < jpeg_kilobytes(images, 95)[1]


def test_a_broken_image_scores_nan_and_spoils_no_other(images):
    broken = images.clone()
    broken[0, 0, 0, 0] = float("nan")
    sizes = jpeg_kilobytes(broken)
    assert sizes[0].isnan()
    assert sizes[1] == jpeg_kilobytes(images)[1]


def test_half_precision_and_values_outside_the_range(images):
    assert torch.equal(jpeg_kilobytes(images * 4 - 1), jpeg_kilobytes((images * 4 - 1).clamp(0, 1)))
    assert jpeg_kilobytes(images.to(torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("quality", [0, 96, 50.0, "high", True])
def test_bad_quality(quality):
    with pytest.raises(ValueError, match="1 to 95"):
        JpegCompressibility(quality=quality)
