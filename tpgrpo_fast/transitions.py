"""Every sampler step as one affine Gaussian transition of the guided velocity.

    mean = a x + b v,      x' = mean + c eps,      eps ~ N(0, I)

with sigma = sigmas[i], sigma' = sigmas[i+1], dt = sigma' - sigma < 0:

| `sde_type`    | source                   | a, b, c                                                                   |
|---------------|--------------------------|---------------------------------------------------------------------------|
| `ode`         | Euler                    | a = 1, b = dt, c = 0                                                      |
| `sde`         | Flow-GRPO                | s = noise_level sqrt(sigma / (1 - sigma^)), sigma^ = sigmas[1] at sigma=1 |
|               |                          | a = 1 + s^2/(2 sigma) dt, b = (1 + s^2 (1 - sigma)/(2 sigma)) dt,         |
|               |                          | c = s sqrt(-dt)                                                           |
| `cps`         | Flow-CPS                 | s = sigma' sin(noise_level pi/2), q = sqrt(sigma'^2 - s^2)                |
|               |                          | a = (1 - sigma') + q, b = -sigma (1 - sigma') + (1 - sigma) q, c = s      |
| `dance`       | DanceGRPO, SDE solver    | a = 1 + eta^2 dt/(2 sigma), b = dt + eta^2 dt (1 - sigma)/(2 sigma),      |
|               |                          | c = eta sqrt(-dt), eta = noise_level                                      |
| `dance_euler` | DanceGRPO, without it    | a = 1, b = dt, c = eta sqrt(-dt)                                          |

Coefficients are computed on the host in float64, so whether a row is deterministic (c = 0) is known without asking the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

SdeType = Literal["ode", "sde", "cps", "dance", "dance_euler"]
LogProbConvention = Literal["flow_grpo", "gaussian"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """Coefficients of one step, for all rows (floats) or row by row (float64 CPU tensors `[N]`).

    Example:
        >>> make("ode", [1.0, 0.5, 0.0], step=0, noise_level=0.0).b
        -0.5
    """

    a: float | torch.Tensor
    """Factor of the state."""
    b: float | torch.Tensor
    """Factor of the guided velocity."""
    c: float | torch.Tensor
    """Standard deviation of the step; 0 marks a deterministic row."""
    std_dev_t: float | torch.Tensor
    """Flow-GRPO's diffusion coefficient s: without the sqrt(-dt) for `sde`, equal to c for `cps` and `dance`."""
    sde_type: SdeType
    """The sampler; in a transition of mixed rows the one of the rows with noise."""
    log_prob_convention: LogProbConvention
    """`gaussian`: the density's logarithm. `flow_grpo`: for `cps` the squared error alone, without any constant."""

    @property
    def unscaled_log_prob(self) -> bool:
        """Whether the log-prob is -(x' - mean)^2, without variance and constants (Flow-GRPO's `cps`)."""
        return self.sde_type == "cps" and self.log_prob_convention == "flow_grpo"

    def rows(self, count: int) -> Transition:
        """The same transition with `[count]` tensors for coefficients.

        Raises:
            ValueError: the transition already holds another number of rows.
        """
        return Transition(
            a=_rows(self.a, count, "a"),
            b=_rows(self.b, count, "b"),
            c=_rows(self.c, count, "c"),
            std_dev_t=_rows(self.std_dev_t, count, "std_dev_t"),
            sde_type=self.sde_type,
            log_prob_convention=self.log_prob_convention,
        )

    def has_noise(self, count: int) -> torch.Tensor:
        """Bool `[count]` on the host: the rows with c > 0."""
        return _rows(self.c, count, "c") > 0


