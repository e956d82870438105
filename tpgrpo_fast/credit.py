"""Credit assignment: from the rewards of completed states to one advantage per step.

Row `i` of `rewards` holds `R_0 … R_n`: the rewards of the clean images that the ODE completion makes of the states
`Z_0 … Z_n` of one rollout, so `R_0` is the pure-ODE baseline and `R_n` the rollout itself. TurningPoint-GRPO
(arXiv 2602.06422) rewards a step by its increment `d_k = R_k - R_{k-1}`, and a turning point, a step that turns the
trajectory towards its overall trend, by all that follows from it, `a_k = R_n - R_{k-1}`.

    credit = assign_credit(rewards, groups, CreditConfig(balance="group"))
    loss = grpo_loss(..., advantage=credit.advantages[:, k])

The module is one pure function of its arguments; it stands alone and needs torch and numpy only.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

__all__ = ["Credit", "CreditConfig", "assign_credit"]

logger = logging.getLogger(__name__)

Method = Literal["turning_point", "incremental", "outcome"]
Trend = Literal["global", "remaining", "any"]
Turning = Literal["replace", "add"]
Aggregated = Literal["from_state", "global"]
Balance = Literal["group", "batch"]
BalanceBy = Literal["aggregated", "global"]
Normalize = Literal["group", "batch_std", "none"]

ArrayT = TypeVar("ArrayT", Tensor, np.ndarray)

# From this many rewards on, the compiled kernels repay their start (an import and a cached load, about a second).
NUMBA_MIN_REWARDS = 1 << 20


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ValueError(f"credit.{name}={value!r}: must be {allowed}")


def _is_finite(value: Any) -> bool:
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    return number and math.isfinite(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditConfig:
    """How rewards become advantages. The defaults are TP-GRPO with the consistency constraint, unbalanced.

    Raises:
        ValueError: a field has a value outside what it allows; the message names the field, the value and the choice.
    """

    method: Method = "turning_point"
    """`turning_point`: increments, with the aggregated reward at turning points; `incremental`: increments alone;
    `outcome`: `R_n` for every step, as in Flow-GRPO; only the last column of the rewards is read."""
    consistent: bool = True
    """Turning points must agree with what follows them (Def. 5.1 and the constrained Remark 5.2), else Def. 4.1."""
    first_step: bool = True
    """Step 1 may take the aggregated reward too (Remark 5.2)."""
    trend: Trend = "global"
    """What a step's sign is compared with: `global` the sign of `R_n - R_0`, `remaining` that of `R_n - R_{k-1}`;
    with `any` every change of sign `d_{k-1} d_k < 0` is a flip (the first step is then held to the global trend)."""
    positive_only: bool = False
    """Turning points at `k >= 2` count only where `R_n > R_0`; the first step is left alone."""
    turning: Turning = "replace"
    """The aggregated reward comes in place of the increment (`replace`) or on top of it (`add`)."""
    aggregated: Aggregated = "from_state"
    """The aggregated reward of step k is `R_n - R_{k-1}` (`from_state`) or `R_n - R_0` (`global`)."""
    balance: Balance | None = None
    """Scope of App. D, a prompt group or the whole batch: equally many turning points of either sign are kept in it."""
    balance_by: BalanceBy = "aggregated"
    """The value whose sign and magnitude balancing goes by: the aggregated reward that is applied, or `R_n - R_0`."""
    eta: float = 1.0
    """Factor on the aggregated reward."""
    sign_eps: float = 0.0
    """`|x| <= sign_eps` counts as zero in every sign; in units of the reward."""
    normalize: Normalize = "group"
    """`group`: mean and population std of the prompt group, per step; `batch_std`: mean of the group, std of the whole
    batch, per step; `none`: the step rewards as they are."""
    std_eps: float = 1e-4
    """Added to the std; in units of the reward."""
    step_weights: Sequence[float] | None = None
    """One factor per step on the advantages (TempFlow-GRPO style); None: all 1."""
    drop_nonfinite: bool = False
    """Rows with a NaN or infinite reward get advantage 0 and leave every statistic, in place of an error."""

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "method": get_args(Method),
            "trend": get_args(Trend),
            "turning": get_args(Turning),
            "aggregated": get_args(Aggregated),
            "balance": (None, *get_args(Balance)),
            "balance_by": get_args(BalanceBy),
            "normalize": get_args(Normalize),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                _refuse(name, getattr(self, name), "one of " + ", ".join(map(repr, allowed)))
        for name in ("consistent", "first_step", "positive_only", "drop_nonfinite"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        if not _is_finite(self.eta):
            _refuse("eta", self.eta, "a finite number")
        for name in ("sign_eps", "std_eps"):
            value = getattr(self, name)
            if not _is_finite(value) or value < 0:
                _refuse(name, value, "a finite number >= 0")
        if self.step_weights is not None:
            weights = self.step_weights
            if isinstance(weights, str) or not hasattr(weights, "__iter__") or not all(map(_is_finite, weights)):
                _refuse("step_weights", weights, "None or one finite number per step")
            # A tuple keeps the frozen record immutable and hashable whatever sequence came in.
            object.__setattr__(self, "step_weights", tuple(float(weight) for weight in weights))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Credit(Generic[ArrayT]):
    """Credit of N rollouts of n steps, of the same kind (torch or numpy) and device as the rewards.

    Three rollouts of one prompt, `rewards = [[0, 2, 1, 3], [1, 1, 1, 1], [0, -1, 0, 1]]`, with `CreditConfig()`:

        Credit(
            step_rewards=[[3, -1, 2], [0, 0, 0], [-1, 2, 1]],      # 3 = a_1 and 2 = a_2 at the turning points
            turning_points=[[True, False, False], [False, False, False], [False, True, False]],
            incremental=[[2, -1, 2], [0, 0, 0], [-1, 1, 1]],
            aggregated=[[3, 1, 2], [0, 0, 0], [1, 2, 1]],
            advantages=[[1.3727, -1.069, 1.2246], [-0.3922, -0.2672, -1.2246], [-0.9805, 1.3362, 0.0]],
            dropped=0,
            dropped_rows=[],
        )

    Rows that were dropped hold zeros everywhere. With method `outcome` no state but the last is read, and
    `incremental` and `aggregated` are zeros.
    """

    step_rewards: ArrayT
    """[N, n] float: the reward credited to each step."""
    turning_points: ArrayT
    """[N, n] bool: the steps that take the aggregated reward, after balancing; all False for the other methods."""
    incremental: ArrayT
    """[N, n] float: `d_k = R_k - R_{k-1}`."""
    aggregated: ArrayT
    """[N, n] float: `a_k = R_n - R_{k-1}` at every step, whatever `CreditConfig.aggregated` says."""
    advantages: ArrayT
    """[N, n] float: the normalised step rewards, times `step_weights`."""
    dropped: int
    """How many rows were left out for a non-finite reward."""
    dropped_rows: ArrayT
    """[dropped] int64: the rows left out, ascending."""


class Segments(NamedTuple):
    """A partition of rows 0 … N-1 into S sets: the prompt groups, or the whole batch as one."""

    ids: Tensor
    """[N] int64: the set of each row, 0 … S-1."""
    order: Tensor
    """[N] int64: the rows, set after set, ascending within each."""
    bounds: Tensor
    """[S + 1] int64: set s is `order[bounds[s]:bounds[s + 1]]`."""


class Blocks(NamedTuple):
    """Credit of the kept rows, block by block, each `[N, m]`."""

    incremental: Tensor
    aggregated: Tensor
    turning: Tensor
    values: Tensor
    advantages: Tensor | None
    """Normalised in the dtype of the statistics; None where that is still to be done."""


class Backend(NamedTuple):
    """The operations that a backend implements; everything else is shared by all of them."""

    turning_points: Callable[[Tensor, Tensor, CreditConfig], Tensor]
    """(d_k [N, m], a_k [N, m], config) -> bool [N, m]: Def. 4.1 or 5.1 and Remark 5.2, before balancing."""
    balance: Callable[[Tensor, Tensor, Segments, float], Tensor]
    """(candidates bool [N, m], value [N, m], scope, sign_eps) -> bool [N, m]: App. D."""
    moments: Callable[[Tensor, Segments], tuple[Tensor, Tensor]]
    """values [N, m] -> their deviation from the segment's mean and the segment's population variance, each [N, m]."""
    fused: Callable[[Tensor, Segments, CreditConfig], Blocks | None] | None = None
    """All of it at once for (rewards [N, m + 1], groups, config), or None where that is not the backend's to do."""


