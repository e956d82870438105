"""Recipes, overrides and the round trip through YAML."""

import dataclasses

import pytest

from tpgrpo_fast.config import Config, ConfigError, load_config, recipe_names


def keys(error):
    return [problem.key for problem in error.value.problems]


@pytest.mark.parametrize("name", ["shapes", "shapes-flow-grpo", "sd35m-jpeg"])
def test_recipes_load_and_survive_the_round_trip(name, tmp_path):
    config = load_config(name)
    assert config.run.name == name
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = load_config(path)
    assert again == config
    assert again.hash() == config.hash()
    assert not config.differences(again)


def test_recipe_names_lists_them_and_shapes_is_the_default():
    assert {"shapes", "shapes-flow-grpo", "sd35m-jpeg"} <= set(recipe_names())
    assert load_config() == load_config("shapes")


def test_flow_grpo_recipe_differs_from_shapes_in_name_and_credit_alone():
    differences = load_config("shapes").differences(load_config("shapes-flow-grpo"))
    assert {key for key in differences if not key.startswith("credit.")} == {"run.name"}
    assert differences["credit.method"] == ("turning_point", "outcome")


def test_sd35m_recipe_holds_the_released_settings():
    config = load_config("sd35m-jpeg")
    assert config.model.path == "stabilityai/stable-diffusion-3.5-medium"
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.dtype) == (32, 64, "float16")
    assert (config.rollout.steps, config.rollout.eval_steps, config.rollout.guidance_scale) == (10, 40, 4.5)
    assert (config.rollout.window_size, config.rollout.window_range) == (9, (0, 9))
    assert (config.rollout.sde_type, config.rollout.noise_level) == ("cps", 0.7)
    assert (config.train.clip_range, config.train.beta, config.train.ema_decay) == (1e-5, 1e-4, 0.9)


def test_overrides_are_typed():
    config = load_config(
        "shapes",
        ["--rollout.window_size", "4", "--train.learning_rate=1e-4", "--credit.balance", "null", "--model.lora.rank=8",
         "--rollout.window_range", "[0, 5]", "--train.betas=[0.8, 0.99]", "--model.full_finetune", "--run.name", "2024",
         "--run.loggers", "[jsonl]", "--data.prompts", "my: prompts.txt", "--credit.consistent", "false"],
    )  # fmt: skip
    assert config.rollout.window_size == 4
    assert config.rollout.window_range == (0, 5)
    assert config.train.learning_rate == 1e-4
    assert config.train.betas == (0.8, 0.99)
    assert config.credit.balance is None
    assert config.credit.consistent is False
    assert config.model.lora.rank == 8
    assert config.model.full_finetune is True
    assert config.run.name == "2024"
    assert config.run.loggers == ("jsonl",)
    assert config.data.prompts == "my: prompts.txt"


def test_a_later_override_wins():
    assert load_config("shapes", ["--run.seed", "1", "--run.seed", "2"]).run.seed == 2


