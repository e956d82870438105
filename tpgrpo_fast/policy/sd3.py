"""Stable Diffusion 3 and 3.5 (`StableDiffusion3Pipeline`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpgrpo_fast.policy.base import Conditioning, Grid, Policy


class StableDiffusion3Policy(Policy):
    """Joint-attention transformer over `[N, C, H, W]` latents, CLIP and T5 text, classifier-free guidance."""

    family = "stable-diffusion-3"
    default_lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """CLIP and T5 embeddings `[N, L, D]` and pooled ones `[N, P]`."""
        texts = list(prompts)
        length = 256 if self.max_text_length is None else self.max_text_length
        with torch.no_grad():
            embeds, _, pooled, _ = self.pipeline.encode_prompt(
                prompt=texts,
                prompt_2=texts,
                prompt_3=texts,
                device=self.pipeline.text_encoder.device,
                do_classifier_free_guidance=False,
                max_sequence_length=length,
            )
        return Conditioning(
            {
                "encoder_hidden_states": embeds.to(self.device, self.dtype),
                "pooled_projections": pooled.to(self.device, self.dtype),
            }
        )

    def grid(self, steps: int, height: int, width: int) -> Grid:
        """The scheduler's grid, its shift depending on the image size where it is configured so."""
        scheduler = type(self.pipeline.scheduler).from_config(self.pipeline.scheduler.config)
        if scheduler.config.get("use_dynamic_shifting", False):
            from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

            _, latent_height, latent_width = self.latent_shape(height, width)
            patch = self.pipeline.transformer.config.patch_size
            config = scheduler.config
            mu = calculate_shift(
                (latent_height // patch) * (latent_width // patch),
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.16),
            )
            scheduler.set_timesteps(steps, device="cpu", mu=mu)
        else:
            scheduler.set_timesteps(steps, device="cpu")
        return Grid(tuple(scheduler.sigmas.tolist()), tuple(scheduler.timesteps.to(torch.float32).tolist()))

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """`(C, H, W)` of a latent."""
        scale = self.pipeline.vae_scale_factor
        multiple = scale * self.pipeline.patch_size
        for name, size in (("height", height), ("width", width)):
            if size <= 0 or size % multiple:
                nearest = max(multiple, round(size / multiple) * multiple)
                raise ValueError(
                    f"rollout.{name} = {size}: this model draws multiples of {multiple} pixels; use {nearest}"
                )
        return (self.pipeline.transformer.config.in_channels, height // scale, width // scale)

    def default_size(self) -> tuple[int, int]:
        """The size the transformer was trained at."""
        size = self.pipeline.default_sample_size * self.pipeline.vae_scale_factor
        return size, size

    def velocity(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
        *,
        module: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        """One transformer call; the timestep stays float32."""
        transformer = self.transformer if module is None else module
        return transformer(
            hidden_states=latents.to(self.dtype), timestep=timesteps, return_dict=False, **conditioning.tensors
        )[0]

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images of the VAE decoder, in its own dtype."""
        vae = self.pipeline.vae
        scaled = latents.to(torch.float32) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images = vae.decode(scaled.to(device=vae.device, dtype=vae.dtype), return_dict=False)[0]
        return (images.to(torch.float32) / 2 + 0.5).clamp(0, 1)