@torch.no_grad()
def assign_credit(
    rewards: ArrayT,
    groups: Tensor | np.ndarray | Sequence[int],
    config: CreditConfig = CreditConfig(),
    *,
    backend: str = "auto",
    num_steps: int | None = None,
    states: Sequence[int] | None = None,
) -> Credit[ArrayT]:
    """Credit each step of each rollout (TurningPoint-GRPO, arXiv 2602.06422: Def. 4.1, 5.1, Remark 5.2, App. D).

    float64 rewards are computed in float64, all others in float32; the statistics of the advantages are always summed
    in float64, in a fixed order per group, so a group's result does not depend on what else is in the batch (with
    `balance="batch"` and `normalize="batch_std"` it does by definition). Torch and numba give the same bits on CPU.

    Args:
        rewards: `[N, n + 1]`, the rewards `R_0 … R_n` of N rollouts. Method `outcome` reads the last column only and
            takes `[N, 1]` too, with `num_steps`.
        groups: `[N]` ints, equal for the rollouts of one prompt; any values, rows of a group in any place. A group of
            one gets advantage 0 unless `config.normalize` is `none`.
        config: how to assign credit.
        backend: `torch` (any device), `numba` (compiled, CPU), `triton` (one fused launch on CUDA or ROCm), or `auto`:
            triton for tensors on such a device, numba for CPU tensors of at least a million rewards, each where it is
            installed, torch otherwise. Training batches are far smaller, and there the milliseconds that numba saves
            do not repay its start.
        num_steps: n; needed where it does not follow from `rewards`, checked where it does.
        states: the completed states when only some are, for example `(0, 2, 4, n)`: ascending from 0 to n, one per
            column. Turning points are then those of the sequence of blocks, and each step of a block takes the block's
            values undivided.

    Raises:
        ValueError: shapes that do not fit, a non-finite reward (the message names the first bad row and column in
            row-major order), or an unknown backend.
        TypeError: rewards that are neither tensor nor array, or groups that are not integers.
        RuntimeError: numba or triton asked for by name and not installed, or triton on a CPU without its interpreter.
    """
    table = _reward_table(rewards)
    group_ids = _group_ids(groups, table)
    block_sizes = _block_sizes(table, config, num_steps, states)
    weights = _step_weights(config, sum(block_sizes), table.device)
    ops = _backend(backend, table)

    kept, dropped = _finite_rows(table, config)
    table, group_ids = table[kept], group_ids[kept]
    segments = _segments(group_ids)

    blocks = ops.fused(table, segments, config) if ops.fused is not None else None
    incremental, aggregated, turning, values, advantages = blocks or _blocks(table, segments, config, ops)
    if advantages is None:
        advantages = _advantages(values, segments, config, ops)

    # Blocks become steps here, and the dropped rows come back as zeros.
    block_of_step = torch.repeat_interleave(torch.tensor(block_sizes, device=table.device))

    def steps(blocks: Tensor) -> Tensor:
        full = blocks.new_zeros(len(kept) + len(dropped), len(block_of_step))
        full[kept] = blocks[:, block_of_step]
        return full

    def out(tensor: Tensor) -> ArrayT:
        return tensor if isinstance(rewards, Tensor) else tensor.numpy()

    return Credit(
        step_rewards=out(steps(values)),
        turning_points=out(steps(turning)),
        incremental=out(steps(incremental)),
        aggregated=out(steps(aggregated)),
        advantages=out((steps(advantages) * weights).to(table.dtype)),
        dropped=len(dropped),
        dropped_rows=out(dropped),
    )


