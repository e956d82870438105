"""Processes and devices of a run, and the one collective outside the update: the gather of rewards."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among its peers."""

    rank: int
    """0 … world_size - 1."""
    world_size: int
    """Number of processes."""
    local_rank: int
    """Place on this machine."""
    device: torch.device
    """Where the model lives."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def rows(self, total: int) -> range:
        """The global rows this process draws: equal, contiguous shares.

        Raises:
            ValueError: `total` does not divide by the number of processes.
        """
        if total % self.world_size:
            raise ValueError(
                f"{total} samples an iteration (data.prompts_per_iteration x data.group_size) do not divide by "
                f"{self.world_size} processes: change data.prompts_per_iteration or the number of processes"
            )
        share = total // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        """All processes' rows `[world_size * n, ...]` of `local [n, ...]`, on the CPU, in global row order."""
        if self.world_size == 1:
            return local.cpu()
        local = local.to(self.device).contiguous()
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local)
        return torch.cat(parts).cpu()

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world_size > 1:
            dist.barrier()


def import_deepspeed() -> Any:
    """DeepSpeed, with the accelerator chosen for this machine and its chatter turned down to warnings."""
    if not torch.cuda.is_available():
        # Without this DeepSpeed probes for other accelerators; with it, it takes the CPU at once.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # These loggers report every optional component that is absent; a run's own output should stand out.
    for name in ("DeepSpeed", "deepspeed", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.utils").logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # Gloo serves one CPU process or a few; the shared-memory extension would be compiled at the first start, for
        # about a minute, and a build killed midway would block the next start.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start(local_rank: int | None = None) -> World:
    """Join the process group that the launcher described, or form one of a single process.

    Args:
        local_rank: `--local_rank` as launchers append it; the environment's LOCAL_RANK by default.
    """
    if local_rank is None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    deepspeed = import_deepspeed()
    if not dist.is_initialized():
        backend = "nccl" if cuda else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # DeepSpeed adopts the group; left to itself it would look for MPI where no launcher has set the environment.
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        # At exit, not after a run: DeepSpeed keeps groups that would outlive it in a process that trains again.
        atexit.register(dist.destroy_process_group)
    return World(rank=dist.get_rank(), world_size=dist.get_world_size(), local_rank=local_rank, device=device)
