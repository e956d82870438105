"""The DeepSpeed update against plain autograd and AdamW, on a tiny random SD3 pipeline in one CPU process."""

import dataclasses
import json

import pytest
import torch

from tpgrpo_fast import adapters, ops, transitions
from tpgrpo_fast import policy as policies
from tpgrpo_fast.config import load_config
from tpgrpo_fast.distributed import start
from tpgrpo_fast.rollout import rollout
from tpgrpo_fast.update import (
    Learner,
    TrainingError,
    fill_deepspeed,
    learning_rate_factor,
    read_deepspeed,
)

PROMPTS = ["a", "a", "b c", "b c"]
OVERRIDES = [
    *("--rollout.steps", "4", "--rollout.window_size", "3", "--rollout.window_range", "[0, 3]"),
    *("--rollout.window", "fixed", "--data.group_size", "2", "--data.prompts_per_iteration", "2"),
    *("--model.lora.rank", "2", "--model.lora.alpha", "4", "--train.updates_per_iteration", "1"),
    *("--train.clip_range", "0.2", "--train.learning_rate", "0.01", "--model.max_text_length", "4"),
    *("--train.ema_decay", "null", "--rollout.guidance_scale", "1.0", "--train.lr_schedule", "constant"),
]


@pytest.fixture(scope="module")
def world():
    return start()


def learner_of(tiny, world, *overrides, deepspeed=None, warm=True):
    config = load_config("shapes", [*OVERRIDES, *overrides])
    policy = policies.load(tiny, max_text_length=4)
    policy.transformer.eval()
    adapters.prepare(policy, config.model, seed=0)
    if warm:
        generator = torch.Generator().manual_seed(1)
        for name, parameter in adapters.trainable(policy.transformer).items():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3, generator=generator)
    settings = read_deepspeed(None) | (deepspeed or {})
    return Learner(policy, config, world, settings)


def drawn_by(learner, **changes):
    config = dataclasses.replace(learner.config.rollout, **changes)
    return rollout(learner.policy, PROMPTS, config, seed=4)


def plain_loss(learner, drawn, advantages, old, velocity_ref=None, guidance=True):
    """The whole update as one batch in plain torch."""
    config = learner.config
    count, steps = advantages.shape
    rows = torch.arange(count).repeat_interleave(steps)
    at = torch.arange(steps).repeat(count)
    times = torch.tensor(drawn.grid.timesteps)[at + drawn.window.start]
    velocity, uncond = learner.policy.guided_pair(
        drawn.states[rows, at],
        times,
        drawn.conditioning.rows(drawn.prompt_index[rows]),
        drawn.unconditional if guidance else None,
    )
    return ops.grpo_loss(
        velocity,
        drawn.states[rows, at],
        drawn.states[rows, at + 1],
        transitions.make("sde", drawn.sigmas, at + drawn.window.start, config.rollout.noise_level),
        old[rows, at],
        advantages[rows, at],
        velocity_uncond=uncond,
        guidance_scale=config.rollout.guidance_scale,
        velocity_ref=velocity_ref,
        clip_range=config.train.clip_range,
        beta=config.train.beta,
    )


def expected_step(learner, loss):
    """Parameters after one AdamW step from `loss`, computed beside the engine."""
    parameters = learner.parameters
    gradients = torch.autograd.grad(loss, parameters)
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    limit = learner.config.train.max_grad_norm
    scale = min(1.0, limit / (float(norm) + 1e-6))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient * scale
    train = learner.config.train
    torch.optim.AdamW(
        copies, lr=train.learning_rate, betas=train.betas, eps=1e-8, weight_decay=train.weight_decay
    ).step()
    return copies, float(norm)


ADVANTAGES = torch.tensor([[1.0, -0.5, 0.0], [0.3, 0.0, -2.0], [0.7, 1.5, -0.2], [0.0, -1.0, 0.4]])