def _blocks(table: Tensor, segments: Segments, config: CreditConfig, ops: Backend) -> Blocks:
    """Increments, turning points and values by a backend's separate operations."""
    if config.method == "outcome":
        values = table[:, -1:]
        incremental = aggregated = torch.zeros_like(values)
        turning = torch.zeros_like(values, dtype=torch.bool)
    else:
        incremental = table[:, 1:] - table[:, :-1]
        aggregated = table[:, -1:] - table[:, :-1]
        values, turning = incremental, torch.zeros_like(incremental, dtype=torch.bool)
        if config.method == "turning_point":
            trend = aggregated[:, :1].expand_as(aggregated)  # R_n - R_0
            bonus = aggregated if config.aggregated == "from_state" else trend
            turning = ops.turning_points(incremental, aggregated, config)
            if config.balance is not None:
                scope = segments if config.balance == "group" else one_segment(table)
                by = bonus if config.balance_by == "aggregated" else trend
                turning = ops.balance(turning, by, scope, config.sign_eps)
            bonus = config.eta * bonus
            replaced = bonus if config.turning == "replace" else incremental + bonus
            values = torch.where(turning & (bonus != 0), replaced, incremental)
    return Blocks(incremental, aggregated, turning, values, None)


def _advantages(values: Tensor, segments: Segments, config: CreditConfig, ops: Backend) -> Tensor:
    """Normalised values [N, m], in the dtype of the statistics."""
    if config.normalize == "none":
        return values.to(_statistics_dtype(values))
    deviation, variance = ops.moments(values, segments)
    if config.normalize == "batch_std":
        _, variance = ops.moments(values, one_segment(values))
    scale = _sqrt(variance) + config.std_eps
    return torch.where(scale > 0, deviation / scale, torch.zeros_like(deviation))


