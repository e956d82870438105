"""Log-probability of a stored step under other velocities, forward and backward."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from tpgrpo_fast.kernels._common import (
    LAUNCH_OPTIONS,
    block_sum,
    finish_log_prob,
    layout,
    load_f32,
    load_guided,
    place,
    rounded,
    row_table,
)


@triton.jit(do_not_specialize=["rows"])
def step_log_prob_fwd_kernel(
    p_velocity,
    p_uncond,
    p_sample,
    p_next,
    p_rows,
    p_partial,
    rows,
    elements,
    chunks,
    guidance_scale,
    GUIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Partial sums of (x' - mean)^2, mean = a x + b v, v = v_u + g (v_c - v_u).

    Bytes per element: each input read once, 4 s with guidance, which is the minimum.
    """
    pid = tl.program_id(0)
    row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
    a, b = tl.load(p_rows + row), tl.load(p_rows + rows + row)
    # [BLOCK] each
    b_v = load_guided(p_velocity + base, p_uncond + base, o_row, m_x, guidance_scale, GUIDED)
    b_mean = a * load_f32(p_sample + base, o_row, m_x) + b * b_v
    b_error = tl.where(m_x, load_f32(p_next + base, o_row, m_x) - b_mean, 0.0)
    tl.store(p_partial + pid, block_sum(b_error * b_error))


@triton.jit(do_not_specialize=["rows"])
def step_log_prob_bwd_kernel(
    p_velocity,
    p_uncond,
    p_sample,
    p_next,
    p_rows,
    p_grad_log_prob,
    p_grad_velocity,
    p_grad_uncond,
    rows,
    elements,
    chunks,
    guidance_scale,
    GUIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """d log p / d v = 2 scale b (x' - mean); times g for v_c and 1 - g for v_u. Rows with c = 0 give 0.

    Bytes per element: each input read once, each gradient written once, 6 s with guidance, which is the minimum.
    """
    pid = tl.program_id(0)
    row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
    a, b, c = tl.load(p_rows + row), tl.load(p_rows + rows + row), tl.load(p_rows + 2 * rows + row)
    scale, grad = tl.load(p_rows + 3 * rows + row), tl.load(p_grad_log_prob + row)
    factor = tl.where(c > 0.0, 2.0 * scale * b * grad, 0.0)
    # [BLOCK] each
    b_v = load_guided(p_velocity + base, p_uncond + base, o_row, m_x, guidance_scale, GUIDED)
    b_mean = a * load_f32(p_sample + base, o_row, m_x) + b * b_v
    b_grad = factor * (load_f32(p_next + base, o_row, m_x) - b_mean)
    if GUIDED:
        b_uncond = (1.0 - guidance_scale) * b_grad
        tl.store(p_grad_uncond + base + o_row, rounded(b_uncond, p_grad_uncond.dtype.element_ty), mask=m_x)
        b_grad = guidance_scale * b_grad
    tl.store(p_grad_velocity + base + o_row, rounded(b_grad, p_grad_velocity.dtype.element_ty), mask=m_x)


def step_log_prob_forward(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
) -> torch.Tensor:
    """`log_prob [N]` of tables `[N, E]`; `a, b, c [N]` are float64 on the host."""
    device, cut = sample.device, layout(sample)
    rows = row_table(a, b, c, device, elements=cut.elements, unscaled=unscaled, reduce_sum=reduce_sum)
    partial = torch.empty((cut.rows, cut.chunks), dtype=torch.float32, device=device)
    step_log_prob_fwd_kernel[cut.grid](
        velocity,
        velocity if velocity_uncond is None else velocity_uncond,
        sample,
        next_sample,
        rows,
        partial,
        cut.rows,
        cut.elements,
        cut.chunks,
        guidance_scale,
        GUIDED=velocity_uncond is not None,
        BLOCK=cut.block,
        **LAUNCH_OPTIONS,
    )
    return finish_log_prob(partial, rows, cut)


def step_log_prob_backward(
    grad_log_prob: torch.Tensor,
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of both velocities, in their dtypes, for `grad_log_prob [N]`."""
    cut = layout(sample)
    rows = row_table(a, b, c, sample.device, elements=cut.elements, unscaled=unscaled, reduce_sum=reduce_sum)
    grad_velocity = torch.empty_like(velocity)
    grad_uncond = None if velocity_uncond is None else torch.empty_like(velocity_uncond)
    step_log_prob_bwd_kernel[cut.grid](
        velocity,
        velocity if velocity_uncond is None else velocity_uncond,
        sample,
        next_sample,
        rows,
        grad_log_prob,
        grad_velocity,
        grad_velocity if grad_uncond is None else grad_uncond,
        cut.rows,
        cut.elements,
        cut.chunks,
        guidance_scale,
        GUIDED=velocity_uncond is not None,
        BLOCK=cut.block,
        **LAUNCH_OPTIONS,
    )
    return grad_velocity, grad_uncond
