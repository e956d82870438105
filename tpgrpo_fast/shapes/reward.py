"""The analytic reward of the shapes task: it reads the generated image and nothing else.

Pixels go to the nearest colour of palette and background; connected foreground regions are the objects; each object has
a colour (share of its inner pixels), a shape (overlap with the three ideal shapes in its bounding box) and a centre.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from tpgrpo_fast.shapes.prompts import COLORS, SHAPES, Scene, parse
from tpgrpo_fast.shapes.render import BACKGROUND, DIRECTIONS, PALETTE

_Array = NDArray[np.float32]

_MIN_AREA, _MAX_AREA = 0.006, 0.30  # of the image; smaller regions are specks, larger ones are no object
_MAX_OBJECTS = 8  # the largest ones compete for the prompt's objects, all of them count
_CHUNK = 16  # images at a time, to stay in the caches
_IN_PLANE = np.zeros((3, 3, 3), bool)  # neighbours within an image, never across images
_IN_PLANE[1] = ndimage.generate_binary_structure(2, 1)


def _ramp(x: _Array, low: float, high: float) -> _Array:
    return np.clip((x - low) / (high - low), 0.0, 1.0)


def _objects(images: _Array) -> tuple[NDArray[np.int64], _Array, _Array, _Array, _Array]:
    """All objects in the order of their images: image index [K], area [K], centre [K, 2] (x, y), scores of the colours
    [K, 4] and of the shapes [K, 3].
    """
    num, _, height, width = images.shape
    colors = np.asarray([*PALETTE.values(), BACKGROUND], np.float32)
    pixels = images.reshape(num, 3, height * width)
    # argmin |p - c|^2 = argmax p.c - |c|^2 / 2
    nearest = (colors @ pixels - 0.5 * (colors**2).sum(1)[:, None]).argmax(1)
    nearest[~np.isfinite(pixels).all(1)] = len(COLORS)
    nearest = nearest.reshape(num, height, width)
    foreground = nearest < len(COLORS)
    inner = ndimage.binary_erosion(foreground, _IN_PLANE)
    labels, count = ndimage.label(foreground, _IN_PLANE)

    image, y, x = np.nonzero(labels)
    label = labels[image, y, x] - 1

    def total(values: NDArray) -> _Array:
        return np.bincount(label, values, count).astype(np.float32)

    area = total(np.ones(label.shape))
    boxes = ndimage.find_objects(labels)
    box = np.asarray([(b[2].start, b[1].start, b[2].stop, b[1].stop) for b in boxes], np.float32).reshape(count, 4)
    side, middle = box[:, 2:] - box[:, :2], 0.5 * (box[:, 2:] + box[:, :2] - 1)

    # u, v in (-1, 1): place of each pixel in its object's bounding box
    u = (x - middle[label, 0]) * 2 / side[label, 0]
    v = (y - middle[label, 1]) * 2 / side[label, 1]
    inside = (u * u + v * v <= 1.0, np.ones(label.shape, bool), np.abs(u) <= 0.5 * (1 + v) + 0.5 / side[label, 0])
    ideal = side.prod(1, keepdims=True) * np.asarray([np.pi / 4, 1.0, 0.5], np.float32)
    overlap = np.stack([total(m) for m in inside], 1)
    iou = overlap / (area[:, None] + ideal - overlap).clip(1.0)
    # a shape is right when it fits, fits better than the others, and is not stretched
    rival = np.stack([np.delete(iou, s, 1).max(1, initial=0.0) for s in range(len(SHAPES))], 1)
    aspect = side.min(1, initial=np.inf) / side.max(1, initial=1.0)
    shape = _ramp(iou - rival, -0.1, 0.06) * _ramp(iou, 0.6, 0.85) * _ramp(aspect, 0.5, 0.8)[:, None]

    voters = inner[image, y, x]
    inner_area = total(voters).clip(1.0)
    color = np.stack([total(voters & (nearest[image, y, x] == c)) for c in range(len(COLORS))], 1) / inner_area[:, None]

    valid = (area >= _MIN_AREA * height * width) & (area <= _MAX_AREA * height * width)
    owner = np.zeros(count, np.int64)
    owner[label] = image
    center = np.stack([total(x), total(y)], 1) / area[:, None]
    order = np.flatnonzero(valid)
    order = order[np.argsort(owner[order], kind="stable")]
    return owner[order], area[order], center[order], _ramp(color[order], 0.3, 0.9), shape[order]


def _relation(relation: str, first: _Array, second: _Array) -> float:
    step = second - first
    cosine = float(step @ np.asarray(DIRECTIONS[relation], np.float32) / max(float(np.linalg.norm(step)), 1e-6))
    return min(max((cosine - 0.2) / 0.5, 0.0), 1.0)


def _score(scene: Scene, area: _Array, center: _Array, color: _Array, shape: _Array) -> tuple[float, ...]:
    """(reward, count, color, shape, position) of one image's objects."""
    found, wanted = len(area), scene.num_objects
    if found == 0:
        return (0.0,) * 5
    count = min(found, wanted) / max(found, wanted)
    if found > _MAX_OBJECTS:
        largest = np.sort(np.argsort(-area, kind="stable")[:_MAX_OBJECTS])
        center, color, shape = center[largest], color[largest], shape[largest]
    # [items, objects]; the product rewards colour and shape on the same object
    c = np.stack([color[:, COLORS.index(item.color)] for item in scene.items])
    s = np.stack([shape[:, SHAPES.index(item.shape)] for item in scene.items])
    match = 0.25 * c + 0.25 * s + 0.5 * c * s

    position = 1.0
    if scene.relation is None:
        chosen = np.argsort(-match[0], kind="stable")[:wanted]
        rows, columns = np.zeros(len(chosen), int), chosen
    elif found == 1:
        rows, columns = np.asarray([int(match[:, 0].argmax())]), np.asarray([0])
        position = 0.0
    else:
        pairs = list(permutations(range(len(c[0])), 2))
        values = np.asarray([match[0, i] + match[1, j] for i, j in pairs])
        best = np.flatnonzero(values >= values.max() - 1e-6)  # indistinguishable pairs share the position score
        position = float(np.mean([_relation(scene.relation, center[pairs[b][0]], center[pairs[b][1]]) for b in best]))
        rows, columns = np.asarray([0, 1]), np.asarray(pairs[best[0]])
    parts = [float(part[rows, columns].sum()) / wanted for part in (match, c, s)]
    return parts[0] * count * (0.5 + 0.5 * position), count, parts[1], parts[2], position