def _sqrt(x: Tensor) -> Tensor:
    # On CPUs torch may take a vector library's square root, which is not correctly rounded; numpy's is.
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


# ---------------------------------------------------------------------------------------------------- torch reference


def _torch_turning_points(incremental: Tensor, aggregated: Tensor, config: CreditConfig) -> Tensor:
    step, remaining = _sign(incremental, config.sign_eps), _sign(aggregated, config.sign_eps)
    trend = remaining[:, :1]
    following = torch.cat([remaining[:, 1:], torch.zeros_like(trend)], dim=1)  # sign(R_n - R_k)
    agreement = step * (remaining if config.trend == "remaining" else trend)
    consistent = (step != 0) & (step == following)

    if config.trend == "any":
        flips = step[:, :-1] * step[:, 1:] < 0
    else:
        flips = (agreement[:, :-1] < 0) & (agreement[:, 1:] > 0)
    if config.consistent:
        flips = flips & consistent[:, 1:]
    if config.positive_only:
        flips = flips & (trend > 0)

    if not config.first_step:
        first = torch.zeros_like(consistent[:, :1])
    else:
        first = consistent[:, :1] if config.consistent else agreement[:, :1] > 0
    return torch.cat([first, flips], dim=1)


def _torch_balance(candidates: Tensor, value: Tensor, scope: Segments, sign_eps: float) -> Tensor:
    rows, _ = candidates.nonzero(as_tuple=True)  # row-major, which the stable sorts below keep among ties
    value, segment = value[candidates], scope.ids[rows]
    side = _sign(value, sign_eps).long()
    bucket = 3 * segment + side + 1
    counts = torch.bincount(bucket, minlength=3 * (len(scope.bounds) - 1))
    quota = torch.minimum(counts[0::3], counts[2::3])[segment]

    order = torch.argsort(value.abs(), descending=True, stable=True)
    order = order[torch.argsort(bucket[order], stable=True)]
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts[bucket[order]]

    kept = candidates.clone()
    kept[candidates] = (quota == 0) | ((side != 0) & (rank < quota))
    return kept


