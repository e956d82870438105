import time

import numpy as np
import pytest
import torch

from tpgrpo_fast.shapes import heldout_prompts, shapes_reward, train_prompts
from tpgrpo_fast.shapes.prompts import COLORS, COUNTS, RELATIONS, SHAPES, Item, Scene, describe, parse
from tpgrpo_fast.shapes.render import BACKGROUND, render

PARTS = ("reward", "count", "color", "shape", "position")
PAIRS = [p for p in train_prompts() + heldout_prompts() if parse(p).relation]
COUNTING = [p for p in train_prompts() + heldout_prompts() if not parse(p).relation]


def draw(prompts: list[str], seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([render(parse(prompt), rng) for prompt in prompts]))


def next_of(value: str, choices: tuple[str, ...]) -> str:
    return choices[(choices.index(value) + 1) % len(choices)]


def change(
    prompt: str, *, color: bool = False, shape: bool = False, count: bool = False, relation: bool = False
) -> str:
    """The prompt with some attributes of its first (or only) object wrong."""
    scene = parse(prompt)
    first = scene.items[0]
    item = Item(
        count=first.count % len(COUNTS) + 1 if count else first.count,
        color=next_of(first.color, COLORS) if color else first.color,
        shape=next_of(first.shape, SHAPES) if shape else first.shape,
    )
    new_relation = next_of(scene.relation, RELATIONS) if relation and scene.relation else scene.relation
    return describe(Scene(items=(item, *scene.items[1:]), relation=new_relation))


def means(images: torch.Tensor, prompts: list[str]) -> dict[str, float]:
    return {name: values.mean().item() for name, values in shapes_reward(images, prompts).items()}


def test_truth_scores_high_everywhere() -> None:
    prompts = train_prompts() + heldout_prompts()
    scores = shapes_reward(draw(prompts), prompts)
    assert tuple(scores) == PARTS
    for values in scores.values():
        assert values.dtype == torch.float32
        assert values.shape == (len(prompts),)
        assert values.mean() > 0.97
        assert values.min() > 0.8
        assert values.max() <= 1


@pytest.mark.parametrize("prompts", [COUNTING, PAIRS[:100]], ids=["counting", "pairs"])
@pytest.mark.parametrize("part", ["color", "shape"])
def test_wrong_color_and_wrong_shape(prompts: list[str], part: str) -> None:
    scores = means(draw([change(prompt, **{part: True}) for prompt in prompts]), prompts)
    assert scores[part] < (0.1 if prompts is COUNTING else 0.75)  # pairs: one object of the two is wrong
    assert scores["reward"] < (0.35 if prompts is COUNTING else 0.75)
    other = {"color": "shape", "shape": "color"}[part]
    assert scores[other] > 0.9
    assert scores["count"] == 1


def test_wrong_everything_is_worse_than_a_wrong_part() -> None:
    kinds: list[dict[str, bool]] = [{"color": True}, {"color": True, "shape": True}]
    scores = [means(draw([change(p, **kind) for p in COUNTING]), COUNTING)["reward"] for kind in kinds]
    assert scores[1] < 0.05 < scores[0]


def test_wrong_position() -> None:
    scores = means(draw([change(prompt, relation=True) for prompt in PAIRS[:100]]), PAIRS[:100])
    assert scores["position"] < 0.25
    assert scores["reward"] < 0.65
    assert min(scores["count"], scores["color"], scores["shape"]) > 0.95


@pytest.mark.parametrize("wanted", COUNTS.values())
@pytest.mark.parametrize("drawn", COUNTS.values())
def test_count_is_graded(wanted: int, drawn: int) -> None:
    scenes = [
        [Scene(items=(Item(count=n, color=c, shape=s),)) for c in COLORS for s in SHAPES] for n in (drawn, wanted)
    ]
    scores = means(draw([describe(s) for s in scenes[0]]), [describe(s) for s in scenes[1]])
    assert scores["count"] == pytest.approx(min(drawn, wanted) / max(drawn, wanted))
    if drawn == wanted:
        assert scores["reward"] > 0.95
    else:
        assert scores["reward"] < 0.85


