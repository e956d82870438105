"""What the kernels share: Philox, Box-Muller, guided velocities, log-probs of rows, and how kernels are launched.

Every big tensor is a contiguous `[N, E]` table; a program works on one block of one row. Sums over a row are taken in
two stages, block by block and then over the blocks in a fixed order, so results do not depend on scheduling.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.standard import _sum_combine

MAX_BLOCK = 1024
# Rounding as in the torch reference: products and sums are not fused, except where a kernel says fma.
LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

# Triton's interpreter cuts float32 to bfloat16 where every device rounds to the nearest even number.
CUTS_BFLOAT16 = tl.constexpr(bool(triton.knobs.runtime.interpret))

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


@triton.jit
def block_sum(b_x):
    """Sum of a block `[BLOCK]`."""
    return tl.reduce(b_x, 0, _sum_combine)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox-4x32-10 (Salmon et al., SC 2011) of uint32 words: counter (c0 … c3), key (k0, k1)."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _radius(b_word):
    """sqrt(-2 ln u), u = (word div 2^8 + 1) / 2^24, good to two units in the last place.

    With u 2^24 = 2^e m, m in [sqrt(1/2), sqrt(2)) and f = m - 1: ln m = f - f^2/2 + f^3 P(f), P a Chebyshev fit.
    ln 2 is split so that its leading part times e is exact.
    """
    b_bits = ((b_word >> 8) + 1).to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True)
    b_exponent = (b_bits - 0x3F3504F3) >> 23
    f = (b_bits - (b_exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = (b_exponent - 24).to(tl.float32)
    z = f * f
    p = tl.fma(f, -0.0790274367, 0.126223192)
    p = tl.fma(p, f, -0.129981831)
    p = tl.fma(p, f, 0.142144963)
    p = tl.fma(p, f, -0.166412815)
    p = tl.fma(p, f, 0.200010449)
    p = tl.fma(p, f, -0.250003070)
    p = tl.fma(p, f, 0.333333313)
    y = tl.fma(e, -2.12194440e-4, p * f * z)
    y = tl.fma(z, -0.5, y)
    return tl.sqrt_rn(-2.0 * tl.fma(e, 0.693359375, f + y))


@triton.jit
def _cos_sin(b_word):
    """cos and sin of 2 pi (word div 2^8) / 2^24.

    The nearest quarter turn is taken off in integers, exactly, which leaves y pi/4 with |y| <= 1; the polynomials in
    y^2 are Chebyshev fits good to 3e-9.
    """
    b_k = (b_word >> 8).to(tl.int32)
    b_quarter = (b_k + (1 << 21)) >> 22
    y = (b_k - (b_quarter << 22)).to(tl.float32) * 4.76837158203125e-07
    z = y * y
    s = tl.fma(z, -3.595429007e-5, 0.00249000685)
    s = tl.fma(s, z, -0.0807454363)
    s = tl.fma(s, z, 0.785398185) * y
    c = tl.fma(z, 3.541952765e-6, -0.000325961388)
    c = tl.fma(c, z, 0.0158543382)
    c = tl.fma(c, z, -0.308425128)
    c = tl.fma(c, z, 1.0)
    m_swap = (b_quarter & 1) != 0
    b_cos, b_sin = tl.where(m_swap, s, c), tl.where(m_swap, c, s)
    return (
        tl.where(((b_quarter + 1) & 2) != 0, -b_cos, b_cos),
        tl.where((b_quarter & 2) != 0, -b_sin, b_sin),
    )


@triton.jit
def normals(first_quad, stream_step, row_uid, iteration, k0, k1, BLOCK: tl.constexpr):
    """The row's normals `[BLOCK]` from element 4 first_quad on; all words are uint32 (see `tpgrpo_fast.noise`)."""
    o_quad = first_quad + tl.arange(0, BLOCK // 4).to(tl.uint32)
    w0, w1, w2, w3 = philox(o_quad, stream_step, row_uid, iteration, k0, k1)
    r01, r23 = _radius(w0), _radius(w2)
    cos01, sin01 = _cos_sin(w1)
    cos23, sin23 = _cos_sin(w3)
    # Elements 4q … 4q+3 are the pairs (n0, n1), (n2, n3): join puts each new axis last.
    b_even = tl.join(r01 * cos01, r23 * cos23)
    b_odd = tl.join(r01 * sin01, r23 * sin23)
    return tl.reshape(tl.join(b_even, b_odd), (BLOCK,))


@triton.jit
def load_f32(p_x, o_x, m_x):
    """A block in float32, 0 outside the row."""
    return tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)