@pytest.mark.parametrize("micro_batch", [1, 2, 5, 12])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_update_is_one_adamw_step_on_the_whole_batch(tiny_sd3, world, micro_batch, stage):
    learner = learner_of(
        tiny_sd3,
        world,
        deepspeed={"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": stage}},
    )
    drawn = drawn_by(learner)
    result = plain_loss(learner, drawn, ADVANTAGES, drawn.log_probs)
    expected, norm = expected_step(learner, result.loss)
    stats = learner.update(drawn, ADVANTAGES, iteration=0)
    assert stats.updates == 1 and stats.pairs == 9 and stats.skipped_pairs == 3
    assert stats.loss == pytest.approx(result.loss.item(), rel=1e-4, abs=1e-7)
    if stage > 0:
        assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    assert stats.ratio_max_dev < 1e-5
    for parameter, wanted in zip(learner.parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted.detach(), rtol=1e-3, atol=2e-5)


def test_second_update_accumulates_from_nothing(tiny_sd3, world):
    """Gradients of the first update must not leak into the second."""
    learner = learner_of(tiny_sd3, world, deepspeed={"train_micro_batch_size_per_gpu": 4})
    drawn = drawn_by(learner)
    learner.update(drawn, ADVANTAGES, iteration=0)
    result = plain_loss(learner, drawn, ADVANTAGES, drawn.log_probs)
    gradients = torch.autograd.grad(result.loss, learner.parameters)
    norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])))
    assert learner.update(drawn, ADVANTAGES, iteration=1).grad_norm == pytest.approx(norm, rel=1e-3)


