"""Which (row, step) pairs enter which micro batch of which optimizer update, on every process.

Everything is computed from the advantages of all rows, which every process has, so all processes agree without talking:
they run equally many micro batches, and the loss is a mean over an update's pairs of all processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tpgrpo_fast.noise import Stream, permutation


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Pairs of one forward and backward pass on this process."""

    rows: torch.Tensor
    """int64 `[m]`: places among this process's own rows."""
    steps: torch.Tensor
    """int64 `[m]`: 0 … n-1 within the window."""
    padding: bool = False
    """Whether it only keeps step with other processes; its loss then has weight 0."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update."""

    micro_batches: tuple[MicroBatch, ...]
    """This process's share; empty when no process has a pair to train on."""
    pairs: int
    """Pairs of all processes, skipped ones included: what the loss is averaged over."""
    trained: int
    """Pairs of all processes that are trained on."""


def plan(
    advantages: torch.Tensor,
    *,
    rank: int = 0,
    world_size: int = 1,
    updates: int,
    epochs: int,
    micro_batch: int,
    seed: int,
    iteration: int,
    skip_zero: bool,
) -> Iterator[Update]:
    """The updates of one iteration, in order.

    Args:
        advantages: `[N, n]` of all rows, in global order; each process owns an equal, contiguous share of rows.
        rank, world_size: this process.
        updates: optimizer updates an epoch is split into, by rows.
        epochs: passes over all rows, each in an order of its own.
        micro_batch: pairs of one micro batch at most.
        seed, iteration: counter of the row order.
        skip_zero: leave out pairs whose advantage is exactly 0.
    """
    count, steps = advantages.shape
    share = count // world_size
    wanted = (advantages != 0) if skip_zero else torch.ones_like(advantages, dtype=torch.bool)
    for epoch in range(epochs):
        order = torch.tensor(permutation(count, seed=seed, stream=Stream.REPLAY, iteration=iteration, row=epoch))
        for rows in order.tensor_split(updates):
            member = torch.zeros(count, dtype=torch.bool)
            member[rows] = True
            live = (wanted & member.unsqueeze(1)).reshape(world_size, share * steps)
            passes = -(-int(live.sum(dim=1).max()) // micro_batch)
            mine = live[rank].nonzero().squeeze(1)
            chunks: Sequence[torch.Tensor] = mine.split(micro_batch) if len(mine) else ()
            batches = [MicroBatch(chunk // steps, chunk % steps) for chunk in chunks]
            idle = MicroBatch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), padding=True)
            batches += [idle] * (passes - len(batches))
            yield Update(tuple(batches), pairs=len(rows) * steps, trained=int(live.sum()))
