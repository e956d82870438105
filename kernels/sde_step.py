"""One sampler step: guidance, affine transition, noise, rounding and log-prob in one pass over memory."""

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
    normals,
    place,
    rounded,
    row_table,
    words,
)

# Where the noise of rows with c > 0 comes from.
NO_NOISE, GIVEN, COUNTED = 0, 1, 2


@triton.jit(do_not_specialize=["rows", "first_rows", "k0", "k1", "iteration"])
def sde_step_fwd_kernel(
    p_velocity,
    p_uncond,
    p_sample,
    p_noise,
    p_rows,
    p_counters,
    p_b_ode,
    p_next,
    p_mean,
    p_first,
    p_partial,
    rows,
    first_rows,
    elements,
    chunks,
    guidance_scale,
    k0,
    k1,
    iteration,
    GUIDED: tl.constexpr,
    NOISE: tl.constexpr,
    MEAN: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x' = round(mean + c eps), mean = a x + b v, v = v_u + g (v_c - v_u); partial sums of (x' - mean)^2.

    With FIRST rows below `first_rows` also give x + b_ode v, the first state of the ODE completion that starts here.

    Bytes per element, s being the size of an element: velocity, its unconditional half, state in and state out, 4 s
    with guidance and in-kernel noise, which is the minimum; 4 bytes per 1024 elements for the partial sums.
    """
    pid = tl.program_id(0)
    row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
    a, b, c = tl.load(p_rows + row), tl.load(p_rows + rows + row), tl.load(p_rows + 2 * rows + row)
    # [BLOCK] each
    b_v = load_guided(p_velocity + base, p_uncond + base, o_row, m_x, guidance_scale, GUIDED)
    b_x = load_f32(p_sample + base, o_row, m_x)
    b_mean = a * b_x + b * b_v
    b_value = b_mean
    if NOISE == 1:
        b_value = b_mean + c * load_f32(p_noise + base, o_row, m_x)
    if NOISE == 2:
        # ODE rows of a mixed launch draw nothing.
        if c > 0.0:
            row_uid = tl.load(p_counters + row).to(tl.uint32)
            stream_step = tl.load(p_counters + rows + row).to(tl.uint32)
            first_quad = ((pid % chunks) * (BLOCK // 4)).to(tl.uint32)
            b_eps = normals(
                first_quad, stream_step, row_uid, iteration.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32), BLOCK
            )
            b_value = b_mean + c * b_eps
    b_stored = rounded(b_value, p_next.dtype.element_ty)
    tl.store(p_next + base + o_row, b_stored, mask=m_x)
    if MEAN:
        tl.store(p_mean + base + o_row, b_mean, mask=m_x)
    if FIRST:
        if row < first_rows:
            b_first = b_x + tl.load(p_b_ode + row) * b_v
            tl.store(p_first + base + o_row, rounded(b_first, p_first.dtype.element_ty), mask=m_x)
    # The state is scored as it is stored.
    b_error = tl.where(m_x, b_stored.to(tl.float32) - b_mean, 0.0)
    tl.store(p_partial + pid, block_sum(b_error * b_error))


@triton.jit(do_not_specialize=["rows", "k0", "k1", "iteration"])
def philox_normal_fwd_kernel(p_counters, p_out, rows, elements, chunks, k0, k1, iteration, BLOCK: tl.constexpr):
    """The normals of `tpgrpo_fast.noise`, 4 bytes written an element."""
    pid = tl.program_id(0)
    row, o_row, m_x, base = place(pid, elements, chunks, BLOCK)
    row_uid = tl.load(p_counters + row).to(tl.uint32)
    stream_step = tl.load(p_counters + rows + row).to(tl.uint32)
    first_quad = ((pid % chunks) * (BLOCK // 4)).to(tl.uint32)
    b_eps = normals(
        first_quad, stream_step, row_uid, iteration.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32), BLOCK
    )
    tl.store(p_out + base + o_row, b_eps, mask=m_x)


def sde_step(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`(next_sample [N, E], log_prob [N], mean [N, E] | None, ode_first [M, E] | None)`.

    `a, b, c [N]` and `b_ode [M]` are float64 on the host, `row_uid, stream_step [N]` int64 on the host; the tables
    `[N, E]` are contiguous and not empty. The first M rows give the first state of an ODE completion each.
    """
    device, cut = sample.device, layout(sample)
    rows = row_table(a, b, c, device, elements=cut.elements, unscaled=unscaled, reduce_sum=reduce_sum)
    next_sample = torch.empty(sample.shape, dtype=out_dtype, device=device)
    mean = torch.empty(sample.shape, dtype=torch.float32, device=device) if want_mean else None
    partial = torch.empty((cut.rows, cut.chunks), dtype=torch.float32, device=device)
    first, slopes = None, None
    if b_ode is not None:
        first = torch.empty((len(b_ode), cut.elements), dtype=out_dtype, device=device)
        slopes = b_ode.to(torch.float32).to(device, non_blocking=True)
    kind, counters = GIVEN if noise is not None else NO_NOISE, None
    if noise is None and row_uid is not None and stream_step is not None:
        kind, counters = COUNTED, torch.stack((row_uid, stream_step)).to(device, non_blocking=True)
    # An absent tensor is passed as one that is there: the kernel does not touch it.
    sde_step_fwd_kernel[cut.grid](
        velocity,
        velocity if velocity_uncond is None else velocity_uncond,
        sample,
        sample if noise is None else noise,
        rows,
        rows if counters is None else counters,
        rows if slopes is None else slopes,
        next_sample,
        next_sample if mean is None else mean,
        next_sample if first is None else first,
        partial,
        cut.rows,
        0 if b_ode is None else len(b_ode),
        cut.elements,
        cut.chunks,
        guidance_scale,
        *words(seed),
        words(iteration)[0],
        GUIDED=velocity_uncond is not None,
        NOISE=kind,
        MEAN=want_mean,
        FIRST=b_ode is not None,
        BLOCK=cut.block,
        **LAUNCH_OPTIONS,
    )
    return next_sample, finish_log_prob(partial, rows, cut), mean, first


def philox_normal(
    out: torch.Tensor, seed: int, row_uid: torch.Tensor, iteration: int, stream_step: torch.Tensor
) -> torch.Tensor:
    """Fills the float32 table `out [N, E]` with the normals of its rows; `row_uid, stream_step` are int64 `[N]`."""
    cut = layout(out)
    counters = torch.stack((row_uid.to(out.device), stream_step.to(out.device)))
    philox_normal_fwd_kernel[cut.grid](
        counters,
        out,
        cut.rows,
        cut.elements,
        cut.chunks,
        *words(seed),
        words(iteration)[0],
        BLOCK=cut.block,
        **LAUNCH_OPTIONS,
    )
    return out
