"""Rollouts: samples with their cached states, log-probs and ODE completions, and plain ODE sampling for evaluation."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpgrpo_fast import completions
from tpgrpo_fast import policy as policies
from tpgrpo_fast.completions import Plan, Velocities
from tpgrpo_fast.config import RolloutConfig, check_window, window_for
from tpgrpo_fast.noise import Stream
from tpgrpo_fast.policy.base import Conditioning, Grid, Policy

PromptCache = dict[str, Conditioning]
"""One-row conditioning of prompts encoded before; pass the same dict again to encode each prompt once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """What a rollout took."""

    passes: int
    """Sequential transformer passes."""
    calls: int
    """Transformer calls, after splitting by `max_rows`."""
    rows: int
    """Row-forwards: guided evaluations of one latent."""
    seconds: float
    """Wall time, decoding and scoring aside."""
    peak_memory: int
    """Bytes: peak allocated on the GPU since the process began, or the process's peak resident size on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """N samples of one iteration.

    Example:
        With T = 8 steps and an SDE window of n = 6 at w = 0 on 4x8x8 latents, 96 samples: states `[96, 7, 4, 8, 8]`,
        log_probs `[96, 6]`, and `images(3)` the `[96, 3, 64, 64]` images completed after three window steps.
    """

    policy: Policy
    """What drew the samples."""
    prompts: tuple[str, ...]
    """N prompts."""
    states: torch.Tensor
    """`[N, n+1, ...]` cached states Z_0 … Z_n in `rollout.latent_dtype`."""
    log_probs: torch.Tensor
    """`[N, n]` float32 log-probs of the window's steps."""
    clean: tuple[torch.Tensor | None, ...]
    """n+1 clean latents `[N, ...]`: completions of Z_0 … Z_{n-1} (None where not computed), then the rollout's end."""
    grid: Grid
    """The sampler's steps."""
    window: range
    """Steps w … w+n-1."""
    conditioning: Conditioning
    """Encoded distinct prompts."""
    prompt_index: torch.Tensor
    """int64 `[N]`: a row's place in `conditioning`."""
    unconditional: Conditioning | None
    """One row, when guided."""
    decode_batch: int
    """Images decoded at a time."""
    stats: RolloutStats
    """What it took."""

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The grid, `T + 1` values."""
        return self.grid.sigmas

    def images(self, k: int) -> torch.Tensor:
        """Images `[N, 3, H, W]` in [0, 1] completed from state `Z_k`; `k = n` is the rollout's own image.

        Raises:
            ValueError: there is no such state, or its completion was not computed.
        """
        if not 0 <= k < len(self.clean):
            raise ValueError(f"images({k}): states are 0 … {len(self.clean) - 1}")
        latents = self.clean[k]
        if latents is None:
            raise ValueError(
                f"images({k}): this rollout was drawn without completions; only images({len(self.clean) - 1})"
            )
        return decode(self.policy, latents, self.decode_batch)


def rollout(
    policy: Policy | object,
    prompts: Sequence[str],
    config: RolloutConfig,
    *,
    iteration: int = 0,
    seed: int = 0,
    row_uid: torch.Tensor | Sequence[int] | None = None,
    initial_uid: torch.Tensor | Sequence[int] | None = None,
    complete: bool = True,
    negative_prompt: str = "",
    cache: PromptCache | None = None,
    on_pass: Callable[[], None] | None = None,
) -> Rollout:
    """Draw one sample for each prompt, with the ODE completion of every cached state (DESIGN: completion engine).

    Args:
        policy: a `Policy`, or a diffusers pipeline of a supported family.
        prompts: N prompts, one a row; equal prompts are encoded once.
        config: the `rollout` section.
        iteration, seed: with `row_uid`, the counter of all noise.
        row_uid: `[N]` global row indices; by default 0 … N-1.
        initial_uid: `[N]` rows whose initial noise is used; by default the row's own, or with `config.same_noise` that
            of the first row with the same prompt.
        complete: whether to complete the states before the last one.
        negative_prompt: prompt of the unconditional branch, with guidance above 1.
        cache: conditioning of prompts encoded before.
        on_pass: called after every transformer pass (a progress bar).

    Raises:
        ValueError: no prompts, `row_uid` of another length, a window that reaches a step without noise, a size the
            model cannot draw.
    """
    policy = _as_policy(policy)
    prompts = tuple(prompts)
    if not prompts:
        raise ValueError("rollout needs at least one prompt")
    uid = _uids("row_uid", range(len(prompts)) if row_uid is None else row_uid, len(prompts))
    height, width = image_size(policy, config)
    grid = policy.grid(config.steps, height, width)
    check_window(config, grid.sigmas)
    started = time.perf_counter()
    start = window_for(config, seed, iteration)
    plan = Plan(
        grid=grid,
        window=range(start, start + config.window_size),
        sde_type=config.sde_type,
        noise_level=config.noise_level,
        seed=seed,
        iteration=iteration,
        row_uid=uid,
        complete=complete,
    )
    velocities = _velocities(policy, prompts, config, grid, negative_prompt, cache, on_pass)
    if initial_uid is None:
        initial_uid = uid[_first_of_prompt(velocities.prompt_index)] if config.same_noise else uid
    first = completions.initial_noise(
        policy,
        height,
        width,
        seed=seed,
        iteration=iteration,
        uid=_uids("initial_uid", initial_uid, len(prompts)),
        stream=Stream.INITIAL,
    )
    latents = first.to(getattr(torch, config.latent_dtype))
    drawn = completions.SCHEDULES[config.schedule](plan, velocities, latents, config.guidance_scale)
    return Rollout(
        policy=policy,
        prompts=prompts,
        states=torch.stack(drawn.states, dim=1),
        log_probs=torch.stack(drawn.log_probs, dim=1),
        clean=tuple(drawn.clean),
        grid=grid,
        window=plan.window,
        conditioning=velocities.conditioning,
        prompt_index=velocities.prompt_index,
        unconditional=velocities.unconditional,
        decode_batch=config.decode_batch,
        stats=RolloutStats(
            passes=velocities.passes,
            calls=velocities.calls,
            rows=velocities.rows,
            seconds=time.perf_counter() - started,
            peak_memory=peak_memory(policy.device),
        ),
    )


def sample(
    policy: Policy | object,
    prompts: Sequence[str],
    config: RolloutConfig,
    *,
    seed: int,
    row_uid: torch.Tensor | Sequence[int],
    steps: int | None = None,
    negative_prompt: str = "",
    cache: PromptCache | None = None,
) -> torch.Tensor:
    """Images `[N, 3, H, W]` in [0, 1] by the ODE alone, from the evaluation stream's noise, whatever the iteration.

    Args:
        steps: denoising steps; by default `config.eval_steps`. The rest is as in `rollout`.
    """
    policy = _as_policy(policy)
    uid = _uids("row_uid", row_uid, len(prompts))
    height, width = image_size(policy, config)
    grid = policy.grid(steps or config.eval_steps, height, width)
    velocities = _velocities(policy, prompts, config, grid, negative_prompt, cache)
    noise = completions.initial_noise(policy, height, width, seed=seed, iteration=0, uid=uid, stream=Stream.EVALUATION)
    plan = Plan(
        grid=grid,
        window=range(0),
        sde_type="ode",
        noise_level=0.0,
        seed=seed,
        iteration=0,
        row_uid=uid,
        complete=False,
    )
    latents = noise.to(getattr(torch, config.latent_dtype))
    clean = completions.wavefront(plan, velocities, latents, config.guidance_scale).clean[-1]
    assert clean is not None
    return decode(policy, clean, config.decode_batch)


def encode(policy: Policy, prompts: Sequence[str], cache: PromptCache | None) -> tuple[Conditioning, torch.Tensor]:
    """Conditioning of the distinct prompts, in order of appearance, and each row's place in it (int64 `[N]`)."""
    distinct = list(dict.fromkeys(prompts))
    cache = {} if cache is None else cache
    for prompt in distinct:
        # One at a time: a prompt's encoding must not depend on which other prompts share its batch.
        if prompt not in cache:
            cache[prompt] = policy.encode([prompt])
    places = {prompt: place for place, prompt in enumerate(distinct)}
    return Conditioning.cat([cache[p] for p in distinct]), torch.tensor([places[p] for p in prompts])


