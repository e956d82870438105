import pytest

from tpgrpo_fast.shapes import heldout_prompts, train_prompts
from tpgrpo_fast.shapes.prompts import COLORS, COUNTS, RELATIONS, SHAPES, Item, Scene, describe, parse


def test_every_prompt_survives_the_round_trip() -> None:
    for prompt in train_prompts() + heldout_prompts():
        assert describe(parse(prompt)) == prompt


def test_every_scene_of_the_grammar_survives_the_round_trip() -> None:
    singles = [Item(color=color, shape=shape) for color in COLORS for shape in SHAPES]
    scenes = [Scene(items=(Item(count=n, color=i.color, shape=i.shape),)) for n in COUNTS.values() for i in singles]
    scenes += [Scene(items=(a, b), relation=relation) for a in singles for b in singles for relation in RELATIONS]
    assert [parse(describe(scene)) for scene in scenes] == scenes


def test_meaning_of_a_prompt() -> None:
    two = parse("two red circles")
    assert (two.items, two.relation, two.num_objects) == ((Item(count=2, color="red", shape="circle"),), None, 2)
    pair = parse("a blue square left of a green triangle")
    assert [(i.count, i.color, i.shape) for i in pair.items] == [(1, "blue", "square"), (1, "green", "triangle")]
    assert (pair.relation, pair.num_objects) == ("left of", 2)


def test_split_is_disjoint_fixed_and_large() -> None:
    train, heldout = train_prompts(), heldout_prompts()
    assert len(set(train)) == len(train)
    assert len(set(heldout)) == len(heldout)
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) >= 300
    assert len(heldout) >= 128
    train.clear()  # a caller's own copy
    assert train_prompts()


@pytest.mark.parametrize("size", [64, 128])
def test_leading_heldout_prompts_are_a_fair_sample(size: int) -> None:
    scenes = [parse(prompt) for prompt in heldout_prompts()[:size]]
    assert 0.06 < sum(scene.relation is None for scene in scenes) / size < 0.25
    for relation in RELATIONS:
        assert 0.12 < sum(scene.relation == relation for scene in scenes) / size < 0.35
    items = [item for scene in scenes for item in scene.items]
    for color in COLORS:
        assert abs(sum(item.color == color for item in items) / len(items) - 1 / len(COLORS)) < 0.1
    for shape in SHAPES:
        assert abs(sum(item.shape == shape for item in items) / len(items) - 1 / len(SHAPES)) < 0.1


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("two pink circles", "pink"),
        ("seven red circles", "seven"),
        ("two red circle", "circle"),
        ("a red circles", "circles"),
        ("a red hexagon", "hexagon"),
        ("a red circle near a blue square", "near"),
        ("a red circle left a blue square", "a"),
        ("a red circle above two blue squares", "two"),
        ("two red circles above a blue square", "above"),
        ("a red circle above a blue square please", "please"),
        ("a red", "the end"),
        ("", "the end"),
    ],
)
def test_other_text_is_refused_by_its_first_bad_word(prompt: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"found '{word}'"):
        parse(prompt)
