"""Rollout and completions on a tiny random SD3 pipeline, against the sequential truth and diffusers' own sampler."""

import dataclasses

import pytest
import torch

from tpgrpo_fast import policy as policies
from tpgrpo_fast.completions import pass_rows
from tpgrpo_fast.config import ConfigError, RolloutConfig
from tpgrpo_fast.rollout import rollout, sample

PROMPTS = ["a", "a", "b c", "b c"]


def settings(**changes):
    base = RolloutConfig(
        steps=6, window_size=3, window_range=(0, 6), sde_type="sde", guidance_scale=1.0, decode_batch=3, eval_steps=5
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def policy(tiny_sd3):
    return policies.load(tiny_sd3, max_text_length=4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize(("start", "size"), [(0, 3), (2, 2), (3, 3), (0, 6), (5, 1)])
def test_wavefront_equals_sequential(policy, guidance, start, size):
    config = settings(window_size=size, window_range=(start, start + size), guidance_scale=guidance)
    fast = rollout(policy, PROMPTS, config, iteration=2, seed=5)
    slow = rollout(policy, PROMPTS, dataclasses.replace(config, schedule="sequential"), iteration=2, seed=5)
    torch.testing.assert_close(fast.states, slow.states, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast.log_probs, slow.log_probs, rtol=1e-4, atol=1e-5)
    assert len(fast.clean) == len(slow.clean) == size + 1
    for a, b in zip(fast.clean, slow.clean, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # Different states must not have been compared with themselves: every completion is an image of its own.
    assert all((fast.clean[k] - fast.clean[k + 1]).abs().max() > 1e-3 for k in range(size))


@pytest.mark.parametrize(("steps", "start", "size"), [(6, 0, 3), (6, 2, 2), (6, 3, 3), (10, 0, 8), (10, 1, 8)])
def test_passes_and_rows_follow_the_formulas(policy, steps, start, size):
    config = settings(steps=steps, window_size=size, window_range=(start, start + size))
    fast = rollout(policy, PROMPTS, config)
    assert fast.stats.passes == steps
    formula = steps + sum(steps - start - k - 1 for k in range(size))
    assert fast.stats.rows == len(PROMPTS) * formula
    assert formula == sum(pass_rows(steps, range(start, start + size), complete=True, schedule="wavefront"))
    slow = rollout(policy, PROMPTS, dataclasses.replace(config, schedule="sequential"))
    assert slow.stats.passes == steps + sum(steps - start - k for k in range(size))
    assert slow.stats.passes == len(
        list(pass_rows(steps, range(start, start + size), complete=True, schedule="sequential"))
    )
    if (steps, start, size) == (10, 0, 8):
        assert (formula, slow.stats.passes) == (54, 62)


def test_transformer_sees_exactly_the_counted_rows(policy):
    seen = []
    handle = policy.transformer.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
    )
    guided = rollout(policy, PROMPTS, settings(guidance_scale=3.0))
    handle.remove()
    assert len(seen) == guided.stats.passes == 6
    assert sum(seen) == 2 * guided.stats.rows  # two transformer rows a guided row-forward


@pytest.mark.parametrize("max_rows", [1, 3, 5, 100])
def test_splitting_passes_changes_nothing_but_rounding(policy, max_rows):
    whole = rollout(policy, PROMPTS, settings())
    split = rollout(policy, PROMPTS, settings(max_rows=max_rows))
    torch.testing.assert_close(split.states, whole.states, rtol=1e-4, atol=1e-5)
    assert split.stats.rows == whole.stats.rows
    assert split.stats.passes == 6
    assert split.stats.calls == sum(
        -(-4 * rows // max_rows) for rows in pass_rows(6, range(3), complete=True, schedule="wavefront")
    )


def test_rows_do_not_depend_on_the_batch_they_are_drawn_in(policy):
    whole = rollout(policy, PROMPTS, settings(), iteration=3, seed=7)
    alone = rollout(policy, PROMPTS[2:3], settings(), iteration=3, seed=7, row_uid=[2])
    torch.testing.assert_close(alone.states, whole.states[2:3], rtol=1e-4, atol=1e-5)
    other = rollout(policy, PROMPTS[2:3], settings(), iteration=4, seed=7, row_uid=[2])
    assert (other.states - alone.states).abs().max() > 0.1


def test_baseline_and_rollout_share_their_initial_noise(policy):
    drawn = rollout(policy, PROMPTS, settings(window_range=(0, 3)), seed=1)
    ode = sample_from(policy, drawn.states[:, 0], steps=6)
    torch.testing.assert_close(drawn.clean[0], ode, rtol=1e-4, atol=1e-5)


def sample_from(policy, latents, *, steps, prompts=PROMPTS, guidance=1.0):
    """Diffusers' own sampler from given latents."""
    return policy.pipeline(
        prompt=list(prompts),
        latents=latents.clone(),
        num_inference_steps=steps,
        guidance_scale=guidance,
        height=16,
        width=16,
        max_sequence_length=4,
        output_type="latent",
    ).images


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_ode_equals_the_pipelines_own_call(policy, guidance):
    config = settings(guidance_scale=guidance)
    images = sample(policy, PROMPTS, config, seed=3, row_uid=range(4))
    from tpgrpo_fast.completions import initial_noise
    from tpgrpo_fast.noise import Stream

    noise = initial_noise(policy, 16, 16, seed=3, iteration=0, uid=torch.arange(4), stream=Stream.EVALUATION)
    expected = policy.pipeline(
        prompt=PROMPTS,
        latents=noise,
        num_inference_steps=5,
        guidance_scale=guidance,
        height=16,
        width=16,
        max_sequence_length=4,
        output_type="pt",
    ).images
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-5)


def test_same_noise_is_shared_by_a_prompt_only(policy):
    shared = rollout(policy, PROMPTS, settings(same_noise=True)).states[:, 0]
    assert torch.equal(shared[0], shared[1]) and torch.equal(shared[2], shared[3])
    assert not torch.equal(shared[0], shared[2])
    own = rollout(policy, PROMPTS, settings()).states[:, 0]
    assert not torch.equal(own[0], own[1])


def test_outcome_draws_no_completions_and_the_same_rollout(policy):
    drawn = rollout(policy, PROMPTS, settings(), complete=False)
    assert drawn.stats.rows == 6 * len(PROMPTS)
    assert drawn.clean[:3] == (None, None, None)
    full = rollout(policy, PROMPTS, settings())
    torch.testing.assert_close(drawn.clean[-1], full.clean[-1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="without completions"):
        drawn.images(0)
    with pytest.raises(ValueError, match="states are 0"):
        drawn.images(4)


def test_images_are_unit_range_and_decoded_in_batches(policy):
    drawn = rollout(policy, PROMPTS, settings())
    images = drawn.images(3)
    assert images.shape == (4, 3, 16, 16) and images.dtype == torch.float32
    assert 0 <= images.min() and images.max() <= 1
    torch.testing.assert_close(images[3:], policy.decode(drawn.clean[3][3:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_are_scored_as_they_are_stored(policy, dtype):
    from tpgrpo_fast import ops, transitions

    drawn = rollout(policy, PROMPTS, settings(latent_dtype=dtype, window_range=(3, 6)))
    assert drawn.states.dtype == getattr(torch, dtype)
    for k, step in enumerate(drawn.window):
        velocity = policy.velocity(
            drawn.states[:, k],
            torch.full((4,), drawn.grid.timesteps[step]),
            drawn.conditioning.rows(drawn.prompt_index),
        )
        score = ops.step_log_prob(
            velocity, drawn.states[:, k], drawn.states[:, k + 1], transitions.make("sde", drawn.sigmas, step, 0.7)
        )
        torch.testing.assert_close(score, drawn.log_probs[:, k], rtol=0, atol=1e-5)


def test_a_pipeline_object_is_accepted(tiny_sd3):
    assert rollout(tiny_sd3, ["a"], settings(height=16, width=16)).states.shape == (1, 4, 4, 8, 8)


def test_prompts_are_encoded_once(policy):
    calls = []
    encode = policy.encode
    policy.encode = lambda prompts: calls.append(tuple(prompts)) or encode(prompts)
    cache = {}
    rollout(policy, PROMPTS, settings(guidance_scale=2.0), cache=cache)
    rollout(policy, PROMPTS, settings(guidance_scale=2.0), cache=cache)
    assert sorted(calls) == [("",), ("a",), ("b c",)]


def test_bad_input_is_refused(policy):
    with pytest.raises(ValueError, match="at least one prompt"):
        rollout(policy, [], settings())
    with pytest.raises(ValueError, match="row_uid"):
        rollout(policy, PROMPTS, settings(), row_uid=[0])
    with pytest.raises(ValueError, match=r"rollout\.height = 26: this model draws multiples of 4 pixels; use 24"):
        policy.latent_shape(26, 16)
    with pytest.raises(ConfigError, match="c = 0"):
        rollout(policy, PROMPTS, settings(sde_type="cps", window_range=(3, 6)))
