"""Plain torch versions of the step operations, as training code for these models writes them: the baselines.

One elementwise operation after another on `[N, ...]` tensors, with coefficients of shape `[N, 1, ...]`. Nothing is
computed twice, and sums over elements come before the arithmetic that is the same for a whole row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def guided_mean(
    velocity: Tensor, velocity_uncond: Tensor, guidance_scale: float, sample: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """The guided velocity and the mean a x + b v."""
    v = velocity_uncond + guidance_scale * (velocity - velocity_uncond)
    return v, a * sample + b * v


def gaussian_log_prob(value: Tensor, mean: Tensor, c: Tensor) -> Tensor:
    """`[N]` average over elements of the log-density."""
    std = c.flatten()
    return -(value - mean).square().flatten(1).mean(dim=1) / (2 * std.square()) - std.log() - LOG_SQRT_2PI


@torch.no_grad()
def sde_step(
    velocity: Tensor,
    velocity_uncond: Tensor,
    guidance_scale: float,
    sample: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state after the step, in the dtype of `sample`, and its log-prob `[N]`."""
    _, mean = guided_mean(velocity, velocity_uncond, guidance_scale, sample, a, b)
    noise = torch.randn_like(mean) if noise is None else noise
    next_sample = (mean + c * noise).to(sample.dtype)
    return next_sample, gaussian_log_prob(next_sample, mean, c)


def grpo_loss(
    velocity: Tensor,
    velocity_uncond: Tensor,
    guidance_scale: float,
    sample: Tensor,
    next_sample: Tensor,
    velocity_ref: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    clip_range: float,
    adv_clip: float,
    beta: float,
) -> Tensor:
    """Clipped surrogate plus `beta` times the KL to a reference velocity, averaged over rows."""
    v, mean = guided_mean(velocity, velocity_uncond, guidance_scale, sample, a, b)
    ratio = (gaussian_log_prob(next_sample, mean, c) - old_log_prob).exp()
    advantage = advantage.clamp(-adv_clip, adv_clip)
    policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))
    deviation = (b.flatten() / c.flatten()).square() / 2
    kl = deviation * (v - velocity_ref).square().flatten(1).mean(dim=1)
    return policy.mean() + beta * kl.mean()