def test_kl_pulls_towards_the_model_without_adapter(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--train.beta", "0.5")
    drawn = drawn_by(learner)
    rows, at = torch.arange(4).repeat_interleave(3), torch.arange(3).repeat(4)
    with torch.no_grad(), adapters.reference(learner.policy):
        reference = learner.policy.velocity(
            drawn.states[rows, at],
            torch.tensor(drawn.grid.timesteps)[at],
            drawn.conditioning.rows(drawn.prompt_index[rows]),
        )
    result = plain_loss(learner, drawn, ADVANTAGES, drawn.log_probs, velocity_ref=reference)
    stats = learner.update(drawn, ADVANTAGES, iteration=0)
    assert stats.kl == pytest.approx(float(result.kl), rel=1e-3) and stats.kl > 1e-6
    assert stats.pairs == 12  # pairs of advantage 0 still feel the KL


def test_cold_adapter_has_no_kl(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--train.beta", "0.5", warm=False)
    assert learner.update(drawn_by(learner), ADVANTAGES, iteration=0).kl == pytest.approx(0.0, abs=1e-10)


def test_guided_training_matches_the_guided_rollout(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--rollout.guidance_scale", "3.0")
    stats = learner.update(drawn_by(learner), ADVANTAGES, iteration=0)
    assert stats.ratio_max_dev < 1e-5


def test_training_without_guidance_recomputes_old_log_probs(tiny_sd3, world):
    learner = learner_of(
        tiny_sd3,
        world,
        *("--rollout.guidance_scale", "3.0", "--train.guidance", "false", "--train.old_log_prob", "recompute"),
    )
    stats = learner.update(drawn_by(learner), ADVANTAGES, iteration=0)
    assert stats.ratio_max_dev < 1e-5


def test_inner_epochs_and_updates_take_their_steps(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--train.updates_per_iteration", "2", "--train.inner_epochs", "3")
    stats = learner.update(drawn_by(learner), ADVANTAGES, iteration=0)
    assert stats.updates == learner.updates == 6
    assert stats.pairs == 27


def test_no_advantage_means_no_step(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world)
    before = [p.detach().clone() for p in learner.parameters]
    stats = learner.update(drawn_by(learner), torch.zeros(4, 3), iteration=0)
    assert (stats.updates, stats.pairs, stats.skipped_pairs) == (0, 0, 12)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))


def test_full_finetuning_moves_the_transformer(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--model.full_finetune", "true", warm=False)
    before = [p.detach().clone() for p in learner.parameters]
    assert sum(p.numel() for p in learner.parameters) == sum(p.numel() for p in learner.policy.transformer.parameters())
    stats = learner.update(drawn_by(learner), ADVANTAGES, iteration=0)
    assert stats.updates == 1
    moved = [not torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True)]
    assert sum(moved) > len(moved) // 2


def test_average_follows_its_ramp_and_is_put_back(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--train.ema_decay", "0.9", "--train.ema_every", "1")
    drawn = drawn_by(learner)
    average = [p.detach().clone() for p in learner.parameters]
    for update in range(3):
        learner.update(drawn, ADVANTAGES, iteration=update)
        decay = 0.0 if update == 0 else min(0.9, (1 + update) / (10 + update))
        average = [decay * a + (1 - decay) * p.detach() for a, p in zip(average, learner.parameters, strict=True)]
    trained = [p.detach().clone() for p in learner.parameters]
    with learner.averaged():
        for parameter, wanted in zip(learner.parameters, average, strict=True):
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(trained, learner.parameters, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(trained, average, strict=True))


def test_average_can_skip_updates(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world, "--train.ema_decay", "0.9", "--train.ema_every", "2")
    start_weights = [p.detach().clone() for p in learner.parameters]
    learner.update(drawn_by(learner), ADVANTAGES, iteration=0)
    with learner.averaged():
        assert all(torch.equal(a, b) for a, b in zip(start_weights, learner.parameters, strict=True))


def test_a_loss_that_is_not_finite_stops_with_its_cause(tiny_sd3, world):
    learner = learner_of(tiny_sd3, world)
    bad = ADVANTAGES.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(TrainingError, match=r"loss is not finite.*train\.learning_rate"):
        learner.update(drawn_by(learner), bad, iteration=0)


def test_deepspeed_auto_values_come_from_the_recipe():
    config = load_config("shapes", OVERRIDES)
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    filled = fill_deepspeed(auto, config, world_size=1, cuda=False)
    assert (filled["train_micro_batch_size_per_gpu"], filled["gradient_accumulation_steps"]) == (12, 1)
    assert filled["train_batch_size"] == 12 and filled["gradient_clipping"] == 1.0
    assert auto["train_batch_size"] == "auto"  # the caller's settings stay as they are
    by_hand = fill_deepspeed({"train_micro_batch_size_per_gpu": 5}, config, world_size=2, cuda=False)
    assert (by_hand["gradient_accumulation_steps"], by_hand["train_batch_size"]) == (2, 20)
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}}
    params = fill_deepspeed({"optimizer": optimizer}, config, world_size=1, cuda=False)["optimizer"]["params"]
    assert params == {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 1e-4, "torch_adam": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, r"train_batch_size = 7.*micro batch 2"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu = 0"),
        ({"bf16": {"enabled": True}}, r"bf16\.enabled = true, but model\.dtype = float32"),
    ],
)
def test_deepspeed_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fill_deepspeed(settings, load_config("shapes", OVERRIDES), world_size=1, cuda=False)


def test_fp16_on_a_cpu_is_refused():
    config = load_config("shapes", [*OVERRIDES, "--model.dtype", "float16"])
    with pytest.raises(ValueError, match="float16 needs a GPU"):
        fill_deepspeed({}, config, world_size=1, cuda=False)


def test_deepspeed_file_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.json: cannot be read"):
        read_deepspeed(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: is not JSON"):
        read_deepspeed(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="one JSON object"):
        read_deepspeed(tmp_path / "list.json")


def test_repository_and_packaged_deepspeed_files_agree(repository_root):
    assert json.loads((repository_root / "ds_config.json").read_text()) == read_deepspeed(None)


def test_learning_rate_schedules():
    base = load_config("shapes", OVERRIDES).train
    constant = learning_rate_factor(dataclasses.replace(base, warmup=4), 10)
    assert [constant(u) for u in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = learning_rate_factor(dataclasses.replace(base, lr_schedule="linear"), 10)
    assert [linear(0), linear(5), linear(10)] == [1.0, 0.5, 0.0]
    cosine = learning_rate_factor(dataclasses.replace(base, lr_schedule="cosine"), 10)
    assert [cosine(0), cosine(5), cosine(10)] == pytest.approx([1.0, 0.5, 0.0])
