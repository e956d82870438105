"""Sections and their combinations: what is accepted, what is refused, and with which words."""

import dataclasses

import pytest

from tpgrpo_fast.config import (
    Config,
    ConfigError,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
    check_window,
    window_for,
)
from tpgrpo_fast.credit import CreditConfig

EVEN_GRID = [1 - i / 10 for i in range(10)] + [0.0]


def test_defaults_are_valid_and_hold_the_released_settings():
    config = Config()
    assert (config.rollout.steps, config.rollout.window_size, config.rollout.sde_type) == (10, 9, "cps")
    assert (config.train.learning_rate, config.train.clip_range, config.data.group_size) == (3e-4, 1e-5, 24)


def test_fields_are_converted_to_their_types():
    rollout = RolloutConfig(window_range=[0, 8], window_size=4.0, guidance_scale=3)
    assert rollout.window_range == (0, 8)
    assert type(rollout.window_size) is int
    assert type(rollout.guidance_scale) is float


@pytest.mark.parametrize("section", [RunConfig, LoraConfig, ModelConfig, DataConfig, RolloutConfig, TrainConfig])
def test_sections_are_frozen(section):
    name = dataclasses.fields(section)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section(), name, None)


@pytest.mark.parametrize(
    ("section", "values", "key", "words"),
    [
        (RunConfig, {"seed": -1}, "run.seed", "at least 0"),
        (RunConfig, {"iterations": 0}, "run.iterations", "at least 1"),
        (RunConfig, {"name": "a/b"}, "run.name", "run.dir"),
        (RunConfig, {"name": ".."}, "run.name", "plain folder name"),
        (RunConfig, {"loggers": ["jsonl", "mlflow"]}, "run.loggers", "tensorboard"),
        (RunConfig, {"loggers": "jsonl"}, "run.loggers", "write it as a list"),
        (LoraConfig, {"rank": 0}, "model.lora.rank", "at least 1"),
        (LoraConfig, {"target_modules": []}, "model.lora.target_modules", "null"),
        (ModelConfig, {"dtype": "float8"}, "model.dtype", "bfloat16"),
        (ModelConfig, {"max_text_length": 1024}, "model.max_text_length", "at most 512"),
        (ModelConfig, {"full_finetune": True, "lora": LoraConfig(path="adapter")}, "model.lora.path", "full_finetune"),
        (DataConfig, {"group_size": 1}, "data.group_size", "at least 2"),
        (DataConfig, {"prompts_per_iteration": 0}, "data.prompts_per_iteration", "at least 1"),
        (DataConfig, {"prompts": ""}, "data.prompts", "builtin name"),
        (RolloutConfig, {"steps": 4}, "rollout.window_size", "at most 4"),
        (RolloutConfig, {"window_size": 4, "window_range": (7, 12)}, "rollout.window_range", "[0, 9]"),
        (RolloutConfig, {"window_size": 2, "window_range": (-1, 5)}, "rollout.window_range", "0 <= low"),
        (RolloutConfig, {"window_size": 5, "window_range": (2, 6)}, "rollout.window_size", "at most 4"),
        (RolloutConfig, {"window_range": "0,7"}, "rollout.window_range", "as a list"),
        (RolloutConfig, {"sde_type": "csp"}, "rollout.sde_type", "did you mean cps?"),
        (RolloutConfig, {"noise_level": 1.1}, "rollout.noise_level", "(0, 1]"),
        (RolloutConfig, {"guidance_scale": 0.5}, "rollout.guidance_scale", "at least 1"),
        (RolloutConfig, {"height": 500}, "rollout.height", "multiple of 8"),
        (RolloutConfig, {"schedule": "packed"}, "rollout.schedule", "wavefront"),
        (RolloutConfig, {"max_rows": "auto"}, "rollout.max_rows", "an integer or null"),
        (TrainConfig, {"learning_rate": float("nan")}, "train.learning_rate", "finite"),
        (TrainConfig, {"clip_range": 0}, "train.clip_range", "above 0"),
        (TrainConfig, {"betas": (0.9, 1.0)}, "train.betas", "[0, 1)"),
        (TrainConfig, {"betas": (0.9,)}, "train.betas", "list of 2"),
        (TrainConfig, {"ema_decay": 1.0}, "train.ema_decay", "below 1"),
        (TrainConfig, {"guidance": 1}, "train.guidance", "true or false"),
    ],
)
def test_a_bad_field_is_refused_with_key_reason_and_remedy(section, values, key, words):
    with pytest.raises(ConfigError) as caught:
        section(**values)
    assert key in [problem.key for problem in caught.value.problems]
    problem = next(problem for problem in caught.value.problems if problem.key == key)
    assert words in str(problem)
    assert problem.reason
    assert problem.remedy


def test_all_problems_of_a_section_come_together():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(learning_rate=0, warmup=-1, adv_clip=0)
    assert [p.key for p in caught.value.problems] == ["train.learning_rate", "train.warmup", "train.adv_clip"]
    assert str(caught.value).startswith("3 problems in ")


