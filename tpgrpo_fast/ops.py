"""The sampler's and the loss's elementwise operations, in float32 whatever the storage dtype.

Everything here works on rows: `velocity`, `sample` and `next_sample` are `[N, ...]` with any trailing shape (SD3's
`[N, C, H, W]`, FLUX's packed `[N, L, C]`), and per-row numbers are `[N]`. Arguments are checked here, once; then one of
three backends does the work:

* `torch`: `tpgrpo_fast.reference`, on any device and in float64 too;
* `triton`: fused kernels for CUDA and ROCm tensors (`tpgrpo_fast.kernels`);
* `cpp`: fused kernels for CPU tensors (`csrc/`).

`auto` takes the kernels of the tensors' device where they are installed, and torch for everything they do not do:
float64, empty batches, and gradients other than those of the velocities. The kernels are `torch.library` operations, so
they work under `torch.compile` and autocast.
"""

import logging
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from tpgrpo_fast import _cpp, reference
from tpgrpo_fast import noise as _noise
from tpgrpo_fast.reference import guided
from tpgrpo_fast.transitions import Transition

__all__ = ["GrpoLoss", "SdeStep", "grpo_loss", "guided", "philox_normal", "sde_step", "step_log_prob"]

LogProb = Literal["mean", "sum"]
Kl = Literal["gaussian", "flow_grpo"]
Backend = Literal["auto", "torch", "triton", "cpp"]

logger = logging.getLogger("tpgrpo_fast")

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTALLED = {"triton": find_spec("triton") is not None, "cpp": _cpp.available()}
_logged: set[str] = set()


class _SdeStepFields(NamedTuple):
    next_sample: torch.Tensor
    log_prob: torch.Tensor
    mean: torch.Tensor | None


