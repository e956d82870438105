"""What a reward is, and the weighted set of them that a run scores images with."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from tpgrpo_fast.rewards.registry import BUILTIN, name_problem, split_import_path

Values: TypeAlias = "torch.Tensor | np.ndarray | Sequence[float]"
"""[N] real numbers, one per image."""


class RewardError(ValueError):
    """A reward that cannot be built, or that returned something else than one finite number per image."""


class Reward(Protocol):
    """A function of images and prompts; options of its recipe entry are fixed before it is called."""

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> Values | Mapping[str, Values]:
        """Score images.

        Args:
            images: [N, 3, H, W] float32 in [0, 1], on the device they were decoded on.
            prompts: N texts.

        Returns:
            [N] numbers, larger is better; or a mapping with them under "reward" and further [N] parts that are logged
            alone.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Rewards of N images, float32 on the CPU.

    Example:
        Scores(total=tensor([0.9, 0.1]), parts={"shapes": tensor([0.9, 0.1]), "shapes/count": tensor([1.0, 0.5])})
    """

    total: torch.Tensor
    """[N] weighted sum of the rewards."""
    parts: dict[str, torch.Tensor]
    """[N] each: every reward by its name, without weight, and its parts as `name/part`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSet:
    """Rewards with weights."""

    rewards: Mapping[str, Reward]
    """Name -> function."""
    weights: Mapping[str, float]
    """Name -> weight in the total; a reward of weight 0 is only logged."""

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> RewardSet:
        """Import and build the rewards of a recipe's `reward` section: name -> weight or {weight, ...options}.

        A name is builtin or the import path `package.module:attribute` of a function, or of a class that is
        constructed with the options. Modules beside the current folder can be imported.

        Raises:
            RewardError: a name, an import, an option or the section itself is wrong.
        """
        if not section:
            raise RewardError("the reward section is empty\n    -> add one, such as --reward.shapes 1.0")
        rewards, weights = {}, {}
        for name, entry in section.items():
            options = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
            weights[name] = float(options.pop("weight", 1.0))
            rewards[name] = _build(name, options)
        return cls(rewards=rewards, weights=weights)

    def score(self, images: torch.Tensor, prompts: Sequence[str], *, allow_nonfinite: bool = False) -> Scores:
        """Score images by every reward.

        Args:
            images: [N, 3, H, W] float in [0, 1], any device.
            prompts: N texts.
            allow_nonfinite: let NaN and infinite rewards through, for credit that drops those rows.

        Raises:
            RewardError: a reward returns another number of values than images, values that are no real numbers, or
                (unless allowed) a non-finite one.
            ValueError: the images are not [N, 3, H, W] floats with one prompt each.
        """
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(f"images: expected [N, 3, H, W] floats, got {list(images.shape)} {images.dtype}")
        if len(prompts) != len(images):
            raise ValueError(f"prompts: expected one for each of {len(images)} images, got {len(prompts)}")
        images = images.detach().float()
        total = torch.zeros(len(images), dtype=torch.float64)
        parts: dict[str, torch.Tensor] = {}
        for name, reward in self.rewards.items():
            try:
                with torch.no_grad():
                    output = reward(images, prompts)
            except Exception as error:
                error.add_note(f"while computing reward {name}")
                raise
            if isinstance(output, Mapping):
                if "reward" not in output:
                    found = ", ".join(map(str, output)) or "none"
                    raise RewardError(
                        f'reward {name}: the mapping it returned has no key "reward" (keys: {found})'
                        '\n    -> put the values to be maximised under "reward"'
                    )
                values = _as_values(name, output["reward"], len(images))
                extra = {f"{name}/{key}": value for key, value in output.items() if key != "reward"}
            else:
                values, extra = _as_values(name, output, len(images)), {}
            if self.weights[name] != 0:
                if not allow_nonfinite:
                    _refuse_nonfinite(name, values, prompts)
                total += self.weights[name] * values
            parts[name] = values.float()
            parts |= {key: _as_values(key, value, len(images)).float() for key, value in extra.items()}
        return Scores(total=total.float(), parts=parts)

    def check(
        self, prompts: Sequence[str], *, height: int = 64, width: int = 64, allow_nonfinite: bool = False
    ) -> Scores:
        """Score two grey images, so that a reward that cannot work fails before any long work.

        Args:
            prompts: prompts of the run; the first two are used.
            height: image height in pixels.
            width: image width in pixels.
            allow_nonfinite: as in :meth:`score`.

        Raises:
            RewardError: as in :meth:`score`.
        """
        pair = [prompts[0], prompts[-1 if len(prompts) < 2 else 1]]
        return self.score(torch.full((2, 3, height, width), 0.5), pair, allow_nonfinite=allow_nonfinite)


