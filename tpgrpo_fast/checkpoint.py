"""Checkpoints: written beside their place and renamed, so that a folder of the final name is always complete.

checkpoints/iteration-000020/
    adapter/                              evaluated weights, peft
    pytorch_lora_weights.safetensors      the same for diffusers' load_lora_weights
    trainer/                              DeepSpeed's state: trained weights, optimizer, schedule
    ema.pt, state.json, config.yaml
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from tpgrpo_fast import adapters
from tpgrpo_fast.config import Config, ConfigError, Problem, load_config
from tpgrpo_fast.distributed import World
from tpgrpo_fast.files import PARTIAL_SUFFIX, publish_folder, write_text
from tpgrpo_fast.update import Learner

_NAME = re.compile(r"iteration-(\d{6,})")
_TRAINER = "trainer"
CONFIG_FILE = "config.yaml"
"""Name of the resolved configuration in run folders and checkpoints."""
# Keys that do not change what the run computes.
_FREE_KEYS = frozenset({"run.name", "run.dir", "run.save_every", "run.keep_checkpoints", "run.loggers"})


def save(folder: Path, learner: Learner, config: Config, world: World, *, iteration: int) -> Path:
    """Write the checkpoint of a finished iteration and remove old ones; all processes call it.

    Args:
        folder: the run's `checkpoints` folder.
        learner: weights, optimizer, average.
        config: the whole configuration; `run.keep_checkpoints` newest ones are kept.
        world: this process.
        iteration: iterations finished.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"iteration-{iteration:06d}"
    temporary = folder / (final.name + PARTIAL_SUFFIX)
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    learner.engine.save_checkpoint(str(temporary), tag=_TRAINER, save_latest=False, exclude_frozen_parameters=True)
    world.barrier()
    if world.is_main:
        with learner.averaged():
            adapters.save(learner.policy, temporary)
        if learner.ema is not None:
            torch.save(learner.ema.state_dict(), temporary / "ema.pt")
        write_text(temporary / CONFIG_FILE, config.to_yaml())
        state = {
            "iteration": iteration,
            "updates": learner.updates,
            "world_size": world.world_size,
            "config_hash": config.hash(),
        }
        write_text(temporary / "state.json", json.dumps(state, indent=1) + "\n")
        publish_folder(temporary, final)
        _prune(folder, config.run.keep_checkpoints)
    world.barrier()
    return final


def found(folder: Path) -> list[Path]:
    """Complete checkpoints of a `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named) if (path / "state.json").is_file()]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The state record of a checkpoint.

    Raises:
        ValueError: it is not one.
    """
    file = checkpoint / "state.json"
    if not file.is_file():
        raise ValueError(f"--resume {checkpoint}: there is no state.json; give a folder checkpoints/iteration-NNNNNN")
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return state


def check_config(checkpoint: Path, config: Config, allowed: list[str]) -> None:
    """Refuse to resume under another configuration.

    Args:
        checkpoint: where the run goes on.
        config: the present configuration.
        allowed: dotted keys that may differ (`--allow-config-change`).

    Raises:
        ConfigError: naming every changed key, its old and its new value.
    """
    before = load_config(checkpoint / CONFIG_FILE)
    free = _FREE_KEYS.union(allowed)
    if config.train.lr_schedule == "constant":
        # A falling learning rate ends with the last iteration: there another number of them changes every update.
        free |= {"run.iterations"}
    problems = [
        Problem(
            key,
            new,
            f"the run was started with {old!r}",
            f"set it back, or resume with --allow-config-change {key}",
        )
        for key, (new, old) in config.differences(before).items()
        if key not in free
    ]
    if problems:
        raise ConfigError(problems, f"resuming {checkpoint}")


def load(checkpoint: Path, learner: Learner, world: World) -> int:
    """Restore weights, optimizer, schedule and average; returns the number of finished iterations.

    Raises:
        ValueError: the checkpoint belongs to another number of processes, or cannot be read.
    """
    state = read_state(checkpoint)
    if state["world_size"] != world.world_size:
        raise ValueError(
            f"--resume {checkpoint}: written by {state['world_size']} processes, but this run has {world.world_size}: "
            "start as many (or start a new run from its adapter with --model.lora.path)"
        )
    loaded, _ = learner.engine.load_checkpoint(str(checkpoint), tag=_TRAINER, load_module_strict=False)
    if loaded is None:
        raise ValueError(f"--resume {checkpoint}: the trainer's state in {_TRAINER}/ cannot be read")
    if learner.ema is not None:
        learner.ema.load_state_dict(torch.load(checkpoint / "ema.pt", map_location="cpu", weights_only=True))
        learner.ema.to(device=world.device, dtype=torch.float32)
    learner.updates = int(state["updates"])
    return int(state["iteration"])


def _prune(folder: Path, keep: int | None) -> None:
    if keep is not None:
        for old in found(folder)[:-keep]:
            shutil.rmtree(old)
