"""Credit of all prompt groups in one launch: turning points, balancing by rank, step rewards, normalised advantages."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.standard import _sum_combine

from tpgrpo_fast.kernels._common import LAUNCH_OPTIONS, device_of

GLOBAL, REMAINING, ANY = 0, 1, 2
TRENDS = {"global": GLOBAL, "remaining": REMAINING, "any": ANY}

# What one program keeps in registers without spilling: (row, step) entries of a group, and pairs of them in balancing.
MAX_ENTRIES, MAX_PAIRS = 4096, 8192


@triton.jit
def _sign(x, eps):
    """-1, 0 or 1, with |x| <= eps as 0."""
    return (x > eps).to(tl.int32) - (x < -eps).to(tl.int32)


@triton.jit
def _steps(
    p_rewards,
    o_row,
    m_row,
    o_step,
    steps,
    eps,
    TREND: tl.constexpr,
    CONSISTENT: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    POSITIVE_ONLY: tl.constexpr,
    GLOBAL_BONUS: tl.constexpr,
    BY_GLOBAL: tl.constexpr,
):
    """(d_k, a_k, bonus, turning, value that balancing goes by) of the rows `o_row [R]` and all steps, `[R, S]` each."""
    m_x = m_row[:, None] & (o_step < steps)[None, :]
    p_x = p_rewards + (o_row * (steps + 1))[:, None] + o_step[None, :]
    # R_{k-1} and R_k with k = o_step + 1; R_{k-2} for the signs of the step before
    b_r, b_next = tl.load(p_x, mask=m_x, other=0.0), tl.load(p_x + 1, mask=m_x, other=0.0)
    b_before = tl.load(p_x - 1, mask=m_x & (o_step > 0)[None, :], other=0.0)
    # R_0 and R_n, [R, 1]
    p_row = p_rewards + (o_row * (steps + 1))[:, None]
    b_start, b_end = (
        tl.load(p_row, mask=m_row[:, None], other=0.0),
        tl.load(p_row + steps, mask=m_row[:, None], other=0.0),
    )

    b_d, b_a = b_next - b_r, b_end - b_r
    b_trend = tl.broadcast_to(b_end - b_start, b_d.shape)
    overall = _sign(b_trend, eps)
    step, step_before = _sign(b_d, eps), _sign(b_r - b_before, eps)
    agreement, agreement_before = step * overall, step_before * overall
    if TREND == 1:
        agreement, agreement_before = step * _sign(b_a, eps), step_before * _sign(b_end - b_before, eps)
    # Definition 4.1
    m_turning = (agreement_before < 0) & (agreement > 0)
    if TREND == 2:
        m_turning = step_before * step < 0
    if POSITIVE_ONLY:
        m_turning = m_turning & (overall > 0)
    # Remark 5.2
    m_first = (o_step == 0)[None, :]
    if FIRST_STEP:
        if CONSISTENT:
            m_turning = m_turning | m_first
        else:
            m_turning = tl.where(m_first, agreement > 0, m_turning)
    else:
        m_turning = m_turning & (o_step > 0)[None, :]
    # Definition 5.1
    if CONSISTENT:
        m_turning = m_turning & (step != 0) & (step == _sign(b_end - b_next, eps))
    b_bonus = b_trend if GLOBAL_BONUS else b_a
    b_by = b_trend if BY_GLOBAL else b_a
    return b_d, b_a, b_bonus, m_turning & m_x, b_by


@triton.jit
def _column_means(b_x, count):
    """Means over the rows of `b_x [R, S]` as `[1, S]`; rows outside the group hold 0."""
    return tl.reduce(b_x, 0, _sum_combine)[None, :] / count


@triton.jit(do_not_specialize=["steps"])
def credit_fwd_kernel(
    p_rewards,
    p_order,
    p_bounds,
    p_turning_in,
    p_values,
    p_turning,
    p_incremental,
    p_aggregated,
    p_advantages,
    steps,
    eps,
    eta,
    std_eps,
    TREND: tl.constexpr,
    CONSISTENT: tl.constexpr,
    FIRST_STEP: tl.constexpr,
    POSITIVE_ONLY: tl.constexpr,
    GLOBAL_BONUS: tl.constexpr,
    BY_GLOBAL: tl.constexpr,
    ADD: tl.constexpr,
    BALANCE: tl.constexpr,
    TURNING_GIVEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One prompt group a program: d_k = R_k - R_{k-1}, a_k = R_n - R_{k-1}, turning points, values, advantages.

    BALANCE keeps a turning point where its rank by magnitude among those of its sign is below the smaller side's count
    (App. D), ties in row-major order; where one side is empty all stay. The advantage is (value - mean) / (std + eps)
    over the group and per step, in float64, as differences to the group's first row: equal values give exactly 0.

    Bytes per (row, step): 4 read, 13 written and 8 for the float64 advantage; rows are read again, from cache, for the
    ranks.
    """
    group = tl.program_id(0)
    begin, end = tl.load(p_bounds + group), tl.load(p_bounds + group + 1)
    o_member = begin + tl.arange(0, ROWS)
    m_row, o_step = o_member < end, tl.arange(0, STEPS)
    # [ROWS], then [ROWS, STEPS] each
    o_row = tl.load(p_order + o_member, mask=m_row, other=0)
    b_d, b_a, b_bonus, m_turning, b_by = _steps(
        p_rewards, o_row, m_row, o_step, steps, eps,
        TREND, CONSISTENT, FIRST_STEP, POSITIVE_ONLY, GLOBAL_BONUS, BY_GLOBAL,
    )  # fmt: skip
    m_x = m_row[:, None] & (o_step < steps)[None, :]
    o_x = (o_row * steps)[:, None] + o_step[None, :]
    if TURNING_GIVEN:
        m_turning = tl.load(p_turning_in + o_x, mask=m_x, other=0) != 0
    if BALANCE:
        side, size = _sign(b_by, eps), tl.abs(b_by)
        place = tl.arange(0, ROWS)[:, None] * STEPS + o_step[None, :]
        rank, positive, negative = side * 0, side * 0, side * 0
        for member in range(0, (end - begin).to(tl.int32)):
            # One other row against all entries: [ROWS, STEPS, STEPS].
            o_other = tl.load(p_order + begin + member + tl.arange(0, 1))
            _, _, _, m_other, b_other = _steps(
                p_rewards, o_other, o_other >= 0, o_step, steps, eps,
                TREND, CONSISTENT, FIRST_STEP, POSITIVE_ONLY, GLOBAL_BONUS, BY_GLOBAL,
            )  # fmt: skip
            other_side, other_size = _sign(b_other, eps), tl.abs(b_other)
            other_place = (member * STEPS + o_step)[None, :]
            positive += tl.reduce((m_other & (other_side > 0)).to(tl.int32), 1, _sum_combine)[:, None]
            negative += tl.reduce((m_other & (other_side < 0)).to(tl.int32), 1, _sum_combine)[:, None]
            m_same = m_other[:, None, :] & (other_side[:, None, :] == side[:, :, None])
            m_larger = other_size[:, None, :] > size[:, :, None]
            m_tie = (other_size[:, None, :] == size[:, :, None]) & (other_place[:, None, :] < place[:, :, None])
            rank += tl.reduce((m_same & (m_larger | m_tie)).to(tl.int32), 2, _sum_combine)
        quota = tl.where(positive < negative, positive, negative)
        m_turning = m_turning & ((quota == 0) | ((side != 0) & (rank < quota)))

    b_bonus = eta * b_bonus
    b_replaced = b_d + b_bonus if ADD else b_bonus
    b_value = tl.where(m_turning & (b_bonus != 0.0), b_replaced, b_d)
    tl.store(p_incremental + o_x, b_d, mask=m_x)
    tl.store(p_aggregated + o_x, b_a, mask=m_x)
    tl.store(p_turning + o_x, m_turning.to(tl.int8), mask=m_x)
    tl.store(p_values + o_x, b_value, mask=m_x)
    if NORMALIZE:
        count = (end - begin).to(tl.float64)
        b_member = b_value.to(tl.float64)
        m_leader = (tl.arange(0, ROWS) == 0)[:, None] & m_x
        b_member = b_member - tl.reduce(tl.where(m_leader, b_member, 0.0), 0, _sum_combine)[None, :]
        b_member = tl.where(m_x, b_member, 0.0)
        b_member = tl.where(m_x, b_member - _column_means(b_member, count), 0.0)
        scale = tl.sqrt(_column_means(b_member * b_member, count)) + std_eps
        b_advantage = tl.where(scale > 0.0, b_member / tl.where(scale > 0.0, scale, 1.0), 0.0)
        tl.store(p_advantages + o_x, b_advantage, mask=m_x)


