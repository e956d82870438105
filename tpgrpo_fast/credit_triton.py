"""The fused kernel of `credit` for CUDA and ROCm tensors: all groups in one launch.

Imported by `credit` on first use only. Decisions equal those of the torch reference exactly, advantages to rounding.
Balancing over the whole batch, or in groups of hundreds, needs a sort, which torch does between two launches; a
batch-wide std is torch's too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpgrpo_fast.credit import TORCH, Backend, Blocks, CreditConfig, Segments, one_segment
from tpgrpo_fast.kernels import credit as kernel


def _fused(table: Tensor, segments: Segments, config: CreditConfig) -> Blocks | None:
    count, steps = table.shape[0], table.shape[1] - 1
    if config.method == "outcome" or table.dtype != torch.float32 or count == 0:
        return None
    largest = int(segments.bounds.diff().max())
    if not kernel.fits(largest, steps, balance=False):
        return None
    by_global = "global" in (config.balance_by, config.aggregated)

    def assign(*, balance: bool, turning: Tensor | None, normalize: bool) -> kernel.Assigned:
        return kernel.assign(
            table.contiguous(),
            segments.order,
            segments.bounds,
            largest,
            trend=config.trend,
            consistent=config.consistent,
            first_step=config.first_step,
            positive_only=config.positive_only,
            global_bonus=config.aggregated == "global",
            by_global=by_global,
            add=config.turning == "add",
            balance=balance,
            turning=turning,
            normalize=normalize,
            eta=config.eta,
            sign_eps=config.sign_eps,
            std_eps=config.std_eps,
        )

    turning, balance = None, config.balance if config.method == "turning_point" else None
    if config.method == "incremental":
        turning = torch.zeros((count, steps), dtype=torch.bool, device=table.device)
    elif balance == "batch" or (balance == "group" and not kernel.fits(largest, steps, balance=True)):
        found = assign(balance=False, turning=None, normalize=False)
        by = found.aggregated[:, :1].expand_as(found.aggregated) if by_global else found.aggregated
        scope = segments if balance == "group" else one_segment(table)
        turning, balance = TORCH.balance(found.turning, by, scope, config.sign_eps), None
    result = assign(balance=balance is not None, turning=turning, normalize=config.normalize == "group")
    advantages = result.advantages if config.normalize == "group" else None
    return Blocks(result.incremental, result.aggregated, result.turning, result.values, advantages)


TRITON = Backend(TORCH.turning_points, TORCH.balance, TORCH.moments, _fused)
