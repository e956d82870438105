import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tpgrpo_fast.shapes import heldout_prompts, pipeline_path, shapes_reward, train_prompts
from tpgrpo_fast.shapes.prompts import parse
from tpgrpo_fast.shapes.render import render


@pytest.fixture(scope="module")
def pipeline() -> Any:
    from diffusers import StableDiffusion3Pipeline

    loaded = StableDiffusion3Pipeline.from_pretrained(pipeline_path())
    loaded.set_progress_bar_config(disable=True)
    return loaded


def draw(pipeline: Any, prompts: list[str], **options: Any) -> torch.Tensor:
    settings = {"num_inference_steps": 8, "guidance_scale": 3.0, "max_sequence_length": 10} | options
    generator = torch.Generator().manual_seed(0)
    return pipeline(prompts, generator=generator, output_type="pt", **settings).images


def test_folder_is_small_and_safe() -> None:
    files = [file for file in pipeline_path().rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 10e6
    assert {file.suffix for file in files} <= {".json", ".safetensors", ".txt"}
    assert json.loads((pipeline_path() / "model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"


def test_every_word_is_one_token(pipeline: Any) -> None:
    for prompt in train_prompts() + heldout_prompts():
        for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2):
            ids = tokenizer(prompt).input_ids
            assert len(ids) == len(prompt.split()) + 2
            assert len(ids) <= tokenizer.model_max_length
            assert tokenizer.decode(ids, skip_special_tokens=True).strip() == prompt


def test_latents_are_normalised_and_the_autoencoder_keeps_the_reward(pipeline: Any) -> None:
    rng = np.random.default_rng(0)
    prompts = heldout_prompts()[:64]
    images = torch.from_numpy(np.stack([render(parse(prompt), rng) for prompt in prompts]))
    vae = pipeline.vae
    with torch.no_grad():
        latents = vae.encode(images * 2 - 1).latents
        decoded = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
    normalised = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert abs(normalised.mean()) < 0.25
    assert 0.7 < normalised.std() < 1.3
    right = shapes_reward(decoded, prompts)["reward"].mean()
    wrong = shapes_reward(decoded, prompts[1:] + prompts[:1])["reward"].mean()
    assert right > 0.85
    assert wrong < 0.35


def test_it_draws_what_is_asked_more_than_anything_else(pipeline: Any) -> None:
    prompts = heldout_prompts()[:48]
    images = draw(pipeline, prompts)
    assert images.shape == (48, 3, 64, 64)
    right = shapes_reward(images, prompts)["reward"].mean()
    shuffled = [shapes_reward(images, prompts[k:] + prompts[:k])["reward"].mean() for k in (1, 2, 3)]
    assert right > torch.stack(shuffled).mean() + 0.1


def test_one_prompt_with_the_defaults_of_diffusers(pipeline: Any) -> None:
    image = pipeline("two red circles", generator=torch.Generator().manual_seed(0), output_type="pt").images
    assert image.shape == (1, 3, 64, 64)
    scores = shapes_reward(image, ["two red circles"])
    assert scores["count"] > 0
    assert scores["color"] > 0


def test_import_is_light() -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import sys, tpgrpo_fast.shapes; sys.exit(any(m in sys.modules for m in ('diffusers', 'transformers')))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