def test_a_message_fits_one_screen():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{f.name: object() for f in dataclasses.fields(TrainConfig)})
    assert len(str(caught.value).splitlines()) <= 30
    assert f"and {len(caught.value.problems) - 12} more" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"rollout": RolloutConfig(sde_type="ode")}, "rollout.sde_type", "sde, cps or dance"),
        ({"rollout": RolloutConfig(noise_level=0)}, "rollout.noise_level", "above 0"),
        ({"rollout": RolloutConfig(window_range=(1, 10))}, "rollout.window_range", "[0, 9]"),
        ({"rollout": RolloutConfig(window_size=10, window_range=(0, 10))}, "rollout.window_range", "c = 0"),
        (
            {"rollout": RolloutConfig(window_size=2, window_range=(0, 10), window="random")},
            "rollout.window_range",
            "step 9 of 10",
        ),
        ({"train": TrainConfig(guidance=False)}, "train.guidance", "recompute"),
        (
            {"rollout": RolloutConfig(guidance_scale=1), "model": ModelConfig(negative_prompt="blurry")},
            "model.negative_prompt",
            "guidance_scale",
        ),
        (
            {"rollout": RolloutConfig(sde_type="dance"), "train": TrainConfig(kl="flow_grpo")},
            "train.kl",
            "gaussian",
        ),
        (
            {"model": ModelConfig(full_finetune=True), "train": TrainConfig(beta=1e-4)},
            "train.beta",
            "without adapter",
        ),
        ({"credit": CreditConfig(step_weights=(1.0, 2.0))}, "credit.step_weights", "9 weights"),
        (
            {"data": DataConfig(group_size=2, prompts_per_iteration=2), "train": TrainConfig(updates_per_iteration=5)},
            "train.updates_per_iteration",
            "at most 4",
        ),
        ({"reward": {}}, "reward", "no reward"),
        ({"reward": {"shapes": 0.0}}, "reward", "every weight is 0"),
        ({"reward": {"shaps": 1.0}}, "reward.shaps", "did you mean shapes?"),
        ({"reward": {"shapes": "high"}}, "reward.shapes", "finite weight"),
        ({"reward": {"shapes": True}}, "reward.shapes", "finite weight"),
        (
            {"reward": {"jpeg_compressibility": {"weight": 1.0, "my quality": 3}}},
            "reward.jpeg_compressibility",
            "option",
        ),
        ({"reward": "shapes"}, "reward", "{shapes: 1.0}"),
    ],
)
def test_an_impossible_combination_is_refused(values, key, words):
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert words in str(caught.value)
    assert caught.value.problems[0].remedy


@pytest.mark.parametrize(
    "values",
    [
        {"train": TrainConfig(guidance=False, old_log_prob="recompute")},
        {"train": TrainConfig(guidance=False), "rollout": RolloutConfig(guidance_scale=1)},
        {"rollout": RolloutConfig(sde_type="sde", window_size=10, window_range=(0, 10))},
        {"rollout": RolloutConfig(window_size=8, window_range=(0, 10))},  # fixed at 0: never reaches the last step
        {"model": ModelConfig(full_finetune=True)},
        {"credit": CreditConfig(method="outcome")},
        {"reward": {"my.module:function": {"weight": 2, "scale": 3}, "my.module.other": 0}},
    ],
)
def test_a_possible_combination_is_accepted(values):
    Config(**values)


def test_plain_sampling_may_use_ode_steps():
    assert RolloutConfig(sde_type="ode", steps=2).steps == 2


def test_reward_section_is_normalised():
    section = {"shapes": {"weight": 1}, "jpeg_compressibility": {"quality": 80}}
    assert Config(reward=section).reward == {"shapes": 1.0, "jpeg_compressibility": {"weight": 1.0, "quality": 80}}


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance"])
def test_check_window_accepts_noisy_steps(sde_type):
    check_window(Config(rollout=RolloutConfig(sde_type=sde_type)), EVEN_GRID)


def test_check_window_refuses_a_step_without_noise():
    rollout = RolloutConfig(window_size=10, window_range=(0, 10))
    with pytest.raises(ConfigError, match=r"(?s)step 9 of 10.*c = 0.*window_range to \[0, 9\]"):
        check_window(rollout, EVEN_GRID)


def test_check_window_refuses_another_grid():
    with pytest.raises(ConfigError, match="9 steps"):
        check_window(Config(), EVEN_GRID[1:])


def test_fixed_window_starts_at_the_range():
    rollout = RolloutConfig(window_size=3, window_range=(2, 9))
    assert {window_for(rollout, 5, iteration) for iteration in range(20)} == {2}
    assert rollout.trained_steps == range(2, 5)


def test_sliding_window_visits_every_start_in_turn():
    rollout = RolloutConfig(window="sliding", window_size=5, window_range=(1, 9))
    assert [window_for(rollout, 0, iteration) for iteration in range(6)] == [1, 2, 3, 4, 1, 2]
    assert rollout.trained_steps == range(1, 9)


def test_random_window_is_a_pure_function_of_seed_and_iteration():
    rollout = RolloutConfig(window="random", window_size=5, window_range=(1, 9))
    drawn = [window_for(rollout, 3, iteration) for iteration in range(64)]
    assert drawn == [window_for(rollout, 3, iteration) for iteration in range(64)]
    assert set(drawn) == {1, 2, 3, 4}
    assert drawn != [window_for(rollout, 4, iteration) for iteration in range(64)]
    # 64 draws of 4 values: each count is 16 on average with standard deviation 3.5.
    assert all(4 <= drawn.count(start) <= 30 for start in (1, 2, 3, 4))