class SdeStep(_SdeStepFields):
    """Result of `sde_step`: `(next_sample, log_prob, mean)`, and `ode_first` where it was asked for.

    `next_sample` `[N, ...]` is the state after the step, in `out_dtype`. `log_prob` `[N]`, float32, is the
    log-probability of `next_sample` as stored, 0 in rows without noise. `mean` `[N, ...]`, float32, is the mean of the
    transition, with `return_mean=True`.
    """

    ode_first: torch.Tensor | None = None
    """`[M, ...]` first states of ODE completions, in `out_dtype`."""


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
    ode_first: Transition | None = None,
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
        ode_first: an `ode` transition, shared or of M rows: also return the ODE step of all rows, or of the first M,
            from the same velocities. It is the first state of the completions that start here.
        backend: `auto`, `torch`, `triton` or `cpp`; the kernels have no gradient, so that with one `auto` is torch.

    Raises:
        ValueError: shapes, devices or dtypes that do not fit; noise is needed and neither given nor seeded.
        RuntimeError: a backend this installation does not have.
    """
    _check_pair("velocity", velocity, "sample", sample)
    if velocity_uncond is not None:
        _check_pair("velocity_uncond", velocity_uncond, "velocity", velocity)
    if noise is not None:
        _check_pair("noise", noise, "sample", sample)
    _check_reduction(log_prob)
    count, out_dtype = len(sample), out_dtype or sample.dtype
    if not out_dtype.is_floating_point:
        raise ValueError(f"out_dtype = {out_dtype}: states are stored in a floating-point dtype")
    if ode_first is not None and ode_first.sde_type != "ode":
        raise ValueError(f"ode_first is a transition of {ode_first.sde_type!r}: make it with sde_type 'ode'")
    transition = transition.rows(count)
    seed_needed = noise is None and (seed is not None and row_uid is not None)
    counter = _counter(seed, iteration, row_uid, step, count) if seed_needed else None
    tensors = (velocity, sample, velocity_uncond, noise)
    which = _choose_backend(backend, tensors, out_dtype=out_dtype, no_gradient=tensors)
    if which == "torch":
        _check_noise(transition.c, noise is not None or counter is not None)
        on_host = (
            None
            if counter is None
            else counter._replace(row_uid=counter.row_uid.cpu(), stream_step=counter.stream_step.cpu())
        )
        next_sample, score, mean = reference.sde_step(
            velocity,
            velocity_uncond,
            guidance_scale,
            sample,
            transition,
            noise if noise is not None else on_host,
            out_dtype,
            log_prob == "sum",
        )
        result = SdeStep(next_sample, score, mean if return_mean else None)
        if ode_first is not None:
            first = _first_rows(ode_first, count)
            v = guided(velocity[:first], None if velocity_uncond is None else velocity_uncond[:first], guidance_scale)
            result.ode_first = reference.affine(ode_first, sample[:first], v).to(out_dtype)
        return result
    next_sample, score, mean, first_state = _sde_step(
        _table(velocity),
        _optional_table(velocity_uncond),
        guidance_scale,
        _table(sample),
        _coefficients(transition),
        _optional_table(noise),
        0 if counter is None else _signed(counter.seed),
        iteration,
        None if counter is None else counter.row_uid,
        None if counter is None else counter.stream_step,
        out_dtype,
        transition.unscaled_log_prob,
        log_prob == "sum",
        return_mean,
        None if ode_first is None else _ode_slopes(ode_first, count),
        which,
    )
    result = SdeStep(next_sample.view(sample.shape), score, mean.view(sample.shape) if return_mean else None)
    if ode_first is not None:
        result.ode_first = first_state.view(-1, *sample.shape[1:])
    return result


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
        RuntimeError: a backend this installation does not have.
    """
    _check_pair("velocity", velocity, "sample", sample)
    _check_pair("next_sample", next_sample, "sample", sample)
    if velocity_uncond is not None:
        _check_pair("velocity_uncond", velocity_uncond, "velocity", velocity)
    _check_reduction(log_prob)
    transition = transition.rows(len(sample))
    which = _choose_backend(
        backend, (velocity, sample, next_sample, velocity_uncond), no_gradient=(sample, next_sample)
    )
    if which == "torch":
        mean = reference.affine(transition, sample, guided(velocity, velocity_uncond, guidance_scale))
        return reference.log_prob(next_sample, mean, transition, log_prob == "sum")
    return _step_log_prob(
        _table(velocity),
        _optional_table(velocity_uncond),
        guidance_scale,
        _table(sample),
        _table(next_sample),
        _coefficients(transition),
        transition.unscaled_log_prob,
        log_prob == "sum",
        which,
    )


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
        RuntimeError: a backend this installation does not have.
    """
    _check_pair("velocity", velocity, "sample", sample)
    _check_pair("next_sample", next_sample, "sample", sample)
    if velocity_uncond is not None:
        _check_pair("velocity_uncond", velocity_uncond, "velocity", velocity)
    if velocity_ref is not None:
        _check_pair("velocity_ref", velocity_ref, "velocity", velocity)
    _check_reduction(log_prob)
    count = len(sample)
    for name, value in (("old_log_prob", old_log_prob), ("advantage", advantage), ("weight", weight)):
        if value is not None and value.shape != (count,):
            raise ValueError(f"{name} has shape {list(value.shape)}, but the batch has {count} rows: give [{count}]")
    if kl not in ("gaussian", "flow_grpo"):
        raise ValueError(f"kl = {kl!r}: choose gaussian or flow_grpo")
    if kl == "flow_grpo" and transition.sde_type.startswith("dance"):
        raise ValueError("kl = 'flow_grpo' is not defined for DanceGRPO's sampler: use kl = 'gaussian'")
    if beta > 0 and velocity_ref is None:
        raise ValueError(f"beta = {beta} asks for a KL: pass velocity_ref, or set beta to 0")
    transition = transition.rows(count)
    deviation = transition.c if kl == "gaussian" else transition.std_dev_t
    which = _choose_backend(
        backend,
        (velocity, sample, next_sample, velocity_uncond, velocity_ref),
        no_gradient=(sample, next_sample, old_log_prob, advantage, weight),
    )
    if which == "torch":
        _check_trainable(transition.c)
        rows = reference.grpo_loss(
            velocity,
            velocity_uncond,
            guidance_scale,
            sample,
            next_sample,
            velocity_ref,
            transition,
            deviation,
            old_log_prob,
            advantage,
            weight,
            clip_range,
            adv_clip,
            log_prob == "sum",
        )
    else:
        ones = torch.ones(count, dtype=torch.float32, device=sample.device)
        ratio, policy, kl_rows, _ = _grpo_loss(
            _table(velocity),
            _optional_table(velocity_uncond),
            guidance_scale,
            _table(sample),
            _table(next_sample),
            None if velocity_ref is None else _table(velocity_ref.detach()),
            _coefficients(transition, deviation),
            _row_vector(old_log_prob, sample),
            _row_vector(advantage, sample),
            ones if weight is None else _row_vector(weight, sample),
            clip_range,
            adv_clip,
            transition.unscaled_log_prob,
            log_prob == "sum",
            which,
        )
        rows = reference.LossRows(ratio.detach(), policy, kl_rows)
    total = float(count if normalizer is None else normalizer) or 1.0
    policy_loss, kl_loss = rows.policy.sum() / total, rows.kl.sum() / total
    outside = ((rows.ratio - 1.0).abs() > clip_range).to(rows.ratio.dtype)
    return GrpoLoss(
        policy_loss + beta * kl_loss,
        policy_loss.detach(),
        kl_loss.detach(),
        rows.ratio,
        outside.sum() / max(count, 1),
    )


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
    rows = torch.as_tensor(row_uid, dtype=torch.int64)
    rows = rows.to(device) if device is not None else rows
    if len(shape) == 0 or rows.dim() != 1 or len(rows) != shape[0]:
        raise ValueError(f"row_uid has shape {list(rows.shape)}, but shape = {list(shape)} asks for one uid a row")
    counter = _counter(seed, iteration, rows, step, len(rows))
    out = torch.empty((len(rows), math.prod(shape[1:])), dtype=torch.float32, device=rows.device)
    which = _choose_backend(backend, (out,))
    if which == "torch":
        return _noise.normal(
            shape, seed=seed, iteration=iteration, row_uid=rows, step=counter.stream_step, stream=stream
        )
    stream_step = counter.stream_step | int(stream)
    return _philox_normal(out, _signed(seed), iteration, rows, stream_step, which).view(tuple(shape))


# ------------------------------------------------------------------------------------------------ torch.library


def _kernels(name: str) -> ModuleType:
    """The module with a backend's functions; its first use imports it."""
    if name == "cpp":
        return _cpp
    from tpgrpo_fast.kernels import steps

    return steps


