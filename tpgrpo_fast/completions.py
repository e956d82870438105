"""The rollout with its ODE completions: which rows enter which transformer pass.

Notation: a rollout has T steps; steps w … w+n-1 inject noise (the SDE window). `Z_k` is the state after k window
steps, and its completion runs the remaining T - w - k steps as an ODE. Two schedules draw the same states and
completions:

* `wavefront`: all completions alive at step i share that step's timestep with the rollout, so one pass a step serves
  them all, and a completion's first velocity is the one the rollout has just computed at `Z_k`. T passes,
  T + sum_{k<n} (T - w - k - 1) row-forwards a sample.
* `sequential`: the rollout, then one completion after the other, nothing shared. It is the truth the others are tested
  against. T + sum_{k<n} (T - w - k) passes and as many row-forwards a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from tpgrpo_fast import ops, transitions
from tpgrpo_fast.noise import Stream
from tpgrpo_fast.policy.base import Conditioning, Grid, Policy
from tpgrpo_fast.transitions import SdeType


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to draw: the same for every schedule."""

    grid: Grid
    """The sampler's steps."""
    window: range
    """SDE steps w … w+n-1; empty for a pure ODE."""
    sde_type: SdeType
    """Sampler inside the window."""
    noise_level: float
    """Its noise level."""
    seed: int
    """Noise counter: the run's seed …"""
    iteration: int
    """… its iteration …"""
    row_uid: torch.Tensor
    """… and the rows' global indices, int64 `[N]` on the host."""
    complete: bool = True
    """Whether the completions of Z_0 … Z_{n-1} are wanted."""

    def transition(self, step: int, *, sde: bool) -> transitions.Transition:
        """The step's coefficients, as SDE or as ODE step."""
        return transitions.make(self.sde_type if sde else "ode", self.grid.sigmas, step, self.noise_level)


@dataclass(slots=True)
class Drawn:
    """What a schedule has drawn."""

    states: list[torch.Tensor] = field(default_factory=list)
    """`Z_0 … Z_n`, each `[N, ...]`."""
    log_probs: list[torch.Tensor] = field(default_factory=list)
    """One `[N]` for each window step."""
    clean: list[torch.Tensor | None] = field(default_factory=list)
    """Clean latents of the completions of `Z_0 … Z_n`, the last being the rollout's own end; None where not wanted."""


