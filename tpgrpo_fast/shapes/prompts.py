"""The grammar of the shapes task: coloured shapes with counts, and pairs of shapes with a position.

Counting prompts ("two red circles") and position prompts ("a blue square left of a green triangle") are a miniature of
GenEval's categories (arXiv 2310.11513). `train_prompts` and `heldout_prompts` are a fixed, disjoint, shuffled split.
"""

import random
from dataclasses import dataclass
from functools import cache

COLORS: tuple[str, ...] = ("red", "green", "blue", "yellow")
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
COUNTS: dict[str, int] = {"a": 1, "two": 2, "three": 3, "four": 4}
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")

_NUM_HELDOUT_COUNT, _NUM_HELDOUT_POSITION = 16, 112


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A number of equal objects, for instance `Item(count=2, color="red", shape="circle")`."""

    count: int = 1
    color: str
    shape: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a prompt asks for: one item, or two single objects of which the first stands in `relation` to the second."""

    items: tuple[Item, ...]
    relation: str | None = None

    @property
    def num_objects(self) -> int:
        """How many objects the scene holds."""
        return sum(item.count for item in self.items)


def describe(scene: Scene) -> str:
    """The prompt of a scene; the inverse of `parse`."""
    words = {count: word for word, count in COUNTS.items()}
    phrases = [f"{words[item.count]} {item.color} {item.shape}{'s' * (item.count > 1)}" for item in scene.items]
    return phrases[0] if scene.relation is None else f"{phrases[0]} {scene.relation} {phrases[1]}"


@cache
def parse(prompt: str) -> Scene:
    """The scene of a prompt. Raises ValueError naming the first word that the grammar does not allow there."""
    words = prompt.split()

    def take(allowed: tuple[str, ...]) -> str:
        word = words.pop(0) if words else "the end"
        if word not in allowed:
            raise ValueError(f"shapes prompt {prompt!r}: found {word!r} where one of {', '.join(allowed)} is expected")
        return word

    def take_item(counts: tuple[str, ...]) -> Item:
        count, color = COUNTS[take(counts)], take(COLORS)
        plural = "s" if count > 1 else ""
        return Item(count=count, color=color, shape=take(tuple(s + plural for s in SHAPES)).removesuffix("s"))

    first = take_item(tuple(COUNTS))
    if not words:
        return Scene(items=(first,))
    if first.count > 1:
        raise ValueError(
            f"shapes prompt {prompt!r}: found {words[0]!r} after several objects, only one may have a position"
        )
    relation = take(("left", "right", "above", "below"))
    if relation in ("left", "right"):
        relation += " " + take(("of",))
    second = take_item(("a",))
    if words:
        raise ValueError(f"shapes prompt {prompt!r}: found {words[0]!r} after the end of the sentence")
    return Scene(items=(first, second), relation=relation)


@cache
def _split() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(train, held-out). Position prompts pair two objects that differ in both colour and shape."""
    rng = random.Random(20240601)
    counting = [
        Scene(items=(Item(count=count, color=color, shape=shape),))
        for count in COUNTS.values() for color in COLORS for shape in SHAPES
    ]  # fmt: skip
    singles = [Item(color=color, shape=shape) for color in COLORS for shape in SHAPES]
    position = [
        Scene(items=(first, second), relation=relation)
        for first in singles for second in singles for relation in RELATIONS
        if first.color != second.color and first.shape != second.shape
    ]  # fmt: skip
    rng.shuffle(counting)
    rng.shuffle(position)
    heldout = [describe(s) for s in counting[:_NUM_HELDOUT_COUNT] + position[:_NUM_HELDOUT_POSITION]]
    train = [describe(s) for s in counting[_NUM_HELDOUT_COUNT:] + position[_NUM_HELDOUT_POSITION:]]
    rng.shuffle(heldout)
    rng.shuffle(train)
    return tuple(train), tuple(heldout)


def train_prompts() -> list[str]:
    """The prompts to train on, in a fixed mixed order."""
    return list(_split()[0])


def heldout_prompts() -> list[str]:
    """The prompts to evaluate on, disjoint from `train_prompts`; any leading part is a representative sample."""
    return list(_split()[1])
