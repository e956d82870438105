"""Configuration of a run: typed sections, recipes in YAML, command-line overrides, and every check that needs no model.

A configuration is read in three layers: the defaults below (the released SD3.5-M settings of TP-GRPO where they apply),
a recipe, and ``--section.key value`` overrides. All problems found are reported together, each with the key, the value,
the reason and the remedy. Nothing here loads a model or looks at a device.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import operator
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml

from tpgrpo_fast import transitions
from tpgrpo_fast.credit import CreditConfig
from tpgrpo_fast.noise import Stream, uniform_words
from tpgrpo_fast.rewards.registry import name_problem

RECIPE_DIR = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = "shapes"
MAX_PROBLEMS_SHOWN = 12

_UNSET: Any = object()


# ---------------------------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    """One thing wrong with a configuration."""

    key: str
    """Dotted key, such as ``rollout.window_size``; empty where no single key is at fault."""
    value: Any
    """The refused value, or ``_UNSET`` where there is none to show."""
    reason: str
    """Why it is refused."""
    remedy: str
    """What to change, and to what."""

    def __str__(self) -> str:
        shown = "" if self.value is _UNSET else f" = {_show(self.value)}"
        head = f"{self.key}{shown}: " if self.key else ""
        return f"{head}{self.reason}" + (f"\n    -> {self.remedy}" if self.remedy else "")


class ConfigError(ValueError):
    """A configuration that cannot run; ``problems`` lists everything found, and the message fits one screen."""

    def __init__(self, problems: Sequence[Problem], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count > 1 else ''} in {source}:"]
        lines += [f"  {problem}" for problem in self.problems[:MAX_PROBLEMS_SHOWN]]
        if count > MAX_PROBLEMS_SHOWN:
            lines.append(f"  ... and {count - MAX_PROBLEMS_SHOWN} more")
        super().__init__("\n".join(lines))


def _show(value: Any, limit: int = 80) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _closest(word: str, choices: Sequence[str]) -> str | None:
    """Return the choice most like `word`, or None when none is close."""
    matches = difflib.get_close_matches(word.replace("-", "_").lower(), choices, n=1, cutoff=0.6)
    return matches[0] if matches else None


# ------------------------------------------------------------------------------------------------ typed conversion


class _Mismatch(ValueError):
    """A value that is not of the type its key asks for."""


def _describe(hint: Any) -> str:
    """Say in words what values a type hint admits."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join("null" if arg is None else str(arg) for arg in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: " + ", ".join(_describe(arg) for arg in args)
    if origin in (tuple, list, Sequence):
        return f"a list, each entry {_describe(args[0])}"
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint, "a mapping of keys to values")


