"""Draws a scene: antialiased shapes of random size and place on a plain light background."""

import numpy as np
from numpy.typing import NDArray

from tpgrpo_fast.shapes.prompts import Item, Scene

IMAGE_SIZE = 64
"""Side of the square images in pixels."""
BACKGROUND: tuple[float, float, float] = (0.96, 0.95, 0.92)
PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.16, 0.16),
    "green": (0.14, 0.64, 0.24),
    "blue": (0.14, 0.32, 0.90),
    "yellow": (0.97, 0.80, 0.12),
}
"""RGB in [0, 1]."""
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left of": (1.0, 0.0),
    "right of": (-1.0, 0.0),
    "above": (0.0, 1.0),
    "below": (0.0, -1.0),
}
"""Unit vector (x to the right, y down) from the first object of a relation to the second."""

_BORDER, _GAP = 2.0, 4.0  # pixels between a shape and the edge, and between two shapes
_LATTICE, _JITTER = 8.0, 1.0  # centres lie on a lattice of this spacing, give or take; a small model learns that fast
_TRIES = 64  # placements proposed at once


def _coverage(shape: str, x: NDArray[np.float32], y: NDArray[np.float32], r: float) -> NDArray[np.float32]:
    """Share of each pixel at (x, y) from the centre that a shape with bounding box 2r x 2r covers."""
    if shape == "circle":
        distance = np.sqrt(x * x + y * y) - r
    elif shape == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - r
    else:  # upright isosceles triangle
        distance = np.maximum((np.abs(x) - 0.5 * (y + r)) / np.sqrt(1.25), y - r)
    return np.clip(0.5 - distance, 0.0, 1.0)


def _place(scene: Scene, size: int, rng: np.random.Generator) -> list[tuple[Item, float, float, float]]:
    """Non-overlapping (item, x, y, half side) of every object, drawn by rejection."""
    objects = [item for item in scene.items for _ in range(item.count)]
    unit = size / IMAGE_SIZE
    small, large = (8.0, 10.0) if len(objects) <= 2 else (7.0, 8.5)
    while True:
        radii = rng.uniform(small, large, (_TRIES, 1, len(objects))) * unit
        places = int(IMAGE_SIZE / _LATTICE)
        centers = rng.integers(1, places, (_TRIES, 2, len(objects))) * _LATTICE * unit
        centers += rng.uniform(-_JITTER, _JITTER, centers.shape) * unit
        # inside the image, and bounding boxes apart along one axis
        low = radii + _BORDER * unit
        apart = np.abs(centers[..., :, None] - centers[..., None, :]).max(1) - radii.swapaxes(1, 2) - radii
        valid = (apart + np.eye(len(objects)) * 4 * size >= _GAP * unit).all((1, 2))
        valid &= ((centers >= low) & (centers <= size - low)).all((1, 2))
        if scene.relation is not None:
            step = centers[..., 1] - centers[..., 0]
            valid &= step @ np.asarray(DIRECTIONS[scene.relation]) >= 0.85 * np.linalg.norm(step, axis=1)
        if valid.any():
            first = valid.argmax()
            return [
                (item, x, y, r)
                for item, (x, y), r in zip(objects, centers[first].T.tolist(), radii[first, 0].tolist(), strict=True)
            ]


def _color(name: str) -> NDArray[np.float32]:
    return np.asarray(PALETTE.get(name, BACKGROUND), np.float32)[:, None, None]


def render(scene: Scene, rng: np.random.Generator, size: int = IMAGE_SIZE) -> NDArray[np.float32]:
    """An image [3, size, size] in [0, 1] that satisfies the scene exactly."""
    image = np.empty((3, size, size), np.float32)
    image[:] = _color("background")
    for item, cx, cy, r in _place(scene, size, rng):
        # only the pixels around the shape
        x, y = (np.arange(int(c - r) - 1, int(c + r) + 2, dtype=np.float32) + np.float32(0.5 - c) for c in (cx, cy))
        patch = image[:, int(cy - r) - 1 : int(cy + r) + 2, int(cx - r) - 1 : int(cx + r) + 2]
        patch += _coverage(item.shape, x[None, :], y[:, None], r) * (_color(item.color) - patch)
    return image
