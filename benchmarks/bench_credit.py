"""Credit assignment on the CPU: compiled numba kernels against the vectorised torch reference."""

import numpy as np
import pytest
import torch

from tpgrpo_fast import credit

credit_numba = pytest.importorskip("tpgrpo_fast.credit_numba", reason="numba is not installed here")

CONFIG = credit.CreditConfig(balance="group")
SPEEDUP = 5.0


def test_credit(race, smoke):
    groups, members, steps = (2, 4, 3) if smoke else (48, 24, 8)
    torch.manual_seed(0)
    rewards = torch.rand(groups * members, steps + 1)
    prompt = torch.arange(groups).repeat_interleave(members)
    segments = credit._segments(prompt)
    incremental, aggregated = rewards.diff(dim=1), rewards[:, -1:] - rewards[:, :-1]
    name = f"{groups} groups x {members} x {steps}"

    def by_torch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        turning = credit.TORCH.turning_points(incremental, aggregated, CONFIG)
        turning = credit.TORCH.balance(turning, aggregated, segments, CONFIG.sign_eps)
        return turning, *credit.TORCH.moments(incremental, segments)

    d, a = (x.double().numpy() for x in (incremental, aggregated))
    order, bounds = segments.order.numpy(), segments.bounds.numpy()

    def by_numba() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        turning, deviation, variance = np.empty(d.shape, bool), np.empty(d.shape), np.empty(d.shape)
        credit_numba._turning_points_kernel(d, a, 0.0, credit_numba.GLOBAL, True, True, False, turning)
        credit_numba._balance_kernel(turning, a, order, bounds, 0.0)
        credit_numba._moments_kernel(d, order, bounds, deviation, variance)
        return turning, deviation, variance

    for expected, got in zip(by_torch(), by_numba(), strict=True):
        assert torch.equal(expected, torch.from_numpy(got))
    speedups = race(
        f"credit kernels {name}",
        {"torch": by_torch, "numba": by_numba},
        elements=incremental.numel(),
        bytes_moved=incremental.numel() * (3 * 8 + 1 + 2 * 8),  # d, a and the values in; turning points and moments out
        calls=20,
    )

    def assign(backend: str) -> credit.Credit[torch.Tensor]:
        return credit.assign_credit(rewards, prompt, CONFIG, backend=backend)

    assert torch.equal(assign("torch").advantages, assign("numba").advantages)
    race(
        f"assign_credit {name}",
        {"torch": lambda: assign("torch"), "numba": lambda: assign("numba")},
        elements=incremental.numel(),
        calls=10,
    )
    assert smoke or speedups["numba"] >= SPEEDUP