def _convert(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint` asks for; raises _Mismatch where that would change its meaning."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for arg in args:
            try:
                return _convert(value, arg)
            except _Mismatch:
                continue
    elif origin is Literal:
        for arg in args:
            if type(value) is type(arg) and value == arg:
                return value
    elif origin in (tuple, list, Sequence):
        if isinstance(value, (list, tuple)):
            fixed = origin is tuple and args[-1] is not Ellipsis
            if not fixed or len(value) == len(args):
                return tuple(_convert(item, args[i] if fixed else args[0]) for i, item in enumerate(value))
    elif hint is type(None):
        if value is None:
            return None
    elif hint is bool or hint is str:
        if isinstance(value, hint):
            return value
    elif hint is int:
        if isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return dict(value)
    raise _Mismatch(_describe(hint))


def _convert_field(hint: Any, key: str, value: Any) -> tuple[Any, list[Problem]]:
    try:
        return _convert(value, hint), []
    except _Mismatch as mismatch:
        expected = str(mismatch)
    choices = [str(c) for arg in (hint, *get_args(hint)) if get_origin(arg) is Literal for c in get_args(arg) if c]
    guess = _closest(value, choices) if isinstance(value, str) else None
    kinds = {hint, get_origin(hint), *get_args(hint), *map(get_origin, get_args(hint))}
    if kinds & {tuple, list, Sequence} and not isinstance(value, (list, tuple, Mapping)):
        remedy = f"write it as a list, such as {_example(hint)}"
    elif guess:
        remedy = f"did you mean {guess}?"
    elif str in kinds and not isinstance(value, (list, Mapping)):
        remedy = "put it in quotes"
    else:
        remedy = f"set {key} to a value such as {_example(hint)}"
    return value, [Problem(key, value, f"expected {expected}", remedy)]


def _example(hint: Any) -> str:
    """Return a value that a type hint admits, as YAML."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _example(args[0])
    if origin is Literal:
        return "null" if args[0] is None else str(args[0])
    if origin in (tuple, list, Sequence):
        return "[" + ", ".join(_example(arg) for arg in args if arg is not Ellipsis) + "]"
    return {int: "4", float: "0.5", bool: "true", str: "name", type(None): "null"}[hint]


def _bounded(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Field with a numeric range; the range is checked whenever the value is not None."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    return field(default=default, metadata={name: limit for name, limit in limits.items() if limit is not None})


def _range_problems(key: str, value: Any, limits: Mapping[str, float]) -> Iterator[Problem]:
    if not isinstance(value, (int, float)):
        return
    words = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
    holds = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
    if not all(holds[name](value, limit) for name, limit in limits.items()):
        allowed = " and ".join(f"{words[name]} {limit:g}" for name, limit in limits.items())
        yield Problem(key, value, f"must be {allowed}", f"set {key} to a value {allowed}")


class _Section:
    """Base of the sections: converts and checks every field at construction, and reports all problems at once."""

    __slots__ = ()
    section: ClassVar[str]

    def __post_init__(self) -> None:
        hints = _field_hints(type(self))
        problems: list[Problem] = []
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            key = f"{self.section}.{spec.name}"
            value, found = _convert_field(hints[spec.name], key, getattr(self, spec.name))
            object.__setattr__(self, spec.name, value)
            problems += found or _range_problems(key, value, spec.metadata)
        problems = problems or list(self._problems())
        if problems:
            raise ConfigError(problems)

    def _problem(self, name: str, reason: str, remedy: str) -> Problem:
        return Problem(f"{self.section}.{name}", getattr(self, name), reason, remedy)

    def _problems(self) -> Iterator[Problem]:
        """Yield what is wrong with fields taken together; runs only when each one is right by itself."""
        return iter(())


def _field_hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {spec.name: hints[spec.name] for spec in dataclasses.fields(cls)}


# -------------------------------------------------------------------------------------------------------- sections


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(_Section):
    """The run itself: where it writes, how long it lasts, what it records."""

    section: ClassVar[str] = "run"

    name: str = "tpgrpo"
    """Name of the run folder inside `dir`."""
    dir: str = "runs"
    """Folder that holds run folders."""
    seed: int = _bounded(0, at_least=0, below=2**63)
    """Seed of every random draw: weights of a cold adapter, noise, prompts, windows."""
    iterations: int = _bounded(100, at_least=1)
    """Iterations (rollout, credit, update) in all."""
    save_every: int = _bounded(20, at_least=0)
    """Iterations between checkpoints; 0 saves at the end only."""
    keep_checkpoints: int | None = _bounded(3, at_least=1)
    """Newest checkpoints kept; null keeps all."""
    eval_every: int = _bounded(20, at_least=0)
    """Iterations between evaluations; 0 evaluates before the first update and at the end only."""
    loggers: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl", "tensorboard")
    """Where metrics go; `metrics.jsonl` is written whether or not `jsonl` is listed."""
    deterministic: bool = False
    """Passes of fixed, padded size and deterministic kernels: one machine repeats bit by bit, somewhat slower."""

    @property
    def folder(self) -> Path:
        """The run folder, `dir`/`name`."""
        return Path(self.dir) / self.name

    def _problems(self) -> Iterator[Problem]:
        if self.name in ("", ".", "..") or re.search(r"[/\\\0]", self.name):
            yield self._problem("name", "must be a plain folder name", "put the parent folder into run.dir")
        if not self.dir:
            yield self._problem("dir", "is empty", "name a folder, such as runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(_Section):
    """Low-rank adapter of the transformer."""

    section: ClassVar[str] = "model.lora"

    rank: int = _bounded(32, at_least=1)
    """Rank of the adapter."""
    alpha: float = _bounded(64.0, above=0)
    """Scale numerator: the adapter's output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] | None = None
    """Name endings of the adapted linear layers; null takes the model family's attention projections."""
    path: str | None = None
    """Folder of a saved adapter to start from; null starts cold, as the identity."""

    def _problems(self) -> Iterator[Problem]:
        if self.target_modules is not None and (not self.target_modules or "" in self.target_modules):
            yield self._problem("target_modules", "names no layer", "list layer names, or null for the default ones")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(_Section):
    """The model that is trained."""

    section: ClassVar[str] = "model"

    path: str = "shapes"
    """A diffusers pipeline folder or hub name; `shapes` is the small one inside the package."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    variant: str | None = None
    """Weight file variant, such as fp16."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Compute dtype of transformer and text encoders; the image decoder always runs in float32."""
    max_text_length: int = _bounded(128, at_least=1, at_most=512)
    """Text tokens of the T5 encoder, where the model has one."""
    negative_prompt: str = ""
    """Prompt of the unconditional branch; used only where rollout.guidance_scale > 1."""
    cache_prompt_embeddings: bool = True
    """Encode each distinct prompt once per run."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapter; ignored where `full_finetune` is true."""
    full_finetune: bool = False
    """Train all weights of the transformer in place of an adapter."""
    attention_backend: str | None = None
    """Name of a diffusers attention backend, such as native or xformers; null keeps diffusers' choice."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute in the update."""

    def _problems(self) -> Iterator[Problem]:
        if not self.path:
            yield self._problem("path", "is empty", "give a pipeline folder, a hub name, or shapes")
        if self.full_finetune and self.lora.path is not None:
            yield Problem(
                "model.lora.path",
                self.lora.path,
                "model.full_finetune trains the transformer's own weights; the adapter would be ignored",
                "set model.lora.path null or model.full_finetune false",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(_Section):
    """Prompts, and how many of them an iteration takes."""

    section: ClassVar[str] = "data"

    prompts: str = "shapes"
    """Training prompts: a .txt file (one a line), a .jsonl file (key "prompt") or a builtin name."""
    eval_prompts: str | None = "shapes-heldout"
    """Evaluation prompts, in the same forms; null evaluates on the training prompts."""
    eval_count: int = _bounded(64, at_least=1)
    """Images of an evaluation; prompts are picked evenly, and repeated with other noise where they are fewer."""
    group_size: int = _bounded(24, at_least=1)
    """Samples per prompt: the rows that one advantage is normalised over."""
    prompts_per_iteration: int = _bounded(48, at_least=1)
    """Distinct prompts an iteration samples, over all ranks."""

    def _problems(self) -> Iterator[Problem]:
        if self.group_size == 1:
            yield self._problem(
                "group_size",
                "advantages compare the samples of a prompt, so a group of one always gets 0 and nothing is learned",
                "set data.group_size to at least 2 (8 to 24 is usual)",
            )
        for name in ("prompts", "eval_prompts"):
            if getattr(self, name) == "":
                yield self._problem(name, "is empty", "give a .txt or .jsonl file or a builtin name")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig(_Section):
    """How samples are drawn. Step i goes from sigmas[i] to sigmas[i+1]; the SDE window is the trained steps."""

    section: ClassVar[str] = "rollout"

    steps: int = _bounded(10, at_least=1)
    """Denoising steps T of a training rollout."""
    eval_steps: int = _bounded(40, at_least=1)
    """Denoising (ODE) steps of evaluation images."""
    window_size: int = _bounded(9, at_least=1)
    """Consecutive steps n that inject noise and are trained."""
    window_range: tuple[int, int] = (0, 9)
    """Steps [low, high) inside which the window lies."""
    window: Literal["fixed", "random", "sliding"] = "fixed"
    """Where it starts: at `low`; drawn anew each iteration; one step further each iteration, then at `low` again."""
    sde_type: Literal["sde", "cps", "dance", "ode"] = "cps"
    """Sampler inside the window: Flow-GRPO's SDE, Flow-CPS, DanceGRPO's SDE; `ode` (no noise) cannot be trained on."""
    noise_level: float = _bounded(0.7, at_least=0)
    """Noise of the window's steps: Flow-GRPO's a, the CPS level in (0, 1], DanceGRPO's eta. Dimensionless."""
    guidance_scale: float = _bounded(4.5, at_least=1)
    """Classifier-free guidance g in v_uncond + g (v_cond - v_uncond); 1 turns guidance off and halves the work."""
    height: int | None = _bounded(None, at_least=8)
    """Image height in pixels; null takes the model's own."""
    width: int | None = _bounded(None, at_least=8)
    """Image width in pixels; null takes the model's own."""
    same_noise: bool = False
    """Give all samples of a prompt the same initial noise."""
    schedule: Literal["wavefront", "sequential"] = "wavefront"
    """Transformer passes: one per step for the rollout and all completions, or one trajectory after the other."""
    max_rows: int | None = _bounded(None, at_least=1)
    """Rows of one transformer pass at most (two transformer rows each under guidance); null sets no limit."""
    latent_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Storage dtype of states; a state is rounded to it before it is scored."""
    decode_batch: int = _bounded(16, at_least=1)
    """Images decoded at a time."""

    @property
    def window_starts(self) -> range:
        """Every first step w the window can have."""
        low, high = self.window_range
        return range(low, low + 1 if self.window == "fixed" else high - self.window_size + 1)

    @property
    def trained_steps(self) -> range:
        """Every step the window can cover."""
        return range(self.window_starts[0], self.window_starts[-1] + self.window_size)

    def _problems(self) -> Iterator[Problem]:
        for name in ("height", "width"):
            if (getattr(self, name) or 0) % 8:
                yield self._problem(name, "the image decoder needs a multiple of 8", f"round rollout.{name} to one")
        if self.sde_type == "cps" and self.noise_level > 1:
            yield self._problem(
                "noise_level",
                "under cps it is a fraction of the noise that is replaced, at most 1",
                "set rollout.noise_level in (0, 1] (0.7 is usual)",
            )
        if self.sde_type != "ode":
            yield from self._window_problems()

    def _window_problems(self) -> Iterator[Problem]:
        low, high = self.window_range
        if self.window_size > self.steps:
            yield self._problem(
                "window_size",
                f"a rollout has only rollout.steps = {self.steps} steps",
                f"set rollout.window_size to at most {self.steps}",
            )
        if not 0 <= low < high <= self.steps:
            yield self._problem(
                "window_range",
                f"must be [low, high) with 0 <= low < high <= rollout.steps = {self.steps}",
                f"set rollout.window_range to [0, {max(self.steps - 1, 1)}]",
            )
        elif self.window_size > high - low:
            yield self._problem(
                "window_size",
                f"does not fit into the {high - low} steps of rollout.window_range = [{low}, {high}]",
                f"set rollout.window_size to at most {high - low}, or widen rollout.window_range",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(_Section):
    """The update. Batch and ZeRO settings live in the DeepSpeed file."""

    section: ClassVar[str] = "train"

    learning_rate: float = _bounded(3e-4, above=0)
    """Peak learning rate of AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine end at 0 with the last update."""
    warmup: int = _bounded(0, at_least=0)
    """Optimizer updates over which the learning rate rises linearly to its peak."""
    weight_decay: float = _bounded(1e-4, at_least=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """Where old log-probs come from: the rollout itself, or a pass of the unchanged policy before the first update."""
    updates_per_iteration: int = _bounded(2, at_least=1)
    """Optimizer updates a pass over the iteration's samples is split into."""
    inner_epochs: int = _bounded(1, at_least=1)
    """Passes over the iteration's samples."""
    clip_range: float = _bounded(1e-5, above=0)
    """The ratio is clipped to [1 - clip_range, 1 + clip_range]; log-probs are means over elements, so it is small."""
    adv_clip: float = _bounded(5.0, above=0)
    """Advantages are clipped to [-adv_clip, adv_clip]."""
    beta: float = _bounded(0.0, at_least=0)
    """Weight of the KL term to the model without adapter; 0 skips its passes."""
    kl: Literal["gaussian", "flow_grpo"] = "gaussian"
    """Variance the KL divides by: the step's own c^2, or Flow-GRPO's (without dt)."""
    guidance: bool = True
    """Train on the guided velocity, as the rollout samples; false trains on the conditional one alone."""
    ema_decay: float | None = _bounded(0.9, at_least=0, below=1)
    """Decay of the averaged weights, ramped up as (1 + k) / (10 + k); null keeps no average."""
    ema_every: int = _bounded(8, at_least=1)
    """Optimizer updates between steps of the average."""
    max_grad_norm: float | None = _bounded(1.0, above=0)
    """Gradient norm clipped to; null does not clip."""
    skip_zero_advantage: bool = True
    """Leave out (row, step) pairs of advantage 0 where no KL term needs them; the loss's mean still counts them."""

    def _problems(self) -> Iterator[Problem]:
        if not all(0 <= beta < 1 for beta in self.betas):
            yield self._problem("betas", "each must be in [0, 1)", "set train.betas to [0.9, 0.999]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a training run depends on. Build it with :func:`load_config`, or section by section.

    Raises:
        ConfigError: listing the combinations that cannot train.
    """

    run: RunConfig = field(default_factory=RunConfig)
    """Where the run writes, how long it lasts, what it records."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that is trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    reward: dict[str, Any] = field(default_factory=lambda: {"shapes": 1.0})
    """Reward name -> weight, or {weight, ...options}; the total is the weighted sum. Read only."""
    credit: CreditConfig = field(default_factory=CreditConfig)
    """From rewards of completed states to per-step advantages."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The update."""

    def __post_init__(self) -> None:
        reward, problems = _normalize_reward(self.reward)
        object.__setattr__(self, "reward", reward)
        problems += _combination_problems(self)
        if problems:
            raise ConfigError(problems)

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested dicts, lists and scalars, with every key resolved."""
        return _plain(dataclasses.asdict(self))

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; loading it back gives an equal Config."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    def hash(self) -> str:
        """Return 16 hex digits that name this configuration: the same in every process, other for any other value."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Config) -> dict[str, tuple[Any, Any]]:
        """Return dotted key -> (value here, value in `other`) for every key that differs."""
        mine, theirs = dict(_leaves(self.to_dict())), dict(_leaves(other.to_dict()))
        return {
            key: (mine.get(key), theirs.get(key))
            for key in {**mine, **theirs}
            if key not in mine or key not in theirs or mine[key] != theirs[key]
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# ---------------------------------------------------------------------------------------------------- combinations


def _normalize_reward(reward: Any) -> tuple[dict[str, Any], list[Problem]]:
    """Return the reward section with float weights (a mapping only where there are options), and its problems."""
    if not isinstance(reward, Mapping):
        remedy = "give names and weights, such as {shapes: 1.0}"
        return {}, [Problem("reward", reward, "expected a mapping of reward names to weights", remedy)]
    result: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, entry in reward.items():
        key = f"reward.{name}"
        wrong = name_problem(name)
        if wrong:
            problems.append(Problem(key, _UNSET, *wrong))
        options = dict(entry) if isinstance(entry, Mapping) else {}
        weight, found = _convert_field(float, key, options.pop("weight", 1.0) if isinstance(entry, Mapping) else entry)
        if found:
            problems.append(
                Problem(
                    key,
                    entry,
                    "expected a finite weight, or a mapping {weight, ...options}",
                    f"set {key} to a number, such as 1.0",
                )
            )
        bad_options = [option for option in options if not (isinstance(option, str) and option.isidentifier())]
        if bad_options:
            problems.append(
                Problem(
                    key,
                    entry,
                    f"{bad_options[0]!r} cannot be the name of an option",
                    "name options as Python arguments",
                )
            )
        result[name] = {"weight": weight, **options} if options else weight
    if not result:
        problems.append(Problem("reward", reward, "no reward is given", "add one, such as --reward.shapes 1.0"))
    elif not problems and all((e["weight"] if isinstance(e, dict) else e) == 0 for e in result.values()):
        problems.append(
            Problem(
                "reward", reward, "every weight is 0, so there is nothing to learn", "give at least one reward a weight"
            )
        )
    return result, problems


def _combination_problems(config: Config) -> Iterator[Problem]:
    """Yield what cannot work across sections."""
    rollout, train, credit, model, data = config.rollout, config.train, config.credit, config.model, config.data
    if rollout.sde_type == "ode":
        yield rollout._problem(
            "sde_type",
            "ODE steps inject no noise and have no log-prob, so they cannot be trained on",
            "set rollout.sde_type to sde, cps or dance",
        )
    elif rollout.noise_level <= 0:
        yield rollout._problem(
            "noise_level",
            "steps without noise have no log-prob, so they cannot be trained on",
            "set rollout.noise_level above 0 (0.7 is usual)",
        )
    elif rollout.sde_type == "cps" and rollout.steps - 1 in rollout.trained_steps:
        yield _zero_noise_problem(rollout, [rollout.steps - 1])
    if rollout.guidance_scale > 1 and not train.guidance and train.old_log_prob == "rollout":
        yield train._problem(
            "guidance",
            f"the rollout samples with guidance {rollout.guidance_scale:g}; its log-probs are not those "
            "of the unguided policy",
            "set train.old_log_prob to recompute, or train.guidance true",
        )
    if rollout.guidance_scale == 1 and model.negative_prompt:
        yield model._problem(
            "negative_prompt",
            "it is never read with rollout.guidance_scale = 1",
            "set rollout.guidance_scale above 1, or remove model.negative_prompt",
        )
    if train.kl == "flow_grpo" and rollout.sde_type == "dance":
        yield train._problem(
            "kl",
            "Flow-GRPO's standard deviation is not defined for rollout.sde_type = dance",
            "set train.kl to gaussian",
        )
    if train.beta > 0 and model.full_finetune:
        yield train._problem(
            "beta",
            "the KL's reference is the model without adapter, and model.full_finetune has none",
            "set train.beta to 0, or model.full_finetune false",
        )
    if credit.step_weights is not None and len(credit.step_weights) != rollout.window_size:
        yield Problem(
            "credit.step_weights",
            list(credit.step_weights),
            f"has {len(credit.step_weights)} entries for rollout.window_size = {rollout.window_size} trained steps",
            f"give {rollout.window_size} weights, or null",
        )
    rows = data.group_size * data.prompts_per_iteration
    if train.updates_per_iteration > rows:
        yield train._problem(
            "updates_per_iteration",
            f"an iteration has only {rows} samples (data.prompts_per_iteration = "
            f"{data.prompts_per_iteration} times data.group_size = {data.group_size})",
            f"set train.updates_per_iteration to at most {rows}",
        )


def _zero_noise_problem(rollout: RolloutConfig, steps: Sequence[int]) -> Problem:
    first = min(steps)
    listed = ", ".join(map(str, steps))
    return rollout._problem(
        "window_range" if rollout.window != "fixed" or first >= rollout.window_range[1] - 1 else "window_size",
        f"the window reaches step{'s' if len(steps) > 1 else ''} {listed} of {rollout.steps}, which under "
        f"{rollout.sde_type} inject{'' if len(steps) > 1 else 's'} no noise (c = 0): the log-prob there is undefined",
        f"set rollout.window_range to [0, {first}] and rollout.window_size to at most {first}"
        if first
        else "set another rollout.sde_type, or more rollout.steps",
    )


def check_window(config: Config | RolloutConfig, sigmas: Sequence[float]) -> None:
    """Refuse a window that can reach a step without noise, on the scheduler's real grid.

    Args:
        config: the configuration, or its rollout section.
        sigmas: the grid, [steps + 1] floats from pure noise to 0.

    Raises:
        ConfigError: the grid has another length, or a step the window can cover has c = 0 (DESIGN: transition table).
    """
    rollout = config.rollout if isinstance(config, Config) else config
    grid = [float(sigma) for sigma in sigmas]
    if len(grid) != rollout.steps + 1:
        raise ConfigError(
            [
                rollout._problem(
                    "steps", f"the scheduler gives {len(grid) - 1} steps", f"set rollout.steps to {len(grid) - 1}"
                )
            ]
        )
    silent = [
        step
        for step in rollout.trained_steps
        if not float(transitions.make(rollout.sde_type, grid, step, rollout.noise_level).c) > 0
    ]
    if silent:
        raise ConfigError([_zero_noise_problem(rollout, silent)])


def window_for(rollout: RolloutConfig, seed: int, iteration: int) -> int:
    """Return the first step w of an iteration's SDE window, a pure function of (seed, iteration) on every rank."""
    starts = rollout.window_starts
    if rollout.window == "fixed":
        return starts[0]
    if rollout.window == "sliding":
        return starts[iteration % len(starts)]
    (word,) = uniform_words(1, seed=seed, stream=Stream.WINDOWS, iteration=iteration)
    return starts[(word * len(starts)) >> 32]


# --------------------------------------------------------------------------------------------------------- loading


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number, as YAML 1.2 does, and refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in RECIPE_DIR.glob("*.yaml"))


def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe and apply command-line overrides.

    Args:
        source: a packaged recipe's name, the path of a YAML file, or None for the recipe `shapes`.
        overrides: tokens `--section.key value` or `--section.key=value`; values are YAML. A flag without value is
            true; `--reward.NAME null` takes a reward out; later ones win.

    Raises:
        ConfigError: everything that is wrong, together.

    Example:
        >>> load_config("shapes", ["--rollout.window_size", "4", "--credit.balance=null"]).rollout.window_size
        4
    """
    name = DEFAULT_RECIPE if source is None else str(source)
    path = _recipe_path(source if source is not None else DEFAULT_RECIPE)
    where = f"recipe {name}" + (" with the command-line overrides" if overrides else "")
    tree = _read_yaml(path)
    problems = _apply_overrides(tree, overrides)
    sections: dict[str, Any] = {}
    hints = _field_hints(Config)
    for key, value in tree.items():
        if key not in hints:
            problems.append(_unknown_key(str(key), value, "", list(hints)))
        elif key == "reward":
            sections[key] = value
        else:
            section, found = _build(hints[key], key, value)
            problems += found
            sections[key] = section
    if problems:
        raise ConfigError(problems, where)
    try:
        return Config(**sections)
    except ConfigError as error:
        raise ConfigError(error.problems, where) from None


def _recipe_path(source: str | Path) -> Path:
    names = recipe_names()
    if isinstance(source, str) and source in names:
        return RECIPE_DIR / f"{source}.yaml"
    path = Path(source)
    if path.is_file():
        return path
    guess = _closest(str(source), names)
    remedy = f"did you mean {guess}? " if guess else ""
    remedy += f"Packaged recipes: {', '.join(names)}; anything else is the path of a YAML file"
    raise ConfigError([Problem("", _UNSET, f"there is no recipe and no file {source}", remedy)], "the choice of recipe")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except UnicodeDecodeError as error:
        problem = Problem("", _UNSET, f"is not UTF-8 at byte {error.start}", "save the file as UTF-8")
        raise ConfigError([problem], str(path)) from None
    except OSError as error:
        problem = Problem("", _UNSET, f"cannot be read: {error.strerror}", "check the path and its permissions")
        raise ConfigError([problem], str(path)) from None
    except yaml.YAMLError as error:
        problem = Problem("", _UNSET, f"is not valid YAML: {_yaml_reason(error)}", "correct that line")
        raise ConfigError([problem], str(path)) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        remedy = "write sections (" + ", ".join(_field_hints(Config)) + ") with keys below them"
        raise ConfigError([Problem("", _UNSET, "expected a mapping of sections", remedy)], str(path))
    return tree


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark, text = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error).split("\n")[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {text}" if mark else text


def _build(cls: Any, prefix: str, mapping: Any) -> tuple[Any, list[Problem]]:
    """Construct a section from a mapping; returns it (or None) and every problem found."""
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        remedy = f"write {prefix}: {{key: value}}"
        return None, [Problem(prefix, mapping, "expected a section with keys below it", remedy)]
    hints = _field_hints(cls)
    values: dict[str, Any] = {}
    unknown: list[Problem] = []
    wrong: list[Problem] = []
    for name, value in mapping.items():
        key = f"{prefix}.{name}"
        if name not in hints:
            unknown.append(_unknown_key(key, value, prefix, list(hints)))
            continue
        convert = _build if dataclasses.is_dataclass(hints[name]) else _convert_field
        values[name], found = convert(hints[name], key, value)
        wrong += found
    problems = unknown + wrong
    if wrong:
        return None, problems  # what the keys say together means nothing while one of them is wrong by itself
    try:
        return cls(**values), problems
    except ConfigError as error:
        return None, problems + list(error.problems)
    except ValueError as error:
        # Of a section that is not ours to phrase: its message names the field, the value and the choice.
        return None, [*problems, Problem("", _UNSET, str(error), f"correct it under {prefix}")]


def _unknown_key(key: str, value: Any, prefix: str, known: Sequence[str]) -> Problem:
    """Say that a key is unknown, and which one is probably meant: in its own section first, then in any other."""
    name = key.rpartition(".")[2]
    everywhere = {leaf: full for full, leaf in _all_keys()}
    guess = _closest(name, known)
    guess = f"{prefix}.{guess}" if guess and prefix else guess or everywhere.get(name)
    where = f"in section {prefix}" if prefix else "section"
    if guess:
        remedy = f"did you mean {guess}?"
    else:
        remedy = f"{prefix or 'the configuration'} has {', '.join(known)}"
    return Problem(key, value if prefix else _UNSET, f"unknown key {where}" if prefix else "unknown section", remedy)


def _all_keys(cls: Any = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, last part) of every key there is."""
    for name, hint in _field_hints(cls or Config).items():
        if dataclasses.is_dataclass(hint):
            yield from _all_keys(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", name


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """Write the overrides into the tree; returns the tokens that make no sense."""
    problems: list[Problem] = []
    tokens = list(overrides)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or len(token) == 2:
            problems.append(Problem("", _UNSET, f"unexpected argument {token!r}", "write --section.key value"))
            continue
        key, equals, raw = token[2:].partition("=")
        path = _override_path(key)
        hint = _hint_of(path)
        if not equals:
            if tokens and not tokens[0].startswith("--"):
                raw = tokens.pop(0)
            elif hint is bool:
                raw = "true"
            else:
                problems.append(Problem(key, _UNSET, "has no value", f"write --{key} value"))
                continue
        try:
            value = yaml.load(raw, Loader=_Loader)
        except yaml.YAMLError as error:
            value = _UNSET
            if not _admits_text(hint):
                reason = f"is not valid YAML: {_yaml_reason(error)}"
                problems.append(Problem(key, raw, reason, "put the value in quotes"))
                continue
        if _admits_text(hint) and not isinstance(value, str) and (value is not None or not raw.strip()):
            value = raw  # text that YAML takes for a number, a date or a mapping
        _write(tree, path, value)
    return problems


def _override_path(key: str) -> list[str]:
    """Split a dotted key. A reward's name may itself hold dots: `reward.package.module:function.option`."""
    section, _, rest = key.partition(".")
    if section != "reward" or not rest:
        return key.split(".")
    module, colon, attribute = rest.partition(":")
    if colon:
        name, _, option = attribute.partition(".")
        return [section, f"{module}:{name}", *([option] if option else [])]
    name, _, option = rest.partition(".")
    if name_problem(name) is None and option:
        return [section, name, option]
    return [section, rest]


def _hint_of(path: Sequence[str]) -> Any:
    hint: Any = Config
    for name in path:
        hint = _field_hints(hint).get(name) if dataclasses.is_dataclass(hint) else None  # type: ignore[arg-type]
    return hint


def _admits_text(hint: Any) -> bool:
    return hint is str or (get_origin(hint) in (Union, types.UnionType) and str in get_args(hint))


def _write(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, last = path
    node = tree
    for name in parents:
        child = node.get(name)
        if not isinstance(child, dict):
            # A reward that is a plain weight becomes a mapping when it gets an option.
            child = {"weight": child} if path[0] == "reward" and node is not tree and child is not None else {}
            node[name] = child
        node = child
    if value is None and path[0] == "reward" and len(path) == 2:
        node.pop(last, None)
    elif isinstance(value, dict) and isinstance(node.get(last), dict) and path[0] != "reward":
        node[last] = {**node[last], **value}
    else:
        node[last] = value
