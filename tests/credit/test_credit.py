"""Credit of hand-computed trajectories, one option at a time, and what `assign_credit` accepts and refuses."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from tpgrpo_fast import credit as credit_module
from tpgrpo_fast.credit import Credit, CreditConfig, assign_credit

# Trajectories, with d = R_k - R_{k-1} and a = R_n - R_{k-1}.
EARLY = [0, 2, 1, 3, 4]  # d = 2 -1 2 1, a = 4 2 3 1
WAVE = [0, -1, 1, 0.5, 2]  # d = -1 2 -0.5 1.5, a = 2 3 1 1.5
OVERSHOOT = [0, 3, 2, 2.5, 1]  # d = 3 -1 0.5 -1.5, a = 1 -2 -1 -1.5; the counterexample to Lemma C.1
RETURNING = [0, 1, -1, 1]  # d = 1 -2 2, a = 1 0 2


@pytest.fixture(params=["torch", "numba"])
def backend(request):
    return request.param


def negated(trajectory):
    return [-reward for reward in trajectory]


def credit_of(trajectories, backend, groups=None, **config) -> Credit[np.ndarray]:
    rewards = np.array(trajectories, dtype=np.float64)
    groups = np.zeros(len(rewards), dtype=int) if groups is None else groups
    return assign_credit(rewards, groups, CreditConfig(**config), backend=backend)


@pytest.mark.parametrize(
    ("trajectory", "config", "turning", "step_rewards"),
    [
        # Step 1 is consistent (d_1 = 2, R_n - R_1 = 2), and so is step 3, which turns back up (d_3 = 2, R_n - R_3 = 1).
        (EARLY, {}, [1, 0, 1, 0], [4, -1, 3, 1]),
        (EARLY, {"first_step": False}, [0, 0, 1, 0], [2, -1, 3, 1]),
        (EARLY, {"positive_only": True}, [1, 0, 1, 0], [4, -1, 3, 1]),
        (negated(EARLY), {}, [1, 0, 1, 0], [-4, 1, -3, -1]),
        (negated(EARLY), {"positive_only": True}, [1, 0, 0, 0], [-4, 1, -2, -1]),
        # Steps 2 and 4 turn; nothing follows step 4, so it is not consistent; s_1 < 0.
        (WAVE, {}, [0, 1, 0, 0], [-1, 3, -0.5, 1.5]),
        (WAVE, {"consistent": False}, [0, 1, 0, 1], [-1, 3, -0.5, 1.5]),
        (WAVE, {"consistent": False, "turning": "add"}, [0, 1, 0, 1], [-1, 5, -0.5, 3]),
        (WAVE, {"consistent": False, "aggregated": "global"}, [0, 1, 0, 1], [-1, 2, -0.5, 2]),
        (WAVE, {"eta": 0.5}, [0, 1, 0, 0], [-1, 1.5, -0.5, 1.5]),
        (WAVE, {"eta": 0.5, "turning": "add"}, [0, 1, 0, 0], [-1, 3.5, -0.5, 1.5]),
        (WAVE, {"eta": 0.0}, [0, 1, 0, 0], [-1, 2, -0.5, 1.5]),
        # d_3 = -0.5 counts as zero, so step 4 no longer follows a step against the trend.
        (WAVE, {"consistent": False, "sign_eps": 0.5}, [0, 1, 0, 0], [-1, 3, -0.5, 1.5]),
        # R_n - R_2 = 1 counts as zero, so step 2 is no longer consistent.
        (WAVE, {"sign_eps": 1.0}, [0, 0, 0, 0], [-1, 2, -0.5, 1.5]),
        # Step 3 turns towards the global trend while all that follows goes the other way: d_3 > 0 > a_3.
        (OVERSHOOT, {"consistent": False}, [1, 0, 1, 0], [1, -1, -1, -1.5]),
        (OVERSHOOT, {}, [0, 0, 0, 0], [3, -1, 0.5, -1.5]),
        (OVERSHOOT, {"consistent": False, "trend": "remaining"}, [1, 0, 0, 1], [1, -1, 0.5, -1.5]),
        (OVERSHOOT, {"consistent": False, "trend": "any"}, [1, 1, 1, 1], [1, -2, -1, -1.5]),
        (OVERSHOOT, {"trend": "any"}, [0, 1, 0, 0], [3, -2, 0.5, -1.5]),
        (OVERSHOOT, {"consistent": False, "trend": "any", "first_step": False}, [0, 1, 1, 1], [3, -2, -1, -1.5]),
        # a_2 = 0: step 2 is a turning point and keeps d_2.
        (RETURNING, {"consistent": False, "trend": "any"}, [1, 1, 1], [1, -2, 2]),
        (RETURNING, {"consistent": False, "trend": "any", "turning": "add"}, [1, 1, 1], [2, -2, 4]),
        # No trend, no turning points; one step alone is never consistent.
        ([0, 1, 0], {"consistent": False}, [0, 0], [1, -1]),
        ([0, 1, 0], {"consistent": False, "trend": "any", "turning": "add"}, [0, 1], [1, -2]),
        ([0, 1, 0], {"consistent": False, "trend": "any", "positive_only": True}, [0, 0], [1, -1]),
        ([0, 1], {}, [0], [1]),
        ([0, 1], {"consistent": False, "turning": "add"}, [1], [2]),
        (WAVE, {"method": "incremental"}, [0, 0, 0, 0], [-1, 2, -0.5, 1.5]),
    ],
)
def test_turning_points_and_step_rewards(trajectory, config, turning, step_rewards, backend):
    credit = credit_of([trajectory], backend, **config)
    assert credit.turning_points.tolist() == [list(map(bool, turning))]
    assert credit.step_rewards.tolist() == [step_rewards]
    assert credit.incremental.tolist() == [np.diff(trajectory).tolist()]
    assert credit.aggregated.tolist() == [[trajectory[-1] - reward for reward in trajectory[:-1]]]


def ends(*final):
    """One-step trajectories: without the constraint step 1 is a turning point of value R_1 wherever R_1 != 0."""
    return [[0, reward] for reward in final]


@pytest.mark.parametrize(
    ("final", "groups", "scope", "kept"),
    [
        ([3, 1, 2, -1, -5, 0], [0] * 6, "group", [1, 0, 1, 1, 1, 0]),
        ([1, -2, -3, -4], [0] * 4, "group", [1, 0, 0, 1]),
        ([3, 1, 2, -1, -5], [0] * 5, None, [1, 1, 1, 1, 1]),
        # Ties of magnitude: the earlier row.
        ([2, 2, 2, -1], [0] * 4, "group", [1, 0, 0, 1]),
        ([-2, 1, -2, 2, -2], [0] * 5, "batch", [1, 1, 1, 1, 0]),
        # One side empty: all are kept. Group 7 has no negatives, group -4 one.
        ([1, 3, 2, 4, -1], [7, -4, 7, -4, -4], "group", [1, 0, 1, 1, 1]),
        ([1, 3, 2, 4, -1], [7, -4, 7, -4, -4], "batch", [0, 0, 0, 1, 1]),
        ([1, 3, 2], [0] * 3, "batch", [1, 1, 1]),
    ],
)
def test_balance_keeps_the_largest_of_each_sign(final, groups, scope, kept, backend):
    credit = credit_of(ends(*final), backend, groups, consistent=False, balance=scope, turning="add")
    assert credit.turning_points[:, 0].tolist() == list(map(bool, kept))
    assert credit.step_rewards[:, 0].tolist() == [reward * (1 + keep) for reward, keep in zip(final, kept, strict=True)]


@pytest.mark.parametrize(
    ("trajectories", "config", "kept"),
    [
        # Values 1, 0, 2 alone: one side is empty, so the zero stays; against -1, 0, -2 it goes.
        ([RETURNING], {}, [[1, 1, 1]]),
        ([RETURNING, negated(RETURNING)], {}, [[1, 0, 1], [1, 0, 1]]),
        # One negative value, -1. By the aggregated reward step 3 of the first row leads with 2; by R_n - R_0 its three
        # steps tie at 1 and the first comes first.
        ([RETURNING, [0, -1, -1, -1]], {}, [[0, 0, 1], [1, 0, 0]]),
        ([RETURNING, [0, -1, -1, -1]], {"balance_by": "global"}, [[1, 0, 0], [1, 0, 0]]),
        ([RETURNING, [0, -1, -1, -1]], {"aggregated": "global"}, [[1, 0, 0], [1, 0, 0]]),
        # With 1 and smaller as zero the sides are {2} and {}.
        ([RETURNING, [0, -1, -1, -1]], {"balance_by": "aggregated", "sign_eps": 0.99}, [[0, 0, 1], [1, 0, 0]]),
    ],
)
def test_balance_goes_by_the_chosen_value(trajectories, config, kept, backend):
    credit = credit_of(trajectories, backend, consistent=False, trend="any", balance="group", **config)
    assert credit.turning_points.tolist() == [list(map(bool, row)) for row in kept]


def test_the_side_of_a_step_follows_balance_by(backend):
    # Step 3 of OVERSHOOT turns up by the global trend (value 1) and down by its aggregated reward (value -1).
    trajectories, config = [OVERSHOOT, EARLY], {"consistent": False, "balance": "group"}
    by_aggregated = credit_of(trajectories, backend, **config)  # values 1, -1 and 4, 3
    by_global = credit_of(trajectories, backend, balance_by="global", **config)  # values 1, 1 and 4, 4
    assert by_aggregated.turning_points.tolist() == [[False, False, True, False], [True, False, False, False]]
    assert by_global.turning_points.tolist() == [[True, False, True, False], [True, False, True, False]]


def population(values):
    return (values - values.mean(0)) / (values.std(0) + 1e-4)


def test_advantages_are_normalised_within_the_group(backend):
    rewards = np.random.default_rng(0).normal(size=(9, 5))
    groups = np.array([4, -1, 4, 4, -1, 7, -1, 4, 4])
    credit = assign_credit(rewards, groups, backend=backend)
    for group in (4, -1):
        members = groups == group
        np.testing.assert_allclose(credit.advantages[members], population(credit.step_rewards[members]), atol=1e-12)
    assert credit.advantages[5].tolist() == [0, 0, 0, 0]  # alone in its group


def test_batch_std_takes_the_group_mean_and_the_batch_std(backend):
    rewards = np.random.default_rng(1).normal(size=(6, 4)) + np.arange(6)[:, None]
    groups = np.array([0, 0, 0, 1, 1, 1])
    credit = assign_credit(rewards, groups, CreditConfig(normalize="batch_std", std_eps=0.01), backend=backend)
    values = credit.step_rewards
    means = np.repeat([values[:3].mean(0), values[3:].mean(0)], 3, axis=0)
    np.testing.assert_allclose(credit.advantages, (values - means) / (values.std(0) + 0.01), atol=1e-12)


def test_without_normalisation_advantages_are_the_step_rewards(backend):
    credit = credit_of([EARLY, WAVE], backend, normalize="none")
    assert credit.advantages.tolist() == credit.step_rewards.tolist()


def test_step_weights_scale_the_advantages_alone(backend):
    plain = credit_of([EARLY, WAVE], backend)
    weighted = credit_of([EARLY, WAVE], backend, step_weights=[0, 0.5, 1, 2])
    np.testing.assert_allclose(weighted.advantages, plain.advantages * [0, 0.5, 1, 2], rtol=1e-15)
    assert weighted.step_rewards.tolist() == plain.step_rewards.tolist()


@pytest.mark.parametrize("std_eps", [1e-4, 0.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(std_eps, dtype, backend):
    rewards = np.tile(np.array([0.1, 0.3, 0.2, 0.7], dtype=dtype), (7, 1))
    for normalize in ("group", "batch_std"):
        config = CreditConfig(normalize=normalize, std_eps=std_eps)
        credit = assign_credit(rewards, np.zeros(7, int), config, backend=backend)
        assert credit.advantages.tolist() == [[0, 0, 0]] * 7


def test_outcome_spreads_the_final_reward(backend):
    config = CreditConfig(method="outcome", step_weights=[1, 1, 2])
    final = np.array([[1.0], [3.0], [2.0], [2.0]])
    credit = assign_credit(final, [0, 0, 1, 1], config, num_steps=3, backend=backend)
    unit = 1 / (1 + 1e-4)
    np.testing.assert_allclose(credit.advantages, np.outer([-unit, unit, 0, 0], [1, 1, 2]), rtol=1e-15)
    assert credit.step_rewards.tolist() == [[1] * 3, [3] * 3, [2] * 3, [2] * 3]
    assert not credit.turning_points.any()

    # The other columns are not read, not even for NaN.
    full = np.concatenate([np.full((4, 3), np.nan), final], axis=1)
    assert assign_credit(full, [0, 0, 1, 1], config, backend=backend).advantages.tolist() == credit.advantages.tolist()
    by_states = assign_credit(final, [0, 0, 1, 1], config, states=(0, 3), backend=backend)
    assert by_states.advantages.tolist() == credit.advantages.tolist()


def test_states_make_blocks_with_undivided_values(backend):
    states, block_of_step = (0, 2, 3, 5, 6), [0, 0, 1, 2, 2, 3]
    rewards = np.array([WAVE, EARLY])
    blocks = assign_credit(rewards, [0, 0], CreditConfig(balance="group"), backend=backend)
    steps = assign_credit(rewards, [0, 0], CreditConfig(balance="group"), states=states, num_steps=6, backend=backend)
    assert steps.step_rewards[0].tolist() == [-1, -1, 3, -0.5, -0.5, 1.5]
    assert steps.turning_points[0].tolist() == [False, False, True, False, False, False]
    for name in ("step_rewards", "turning_points", "incremental", "aggregated", "advantages"):
        assert getattr(steps, name).tolist() == getattr(blocks, name)[:, block_of_step].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_rows_are_left_out_of_everything(bad, backend):
    rng = np.random.default_rng(2)
    rewards, groups = rng.integers(-3, 4, size=(10, 6)).astype(float), np.arange(10) % 2
    rewards[3, 2] = rewards[8, 0] = rewards[8, 5] = bad
    kept = [0, 1, 2, 4, 5, 6, 7, 9]
    for balance, normalize in (("group", "group"), ("batch", "batch_std")):
        choice = {"balance": balance, "normalize": normalize, "consistent": False}
        config = CreditConfig(drop_nonfinite=True, **choice)
        credit = assign_credit(rewards, groups, config, backend=backend)
        alone = assign_credit(rewards[kept], groups[kept], CreditConfig(**choice), backend=backend)
        assert (credit.dropped, credit.dropped_rows.tolist()) == (2, [3, 8])
        for name in ("step_rewards", "turning_points", "incremental", "aggregated", "advantages"):
            assert getattr(credit, name)[kept].tolist() == getattr(alone, name).tolist()
            assert not getattr(credit, name)[[3, 8]].any()


def test_all_rows_dropped(backend):
    config = CreditConfig(drop_nonfinite=True, balance="batch", normalize="batch_std")
    credit = assign_credit(np.full((3, 4), np.nan), [0, 0, 1], config, backend=backend)
    assert credit.dropped == 3
    assert credit.advantages.tolist() == [[0, 0, 0]] * 3


def test_the_first_bad_reward_is_named_in_row_major_order(backend):
    rewards = torch.zeros(4, 5)
    rewards[3, 0] = rewards[2, 4] = rewards[2, 3] = float("nan")
    with pytest.raises(ValueError, match=r"rewards\[2, 3\] is nan .*row 2, column 3.*credit.drop_nonfinite=True"):
        assign_credit(rewards, [0] * 4, backend=backend)
    with pytest.raises(ValueError, match=r"rewards\[2, 4\] is nan"):
        assign_credit(rewards, [0] * 4, CreditConfig(method="outcome"), backend=backend)


@pytest.mark.parametrize("balance", [None, "group", "batch"])
@pytest.mark.parametrize("normalize", ["group", "batch_std", "none"])
def test_no_rows(balance, normalize, backend):
    config = CreditConfig(balance=balance, normalize=normalize)
    credit = assign_credit(torch.zeros(0, 5), [], config, backend=backend)
    for name in ("step_rewards", "turning_points", "incremental", "aggregated", "advantages"):
        assert getattr(credit, name).shape == (0, 4)
    assert credit.dropped == 0
    outcome = CreditConfig(method="outcome", normalize=normalize)
    assert assign_credit(np.zeros((0, 1)), [], outcome, num_steps=4, backend=backend).advantages.shape == (0, 4)


@pytest.mark.parametrize(
    ("given", "computed"),
    [("float64", "float64"), ("float32", "float32"), ("float16", "float32"), ("int64", "float32")],
)
def test_kind_and_dtype_come_back(given, computed, backend):
    table = np.array([EARLY, negated(EARLY)]).astype(given)
    for rewards, kind in ((table, np.ndarray), (torch.from_numpy(table), torch.Tensor)):
        for groups in ([0, 0], np.zeros(2, np.int32), torch.zeros(2, dtype=torch.uint8)):
            credit = assign_credit(rewards, groups, backend=backend)
            for name in ("step_rewards", "incremental", "aggregated", "advantages"):
                assert isinstance(getattr(credit, name), kind)
                assert str(getattr(credit, name).dtype).removeprefix("torch.") == computed
            assert isinstance(credit.turning_points, kind)
            assert str(credit.turning_points.dtype).removeprefix("torch.") == "bool"
            assert str(credit.dropped_rows.dtype).removeprefix("torch.") == "int64"


def test_bfloat16_is_computed_in_float32(backend):
    rewards = torch.tensor([EARLY, WAVE], dtype=torch.bfloat16)
    credit = assign_credit(rewards, [0, 0], backend=backend)
    assert credit.advantages.dtype == torch.float32
    assert torch.equal(credit.advantages, assign_credit(rewards.float(), [0, 0], backend=backend).advantages)


def test_rewards_are_not_changed_and_carry_no_gradient(backend):
    rewards = torch.randn(4, 4, requires_grad=True)
    before = rewards.detach().clone()
    credit = assign_credit(rewards.T, [0] * 4, CreditConfig(balance="group"), backend=backend)  # not contiguous
    assert torch.equal(rewards, before)
    assert not credit.advantages.requires_grad

    frozen = np.array([EARLY, WAVE])
    frozen.flags.writeable = False
    credit_numpy = assign_credit(frozen[::-1], [0, 0], backend=backend)
    assert not np.shares_memory(credit_numpy.step_rewards, frozen)


@pytest.mark.gpu
def test_cuda_equals_cpu():
    rewards, groups = torch.randint(-3, 4, (96, 9)).float(), torch.arange(96) % 4
    config = CreditConfig(consistent=False, trend="remaining", balance="group")
    on_cpu, on_gpu = assign_credit(rewards, groups, config), assign_credit(rewards.cuda(), groups, config)
    assert on_gpu.advantages.is_cuda
    assert torch.equal(on_cpu.turning_points, on_gpu.turning_points.cpu())
    assert torch.equal(on_cpu.step_rewards, on_gpu.step_rewards.cpu())
    torch.testing.assert_close(on_cpu.advantages, on_gpu.advantages.cpu(), rtol=1e-6, atol=1e-6)


def test_the_example_of_the_docstring():
    rewards = torch.tensor([[0, 2, 1, 3], [1, 1, 1, 1], [0, -1, 0, 1.0]])
    credit = assign_credit(rewards, [0, 0, 0])
    assert credit.step_rewards.tolist() == [[3, -1, 2], [0, 0, 0], [-1, 2, 1]]
    assert credit.turning_points.tolist() == [[True, False, False], [False] * 3, [False, True, False]]
    expected = [[1.3727, -1.0690, 1.2246], [-0.3922, -0.2672, -1.2246], [-0.9805, 1.3362, 0.0]]
    torch.testing.assert_close(credit.advantages, torch.tensor(expected), atol=6e-5, rtol=0)
    text = " ".join(Credit.__doc__.split())
    for field in (credit.step_rewards, credit.turning_points, credit.incremental, credit.aggregated):
        assert str((field.int() if field.dtype != torch.bool else field).tolist()) in text
    assert str(expected) in text


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("method", "turning", "'turning_point', 'incremental', 'outcome'"),
        ("trend", None, "'global', 'remaining', 'any'"),
        ("turning", "sum", "'replace', 'add'"),
        ("aggregated", "state", "'from_state', 'global'"),
        ("balance", "prompt", "None, 'group', 'batch'"),
        ("balance_by", ["global"], "'aggregated', 'global'"),
        ("normalize", "std", "'group', 'batch_std', 'none'"),
        ("consistent", 1, "True or False"),
        ("first_step", "yes", "True or False"),
        ("positive_only", None, "True or False"),
        ("drop_nonfinite", 0, "True or False"),
        ("eta", float("inf"), "a finite number"),
        ("eta", "1", "a finite number"),
        ("sign_eps", -1e-9, "a finite number >= 0"),
        ("std_eps", -1.0, "a finite number >= 0"),
        ("std_eps", float("nan"), "a finite number >= 0"),
        ("step_weights", [1.0, float("nan")], "one finite number per step"),
        ("step_weights", 2.0, "one finite number per step"),
        ("step_weights", "12", "one finite number per step"),
    ],
)
def test_config_refuses(field, value, allowed):
    with pytest.raises(ValueError, match=rf"^credit\.{field}=.*must be") as error:
        CreditConfig(**{field: value})
    assert repr(value) in str(error.value)
    assert allowed in str(error.value)


def test_config_is_a_value():
    config = CreditConfig(step_weights=[1, 2])
    assert config == CreditConfig(step_weights=(1.0, 2.0))
    assert hash(config) == hash(CreditConfig(step_weights=np.array([1, 2])))


@pytest.mark.parametrize(
    ("rewards", "groups", "kwargs", "error", "message"),
    [
        ([[0.0, 1.0]], [0], {}, TypeError, "torch tensor or a numpy array, got list"),
        (np.zeros((2, 3), complex), [0, 0], {}, TypeError, "real numbers, got dtype complex128"),
        (torch.zeros(2, 3, dtype=torch.complex64), [0, 0], {}, TypeError, "real numbers"),
        (np.array([["a", "b"]]), [0], {}, TypeError, "real numbers"),
        (torch.zeros(3), [0] * 3, {}, ValueError, r"\[N, n \+ 1\].*got shape \(3,\)"),
        (torch.zeros(3, 0), [0] * 3, {}, ValueError, r"got shape \(3, 0\)"),
        (torch.zeros(3, 4), [0, 0], {}, ValueError, r"one entry per row.*\(3,\), got \(2,\)"),
        (torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int64), {}, ValueError, r"got \(3, 1\)"),
        (torch.zeros(3, 4), [0.0, 1.0, 2.0], {}, TypeError, "integers.*float64"),
        (torch.zeros(3, 4), torch.zeros(3), {}, TypeError, "integers.*float32"),
        (torch.zeros(3, 4), [True, False, True], {}, TypeError, "integers.*bool"),
        (torch.zeros(3, 1), [0] * 3, {"num_steps": 4}, ValueError, "method='turning_point' needs.*'outcome'"),
        (torch.zeros(3, 5), [0] * 3, {"num_steps": 5}, ValueError, r"num_steps=5: .*\(0, 1, 2, 3, 4\) make 4 steps"),
        (torch.zeros(3, 5), [0] * 3, {"num_steps": 0}, ValueError, "num_steps=0: must be an integer >= 1"),
        (torch.zeros(3, 3), [0] * 3, {"states": (0, 2)}, ValueError, "names 2 states, rewards have 3 columns"),
        (torch.zeros(3, 3), [0] * 3, {"states": (1, 2, 4)}, ValueError, "ascending from 0 to n"),
        (torch.zeros(3, 3), [0] * 3, {"states": (0, 4, 2)}, ValueError, "ascending from 0 to n"),
        (torch.zeros(3, 3), [0] * 3, {"states": (0, 1.5, 2)}, ValueError, "integers"),
        (
            torch.zeros(3, 3),
            [0] * 3,
            {"backend": "cuda"},
            ValueError,
            "'cuda' is not available.*'torch', 'numba' or 'triton'",
        ),
        (torch.zeros(3, 3, device="meta"), [0] * 3, {"backend": "numba"}, ValueError, "CPU tensors.*meta"),
        (torch.zeros(3, 3), [0] * 3, {"config": CreditConfig(step_weights=[1])}, ValueError, "1 entries.*2 steps"),
        (torch.zeros(3, 1), [0] * 3, {"config": CreditConfig(method="outcome")}, ValueError, "pass num_steps=n"),
    ],
)
def test_assign_credit_refuses(rewards, groups, kwargs, error, message):
    with pytest.raises(error, match=message):
        assign_credit(rewards, groups, **kwargs)


# ---------------------------------------------------------------------------------------------------------- backends


def test_importing_credit_does_not_import_numba():
    code = "import sys, tpgrpo_fast.credit; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def hide_numba(monkeypatch):
    import tpgrpo_fast

    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "tpgrpo_fast.credit_numba", raising=False)
    monkeypatch.delattr(tpgrpo_fast, "credit_numba", raising=False)


def test_missing_numba_is_an_error_only_when_named(monkeypatch):
    hide_numba(monkeypatch)
    monkeypatch.setattr(credit_module, "NUMBA_MIN_REWARDS", 0)
    with pytest.raises(RuntimeError, match="pip install numba"):
        credit_of([EARLY], "numba")
    assert credit_of([EARLY], "auto").step_rewards.tolist() == [[4, -1, 3, 1]]


def test_auto_takes_numba_for_large_tables_only():
    small, large = torch.zeros(4, 4), torch.zeros(1, 1).expand(credit_module.NUMBA_MIN_REWARDS, 1)
    assert credit_module._backend("auto", small) is credit_module.TORCH
    assert credit_module._backend("auto", large) is credit_module._backend("numba", large)
    assert credit_module._backend("auto", large.to("meta")) is credit_module.TORCH
