"""Policies: loading, grids, batches of mixed timesteps; and what happens when a model is not there."""

import pytest
import torch

from tpgrpo_fast import policy as policies
from tpgrpo_fast.policy import ModelNotFoundError


@pytest.fixture
def policy(tiny_sd3):
    return policies.load(tiny_sd3, max_text_length=4)


@pytest.mark.parametrize("steps", [1, 4, 10, 40])
def test_grid_is_the_schedulers_own(policy, steps):
    scheduler = policy.pipeline.scheduler
    scheduler.set_timesteps(steps)
    grid = policy.grid(steps, 16, 16)
    assert grid.steps == steps
    assert torch.equal(torch.tensor(grid.sigmas), scheduler.sigmas)
    assert torch.equal(torch.tensor(grid.timesteps), scheduler.timesteps.float())
    assert grid.sigmas[0] == 1.0 and grid.sigmas[-1] == 0.0


def test_grid_leaves_the_pipelines_scheduler_alone(policy):
    policy.pipeline.scheduler.set_timesteps(7)
    before = policy.pipeline.scheduler.sigmas.clone()
    policy.grid(3, 16, 16)
    assert torch.equal(policy.pipeline.scheduler.sigmas, before)


def test_dynamic_shift_depends_on_the_image_size(tiny_sd3):
    from diffusers import FlowMatchEulerDiscreteScheduler

    tiny_sd3.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=4)
    policy = policies.load(tiny_sd3)
    small, large = policy.grid(5, 8, 8), policy.grid(5, 16, 16)
    assert small.sigmas != large.sigmas
    latents = torch.randn(1, 4, 8, 8)
    tiny_sd3(
        prompt="a",
        latents=latents,
        num_inference_steps=5,
        height=16,
        width=16,
        guidance_scale=1.0,
        max_sequence_length=4,
        output_type="latent",
    )
    assert torch.equal(torch.tensor(large.sigmas), tiny_sd3.scheduler.sigmas)


def test_rows_at_different_timesteps_share_a_batch(policy):
    latents, times = torch.randn(3, 4, 8, 8), torch.tensor([1000.0, 600.0, 20.0])
    conditioning = policy.encode(["a", "b", "c"])
    with torch.no_grad():
        together = policy.velocity(latents, times, conditioning)
        for row in range(3):
            index = torch.tensor([row])
            alone = policy.velocity(latents[index], times[index], conditioning.rows(index))
            torch.testing.assert_close(together[index], alone, rtol=1e-4, atol=1e-5)


def test_guided_pair_is_two_plain_velocities(policy):
    latents, times = torch.randn(2, 4, 8, 8), torch.tensor([900.0, 100.0])
    conditioning, empty = policy.encode(["a", "b"]), policy.encode([""])
    with torch.no_grad():
        cond, uncond = policy.guided_pair(latents, times, conditioning, empty)
        torch.testing.assert_close(cond, policy.velocity(latents, times, conditioning), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(uncond, policy.velocity(latents, times, empty.expand(2)), rtol=1e-4, atol=1e-5)
        assert policy.guided_pair(latents, times, conditioning, None)[1] is None


def test_sizes_the_model_cannot_draw_are_refused(policy):
    assert policy.latent_shape(16, 8) == (4, 8, 4)
    with pytest.raises(ValueError, match=r"rollout\.width = 15: this model draws multiples of 4 pixels; use 16"):
        policy.latent_shape(16, 15)


def test_a_pipeline_of_another_family_names_those_supported():
    class OtherPipeline:
        pass

    with pytest.raises(ValueError, match=r"OtherPipeline are not supported.*StableDiffusion3Pipeline.*subclass"):
        policies.load(OtherPipeline())


def test_missing_weights_say_what_to_download(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match=r"hf download stabilityai/stable-diffusion-3\.5-medium"):
        policies.load("stabilityai/stable-diffusion-3.5-medium")


def test_a_folder_that_is_no_pipeline_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"without model_index\.json"):
        policies.load(tmp_path)


def test_an_incomplete_pipeline_folder_is_refused(tmp_path, tiny_sd3):
    import shutil

    tiny_sd3.save_pretrained(tmp_path / "saved")
    policies.load(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved" / "transformer")
    with pytest.raises(ModelNotFoundError, match="could not be loaded"):
        policies.load(tmp_path / "saved")