@triton.jit
def load_guided(p_velocity, p_uncond, o_x, m_x, guidance_scale, GUIDED: tl.constexpr):
    """v = v_uncond + g (v_cond - v_uncond), or v_cond alone."""
    b_v = load_f32(p_velocity, o_x, m_x)
    if GUIDED:
        b_u = load_f32(p_uncond, o_x, m_x)
        b_v = b_u + guidance_scale * (b_v - b_u)
    return b_v


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """A float32 block in the storage dtype, to the nearest even number."""
    if CUTS_BFLOAT16 and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = tl.where(b_x == b_x, b_bits + 0x7FFF + ((b_bits >> 16) & 1), b_bits)
        b_stored = (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        b_stored = b_x.to(dtype)
    return b_stored


@triton.jit
def place(pid, elements, chunks, BLOCK: tl.constexpr):
    """(row, element offsets in the row, mask, first element's offset in the table) of a program, in int64."""
    row = (pid // chunks).to(tl.int64)
    o_row = (pid % chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, o_row, o_row < elements, row * elements


@triton.jit
def row_sum(p_partial, row, chunks, BLOCK: tl.constexpr):
    """Sum of the row's `chunks` partial sums, always in the same order."""
    b_sum = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, chunks, BLOCK):
        o_chunk = start + tl.arange(0, BLOCK)
        b_sum += tl.load(p_partial + row.to(tl.int64) * chunks + o_chunk, mask=o_chunk < chunks, other=0.0)
    return block_sum(b_sum)


@triton.jit
def row_log_prob(p_partial, p_rows, rows, row, chunks, BLOCK: tl.constexpr):
    """log p = -scale S - constant, S = sum (x' - mean)^2; 0 for a row with c = 0."""
    scale, constant = tl.load(p_rows + 3 * rows + row), tl.load(p_rows + 4 * rows + row)
    noisy = tl.load(p_rows + 2 * rows + row) > 0.0
    score = -row_sum(p_partial, row, chunks, BLOCK) * scale - constant
    return tl.where(noisy, score, 0.0)


@triton.jit(do_not_specialize=["rows"])
def log_prob_kernel(p_partial, p_rows, p_log_prob, rows, chunks, BLOCK: tl.constexpr):
    """log_prob [N] of partial sums [N, chunks]; see `row_log_prob`."""
    row = tl.program_id(0)
    tl.store(p_log_prob + row, row_log_prob(p_partial, p_rows, rows, row, chunks, BLOCK))


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Launches inside go to the tensor's GPU, whichever is the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class Layout(NamedTuple):
    """How a `[N, E]` table is cut into programs."""

    rows: int
    elements: int
    block: int
    chunks: int

    @property
    def grid(self) -> tuple[int]:
        """One program a block."""
        return (self.rows * self.chunks,)

    @property
    def chunk_block(self) -> int:
        """Partial sums that a finishing program loads at a time."""
        return min(MAX_BLOCK, triton.next_power_of_2(self.chunks))


def layout(table: torch.Tensor) -> Layout:
    """The cut of `table [N, E]`."""
    rows, elements = table.shape
    block = min(MAX_BLOCK, max(16, triton.next_power_of_2(elements)))
    return Layout(rows, elements, block, triton.cdiv(elements, block))


def row_table(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    device: torch.device,
    *,
    elements: int,
    unscaled: bool,
    reduce_sum: bool,
    inv_two_var_kl: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float32 `[6, N]` on `device`: a, b, c, the scale and the constant of log p, the scale of the KL.

    The coefficients come as float64 on the host and are rounded once, after everything is derived from them; one small
    copy takes all of them to the device without waiting for it.
    """
    safe = torch.where(c > 0, c, 1.0)
    average = 1.0 if reduce_sum else 1.0 / elements
    if unscaled:
        scale, constant = torch.full_like(c, average), torch.zeros_like(c)
    else:
        scale, constant = average * 0.5 / safe.square(), (safe.log() + _LOG_SQRT_2PI) * (average * elements)
    kl = torch.zeros_like(c) if inv_two_var_kl is None else inv_two_var_kl / elements
    return torch.stack((a, b, c, scale, constant, kl)).to(torch.float32).to(device, non_blocking=True)


def finish_log_prob(partial: torch.Tensor, rows: torch.Tensor, cut: Layout) -> torch.Tensor:
    """Log-probs `[N]` of the partial sums `[N, chunks]`."""
    log_prob = torch.empty(cut.rows, dtype=torch.float32, device=partial.device)
    log_prob_kernel[(cut.rows,)](partial, rows, log_prob, cut.rows, cut.chunks, BLOCK=cut.chunk_block, **LAUNCH_OPTIONS)
    return log_prob


def words(value: int) -> tuple[int, int]:
    """The two 32-bit words of a number in [0, 2^64), low word first, as the signed ints that a kernel takes.

    A kernel compiled for one signature then serves every seed.
    """
    low, high = value & 0xFFFFFFFF, value >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)
