import numpy as np
import pytest
from scipy import ndimage

from tpgrpo_fast.shapes import heldout_prompts
from tpgrpo_fast.shapes.prompts import RELATIONS, parse
from tpgrpo_fast.shapes.render import BACKGROUND, IMAGE_SIZE, PALETTE, render


def test_image_is_a_function_of_scene_and_generator() -> None:
    scene = parse("three blue triangles")
    first, second, other = (render(scene, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first.dtype == np.float32
    assert first.shape == (3, IMAGE_SIZE, IMAGE_SIZE)
    assert first.min() >= 0
    assert first.max() <= 1
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 0.1


def test_objects_are_apart_and_inside() -> None:
    rng = np.random.default_rng(0)
    background = np.asarray(BACKGROUND, np.float32)[:, None, None]
    for prompt in heldout_prompts()[:64]:
        touched = np.abs(render(parse(prompt), rng) - background).max(0) > 1e-3
        assert ndimage.label(touched, np.ones((3, 3)))[1] == parse(prompt).num_objects, prompt
        border = np.concatenate([touched[0], touched[-1], touched[:, 0], touched[:, -1]])
        assert not border.any(), prompt


@pytest.mark.parametrize("relation", RELATIONS)
def test_position_of_a_pair(relation: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        image = render(parse(f"a red circle {relation} a blue square"), rng)
        centers = [
            ndimage.center_of_mass(np.abs(image - np.asarray(PALETTE[c], np.float32)[:, None, None]).max(0) < 0.05)
            for c in ("red", "blue")
        ]
        down, right = np.subtract(centers[1], centers[0])
        along = {"left of": right, "right of": -right, "above": down, "below": -down}[relation]
        assert along > 8
        assert along >= 0.8 * np.hypot(down, right)


def test_edges_are_antialiased() -> None:
    image = render(parse("a red circle"), np.random.default_rng(2))
    green = np.unique(image[1].round(3))
    assert len(green) > 8  # between the background's and the shape's own value