def make(
    sde_type: SdeType,
    sigmas: Sequence[float] | torch.Tensor,
    step: int | torch.Tensor,
    noise_level: float,
    *,
    log_prob_convention: LogProbConvention | None = None,
) -> Transition:
    """The transition from `sigmas[step]` to `sigmas[step + 1]`.

    Args:
        sde_type: one of the table above.
        sigmas: the scheduler's grid `[T + 1]`, from noise (1) to image (0).
        step: an int, or an int tensor `[N]` for rows at different steps.
        noise_level: Flow-GRPO's and Flow-CPS's noise level, DanceGRPO's eta; ignored by `ode`.
        log_prob_convention: by default `flow_grpo` for `cps` and `gaussian` for the rest (they agree for `sde`).

    Raises:
        ValueError: unknown names, a step outside the grid, a grid that does not fall, a noise level out of range.
    """
    if sde_type not in get_args(SdeType):
        raise ValueError(f"sde_type = {sde_type!r}: choose one of {', '.join(get_args(SdeType))}")
    if log_prob_convention is None:
        log_prob_convention = "flow_grpo" if sde_type == "cps" else "gaussian"
    if log_prob_convention not in get_args(LogProbConvention):
        raise ValueError(f"log_prob_convention = {log_prob_convention!r}: choose flow_grpo or gaussian")
    grid = torch.as_tensor(sigmas, dtype=torch.float64, device="cpu").tolist()
    if isinstance(step, torch.Tensor) and step.dim() == 1:
        steps = step.tolist()
        table = {i: _coefficients(sde_type, grid, i, noise_level) for i in set(steps)}
        columns = torch.tensor([table[i] for i in steps], dtype=torch.float64).reshape(-1, 4).unbind(dim=1)
        a, b, c, std_dev_t = columns
        return Transition(
            a=a, b=b, c=c, std_dev_t=std_dev_t, sde_type=sde_type, log_prob_convention=log_prob_convention
        )
    scalars = _coefficients(sde_type, grid, int(step), noise_level)
    return Transition(
        a=scalars[0],
        b=scalars[1],
        c=scalars[2],
        std_dev_t=scalars[3],
        sde_type=sde_type,
        log_prob_convention=log_prob_convention,
    )


def concat(parts: Sequence[tuple[Transition, int]]) -> Transition:
    """One transition for a batch made of several: `(transition, number of rows)` in order. Empty parts are dropped.

    Raises:
        ValueError: no rows, or two different samplers with noise.
    """
    parts = [(t, count) for t, count in parts if count > 0]
    if not parts:
        raise ValueError("concat needs at least one part with rows")
    noisy = [t for t, _ in parts if t.sde_type != "ode"]
    kinds = {(t.sde_type, t.log_prob_convention) for t in noisy}
    if len(kinds) > 1:
        raise ValueError(f"rows of one batch mix the samplers {sorted(kinds)}: only `ode` rows may join another kind")
    kind = noisy[0] if noisy else parts[0][0]
    tables = [t.rows(count) for t, count in parts]
    return Transition(
        a=torch.cat([torch.as_tensor(t.a) for t in tables]),
        b=torch.cat([torch.as_tensor(t.b) for t in tables]),
        c=torch.cat([torch.as_tensor(t.c) for t in tables]),
        std_dev_t=torch.cat([torch.as_tensor(t.std_dev_t) for t in tables]),
        sde_type=kind.sde_type,
        log_prob_convention=kind.log_prob_convention,
    )


def _rows(value: float | torch.Tensor, count: int, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full((count,), value, dtype=torch.float64)
    if value.shape != (count,):
        raise ValueError(f"transition.{name} has shape {list(value.shape)}, but the batch has {count} rows")
    return value


def _coefficients(sde_type: str, sigmas: list[float], step: int, noise_level: float) -> tuple[float, ...]:
    steps = len(sigmas) - 1
    if not 0 <= step < steps:
        raise ValueError(f"step = {step} is outside the grid: it has steps 0 … {steps - 1}")
    sigma, sigma_next = sigmas[step], sigmas[step + 1]
    if not 0.0 <= sigma_next < sigma <= 1.0:
        raise ValueError(
            f"sigmas[{step}] = {sigma} and sigmas[{step + 1}] = {sigma_next}: a grid falls from at most 1 to 0"
        )
    dt = sigma_next - sigma
    if sde_type == "ode":
        return 1.0, dt, 0.0, 0.0
    if not (math.isfinite(noise_level) and noise_level >= 0.0):
        raise ValueError(f"noise_level = {noise_level}: give a finite number of at least 0")
    if sde_type == "cps":
        if noise_level > 1.0:
            raise ValueError(f"noise_level = {noise_level}: `cps` takes 0 … 1 (the angle is noise_level · pi/2)")
        s = sigma_next * math.sin(noise_level * math.pi / 2)
        # noise_level = 1 leaves no deterministic part; rounding must not make the root's argument negative.
        q = math.sqrt(max(sigma_next**2 - s**2, 0.0))
        return (1 - sigma_next) + q, -sigma * (1 - sigma_next) + (1 - sigma) * q, s, s
    if sde_type == "sde":
        reference = sigmas[1] if sigma == 1.0 else sigma
        s = noise_level * math.sqrt(sigma / (1 - reference))
        drift = s**2 / (2 * sigma)
        return 1 + drift * dt, (1 + drift * (1 - sigma)) * dt, s * math.sqrt(-dt), s
    c = noise_level * math.sqrt(-dt)
    if sde_type == "dance_euler":
        return 1.0, dt, c, c
    drift = 0.5 * noise_level**2 * dt / sigma
    return 1 + drift, dt + drift * (1 - sigma), c, c