@torch.library.custom_op("tpgrpo_fast::sde_step", mutates_args=())
def _sde_step(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    coefficients: torch.Tensor,
    noise: torch.Tensor | None,
    seed: int,
    iteration: int,
    row_uid: torch.Tensor | None,
    stream_step: torch.Tensor | None,
    out_dtype: torch.dtype,
    unscaled: bool,
    reduce_sum: bool,
    want_mean: bool,
    b_ode: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(next_sample, log_prob, mean or empty, ode_first or empty)`; coefficients are float64 `[4, N]` on the host."""
    a, b, c, _ = coefficients
    counted = noise is None and row_uid is not None
    _check_noise(c, noise is not None or counted)
    if not bool((c > 0).any()):
        noise, counted = None, False
    next_sample, score, mean, first = _kernels(backend).sde_step(
        velocity,
        velocity_uncond,
        guidance_scale,
        sample,
        a,
        b,
        c,
        noise,
        seed % (1 << 64),
        iteration,
        row_uid if counted else None,
        stream_step if counted else None,
        out_dtype,
        unscaled,
        reduce_sum,
        want_mean,
        b_ode,
    )
    nothing = sample.new_empty(0)
    return next_sample, score, nothing if mean is None else mean, sample.new_empty(0) if first is None else first


@_sde_step.register_fake
def _(*arguments):  # type: ignore[no-untyped-def]
    sample, out_dtype, want_mean, b_ode = arguments[3], arguments[10], arguments[13], arguments[14]
    rows, elements = sample.shape
    return (
        sample.new_empty((rows, elements), dtype=out_dtype),
        sample.new_empty(rows, dtype=torch.float32),
        sample.new_empty((rows, elements), dtype=torch.float32) if want_mean else sample.new_empty(0),
        sample.new_empty(0) if b_ode is None else sample.new_empty((len(b_ode), elements), dtype=out_dtype),
    )


@torch.library.custom_op("tpgrpo_fast::step_log_prob", mutates_args=())
def _step_log_prob(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    coefficients: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
    backend: str,
) -> torch.Tensor:
    """`log_prob [N]`."""
    a, b, c, _ = coefficients
    return _kernels(backend).step_log_prob_forward(
        velocity, velocity_uncond, guidance_scale, sample, next_sample, a, b, c, unscaled, reduce_sum
    )


@torch.library.custom_op("tpgrpo_fast::step_log_prob_backward", mutates_args=())
def _step_log_prob_backward(
    grad_log_prob: torch.Tensor,
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    coefficients: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(grad_velocity, grad_velocity_uncond or empty)`."""
    a, b, c, _ = coefficients
    return _pair(
        *_kernels(backend).step_log_prob_backward(
            grad_log_prob.contiguous(), velocity, velocity_uncond, guidance_scale, sample, next_sample, a, b, c,
            unscaled, reduce_sum,
        )
    )  # fmt: skip


@_step_log_prob.register_fake
def _(velocity, velocity_uncond, guidance_scale, sample, *rest):  # type: ignore[no-untyped-def]
    return sample.new_empty(len(sample), dtype=torch.float32)


@_step_log_prob_backward.register_fake
def _(grad_log_prob, velocity, velocity_uncond, *rest):  # type: ignore[no-untyped-def]
    return _pair(torch.empty_like(velocity), None if velocity_uncond is None else torch.empty_like(velocity_uncond))


@torch.library.custom_op("tpgrpo_fast::grpo_loss", mutates_args=())
def _grpo_loss(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    coefficients: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    clip_range: float,
    adv_clip: float,
    unscaled: bool,
    reduce_sum: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(ratio, policy, kl, d policy / d log p)`, each `[N]`, weighted and not yet averaged."""
    a, b, c, k = coefficients
    _check_trainable(c)
    return _kernels(backend).grpo_loss_forward(
        velocity, velocity_uncond, guidance_scale, sample, next_sample, velocity_ref, a, b, c, k, old_log_prob,
        advantage, weight, clip_range, adv_clip, unscaled, reduce_sum,
    )  # fmt: skip


@torch.library.custom_op("tpgrpo_fast::grpo_loss_backward", mutates_args=())
def _grpo_loss_backward(
    grad_log_prob: torch.Tensor,
    grad_kl: torch.Tensor,
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    coefficients: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(grad_velocity, grad_velocity_uncond or empty)`."""
    a, b, c, k = coefficients
    return _pair(
        *_kernels(backend).grpo_loss_backward(
            grad_log_prob.contiguous(), grad_kl.contiguous(), velocity, velocity_uncond, guidance_scale, sample,
            next_sample, velocity_ref, a, b, c, k, unscaled, reduce_sum,
        )
    )  # fmt: skip


@_grpo_loss.register_fake
def _(velocity, velocity_uncond, guidance_scale, sample, *rest):  # type: ignore[no-untyped-def]
    return tuple(sample.new_empty(len(sample), dtype=torch.float32) for _ in range(4))


@_grpo_loss_backward.register_fake
def _(grad_log_prob, grad_kl, velocity, velocity_uncond, *rest):  # type: ignore[no-untyped-def]
    return _pair(torch.empty_like(velocity), None if velocity_uncond is None else torch.empty_like(velocity_uncond))


@torch.library.custom_op("tpgrpo_fast::philox_normal", mutates_args=())
def _philox_normal(
    like: torch.Tensor, seed: int, iteration: int, row_uid: torch.Tensor, stream_step: torch.Tensor, backend: str
) -> torch.Tensor:
    """Normals of the shape and on the device of `like [N, E]`, float32."""
    out = torch.empty_like(like)
    return _kernels(backend).philox_normal(out, seed % (1 << 64), row_uid, iteration, stream_step)


@_philox_normal.register_fake
def _(like, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(like)


def _save_log_prob(ctx, inputs, output):  # type: ignore[no-untyped-def]
    velocity, uncond, guidance_scale, sample, next_sample, coefficients, *options = inputs
    ctx.save_for_backward(velocity, uncond, sample, next_sample, coefficients)
    ctx.guidance_scale, ctx.options = guidance_scale, options


def _log_prob_gradient(ctx, grad):  # type: ignore[no-untyped-def]
    velocity, uncond, sample, next_sample, coefficients = ctx.saved_tensors
    grads = _step_log_prob_backward(
        grad, velocity, uncond, ctx.guidance_scale, sample, next_sample, coefficients, *ctx.options
    )
    return (grads[0], None if uncond is None else grads[1], *[None] * 7)


_step_log_prob.register_autograd(_log_prob_gradient, setup_context=_save_log_prob)


def _save_loss(ctx, inputs, output):  # type: ignore[no-untyped-def]
    velocity, uncond, guidance_scale, sample, next_sample, reference_velocity, coefficients, _, _, weight = inputs[:10]
    ctx.save_for_backward(velocity, uncond, sample, next_sample, reference_velocity, coefficients, weight, output[3])
    ctx.guidance_scale, ctx.options = guidance_scale, inputs[12:]


def _loss_gradient(ctx, _grad_ratio, grad_policy, grad_kl, _grad_slope):  # type: ignore[no-untyped-def]
    velocity, uncond, sample, next_sample, reference_velocity, coefficients, weight, slope = ctx.saved_tensors
    grads = _grpo_loss_backward(
        grad_policy * slope,
        grad_kl * weight,
        velocity,
        uncond,
        ctx.guidance_scale,
        sample,
        next_sample,
        reference_velocity,
        coefficients,
        *ctx.options,
    )
    return (grads[0], None if uncond is None else grads[1], *[None] * 13)


_grpo_loss.register_autograd(_loss_gradient, setup_context=_save_loss)


def _pair(first: torch.Tensor, second: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return first, first.new_empty(0) if second is None else second


# ----------------------------------------------------------------------------------------------- arguments


def _table(value: torch.Tensor) -> torch.Tensor:
    """`[N, ...]` as a contiguous `[N, E]`."""
    return value.reshape(len(value), -1).contiguous()


def _optional_table(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else _table(value)


def _row_vector(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[N]` in float32 on the device of the big tensors."""
    return value.detach().to(device=like.device, dtype=torch.float32).contiguous()


def _coefficients(transition: Transition, kl_deviation: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Float64 `[4, N]` on the host: a, b, c and the factor of the squared mean difference in the KL."""
    deviation = torch.as_tensor(kl_deviation, dtype=torch.float64).expand_as(torch.as_tensor(transition.c))
    inverse = torch.where(deviation > 0, 0.5 / deviation.square(), 0.0)
    return torch.stack([torch.as_tensor(x) for x in (transition.a, transition.b, transition.c)] + [inverse])


def _first_rows(ode_first: Transition, count: int) -> int:
    """M: rows whose first ODE state is wanted."""
    rows = len(ode_first.b) if isinstance(ode_first.b, torch.Tensor) else count
    if rows > count:
        raise ValueError(f"ode_first holds {rows} rows, but the batch has {count}")
    return rows


def _ode_slopes(ode_first: Transition, count: int) -> torch.Tensor:
    """dt of the first M rows, float64 on the host."""
    return torch.as_tensor(ode_first.rows(_first_rows(ode_first, count)).b)


def _counter(
    seed: int | None, iteration: int, row_uid: torch.Tensor | Sequence[int] | None, step: int | torch.Tensor, count: int
) -> reference.Counter:
    """The noise's counter with one uid and one step a row, on the device of `row_uid`."""
    assert seed is not None and row_uid is not None
    _noise.split_seed(seed)
    if not torch.compiler.is_compiling():  # reading them would break the graph
        _noise.check_counter(iteration=iteration, row_uid=row_uid, step=step)
    uid = torch.as_tensor(row_uid, dtype=torch.int64)
    if uid.shape != (count,):
        raise ValueError(f"row_uid has shape {list(uid.shape)}, but the batch has {count} rows")
    if isinstance(step, torch.Tensor) and step.dim() > 0:
        if step.shape != (count,):
            raise ValueError(f"step has shape {list(step.shape)}: give one int, or one for each of {count} rows")
        steps = step.to(device=uid.device, dtype=torch.int64)
    elif isinstance(step, torch.Tensor):
        steps = step.to(device=uid.device, dtype=torch.int64).expand(count)
    else:
        steps = torch.full((count,), int(step), dtype=torch.int64, device=uid.device)
    return reference.Counter(seed, iteration, uid, steps)


def _signed(seed: int) -> int:
    """A seed in [0, 2^64) as the int64 of the same bits, which is what an operation's signature holds."""
    return seed - ((seed >> 63) << 64)


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


def _check_noise(c: float | torch.Tensor, has_source: bool) -> None:
    if not has_source and bool((torch.as_tensor(c) > 0).any()):
        raise ValueError("sde_step needs noise for rows with c > 0: pass `noise`, or `seed` and `row_uid`")


def _check_trainable(c: float | torch.Tensor) -> None:
    silent = torch.as_tensor(c) <= 0
    if bool(silent.any()):
        raise ValueError(
            f"row {int(silent.nonzero()[0])} of the loss has c = 0: a step without noise has no log-prob to train on. "
            "Leave such steps out of the SDE window (rollout.window_range) or raise rollout.noise_level"
        )


# ------------------------------------------------------------------------------------------------ backends


def _choose_backend(
    backend: str,
    tensors: Sequence[torch.Tensor | None],
    *,
    out_dtype: torch.dtype = torch.float32,
    no_gradient: Sequence[torch.Tensor | None] = (),
) -> str:
    """`torch`, `triton` or `cpp` for a call with these tensors, the first of which tells the device.

    `no_gradient` are those that the kernels do not differentiate.
    """
    if backend not in ("auto", "torch", "triton", "cpp"):
        raise ValueError(f"backend = {backend!r}: choose auto, torch, triton or cpp")
    if backend == "torch":
        return "torch"
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device.type
    native = {"cuda": "triton", "cpu": "cpp"}.get(device, "torch")
    if backend != "auto":
        _check_available(backend, device)
    dtypes = [tensor.dtype for tensor in given] + [out_dtype]
    unsupported = [dtype for dtype in dtypes if dtype not in KERNEL_DTYPES]
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in no_gradient)
    if backend == "auto":
        if unsupported or gradient or not INSTALLED.get(native, False) or given[0].numel() == 0:
            native = "torch"
        elif not torch.compiler.is_compiling():
            _log_once(native, device)
        return native
    if unsupported:
        raise ValueError(f"backend = {backend!r} takes float32, bfloat16 and float16, not {unsupported[0]}: use torch")
    if gradient:
        raise ValueError(
            f"backend = {backend!r} differentiates log-probs and losses in the velocities only: call it under "
            "torch.no_grad() or with detached tensors, or use backend = 'torch'"
        )
    return "torch" if given[0].numel() == 0 else backend


def _check_available(backend: str, device: str) -> None:
    if backend == "cpp":
        if not INSTALLED["cpp"]:
            _cpp.load()  # raises, with the remedy
        if device != "cpu":
            raise ValueError(f"backend = 'cpp' takes CPU tensors, not {device}: use triton, torch or auto")
    else:
        if not INSTALLED["triton"]:
            raise RuntimeError("backend = 'triton' is missing: pip install 'triton>=3.6', or use auto or torch")
        if device != "cuda" and not (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
            raise RuntimeError(
                f"backend = 'triton' takes CUDA tensors, not {device}: move them to a GPU, set TRITON_INTERPRET=1 "
                "before Python starts to interpret the kernels on the CPU, or use auto or torch"
            )


def _log_once(backend: str, device: str) -> None:
    if device not in _logged:
        _logged.add(device)
        logger.info("step kernels of %s tensors: backend %s", device, backend)