def decode(policy: Policy, latents: torch.Tensor, batch: int) -> torch.Tensor:
    """Images `[N, 3, H, W]` in [0, 1] of clean latents, `batch` at a time."""
    return torch.cat([policy.decode(part) for part in latents.split(batch)])


def image_size(policy: Policy, config: RolloutConfig) -> tuple[int, int]:
    """(height, width) in pixels: the configured ones, or the model's own."""
    height, width = policy.default_size()
    return config.height or height, config.width or width


def peak_memory(device: torch.device) -> int:
    """Bytes; see `RolloutStats.peak_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _as_policy(policy: Policy | object) -> Policy:
    return policy if isinstance(policy, Policy) else policies.load(policy)


def _velocities(
    policy: Policy,
    prompts: Sequence[str],
    config: RolloutConfig,
    grid: Grid,
    negative_prompt: str,
    cache: PromptCache | None,
    on_pass: Callable[[], None] | None = None,
) -> Velocities:
    """The policy's row-forwards for these prompts, guided where `config` says so."""
    conditioning, prompt_index = encode(policy, prompts, cache)
    unconditional = encode(policy, (negative_prompt,), cache)[0] if config.guidance_scale != 1.0 else None
    return Velocities(policy, grid, conditioning, prompt_index, unconditional, config.max_rows, on_pass)


def _uids(name: str, value: torch.Tensor | Sequence[int], count: int) -> torch.Tensor:
    uid = torch.as_tensor(value, dtype=torch.int64).cpu()
    if uid.shape != (count,):
        raise ValueError(f"{name} has shape {list(uid.shape)}, but there are {count} prompts: give one uid a row")
    return uid


def _first_of_prompt(prompt_index: torch.Tensor) -> torch.Tensor:
    """For each row the first row with the same prompt."""
    first: dict[int, int] = {}
    return torch.tensor([first.setdefault(place, row) for row, place in enumerate(prompt_index.tolist())])