class Velocities:
    """Guided row-forwards of the policy, split into calls of at most `max_rows` rows, and counted."""

    def __init__(
        self,
        policy: Policy,
        grid: Grid,
        conditioning: Conditioning,
        prompt_index: torch.Tensor,
        unconditional: Conditioning | None,
        max_rows: int | None,
        on_pass: Callable[[], None] | None = None,
    ) -> None:
        self._policy = policy
        self._timesteps = torch.tensor(grid.timesteps, dtype=torch.float32, device=policy.device)
        self.conditioning = conditioning
        """Encoded distinct prompts."""
        self.prompt_index = prompt_index
        """int64 `[N]`: a sample's place in `conditioning`."""
        self.unconditional = unconditional
        """One row, when guided."""
        self._places = prompt_index.to(policy.device)
        self._max_rows = max_rows
        self._on_pass = on_pass
        self.passes = 0
        """Sequential passes: calls of this object."""
        self.calls = 0
        """Transformer calls, after splitting."""
        self.rows = 0
        """Row-forwards (one guided evaluation each)."""

    @torch.no_grad()
    def __call__(self, latents: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Velocities `(conditional, unconditional)` of `latents [m N, ...]` at a step; row r is of sample r mod N."""
        count = latents.shape[0]
        prompts = self._places.repeat(count // len(self._places))
        timesteps = self._timesteps[step].expand(count)
        size = count if self._max_rows is None else self._max_rows
        conds, unconds = [], []
        for rows in torch.arange(count, device=latents.device).split(size):
            cond, uncond = self._policy.guided_pair(
                latents[rows], timesteps[rows], self.conditioning.rows(prompts[rows]), self.unconditional
            )
            conds.append(cond)
            unconds.append(uncond)
            self.calls += 1
        self.passes += 1
        self.rows += count
        if self._on_pass is not None:
            self._on_pass()
        cond = conds[0] if len(conds) == 1 else torch.cat(conds)
        if unconds[0] is None:
            return cond, None
        return cond, unconds[0] if len(unconds) == 1 else torch.cat([u for u in unconds if u is not None])


def wavefront(plan: Plan, velocities: Velocities, latents: torch.Tensor, guidance_scale: float) -> Drawn:
    """One pass a step for the rollout and every completion alive; see the module's docstring."""
    drawn = Drawn()
    count = latents.shape[0]
    state = latents
    completions: list[torch.Tensor] = []
    for step in range(plan.grid.steps):
        sde = step in plan.window
        if sde and step == plan.window.start:
            drawn.states.append(state)
        rows = torch.cat([state, *completions]) if completions else state
        cond, uncond = velocities(rows, step)
        euler = plan.transition(step, sde=False)
        mixed = transitions.concat([(plan.transition(step, sde=sde), count), (euler, count * len(completions))])
        # A window step also starts a completion, which takes its first step with the rollout's own velocity.
        starts = sde and plan.complete
        stepped = ops.sde_step(
            cond,
            rows,
            mixed,
            velocity_uncond=uncond,
            guidance_scale=guidance_scale,
            seed=plan.seed,
            iteration=plan.iteration,
            row_uid=plan.row_uid.repeat(1 + len(completions)),
            step=step,
            ode_first=euler.rows(count) if starts else None,
        )
        following = list(stepped.next_sample.split(count))
        if stepped.ode_first is not None:
            following.append(stepped.ode_first)
        state, completions = following[0], following[1:]
        if sde:
            drawn.states.append(state)
            drawn.log_probs.append(stepped.log_prob[:count])
    drawn.clean = [*(completions if plan.complete else [None] * len(plan.window)), state]
    return drawn


def sequential(plan: Plan, velocities: Velocities, latents: torch.Tensor, guidance_scale: float) -> Drawn:
    """The rollout, then each completion by itself; see the module's docstring."""

    def advance(state: torch.Tensor, step: int, *, sde: bool) -> ops.SdeStep:
        cond, uncond = velocities(state, step)
        return ops.sde_step(
            cond,
            state,
            plan.transition(step, sde=sde),
            velocity_uncond=uncond,
            guidance_scale=guidance_scale,
            seed=plan.seed,
            iteration=plan.iteration,
            row_uid=plan.row_uid,
            step=step,
        )

    def completion(state: torch.Tensor, start: int) -> torch.Tensor:
        for step in range(start, plan.grid.steps):
            state = advance(state, step, sde=False).next_sample
        return state

    drawn = Drawn()
    state = latents
    for step in range(plan.grid.steps):
        sde = step in plan.window
        if sde and step == plan.window.start:
            drawn.states.append(state)
        stepped = advance(state, step, sde=sde)
        state = stepped.next_sample
        if sde:
            drawn.states.append(state)
            drawn.log_probs.append(stepped.log_prob)
    drawn.clean = [
        *(completion(z, step) if plan.complete else None for z, step in zip(drawn.states, plan.window, strict=False)),
        state,
    ]
    return drawn


SCHEDULES: dict[str, Callable[[Plan, Velocities, torch.Tensor, float], Drawn]] = {
    "wavefront": wavefront,
    "sequential": sequential,
}


def pass_rows(steps: int, window: range, *, complete: bool, schedule: str) -> Iterator[int]:
    """Rows a sample of each sequential pass, in order: what a rollout will cost before it is run."""
    if schedule == "wavefront":
        for step in range(steps):
            yield 1 + (sum(start < step for start in window) if complete else 0)
    else:
        yield from (1 for _ in range(steps))
        for start in window if complete else ():
            yield from (1 for _ in range(start, steps))


def initial_noise(
    policy: Policy, height: int, width: int, *, seed: int, iteration: int, uid: torch.Tensor, stream: Stream
) -> torch.Tensor:
    """Latents `[N, ...]` of pure noise, float32 on the policy's device; equal uids get equal noise."""
    shape = (len(uid), *policy.latent_shape(height, width))
    return ops.philox_normal(
        shape, seed=seed, iteration=iteration, row_uid=uid.to(policy.device), step=0, stream=stream
    )