class Assigned(NamedTuple):
    """What the kernel gives, each `[N, n]`."""

    values: torch.Tensor
    """float32: step rewards."""
    turning: torch.Tensor
    """bool: turning points, after balancing."""
    incremental: torch.Tensor
    """float32."""
    aggregated: torch.Tensor
    """float32."""
    advantages: torch.Tensor
    """float64: normalised by group; unset without `normalize`."""


def fits(largest_group: int, steps: int, *, balance: bool) -> bool:
    """Whether a program can hold a group of that many rows, and balance it."""
    rows, columns = triton.next_power_of_2(largest_group), triton.next_power_of_2(steps)
    return rows * columns <= MAX_ENTRIES and (not balance or rows * columns * columns <= MAX_PAIRS)


def assign(
    rewards: torch.Tensor,
    order: torch.Tensor,
    bounds: torch.Tensor,
    largest_group: int,
    *,
    trend: str,
    consistent: bool,
    first_step: bool,
    positive_only: bool,
    global_bonus: bool,
    by_global: bool,
    add: bool,
    balance: bool,
    turning: torch.Tensor | None,
    normalize: bool,
    eta: float,
    sign_eps: float,
    std_eps: float,
) -> Assigned:
    """Credit of `rewards [N, n + 1]`, float32 and contiguous, N > 0, for the groups `order[bounds[g]:bounds[g + 1]]`.

    `turning`, bool `[N, n]`, replaces the kernel's own turning points (those balanced over the whole batch, say).
    """
    count, steps = rewards.shape[0], rewards.shape[1] - 1
    rows, columns = triton.next_power_of_2(largest_group), triton.next_power_of_2(steps)
    values, incremental, aggregated = (rewards.new_empty((count, steps)) for _ in range(3))
    found = torch.empty((count, steps), dtype=torch.int8, device=rewards.device)
    advantages = torch.empty((count, steps), dtype=torch.float64, device=rewards.device)
    pairs = rows * columns * columns if balance else rows * columns
    with device_of(rewards):
        credit_fwd_kernel[(len(bounds) - 1,)](
            rewards,
            order,
            bounds,
            found if turning is None else turning.to(torch.int8),
            values,
            found,
            incremental,
            aggregated,
            advantages,
            steps,
            sign_eps,
            eta,
            std_eps,
            TREND=TRENDS[trend],
            CONSISTENT=consistent,
            FIRST_STEP=first_step,
            POSITIVE_ONLY=positive_only,
            GLOBAL_BONUS=global_bonus,
            BY_GLOBAL=by_global,
            ADD=add,
            BALANCE=balance,
            TURNING_GIVEN=turning is not None,
            NORMALIZE=normalize,
            ROWS=rows,
            STEPS=columns,
            **LAUNCH_OPTIONS | {"num_warps": min(16, max(1, pairs // 512))},
        )
    return Assigned(values, found != 0, incremental, aggregated, advantages)
