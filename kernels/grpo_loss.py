"""GRPO's clipped surrogate and its KL to a reference velocity: one forward pass, one backward pass that recomputes."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpgrpo_fast.kernels._common import (
    LAUNCH_OPTIONS,
    block_sum,
    layout,
    load_f32,
    load_guided,
    place,
    rounded,
    row_log_prob,
    row_sum,
    row_table,
)


@triton.jit(do_not_specialize=["rows"])
def grpo_loss_fwd_kernel(
    p_velocity,
    p_uncond,
    p_sample,
    p_next,
    p_ref,
    p_rows,
    p_partial,
    p_partial_kl,
    rows,
    elements,
    chunks,
    guidance_scale,
    GUIDED: tl.constexpr,
    KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums of (x' - mean)^2 and of (mean - mean_ref)^2, mean = a x + b v, mean_ref = a x + b v_ref.

    Bytes per element: each input read once, 5 s with guidance and KL, which is the minimum.
    """
    pid = tl.program_id(0)
    row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
    a, b = tl.load(p_rows + row), tl.load(p_rows + rows + row)
    # [BLOCK] each
    b_v = load_guided(p_velocity + base, p_uncond + base, o_row, m_x, guidance_scale, GUIDED)
    b_ax = a * load_f32(p_sample + base, o_row, m_x)
    b_mean = b_ax + b * b_v
    b_error = tl.where(m_x, load_f32(p_next + base, o_row, m_x) - b_mean, 0.0)
    tl.store(p_partial + pid, block_sum(b_error * b_error))
    if KL:
        # Outside the row both means are 0.
        b_shift = b_mean - (b_ax + b * load_f32(p_ref + base, o_row, m_x))
        tl.store(p_partial_kl + pid, block_sum(b_shift * b_shift))


