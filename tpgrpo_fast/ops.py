"""The sampler's and the loss's elementwise operations, in float32 whatever the storage dtype.

Everything here works on rows: `velocity`, `sample` and `next_sample` are `[N, ...]` with any trailing shape (SD3's
`[N, C, H, W]`, FLUX's packed `[N, L, C]`), and per-row numbers are `[N]`. The code below is the reference in plain
torch that other backends are measured against.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from tpgrpo_fast import noise as _noise
from tpgrpo_fast.transitions import Transition

LogProb = Literal["mean", "sum"]
Kl = Literal["gaussian", "flow_grpo"]
Backend = Literal["auto", "torch", "triton", "cpp"]

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class SdeStep(NamedTuple):
    """Result of `sde_step`."""

    next_sample: torch.Tensor
    """`[N, ...]` state after the step, in `out_dtype`."""
    log_prob: torch.Tensor
    """`[N]` float32 log-probability of `next_sample` as stored; 0 in rows without noise."""
    mean: torch.Tensor | None
    """`[N, ...]` float32 mean of the transition, with `return_mean=True`."""


class GrpoLoss(NamedTuple):
    """Result of `grpo_loss`; `loss` carries the gradient."""

    loss: torch.Tensor
    """Scalar: `policy_loss + beta * kl`."""
    policy_loss: torch.Tensor
    """Scalar: clipped surrogate, averaged over `normalizer` pairs."""
    kl: torch.Tensor
    """Scalar: KL to the reference velocity, averaged over `normalizer` pairs; 0 without one."""
    ratio: torch.Tensor
    """`[N]` probability ratios, detached."""
    clip_fraction: torch.Tensor
    """Scalar: share of rows with |ratio - 1| > clip_range."""


def sde_step(
    velocity: torch.Tensor,
    sample: torch.Tensor,
    transition: Transition,
    *,
    velocity_uncond: torch.Tensor | None = None,
    guidance_scale: float = 1.0,
    noise: torch.Tensor | None = None,
    seed: int | None = None,
    iteration: int = 0,
    row_uid: torch.Tensor | Sequence[int] | None = None,
    step: int | torch.Tensor = 0,
    out_dtype: torch.dtype | None = None,
    log_prob: LogProb = "mean",
    return_mean: bool = False,
    backend: Backend = "auto",
) -> SdeStep:
    """One sampler step x' = a x + b v + c eps, rounded to its storage dtype and scored as stored.

    Args:
        velocity: `[N, ...]` conditional velocity.
        sample: `[N, ...]` state before the step.
        transition: coefficients from `transitions.make`, shared or row by row; rows with c = 0 are ODE steps.
        velocity_uncond: `[N, ...]` unconditional velocity; then v = v_uncond + guidance_scale (v_cond - v_uncond).
        guidance_scale: classifier-free guidance; used with `velocity_uncond` only.
        noise: `[N, ...]` normals to use instead of counter-based ones.
        seed, iteration, row_uid, step: counter of the noise (see `tpgrpo_fast.noise`); `step` may be `[N]`.
        out_dtype: storage dtype of the result; by default that of `sample`.
        log_prob: average over elements (`mean`) or `sum`.
        return_mean: also return the mean.
        backend: `auto` or `torch`.

    Raises:
        ValueError: shapes, devices or dtypes that do not fit; noise is needed and neither given nor seeded.
        RuntimeError: a backend this installation does not have.
    """
    _choose_backend(backend)
    _check_pair("velocity", velocity, "sample", sample)
    _check_reduction(log_prob)
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype = {out_dtype}: states are stored in a floating-point dtype")
    count = sample.shape[0]
    noisy = transition.has_noise(count)
    mean = _mean(velocity, sample, transition, velocity_uncond, guidance_scale)
    next_sample = mean
    if noisy.any():
        c = _column(transition.c, mean)
        if noise is not None:
            _check_pair("noise", noise, "sample", sample)
            next_sample = mean + c * noise.to(mean.dtype)
        else:
            if seed is None or row_uid is None:
                raise ValueError("sde_step needs noise for rows with c > 0: pass `noise`, or `seed` and `row_uid`")
            if isinstance(step, torch.Tensor) and step.dim() > 0 and step.shape != (count,):
                raise ValueError(f"step has shape {list(step.shape)}, but the batch has {count} rows: give [{count}]")
            rows = noisy.nonzero().squeeze(1)
            uid = torch.as_tensor(row_uid, dtype=torch.int64).cpu()
            if uid.shape != (count,):
                raise ValueError(f"row_uid has shape {list(uid.shape)}, but the batch has {count} rows")
            eps = _noise.normal(
                (len(rows), *sample.shape[1:]),
                seed=seed,
                iteration=iteration,
                row_uid=uid[rows],
                step=step.cpu()[rows] if isinstance(step, torch.Tensor) and step.dim() == 1 else int(step),
                device=sample.device,
            )
            on_device = rows.to(sample.device)
            next_sample = mean.index_add(0, on_device, c[on_device] * eps.to(mean.dtype))
    next_sample = next_sample.to(out_dtype or sample.dtype)
    score = _gaussian_log_prob(next_sample, mean, transition, noisy, log_prob)
    return SdeStep(next_sample, score, mean if return_mean else None)


def step_log_prob(
    velocity: torch.Tensor,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    transition: Transition,
    *,
    velocity_uncond: torch.Tensor | None = None,
    guidance_scale: float = 1.0,
    log_prob: LogProb = "mean",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Log-probability `[N]` of a stored step under other velocities; differentiable in the velocities.

    Arguments are those of `sde_step`; `next_sample` is the stored state after the step. Rows with c = 0 get 0.

    Raises:
        ValueError: shapes, devices or dtypes that do not fit.
    """
    _choose_backend(backend)
    _check_pair("velocity", velocity, "sample", sample)
    _check_pair("next_sample", next_sample, "sample", sample)
    _check_reduction(log_prob)
    mean = _mean(velocity, sample, transition, velocity_uncond, guidance_scale)
    return _gaussian_log_prob(next_sample, mean, transition, transition.has_noise(sample.shape[0]), log_prob)


