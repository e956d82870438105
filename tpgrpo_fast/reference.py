"""The step operations in plain torch: the truth that the kernels are measured against.

Everything works on rows `[N, ...]` with any trailing shape, in float32 (float64 stays float64), and differentiates as
torch does. `tpgrpo_fast.ops` checks the arguments; nothing is checked here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tpgrpo_fast import noise as _noise
from tpgrpo_fast.transitions import Transition

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class Counter(NamedTuple):
    """Where the noise of a batch comes from; see `tpgrpo_fast.noise`."""

    seed: int
    iteration: int
    row_uid: torch.Tensor
    """int64 `[N]`."""
    stream_step: torch.Tensor
    """int64 `[N]`."""


class LossRows(NamedTuple):
    """What a loss is made of, row by row, weighted and not yet averaged; each `[N]`."""

    ratio: torch.Tensor
    policy: torch.Tensor
    kl: torch.Tensor


def guided(velocity: torch.Tensor, velocity_uncond: torch.Tensor | None, guidance_scale: float) -> torch.Tensor:
    """v_uncond + g (v_cond - v_uncond) in float32 (float64 stays)."""
    dtype = torch.float64 if velocity.dtype == torch.float64 else torch.float32
    if velocity_uncond is None:
        return velocity.to(dtype)
    uncond = velocity_uncond.to(dtype)
    return uncond + guidance_scale * (velocity.to(dtype) - uncond)


def sde_step(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    transition: Transition,
    noise: torch.Tensor | Counter | None,
    out_dtype: torch.dtype,
    reduce_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(next_sample, log_prob [N], mean)`; `noise` may be None where no row has any."""
    mean = affine(transition, sample, guided(velocity, velocity_uncond, guidance_scale))
    value = mean
    if isinstance(noise, torch.Tensor):
        value = mean + column(transition.c, mean) * noise.to(mean.dtype)
    elif noise is not None:
        rows = transition.has_noise(len(mean)).nonzero().squeeze(1)
        eps = _noise.normal(
            (len(rows), *mean.shape[1:]),
            seed=noise.seed,
            iteration=noise.iteration,
            row_uid=noise.row_uid[rows],
            step=noise.stream_step[rows],
            device=mean.device,
        )
        rows = rows.to(mean.device)
        value = mean.index_add(0, rows, column(transition.c, mean)[rows] * eps.to(mean.dtype))
    next_sample = value.to(out_dtype)
    return next_sample, log_prob(next_sample, mean, transition, reduce_sum), mean


def affine(transition: Transition, sample: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
    """a x + b v in the dtype of `velocity`."""
    return column(transition.a, velocity) * sample.to(velocity.dtype) + column(transition.b, velocity) * velocity


def log_prob(next_sample: torch.Tensor, mean: torch.Tensor, transition: Transition, reduce_sum: bool) -> torch.Tensor:
    """`[N]` log-probability of `next_sample` as it is stored, 0 in rows without noise."""
    count, elements = len(mean), math.prod(mean.shape[1:])
    error = (next_sample.to(mean.dtype) - mean).square().reshape(count, elements)
    reduced = error.sum(dim=1) if reduce_sum else error.mean(dim=1)
    c = torch.as_tensor(transition.c, dtype=torch.float64).expand(count)
    noisy = (c > 0).to(mean.device)
    if transition.unscaled_log_prob:
        return torch.where(noisy, -reduced, 0.0)
    # A row without noise divides by 1 and takes log 1, so that no NaN appears even in its gradient.
    c = torch.where(c > 0, c, 1.0)
    scale = (0.5 / c.square()).to(device=mean.device, dtype=mean.dtype)
    constant = (c.log() + LOG_SQRT_2PI).to(device=mean.device, dtype=mean.dtype)
    return torch.where(noisy, -reduced * scale - constant * (elements if reduce_sum else 1), 0.0)


def grpo_loss(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    transition: Transition,
    kl_deviation: float | torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor | None,
    clip_range: float,
    adv_clip: float,
    reduce_sum: bool,
) -> LossRows:
    """w max(-A r, -A clip(r)) and w mean((mu - mu_ref)^2) / (2 kl_deviation^2) of each row."""
    mean = affine(transition, sample, guided(velocity, velocity_uncond, guidance_scale))
    new_log_prob = log_prob(next_sample, mean, transition, reduce_sum)
    weight = torch.ones_like(new_log_prob) if weight is None else weight.to(new_log_prob)
    adv = advantage.to(new_log_prob).clamp(-adv_clip, adv_clip)
    ratio = torch.exp(new_log_prob - old_log_prob.to(new_log_prob))
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy = weight * torch.maximum(-adv * ratio, -adv * clipped)
    if velocity_ref is None:
        return LossRows(ratio.detach(), policy, torch.zeros_like(policy))
    mean_ref = affine(transition, sample, velocity_ref.detach().to(mean.dtype))
    squared = (mean - mean_ref).square().reshape(len(mean), math.prod(mean.shape[1:])).mean(dim=1)
    variance = column(kl_deviation, mean).flatten().square()
    return LossRows(ratio.detach(), policy, weight * squared / (2.0 * variance))


def column(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A coefficient as `[N, 1, …]` next to `like [N, ...]`, in its dtype and on its device."""
    column = torch.as_tensor(value, dtype=torch.float64).to(device=like.device, dtype=like.dtype)
    return column.reshape(-1, *([1] * (like.dim() - 1))).expand(len(like), *([1] * (like.dim() - 1)))
