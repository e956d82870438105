"""The fused credit kernel decides as the torch reference does, in every configuration and for groups of any size."""

import itertools

import pytest
import torch

from tpgrpo_fast import credit as credit_module
from tpgrpo_fast.credit import CreditConfig, assign_credit

EXACT = ("step_rewards", "turning_points", "incremental", "aggregated")
OPTIONS = {
    "trend": ("global", "remaining", "any"),
    "consistent": (True, False),
    "first_step": (True, False),
    "positive_only": (False, True),
    "turning": ("replace", "add"),
    "aggregated": ("from_state", "global"),
    "balance": (None, "group", "batch"),
    "balance_by": ("aggregated", "global"),
    "normalize": ("group", "batch_std", "none"),
    "sign_eps": (0.0, 0.3),
    "eta": (1.0, 0.7),
}


def configurations(every):
    """Every so many of all combinations; the stride shares no factor with the options' counts."""
    table = itertools.product(*OPTIONS.values())
    return [CreditConfig(**dict(zip(OPTIONS, row, strict=True))) for row in itertools.islice(table, 0, None, every)]


def rewards_on_a_lattice(rows, steps, seed, device):
    """Small multiples of 1/4: sums are exact, and zeros, ties and repeated values are common."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-3, 4, (rows, steps + 1), generator=generator) / 4).to(device)


def check(rewards, groups, config):
    expected = assign_credit(rewards, groups, config, backend="torch")
    actual = assign_credit(rewards, groups, config, backend="triton")
    for name in EXACT:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), (name, config)
    torch.testing.assert_close(actual.advantages, expected.advantages, rtol=3e-7, atol=3e-7)
    return actual


@pytest.mark.parametrize("config", configurations(97), ids=range(len(configurations(97))))
def test_every_option(device, config):
    groups = torch.tensor([5, -1, 5, 5, 7, -1, 5, 7, 7, -1, 2])  # one of them alone
    check(rewards_on_a_lattice(11, 5, 3, device), groups, config)


@pytest.mark.parametrize(
    ("size", "groups", "steps"), [(1, 1, 1), (1, 3, 4), (2, 3, 2), (24, 3, 8), (33, 1, 7), (7, 2, 16), (5, 12, 3)]
)
def test_sizes(device, size, groups, steps):
    rewards = rewards_on_a_lattice(size * groups, steps, size, device)
    members = torch.arange(groups).repeat(size)  # rows of a group lie apart
    found = check(rewards, members, CreditConfig(balance="group"))
    check(rewards, members, CreditConfig(balance="group", consistent=False, normalize="none"))
    check(rewards, members, CreditConfig(method="incremental"))
    check(rewards, members, CreditConfig(method="outcome"))
    assert found.advantages.isfinite().all()


def test_balancing_has_something_to_decide(device):
    # Guards the tests above: with random rewards balancing takes some turning points away, and not all.
    rewards, groups = rewards_on_a_lattice(72, 8, 24, device), torch.arange(3).repeat(24)
    before = assign_credit(rewards, groups, CreditConfig(), backend="triton").turning_points.sum()
    after = assign_credit(rewards, groups, CreditConfig(balance="group"), backend="triton").turning_points.sum()
    assert 0 < after < before


def test_equal_rewards_give_exactly_zero(device):
    rewards = torch.full((6, 4), 0.1, device=device).cumsum(1)
    found = check(rewards, torch.zeros(6, dtype=torch.int64), CreditConfig())
    assert not found.advantages.any()
    check(rewards, torch.zeros(6, dtype=torch.int64), CreditConfig(std_eps=0.0))


def test_dropped_rows_blocks_and_weights(device):
    rewards = rewards_on_a_lattice(9, 3, 5, device)
    rewards[4, 1] = float("nan")
    config = CreditConfig(drop_nonfinite=True, balance="group", step_weights=range(1, 7))
    groups = torch.arange(9) % 3
    expected = assign_credit(rewards, groups, config, backend="torch", states=(0, 2, 3, 6))
    actual = assign_credit(rewards, groups, config, backend="triton", states=(0, 2, 3, 6))
    assert torch.equal(actual.step_rewards, expected.step_rewards)
    assert not actual.advantages[4].any()
    torch.testing.assert_close(actual.advantages, expected.advantages, rtol=3e-7, atol=3e-7)


def test_what_the_kernel_does_not_do_goes_to_torch(device):
    # Groups too large for one program, or for its balancing, float64 rewards, no rows.
    groups = torch.zeros(600, dtype=torch.int64)
    for rewards in (
        rewards_on_a_lattice(600, 8, 1, device),
        rewards_on_a_lattice(40, 16, 1, device),
        rewards_on_a_lattice(600, 2, 1, device).double(),
        torch.zeros(0, 4, device=device),
    ):
        check(rewards, groups[: len(rewards)], CreditConfig(balance="group"))


def test_group_results_do_not_depend_on_the_batch(device):
    rewards, groups = rewards_on_a_lattice(24, 5, 2, device), torch.arange(4).repeat(6)
    whole = assign_credit(rewards, groups, CreditConfig(balance="group"), backend="triton")
    for group in range(4):
        part = assign_credit(
            rewards[groups == group], groups[groups == group], CreditConfig(balance="group"), backend="triton"
        )
        assert torch.equal(part.advantages, whole.advantages[groups == group])


def test_a_missing_triton_or_interpreter_is_named(monkeypatch):
    rewards, groups = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        assign_credit(rewards, groups, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(credit_module, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'triton>=3\.6'"):
        assign_credit(rewards, groups, backend="triton")