def grpo_loss(
    velocity: torch.Tensor,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    transition: Transition,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    *,
    velocity_uncond: torch.Tensor | None = None,
    guidance_scale: float = 1.0,
    velocity_ref: torch.Tensor | None = None,
    clip_range: float = 1e-4,
    adv_clip: float = 5.0,
    beta: float = 0.0,
    kl: Kl = "gaussian",
    weight: torch.Tensor | None = None,
    normalizer: float | None = None,
    log_prob: LogProb = "mean",
    backend: Backend = "auto",
) -> GrpoLoss:
    """GRPO's clipped surrogate over (row, step) pairs, with an optional KL to a reference velocity.

        loss = 1/M sum_i w_i [max(-A_i r_i, -A_i clip(r_i, 1 - clip_range, 1 + clip_range)) + beta KL_i]
        r_i = exp(log_prob_i - old_log_prob_i),   KL_i = mean((mu - mu_ref)^2) / (2 v_i)

    with v = c^2 for `kl="gaussian"` (the KL of two Gaussians of that variance) and v = std_dev_t^2 for `flow_grpo`.

    Args:
        velocity, sample, next_sample, transition, velocity_uncond, guidance_scale: as in `step_log_prob`.
        old_log_prob: `[N]` log-probs under the policy that drew the samples.
        advantage: `[N]`, clamped to ±`adv_clip`.
        velocity_ref: `[N, ...]` reference velocity, guided already; needed when `beta` > 0.
        weight: `[N]` factor of each pair's loss.
        normalizer: M, the number of pairs the mean runs over; by default N.
        log_prob: as in the rollout.

    Raises:
        ValueError: a row with c = 0, KL in Flow-GRPO's convention with DanceGRPO's sampler, shapes that do not fit.
    """
    _choose_backend(backend)
    _check_pair("velocity", velocity, "sample", sample)
    _check_pair("next_sample", next_sample, "sample", sample)
    _check_reduction(log_prob)
    count = sample.shape[0]
    for name, value in (("old_log_prob", old_log_prob), ("advantage", advantage), ("weight", weight)):
        if value is not None and value.shape != (count,):
            raise ValueError(f"{name} has shape {list(value.shape)}, but the batch has {count} rows: give [{count}]")
    noisy = transition.has_noise(count)
    if not noisy.all():
        row = int((~noisy).nonzero()[0])
        raise ValueError(
            f"row {row} of the loss has c = 0: a step without noise has no log-prob to train on. "
            "Leave such steps out of the SDE window (rollout.window_range) or raise rollout.noise_level"
        )
    if kl not in ("gaussian", "flow_grpo"):
        raise ValueError(f"kl = {kl!r}: choose gaussian or flow_grpo")
    if kl == "flow_grpo" and transition.sde_type.startswith("dance"):
        raise ValueError("kl = 'flow_grpo' is not defined for DanceGRPO's sampler: use kl = 'gaussian'")
    if beta > 0 and velocity_ref is None:
        raise ValueError(f"beta = {beta} asks for a KL: pass velocity_ref, or set beta to 0")
    if velocity_ref is not None:
        _check_pair("velocity_ref", velocity_ref, "sample", sample)

    mean = _mean(velocity, sample, transition, velocity_uncond, guidance_scale)
    new_log_prob = _gaussian_log_prob(next_sample, mean, transition, noisy, log_prob)
    weight = torch.ones_like(new_log_prob) if weight is None else weight.to(new_log_prob)
    total = float(max(count, 1) if normalizer is None else normalizer)
    adv = advantage.to(new_log_prob).clamp(-adv_clip, adv_clip)
    ratio = torch.exp(new_log_prob - old_log_prob.to(new_log_prob))
    clipped = ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    policy_loss = (weight * torch.maximum(-adv * ratio, -adv * clipped)).sum() / total
    kl_loss = torch.zeros_like(policy_loss)
    if velocity_ref is not None:
        mean_ref = _mean(velocity_ref.detach(), sample, transition, None, 1.0)
        deviation = transition.c if kl == "gaussian" else transition.std_dev_t
        variance = _column(deviation, mean).flatten().square()
        per_row = (mean - mean_ref).square().reshape(count, math.prod(mean.shape[1:])).mean(dim=1) / (2.0 * variance)
        kl_loss = (weight * per_row).sum() / total
    detached = ratio.detach()
    clip_fraction = ((detached - 1.0).abs() > clip_range).to(detached.dtype).sum() / max(count, 1)
    loss = policy_loss + beta * kl_loss
    return GrpoLoss(loss, policy_loss.detach(), kl_loss.detach(), detached, clip_fraction)


