"""The operations of `credit` as compiled CPU loops, parallel over rows or groups.

Imported by `credit` on first use only. They add in the same order and in the same precision as the torch reference,
so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from tpgrpo_fast.credit import Backend, CreditConfig, Segments

GLOBAL, REMAINING, ANY = 0, 1, 2
TRENDS = {"global": GLOBAL, "remaining": REMAINING, "any": ANY}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled in parallel on first call, kept on disk where a folder for it can be written."""
    try:
        return njit(parallel=True, cache=True)(function)
    except RuntimeError:  # no writable cache folder
        return njit(parallel=True)(function)


@njit(inline="always")
def _sign(x: float, eps: float) -> int:
    return int(x > eps) - int(x < -eps)


@njit(inline="always")
def _tree_sum(x: np.ndarray) -> float:
    """Sum of x [G] by the binary tree over neighbours; overwrites x."""
    stride = 1
    while stride < x.size:
        for i in range(0, x.size - stride, 2 * stride):
            x[i] += x[i + stride]
        stride *= 2
    return x[0]


@_compiled
def _turning_points_kernel(
    incremental: np.ndarray,
    aggregated: np.ndarray,
    eps: float,
    trend: int,
    consistent: bool,
    first_step: bool,
    positive_only: bool,
    turning: np.ndarray,
) -> None:
    rows, steps = incremental.shape
    for row in prange(rows):
        overall = _sign(aggregated[row, 0], eps)
        step_before, agreement_before = 0, 0
        for k in range(steps):
            step, remaining = _sign(incremental[row, k], eps), _sign(aggregated[row, k], eps)
            following = _sign(aggregated[row, k + 1], eps) if k + 1 < steps else 0
            agreement = step * (remaining if trend == REMAINING else overall)
            if k == 0:
                turns = first_step and (consistent or agreement > 0)
            else:
                turns = step_before * step < 0 if trend == ANY else agreement_before < 0 and agreement > 0
                turns = turns and (overall > 0 or not positive_only)
            turning[row, k] = turns and (not consistent or (step != 0 and step == following))
            step_before, agreement_before = step, agreement


@_compiled
def _balance_kernel(kept: np.ndarray, value: np.ndarray, order: np.ndarray, bounds: np.ndarray, eps: float) -> None:
    steps = kept.shape[1]
    for segment in prange(bounds.size - 1):
        rows = order[bounds[segment] : bounds[segment + 1]]
        counts = np.zeros(3, np.int64)
        for row in rows:
            for k in range(steps):
                if kept[row, k]:
                    counts[_sign(value[row, k], eps) + 1] += 1
        quota = min(counts[0], counts[2])
        if quota == 0:
            continue
        for side in (-1, 0, 1):
            size = counts[side + 1]
            places = np.empty(size, np.int64)
            magnitudes = np.empty(size, np.float64)
            filled = 0
            for row in rows:
                for k in range(steps):
                    if kept[row, k] and _sign(value[row, k], eps) == side:
                        places[filled] = row * steps + k
                        magnitudes[filled] = -abs(value[row, k])
                        filled += 1
            ranking = np.argsort(magnitudes, kind="mergesort")
            for place in places[ranking[quota if side != 0 else 0 :]]:
                kept[place // steps, place % steps] = False


@_compiled
def _moments_kernel(
    values: np.ndarray, order: np.ndarray, bounds: np.ndarray, deviation: np.ndarray, variance: np.ndarray
) -> None:
    for segment in prange(bounds.size - 1):
        rows = order[bounds[segment] : bounds[segment + 1]]
        members = np.empty(rows.size, np.float64)
        terms = np.empty(rows.size, np.float64)
        for k in range(values.shape[1]):
            first = values[rows[0], k]
            for i in range(rows.size):
                members[i] = values[rows[i], k] - first
                terms[i] = members[i]
            mean = _tree_sum(terms) / rows.size
            for i in range(rows.size):
                members[i] -= mean
                terms[i] = members[i] * members[i]
            spread = _tree_sum(terms) / rows.size
            for i in range(rows.size):
                deviation[rows[i], k] = members[i]
                variance[rows[i], k] = spread


def _turning_points(incremental: Tensor, aggregated: Tensor, config: CreditConfig) -> Tensor:
    turning = torch.empty(incremental.shape, dtype=torch.bool)
    flags = (config.consistent, config.first_step, config.positive_only)
    eps = _rounded(config.sign_eps, incremental)
    _turning_points_kernel(
        _doubles(incremental), _doubles(aggregated), eps, TRENDS[config.trend], *flags, turning.numpy()
    )
    return turning


def _balance(candidates: Tensor, value: Tensor, scope: Segments, sign_eps: float) -> Tensor:
    kept = candidates.clone()
    eps = _rounded(sign_eps, value)
    _balance_kernel(kept.numpy(), _doubles(value), scope.order.numpy(), scope.bounds.numpy(), eps)
    return kept


def _moments(values: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    deviation, variance = np.empty(values.shape), np.empty(values.shape)
    _moments_kernel(_doubles(values), segments.order.numpy(), segments.bounds.numpy(), deviation, variance)
    return torch.from_numpy(deviation), torch.from_numpy(variance)


def _doubles(x: Tensor) -> np.ndarray:
    """`x` in float64, which is exact: the kernels are compiled for that alone."""
    return x.to(torch.float64).contiguous().numpy()


def _rounded(eps: float, x: Tensor) -> float:
    """`eps` as a comparison in the dtype of `x` sees it."""
    return torch.tensor(eps, dtype=x.dtype).item()


NUMBA = Backend(_turning_points, _balance, _moments)