def _as_values(name: str, output: Any, count: int) -> torch.Tensor:
    """Return float64 [count] on the CPU."""
    if isinstance(output, torch.Tensor):
        array = output.detach().cpu()
        real = not array.is_complex()
    else:
        try:
            array = torch.as_tensor(np.asarray(output))
            real = not array.is_complex()
        except (TypeError, ValueError, RuntimeError):  # ragged lists, strings, objects
            real = False
    if not real:
        raise RewardError(
            f"reward {name}: returned {type(output).__name__}, not real numbers"
            f"\n    -> return a tensor, an array or a list of {count} floats"
        )
    if tuple(array.shape) != (count,):
        raise RewardError(
            f"reward {name}: returned values of shape {list(array.shape)} for {count} images"
            f"\n    -> return one value per image, shape [{count}]"
        )
    return array.double()


def _refuse_nonfinite(name: str, values: torch.Tensor, prompts: Sequence[str]) -> None:
    bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
    if bad:
        first = bad[0]
        raise RewardError(
            f"reward {name}: {values[first].item()} for image {first} ({len(bad)} of {len(values)} are not finite), "
            f"prompt {prompts[first]!r}\n    -> correct the reward, or set credit.drop_nonfinite true to leave such "
            "samples out of the update"
        )


def _build(name: str, options: Mapping[str, Any]) -> Reward:
    target = _resolve(name)
    if not callable(target):
        raise RewardError(
            f"reward {name}: is a {type(target).__name__}, not a function\n    -> name a function or class"
        )
    try:
        reward: Any = target(**options) if inspect.isclass(target) else _bind(target, options)
    except (TypeError, ValueError) as error:
        given = ", ".join(options) or "none"
        raise RewardError(
            f"reward {name}: {error} (options given: {given})\n    -> correct the options under reward.{name}"
        ) from error
    if not callable(reward):
        raise RewardError(f"reward {name}: its instances cannot be called\n    -> give the class a __call__ method")
    return reward


def _bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Reward:
    """Fix the options of a function; raises TypeError where it does not take them."""
    inspect.signature(function).bind(None, None, **options)
    return functools.partial(function, **options)


def _resolve(name: str) -> Any:
    """Import what a reward's name stands for."""
    wrong = name_problem(name)
    if wrong:
        raise RewardError(f"reward {name}: {wrong[0]}\n    -> {wrong[1]}")
    split = split_import_path(BUILTIN.get(name, name))
    assert split is not None  # name_problem has seen to it
    module_name, attribute = split
    # A console script, unlike `python -m`, does not see modules in the current folder.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(
            f"reward {name}: importing {module_name} failed: {error}"
            f"\n    -> install it, or start from the folder that holds it (now {os.getcwd()})"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [entry for entry in vars(target) if not entry.startswith("_")][:8]
            raise RewardError(
                f"reward {name}: {module_name} has no attribute {attribute}"
                f"\n    -> it has {', '.join(public) or 'nothing public'}"
            )
        target = getattr(target, part)
    return target