def philox_normal(
    shape: Sequence[int],
    *,
    seed: int,
    iteration: int,
    row_uid: torch.Tensor | Sequence[int],
    step: int | torch.Tensor,
    backend: Backend = "auto",
    device: torch.device | str | None = None,
    stream: _noise.Stream = _noise.Stream.STEP,
) -> torch.Tensor:
    """Noise `[N, ...]` float32, a pure function of its arguments; see `tpgrpo_fast.noise.normal`."""
    _choose_backend(backend)
    return _noise.normal(
        shape, seed=seed, iteration=iteration, row_uid=row_uid, step=step, stream=stream, device=device
    )


def guided(velocity: torch.Tensor, velocity_uncond: torch.Tensor | None, guidance_scale: float) -> torch.Tensor:
    """v_uncond + g (v_cond - v_uncond) in float32 (float64 stays)."""
    dtype = torch.float64 if velocity.dtype == torch.float64 else torch.float32
    if velocity_uncond is None:
        return velocity.to(dtype)
    uncond = velocity_uncond.to(dtype)
    return uncond + guidance_scale * (velocity.to(dtype) - uncond)


def _mean(
    velocity: torch.Tensor,
    sample: torch.Tensor,
    transition: Transition,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
) -> torch.Tensor:
    if velocity_uncond is not None:
        _check_pair("velocity_uncond", velocity_uncond, "velocity", velocity)
    v = guided(velocity, velocity_uncond, guidance_scale)
    return _column(transition.a, v) * sample.to(v.dtype) + _column(transition.b, v) * v


def _gaussian_log_prob(
    value: torch.Tensor, mean: torch.Tensor, transition: Transition, noisy: torch.Tensor, log_prob: LogProb
) -> torch.Tensor:
    """`[N]` log-probability of `value` as it is stored, 0 in rows without noise."""
    elements = math.prod(mean.shape[1:])
    error = (value.to(mean.dtype) - mean).square().reshape(mean.shape[0], elements)
    reduced = error.mean(dim=1) if log_prob == "mean" else error.sum(dim=1)
    if transition.unscaled_log_prob:
        score = -reduced
    else:
        # A row without noise divides by 1 and takes log 1, so that no NaN appears even in its gradient.
        c = torch.where(noisy, torch.as_tensor(transition.c, dtype=torch.float64).expand(len(noisy)), 1.0)
        scale = (0.5 / c.square()).to(device=mean.device, dtype=mean.dtype)
        constant = (c.log() + _LOG_SQRT_2PI).to(device=mean.device, dtype=mean.dtype)
        score = -reduced * scale - constant * (1 if log_prob == "mean" else elements)
    return score if bool(noisy.all()) else torch.where(noisy.to(mean.device), score, torch.zeros_like(score))


def _column(value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A coefficient as `[N, 1, …]` (or `[1, …]`) next to `like [N, ...]`, in its dtype and on its device."""
    column = torch.as_tensor(value, dtype=torch.float64).to(device=like.device, dtype=like.dtype)
    if column.dim() == 1 and column.shape[0] != like.shape[0]:
        raise ValueError(f"transition holds {column.shape[0]} rows, but the batch has {like.shape[0]}")
    return column.reshape(-1, *([1] * (like.dim() - 1))).expand(like.shape[0], *([1] * (like.dim() - 1)))


def _check_pair(name: str, value: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if value.shape != other.shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}, but {other_name} has {list(other.shape)}: they must agree"
        )
    if value.device != other.device:
        raise ValueError(f"{name} is on {value.device}, but {other_name} is on {other.device}: move one of them")
    for label, tensor in ((name, value), (other_name, other)):
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{label} has dtype {tensor.dtype}: convert it to a floating-point dtype")
    if value.dim() == 0:
        raise ValueError(f"{name} is a scalar: give it a leading row dimension")


def _check_reduction(log_prob: str) -> None:
    if log_prob not in ("mean", "sum"):
        raise ValueError(f"log_prob = {log_prob!r}: choose mean or sum")


def _choose_backend(backend: str) -> None:
    if backend not in ("auto", "torch", "triton", "cpp"):
        raise ValueError(f"backend = {backend!r}: choose auto, torch, triton or cpp")
    if backend in ("triton", "cpp"):
        raise RuntimeError(
            f"backend = {backend!r}: this version has no such kernel for this operation; use auto or torch"
        )