def shapes_reward(images: torch.Tensor, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """How well images [N, 3, H, W] in [0, 1] show their prompts.

    Returns float32 [N] tensors in [0, 1] on the images' device: `reward` and its parts `count`, `color`, `shape`,
    `position`. With n objects asked for and m found, `count` is min(n, m) / max(n, m); `color` and `shape` are means
    over the n objects, the best matching ones found; `position` grades the angle between the pair and is 1 where the
    prompt names no position (0 in an image without objects). The reward multiplies the mean match of colour and shape
    on the same object by `count` and by (1 + position) / 2. A non-finite pixel counts as background.

    Raises ValueError for another number of prompts than images, a wrong image shape, or a prompt outside the grammar.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images: expected [N, 3, H, W], got {list(images.shape)}")
    if len(images) != len(prompts):
        raise ValueError(f"prompts: expected one for each of the {len(images)} images, got {len(prompts)}")
    scenes = [parse(prompt) for prompt in prompts]
    pixels = images.detach().float().cpu().numpy()
    scores = np.zeros((len(scenes), 5), np.float32)
    for start in range(0, len(scenes), _CHUNK):
        owner, *features = _objects(pixels[start : start + _CHUNK])
        for n, scene in enumerate(scenes[start : start + _CHUNK]):
            own = slice(*np.searchsorted(owner, (n, n + 1)))
            scores[start + n] = _score(scene, *(f[own] for f in features))
    columns = torch.from_numpy(scores).to(images.device).unbind(1)
    return dict(zip(("reward", "count", "color", "shape", "position"), columns, strict=True))