@pytest.mark.parametrize(
    ("overrides", "reward"),
    [
        (["--reward.shapes", "0.5"], {"shapes": 0.5}),
        (["--reward.jpeg_compressibility", "2"], {"shapes": 1.0, "jpeg_compressibility": 2.0}),
        (["--reward.shapes", "null", "--reward.my.module:fn", "1"], {"my.module:fn": 1.0}),
        (["--reward.shapes=null", "--reward.my.module.fn", "1"], {"my.module.fn": 1.0}),
        (["--reward", "{jpeg_incompressibility: 1}"], {"jpeg_incompressibility": 1.0}),
        (
            ["--reward.my.module:fn", "0.5", "--reward.my.module:fn.scale", "3"],
            {"shapes": 1.0, "my.module:fn": {"weight": 0.5, "scale": 3}},
        ),
        (
            ["--reward.jpeg_compressibility.quality", "80"],
            {"shapes": 1.0, "jpeg_compressibility": {"weight": 1.0, "quality": 80}},
        ),
    ],
)
def test_reward_overrides(overrides, reward):
    assert load_config("shapes", overrides).reward == reward


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["--rollout.window_sise", "4"], "rollout.window_sise", "did you mean rollout.window_size?"),
        (["--train.learning-rate", "1"], "train.learning-rate", "did you mean train.learning_rate?"),
        (["--train.noise_level", "1"], "train.noise_level", "did you mean rollout.noise_level?"),
        (["--model.lora.rnk", "1"], "model.lora.rnk", "did you mean model.lora.rank?"),
        (["--rolout.steps", "1"], "rolout", "did you mean rollout?"),
        (["--train.quux", "1"], "train.quux", "train has learning_rate"),
        (["--rollout.completion", "heun"], "rollout.completion", "unknown key"),
        (["--credit.balanced", "group"], "credit.balanced", "did you mean credit.balance?"),
        (["--credit.method", "outcom"], "credit.method", "did you mean outcome?"),
        (["--credit.std_eps", "-1"], "", "credit.std_eps"),
        (["--reward.shaps", "1"], "reward.shaps", "did you mean shapes?"),
        (["--run.seed"], "run.seed", "has no value"),
        (["--run.seed", "--run.deterministic"], "run.seed", "has no value"),
        (["--run.seed", "1.5"], "run.seed", "an integer"),
        (["--rollout.window_range", "[0, 7"], "rollout.window_range", "not valid YAML"),
        (["--model.lora", "3"], "model.lora", "keys below it"),
        (["--train", "3"], "train", "keys below it"),
        (["run.seed", ], "", "unexpected argument 'run.seed'"),
        (["--rollout.window_range", "[0, 9]"], "rollout.window_range", "rollout.steps = 8"),
        (["--rollout.sde_type", "cps", "--rollout.window_range", "[0, 8]"], "rollout.window_range", "c = 0"),
        (["--data.group_size", "1"], "data.group_size", "at least 2"),
    ],
)  # fmt: skip
def test_a_bad_override_is_refused(overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        load_config("shapes", overrides)
    assert keys(caught) == [key]
    assert words in str(caught.value)
    assert caught.value.problems[0].remedy


def test_problems_of_all_sections_come_together():
    with pytest.raises(ConfigError) as caught:
        load_config("shapes", ["--run.seed=-1", "--rollout.stps=3", "--train.betas=1", "--modl.path=x", "--foo"])
    assert sorted(keys(caught)) == ["foo", "modl", "rollout.stps", "run.seed", "train.betas"]
    assert "recipe shapes with the command-line overrides" in str(caught.value)


def test_unknown_recipe():
    with pytest.raises(ConfigError, match=r"(?s)no recipe and no file shape\b.*did you mean shapes.*sd35m-jpeg"):
        load_config("shape")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"run: {name: \xff}", "not UTF-8 at byte 12"),
        (b"run: [1, 2", "not valid YAML: line 1"),
        (b"- run\n- train\n", "expected a mapping of sections"),
        (b"run: 3", "keys below it"),
        (b"run: {seed: 1}\nrun: {seed: 2}\n", "key run is given twice"),
        (b"train: {learning_rate: fast}", "a finite number"),
        (b"1: {}", "unknown section"),
    ],
)
def test_bad_files(tmp_path, content, words):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value)


def test_a_file_may_set_a_few_keys_alone(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("train:\n  learning_rate: 1e-4\ncredit:\n")
    config = load_config(str(path))
    assert config == Config(train=dataclasses.replace(Config().train, learning_rate=1e-4))


def test_hash_and_differences_follow_every_value():
    config = load_config("shapes")
    other = load_config("shapes", ["--train.beta", "0.1", "--model.lora.rank", "4"])
    assert config.hash() != other.hash()
    assert config.differences(other) == {"train.beta": (0.0, 0.1), "model.lora.rank": (config.model.lora.rank, 4)}


def test_floats_survive_the_round_trip_exactly(tmp_path):
    path = tmp_path / "config.yaml"
    for value in (1e-5, 0.1 + 0.2, 1e-17, 123456.789):
        config = load_config("shapes", [f"--train.clip_range={value!r}"])
        path.write_text(config.to_yaml())
        assert load_config(path).train.clip_range == value
