"""Building rewards from a recipe, scoring with them, and refusing what is wrong."""

import sys

import numpy as np
import pytest
import torch

from tpgrpo_fast.config import Config
from tpgrpo_fast.rewards import BUILTIN, RewardError, RewardSet
from tpgrpo_fast.shapes import train_prompts

USER_MODULE = """
import torch

def brightness(images, prompts, scale=1.0, offset=0.0):
    return images.mean(dim=(1, 2, 3)) * scale + offset

def parts(images, prompts):
    red = images[:, 0].mean(dim=(1, 2))
    return {"reward": red.tolist(), "red": red, "index": list(range(len(prompts)))}

class Length:
    def __init__(self, per=1):
        self.per = per

    def __call__(self, images, prompts):
        return [len(prompt) // self.per for prompt in prompts]

class Mute:
    pass

def crash(images, prompts):
    raise ZeroDivisionError("inside the reward")

NUMBER = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_user_rewards.py").write_text(USER_MODULE)
    (tmp_path / "my_broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield "my_user_rewards"
    for name in ("my_user_rewards", "my_broken_rewards"):
        sys.modules.pop(name, None)


@pytest.fixture
def images():
    return torch.tensor([0.25, 0.5, 1.0]).reshape(3, 1, 1, 1).expand(3, 3, 8, 8)


def constant(value, name="r", weight=1.0):
    return RewardSet(rewards={name: lambda images, prompts: value}, weights={name: weight})


PROMPTS = ["a", "bb", "cccc"]


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_builtin_rewards_build_and_score(name):
    prompts = train_prompts()[:2]
    scores = RewardSet.from_config({name: 1.0}).check(prompts)
    assert scores.total.shape == (2,)
    assert scores.total.dtype == torch.float32
    assert torch.equal(scores.total, scores.parts[name])


def test_shapes_parts_are_logged_alone():
    scores = RewardSet.from_config({"shapes": 1.0}).check(train_prompts())
    assert {"shapes", "shapes/count", "shapes/color", "shapes/shape", "shapes/position"} == set(scores.parts)


def test_weighted_sum_of_user_rewards(user_module, images):
    section = {
        f"{user_module}:brightness": {"weight": 2.0, "scale": 4.0},
        f"{user_module}.Length": -1.0,
        f"{user_module}:parts": 0.0,
    }
    scores = RewardSet.from_config(Config(reward=section).reward).score(images, PROMPTS)
    assert scores.total.tolist() == [2 * 1 - 1, 2 * 2 - 2, 2 * 4 - 4]
    assert scores.parts[f"{user_module}:brightness"].tolist() == [1, 2, 4]
    assert scores.parts[f"{user_module}.Length"].tolist() == [1, 2, 4]
    assert scores.parts[f"{user_module}:parts/index"].tolist() == [0, 1, 2]
    assert all(part.dtype == torch.float32 and part.device.type == "cpu" for part in scores.parts.values())


def test_class_options(user_module, images):
    assert RewardSet.from_config({f"{user_module}:Length": {"per": 2}}).score(images, PROMPTS).total.tolist() == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, dtype=torch.float16),
        np.ones(3),
        [1, 1, 1],
        [True, True, True],
        [torch.tensor(1.0)] * 3,
        (1.0,) * 3,
    ],
)
def test_every_form_of_numbers_is_taken(images, value):
    assert constant(value).score(images, PROMPTS).total.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0, 2.0], "shape [2] for 3 images"),
        (torch.ones(3, 1), "shape [3, 1] for 3 images"),
        (1.0, "shape [] for 3 images"),
        (None, "returned NoneType, not real numbers"),
        (["a", "b", "c"], "not real numbers"),
        ([[1.0], [1.0, 2.0], [1.0]], "not real numbers"),
        (torch.ones(3, dtype=torch.complex64), "not real numbers"),
        ({"score": [1.0, 2.0, 3.0]}, 'no key "reward" (keys: score)'),
        ({"reward": [1.0, 2.0, 3.0], "part": [1.0]}, "my_reward/part: returned values of shape [1]"),
        ([1.0, float("nan"), float("nan")], "nan for image 1 (2 of 3 are not finite), prompt 'bb'"),
        ([1.0, 2.0, float("inf")], "inf for image 2"),
    ],
)
def test_a_wrong_return_names_reward_and_remedy(images, value, words):
    with pytest.raises(RewardError) as caught:
        constant(value, "my_reward").score(images, PROMPTS)
    assert words in str(caught.value)
    assert str(caught.value).startswith("reward my_reward")
    assert "->" in str(caught.value)


def test_nonfinite_rewards_pass_where_credit_drops_them(images):
    rewards = constant([1.0, float("nan"), 2.0])
    with pytest.raises(RewardError, match=r"credit\.drop_nonfinite true"):
        rewards.score(images, PROMPTS)
    total = rewards.score(images, PROMPTS, allow_nonfinite=True).total
    assert total[[0, 2]].tolist() == [1.0, 2.0]
    assert total[1].isnan()


def test_a_reward_of_weight_zero_is_logged_and_cannot_spoil_the_total(images):
    rewards = RewardSet(
        rewards={"a": lambda images, prompts: [1.0] * 3, "b": lambda images, prompts: [float("nan")] * 3},
        weights={"a": 1.0, "b": 0.0},
    )
    scores = rewards.score(images, PROMPTS)
    assert scores.total.tolist() == [1.0] * 3
    assert scores.parts["b"].isnan().all()


def test_check_finds_a_wrong_length_before_any_work():
    with pytest.raises(RewardError, match="shape \\[1\\] for 2 images"):
        constant([1.0]).check(["only one prompt"])


def test_an_error_inside_a_reward_keeps_its_traceback_and_names_it(user_module, images):
    with pytest.raises(ZeroDivisionError, match="inside the reward") as caught:
        RewardSet.from_config({f"{user_module}:crash": 1.0}).score(images, PROMPTS)
    assert caught.value.__notes__ == [f"while computing reward {user_module}:crash"]


def test_rewards_see_float_images_without_gradient():
    seen = {}

    def look(images, prompts):
        seen.update(dtype=images.dtype, grad=torch.is_grad_enabled(), needs=images.requires_grad)
        return [0.0] * len(prompts)

    images = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    RewardSet(rewards={"look": look}, weights={"look": 1.0}).score(images, ["a", "b"])
    assert seen == {"dtype": torch.float32, "grad": False, "needs": False}


@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 1, 8, 8), (2, 3, 8, 8)])
def test_bad_images(shape):
    with pytest.raises(ValueError, match="expected"):
        constant([1.0] * 3).score(torch.zeros(shape), PROMPTS)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("shaps", {}, "did you mean shapes?"),
        ("no such: thing", {}, "package.module:function"),
        ("no_such_module_here:f", {}, "importing no_such_module_here failed"),
        ("my_broken_rewards:f", {}, "a_module_that_is_not_there"),
        ("my_user_rewards:brightnes", {}, "it has torch, brightness, parts"),
        ("my_user_rewards:NUMBER", {}, "not a function"),
        ("my_user_rewards:Mute", {}, "__call__"),
        ("my_user_rewards:brightness", {"scal": 2}, "scal"),
        ("my_user_rewards:Length", {"scal": 2}, "scal"),
        ("shapes", {"size": 2}, "options given: size"),
        ("jpeg_compressibility", {"quality": 0}, "quality = 0"),
    ],
)
def test_a_reward_that_cannot_be_built_is_refused(user_module, name, options, words):
    with pytest.raises(RewardError) as caught:
        RewardSet.from_config({name: {"weight": 1.0, **options}})
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"reward {name}: ")
    assert "->" in str(caught.value)


def test_empty_section():
    with pytest.raises(RewardError, match=r"--reward\.shapes"):
        RewardSet.from_config({})