def test_extra_and_missing_objects_of_a_pair() -> None:
    prompts = PAIRS[:60]
    images = draw(prompts)
    alone = draw([describe(Scene(items=parse(prompt).items[:1])) for prompt in prompts])
    assert means(alone, prompts)["reward"] < 0.3
    assert means(alone, prompts)["position"] == 0
    # a third object in whatever corner is free of others
    square = torch.tensor([0.14, 0.64, 0.24])[:, None, None].expand(3, 9, 9)
    crowded, free = images.clone(), []
    background = torch.tensor(BACKGROUND)[:, None, None]
    for image in crowded:
        for rows in (slice(0, 12), slice(52, 64)):
            for columns in (slice(0, 12), slice(52, 64)):
                if (image[:, rows, columns] - background).abs().max() < 1e-3 and len(free) < len(crowded):
                    image[:, rows, columns][:, 1:10, 1:10] = square
                    free.append(True)
                    break
            else:
                continue
            break
        else:
            free.append(False)
    kept = [i for i, ok in enumerate(free) if ok]
    assert len(kept) > 40
    scores = means(crowded[kept], [prompts[i] for i in kept])
    assert scores["count"] == pytest.approx(2 / 3)
    assert scores["reward"] < 0.72


@pytest.mark.parametrize("value", [0.0, 1.0, BACKGROUND, (0.88, 0.16, 0.16), float("nan"), float("inf")])
def test_plain_images_score_zero(value: float | tuple[float, float, float]) -> None:
    image = torch.as_tensor(value).expand(3).reshape(1, 3, 1, 1).expand(2, 3, 64, 64)
    for values in shapes_reward(image, ["a red square", "a red square above a blue circle"]).values():
        assert values.tolist() == [0, 0]


def test_noise_scores_near_zero() -> None:
    prompts = heldout_prompts()
    generator = torch.Generator().manual_seed(0)
    assert means(torch.rand(len(prompts), 3, 64, 64, generator=generator), prompts)["reward"] < 0.05


def test_nan_pixels_are_background() -> None:
    prompts = heldout_prompts()[:32]
    images = draw(prompts)
    empty = (images - torch.tensor(BACKGROUND)[:, None, None]).abs().amax(1, keepdim=True).expand_as(images) < 1e-3
    spoiled = images.masked_fill(empty, float("nan"))
    for name, values in shapes_reward(images, prompts).items():
        assert torch.equal(values, shapes_reward(spoiled, prompts)[name]), name


def test_scores_do_not_depend_on_the_batch() -> None:
    prompts = heldout_prompts()[:40]
    images = draw([change(prompt, color=True) for prompt in prompts])
    whole = shapes_reward(images, prompts)["reward"]
    single = torch.cat([shapes_reward(images[i : i + 1], prompts[i : i + 1])["reward"] for i in range(len(prompts))])
    assert torch.equal(whole, single)
    assert shapes_reward(images[:0], [])["reward"].shape == (0,)


def test_other_sizes_and_precisions() -> None:
    prompts = heldout_prompts()[:24]
    rng = np.random.default_rng(0)
    large = torch.from_numpy(np.stack([render(parse(prompt), rng, size=128) for prompt in prompts]))
    assert means(large, prompts)["reward"] > 0.97
    assert means(draw(prompts).half(), prompts)["reward"] > 0.95


def test_an_image_takes_about_a_millisecond() -> None:
    prompts = heldout_prompts() * 4
    images = draw(prompts[:128]).repeat(4, 1, 1, 1)
    durations = []
    for _ in range(3):
        start = time.thread_time()
        shapes_reward(images, prompts)
        durations.append(time.thread_time() - start)
    assert min(durations) / len(prompts) < 4e-3  # measured 0.7 ms; slack for slow and busy machines


def test_bad_input_is_named() -> None:
    images = draw(["a red circle"])
    with pytest.raises(ValueError, match="one for each of the 1 images, got 2"):
        shapes_reward(images, ["a red circle"] * 2)
    with pytest.raises(ValueError, match=r"\[N, 3, H, W\], got \[3, 64, 64\]"):
        shapes_reward(images[0], ["a red circle"])
    with pytest.raises(ValueError, match="dog"):
        shapes_reward(images, ["a red dog"])
