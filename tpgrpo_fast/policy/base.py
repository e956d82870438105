"""What the sampler and the update need of a model family; one small adapter a family over a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts, one row each: named tensors `[N, ...]` that the family's transformer takes."""

    tensors: dict[str, torch.Tensor]

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def rows(self, index: torch.Tensor) -> Conditioning:
        """The rows `index` (int64), in that order; rows may repeat."""
        return Conditioning({name: value[index.to(value.device)] for name, value in self.tensors.items()})

    def expand(self, count: int) -> Conditioning:
        """A one-row conditioning for `count` rows, without copying."""
        return Conditioning({name: value.expand(count, *value.shape[1:]) for name, value in self.tensors.items()})

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """The parts' rows, one after the other."""
        return Conditioning({name: torch.cat([p.tensors[name] for p in parts]) for name in parts[0].tensors})


@dataclass(frozen=True, slots=True)
class Grid:
    """A sampler's steps: sigma falls from `sigmas[0]` to 0, step `i` shows `timesteps[i]` to the transformer."""

    sigmas: tuple[float, ...]
    """`T + 1` values."""
    timesteps: tuple[float, ...]
    """`T` values, exactly as the pipeline's own scheduler makes them (float32)."""

    @property
    def steps(self) -> int:
        """T."""
        return len(self.timesteps)


class Policy:
    """A diffusers pipeline as the rollout and the update see it. Families subclass this.

    `velocity` is the only thing that runs the trained transformer. It takes rows at any mix of timesteps, and it is the
    same call in the rollout and in training, so both see the same conditioning, dtypes and rounding.
    """

    family: str
    """Name of the model family."""
    default_lora_targets: tuple[str, ...]
    """Modules that carry LoRA when the recipe names none."""

    def __init__(self, pipeline: Any, *, max_text_length: int | None = None) -> None:
        self.pipeline = pipeline
        self.max_text_length = max_text_length
        for name in ("vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
            module = getattr(pipeline, name, None)
            if isinstance(module, nn.Module):
                module.requires_grad_(False).eval()

    @property
    def transformer(self) -> Any:
        """The network that predicts velocities, adapters included: a diffusers `ModelMixin`."""
        return self.pipeline.transformer

    @property
    def device(self) -> torch.device:
        """Where the transformer lives."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The transformer's dtype: what its inputs are cast to."""
        return next(self.transformer.parameters()).dtype

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """Conditioning of `prompts`, one row each, without gradient."""
        raise NotImplementedError

    def grid(self, steps: int, height: int, width: int) -> Grid:
        """The scheduler's own grid for `steps` steps at an image size in pixels."""
        raise NotImplementedError

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one latent, without the row dimension.

        Raises:
            ValueError: the model cannot draw images of this size.
        """
        raise NotImplementedError

    def default_size(self) -> tuple[int, int]:
        """(height, width) in pixels when the recipe names none."""
        raise NotImplementedError

    def velocity(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
        *,
        module: Callable[..., Any] | None = None,
    ) -> torch.Tensor:
        """Velocities `[N, ...]` of `latents [N, ...]` at `timesteps [N]` (float32), one row of conditioning each.

        `module` stands in for the transformer (a DeepSpeed engine around it, say).
        """
        raise NotImplementedError

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images `[N, 3, H, W]`, float32 in [0, 1], of clean latents."""
        raise NotImplementedError

    def guided_pair(
        self,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Conditioning,
        unconditional: Conditioning | None,
        *,
        module: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One row-forward: `(conditional, unconditional)` velocities, the latter None without guidance.

        Both halves run in one batch, the unconditional one first, as diffusers' pipelines do.
        """
        if unconditional is None:
            return self.velocity(latents, timesteps, conditioning, module=module), None
        both = self.velocity(
            torch.cat([latents, latents]),
            torch.cat([timesteps, timesteps]),
            Conditioning.cat([unconditional.expand(len(latents)), conditioning]),
            module=module,
        )
        uncond, cond = both.chunk(2)
        return cond, uncond