def _torch_moments(values: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    first, sizes = segments.bounds[:-1], segments.bounds.diff()
    segment_of = torch.repeat_interleave(sizes)
    counts = sizes[:, None]
    members = values[segments.order].to(_statistics_dtype(values))
    # Sums run over differences to the segment's first member: equal values then deviate by exactly 0.
    members = members - members[first][segment_of]
    members = members - (_segment_sums(members, segments.bounds) / counts)[segment_of]
    variance = _segment_sums(members * members, segments.bounds) / counts

    deviation = torch.empty_like(members)
    deviation[segments.order] = members
    return deviation, variance[segments.ids]


def _segment_sums(members: Tensor, bounds: Tensor) -> Tensor:
    """Sums [S, m] over the rows of each segment, by the binary tree over its own rows.

    Neither the device nor the other segments change the order of the additions.
    """
    sizes = bounds.diff()
    end = torch.repeat_interleave(bounds[1:], sizes)
    row = torch.arange(len(members), device=members.device)
    longest, stride = int(sizes.max()) if len(sizes) else 0, 1
    while stride < longest:
        partner = row + stride
        inside = partner < end
        addend = members[partner.clamp(max=len(members) - 1)]
        members = members + torch.where(inside[:, None], addend, torch.zeros_like(addend))
        stride *= 2
    return members[bounds[:-1]]


def _sign(x: Tensor, eps: float) -> Tensor:
    """-1, 0 or 1 as int8, with |x| <= eps as 0."""
    return (x > eps).to(torch.int8) - (x < -eps).to(torch.int8)


def _statistics_dtype(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64


def one_segment(table: Tensor) -> Segments:
    rows = torch.arange(len(table), device=table.device)
    bounds = [0, len(table)] if len(table) else [0]
    return Segments(torch.zeros_like(rows), rows, torch.tensor(bounds, device=table.device))


def _segments(group_ids: Tensor) -> Segments:
    _, ids, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    bounds = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return Segments(ids, torch.argsort(ids, stable=True), bounds)


# ----------------------------------------------------------------------------------------------------------- backends

TORCH = Backend(_torch_turning_points, _torch_balance, _torch_moments)


def _backend(name: str, table: Tensor) -> Backend:
    """The backend of that name for a table of rewards; `auto` is resolved. A new backend is added here."""
    on_cpu = table.device.type == "cpu"
    if name == "auto":
        large = table.numel() >= NUMBA_MIN_REWARDS
        name = "torch"
        if on_cpu and large and find_spec("numba"):
            name = "numba"
        elif table.is_cuda and find_spec("triton"):
            name = "triton"
        _log_once(name)
    if name == "torch":
        return TORCH
    if name == "numba":
        if not on_cpu:
            raise ValueError(f"backend='numba' takes CPU tensors, rewards are on {table.device}: use backend='torch'")
        try:
            from tpgrpo_fast import credit_numba  # deferred: importing numba takes longer than all of credit
        except ModuleNotFoundError as error:
            if error.name != "numba":
                raise
            raise RuntimeError("backend='numba' needs numba: pip install numba, or use backend='torch'") from error
        return credit_numba.NUMBA
    if name == "triton":
        if not table.is_cuda and not (on_cpu and os.environ.get("TRITON_INTERPRET") == "1"):
            raise RuntimeError(
                f"backend='triton' takes CUDA tensors, rewards are on {table.device}: move them, set "
                "TRITON_INTERPRET=1 before Python starts to interpret the kernel on the CPU, or use backend='torch'"
            )
        if not find_spec("triton"):
            raise RuntimeError("backend='triton' needs Triton: pip install 'triton>=3.6', or use backend='torch'")
        from tpgrpo_fast import credit_triton

        return credit_triton.TRITON
    raise ValueError(f"backend={name!r} is not available for credit: use 'auto', 'torch', 'numba' or 'triton'")


_logged: set[str] = set()


def _log_once(name: str) -> None:
    if name not in _logged:
        _logged.add(name)
        logger.info("credit: backend %s", name)


# --------------------------------------------------------------------------------------------------------- validation


def _reward_table(rewards: Tensor | np.ndarray) -> Tensor:
    """Rewards as a contiguous tensor in the working dtype."""
    if isinstance(rewards, Tensor):
        numeric = not rewards.is_complex()
        wide = rewards.dtype == torch.float64
    elif isinstance(rewards, np.ndarray):
        numeric = rewards.dtype.kind in "fiub"
        wide = rewards.dtype == np.float64
    else:
        raise TypeError(f"rewards must be a torch tensor or a numpy array, got {type(rewards).__name__}")
    if not numeric:
        raise TypeError(f"rewards must be real numbers, got dtype {rewards.dtype}")
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(
            f"rewards must be [N, n + 1], one column per completed state; got shape {tuple(rewards.shape)}"
        )
    if isinstance(rewards, Tensor):
        return rewards.detach().to(torch.float64 if wide else torch.float32).contiguous()
    return torch.from_numpy(np.array(rewards, dtype=np.float64 if wide else np.float32, order="C"))


def _group_ids(groups: Tensor | np.ndarray | Sequence[int], table: Tensor) -> Tensor:
    if isinstance(groups, Tensor):
        integral = not (groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool)
    else:
        groups = np.asarray(groups)
        integral = groups.dtype.kind in "iu" or groups.size == 0
    if not integral:
        raise TypeError(f"groups must be integers, one prompt index per row; got dtype {groups.dtype}")
    if tuple(groups.shape) != (len(table),):
        raise ValueError(
            f"groups must have one entry per row of rewards: shape ({len(table)},), got {tuple(groups.shape)}"
        )
    ids = groups.detach() if isinstance(groups, Tensor) else torch.from_numpy(groups.astype(np.int64))
    return ids.to(device=table.device, dtype=torch.int64)


def _block_sizes(table: Tensor, config: CreditConfig, num_steps: int | None, states: Sequence[int] | None) -> list[int]:
    """The number of steps of each block between completed states; method `outcome` is one block of n steps."""
    columns = table.shape[1]
    outcome = config.method == "outcome"
    if num_steps is not None and (not isinstance(num_steps, (int, np.integer)) or num_steps < 1):
        raise ValueError(f"num_steps={num_steps!r}: must be an integer >= 1")
    if columns == 1 and not outcome:
        raise ValueError(
            f"rewards [N, 1] hold no completed state but the last, and credit.method={config.method!r} needs "
            "[N, n + 1]: complete the states, or set credit.method='outcome'"
        )
    if states is not None:
        whole = all(isinstance(state, (int, np.integer)) for state in states)
        ascending = all(low < high for low, high in pairwise(states))
        if len(states) < 2 or states[0] != 0 or not (whole and ascending):
            raise ValueError(
                f"states={tuple(states)}: must be integers ascending from 0 to n, for example (0, 2, 4, 8)"
            )
        if len(states) != columns and not (outcome and columns == 1):
            raise ValueError(f"states={tuple(states)} names {len(states)} states, rewards have {columns} columns")
    elif columns > 1:
        states = range(columns)
    elif num_steps is not None:
        states = (0, num_steps)
    else:
        raise ValueError("rewards [N, 1] do not tell the number of steps: pass num_steps=n")
    if num_steps is not None and num_steps != states[-1]:
        raise ValueError(f"num_steps={num_steps}: the completed states {tuple(states)} make {states[-1]} steps")
    if outcome:
        return [int(states[-1])]
    return [high - low for low, high in pairwise(states)]


def _step_weights(config: CreditConfig, num_steps: int, device: torch.device) -> Tensor:
    if config.step_weights is None:
        return torch.ones(1, device=device)
    if len(config.step_weights) != num_steps:
        raise ValueError(
            f"credit.step_weights has {len(config.step_weights)} entries, the rewards make {num_steps} steps: "
            "give one weight per step"
        )
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.tensor(config.step_weights, dtype=dtype, device=device)


def _finite_rows(table: Tensor, config: CreditConfig) -> tuple[Tensor, Tensor]:
    """Rows to keep and rows to drop, by the columns that the method reads."""
    first_column = table.shape[1] - 1 if config.method == "outcome" else 0
    bad = ~torch.isfinite(table[:, first_column:])
    bad_rows = bad.any(dim=1)
    dropped = bad_rows.nonzero().squeeze(1)
    if len(dropped) and not config.drop_nonfinite:
        row, column = (int(index) for index in bad.nonzero()[0])
        column += first_column
        raise ValueError(
            f"rewards[{row}, {column}] is {table[row, column].item()} (row {row}, column {column}): repair the reward, "
            "or set credit.drop_nonfinite=True to give such rows advantage 0"
        )
    return (~bad_rows).nonzero().squeeze(1), dropped
