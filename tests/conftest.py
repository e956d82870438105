import os
from pathlib import Path
from typing import Any

# Nothing here may reach a model hub or a display; set before anything imports those libraries. One thread a process:
# tensors are tiny, and the threads of two test processes would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:  # on a machine that has what `pytest -m gpu` needs and no more
    pass
else:
    # The same examples in every run: a failure is a failure, not luck.
    settings.register_profile("tpgrpo_fast", derandomize=True, deadline=None)
    settings.load_profile("tpgrpo_fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` only tests/kernels is read: the other tests need packages that a GPU machine may lack."""
    if config.option.markexpr != "gpu" or collection_path in (Path(__file__).parent, config.rootpath):
        return None
    return (Path(__file__).parent / "kernels") not in (collection_path, *collection_path.parents) or None


@pytest.fixture(scope="session")
def repository_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_sd3() -> Any:
    """A random StableDiffusion3Pipeline of a few thousand parameters: 16x16 images, 4x8x8 latents, no T5."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    # The output layers of a new transformer are near zero; larger weights make velocities depend on every input.
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    vocabulary = {
        word: place for place, word in enumerate(["<|startoftext|>", "<|endoftext|>", "a</w>", "b</w>", "c</w>"])
    }
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=6)
    text = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=16,
        max_position_embeddings=6,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
            shift_factor=0.1,
            scaling_factor=1.3,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModelWithProjection(text),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(text),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