@triton.jit(do_not_specialize=["rows"])
def grpo_loss_rows_kernel(
    p_partial,
    p_partial_kl,
    p_rows,
    p_old_log_prob,
    p_advantage,
    p_weight,
    p_ratio,
    p_policy,
    p_kl,
    p_slope,
    rows,
    chunks,
    clip_range,
    adv_clip,
    KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """r = exp(log p - old), A clamped: policy = w max(-A r, -A clip(r)), slope = d policy / d log p, kl = w KL.

    Selections are written so that a NaN comes through.
    """
    row = tl.program_id(0)
    log_prob = row_log_prob(p_partial, p_rows, rows, row, chunks, BLOCK)
    weight, advantage = tl.load(p_weight + row), tl.load(p_advantage + row)
    advantage = tl.where(advantage > adv_clip, adv_clip, tl.where(advantage < -adv_clip, -adv_clip, advantage))
    # In float64, as the float32 exponential of some devices is off by several roundings.
    ratio = tl.exp((log_prob - tl.load(p_old_log_prob + row)).to(tl.float64)).to(tl.float32)
    low, high = 1.0 - clip_range, 1.0 + clip_range
    clipped = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    plain, held = -advantage * ratio, -advantage * clipped
    tl.store(p_ratio + row, ratio)
    tl.store(p_policy + row, weight * tl.where(plain < held, held, plain))
    tl.store(p_slope + row, tl.where(plain < held, 0.0, weight * plain))
    if KL:
        kl = row_sum(p_partial_kl, row, chunks, BLOCK) * tl.load(p_rows + 5 * rows + row)
        tl.store(p_kl + row, weight * kl)
    else:
        tl.store(p_kl + row, 0.0)


@triton.jit(do_not_specialize=["rows"])
def grpo_loss_bwd_kernel(
    p_velocity,
    p_uncond,
    p_sample,
    p_next,
    p_ref,
    p_rows,
    p_grad_log_prob,
    p_grad_kl,
    p_grad_velocity,
    p_grad_uncond,
    rows,
    elements,
    chunks,
    guidance_scale,
    GUIDED: tl.constexpr,
    KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d loss / d v = 2 b [scale g_log_prob (x' - mean) + scale_kl g_kl (mean - mean_ref)]; g for v_c, 1 - g for v_u.

    Bytes per element: each input read once, each gradient written once, 7 s with guidance and KL, which is the minimum
    for gradients that are recomputed; nothing is kept between the passes.
    """
    pid = tl.program_id(0)
    row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
    a, b = tl.load(p_rows + row), tl.load(p_rows + rows + row)
    pull = 2.0 * tl.load(p_rows + 3 * rows + row) * b * tl.load(p_grad_log_prob + row)
    # [BLOCK] each
    b_v = load_guided(p_velocity + base, p_uncond + base, o_row, m_x, guidance_scale, GUIDED)
    b_ax = a * load_f32(p_sample + base, o_row, m_x)
    b_mean = b_ax + b * b_v
    b_grad = pull * (load_f32(p_next + base, o_row, m_x) - b_mean)
    if KL:
        push = 2.0 * tl.load(p_rows + 5 * rows + row) * b * tl.load(p_grad_kl + row)
        b_grad += push * (b_mean - (b_ax + b * load_f32(p_ref + base, o_row, m_x)))
    if GUIDED:
        b_uncond = (1.0 - guidance_scale) * b_grad
        tl.store(p_grad_uncond + base + o_row, rounded(b_uncond, p_grad_uncond.dtype.element_ty), mask=m_x)
        b_grad = guidance_scale * b_grad
    tl.store(p_grad_velocity + base + o_row, rounded(b_grad, p_grad_velocity.dtype.element_ty), mask=m_x)


def grpo_loss_forward(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    inv_two_var_kl: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    clip_range: float,
    adv_clip: float,
    unscaled: bool,
    reduce_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(ratio, policy, kl, d policy / d log p)`, each float32 `[N]`, weighted and not yet averaged.

    `a, b, c, inv_two_var_kl [N]` are float64 on the host, `old_log_prob, advantage, weight [N]` float32 on the device.
    """
    device, cut = sample.device, layout(sample)
    rows = row_table(
        a,
        b,
        c,
        device,
        elements=cut.elements,
        unscaled=unscaled,
        reduce_sum=reduce_sum,
        inv_two_var_kl=inv_two_var_kl,
    )
    partial, partial_kl = (torch.empty((cut.rows, cut.chunks), dtype=torch.float32, device=device) for _ in range(2))
    grpo_loss_fwd_kernel[cut.grid](
        velocity,
        velocity if velocity_uncond is None else velocity_uncond,
        sample,
        next_sample,
        velocity if velocity_ref is None else velocity_ref,
        rows,
        partial,
        partial_kl,
        cut.rows,
        cut.elements,
        cut.chunks,
        guidance_scale,
        GUIDED=velocity_uncond is not None,
        KL=velocity_ref is not None,
        BLOCK=cut.block,
        **LAUNCH_OPTIONS,
    )
    ratio, policy, kl, slope = (torch.empty(cut.rows, dtype=torch.float32, device=device) for _ in range(4))
    grpo_loss_rows_kernel[(cut.rows,)](
        partial,
        partial_kl,
        rows,
        old_log_prob,
        advantage,
        weight,
        ratio,
        policy,
        kl,
        slope,
        cut.rows,
        cut.chunks,
        clip_range,
        adv_clip,
        KL=velocity_ref is not None,
        BLOCK=cut.chunk_block,
        **LAUNCH_OPTIONS,
    )
    return ratio, policy, kl, slope


def grpo_loss_backward(
    grad_log_prob: torch.Tensor,
    grad_kl: torch.Tensor,
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    inv_two_var_kl: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of both velocities, in their dtypes, for d loss / d log p and d loss / d KL, each float32 `[N]`."""
    cut = layout(sample)
    rows = row_table(
        a,
        b,
        c,
        sample.device,
        elements=cut.elements,
        unscaled=unscaled,
        reduce_sum=reduce_sum,
        inv_two_var_kl=inv_two_var_kl,
    )
    grad_velocity = torch.empty_like(velocity)
    grad_uncond = None if velocity_uncond is None else torch.empty_like(velocity_uncond)
    grpo_loss_bwd_kernel[cut.grid](
        velocity,
        velocity if velocity_uncond is None else velocity_uncond,
        sample,
        next_sample,
        velocity if velocity_ref is None else velocity_ref,
        rows,
        grad_log_prob,
        grad_kl,
        grad_velocity,
        grad_velocity if grad_uncond is None else grad_uncond,
        cut.rows,
        cut.elements,
        cut.chunks,
        guidance_scale,
        GUIDED=velocity_uncond is not None,
        KL=velocity_ref is not None,
        BLOCK=cut.block,
        **LAUNCH_OPTIONS,
    )
    return grad_velocity, grad_uncond
