"""Credit against the definitions in exact arithmetic, its lemmas and invariances, and backend against backend."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpgrpo_fast.credit import CreditConfig, assign_credit

FIELDS = ("step_rewards", "turning_points", "incremental", "aggregated", "advantages")
BACKENDS = ("torch", "numba")


# ------------------------------------------------------------------------------- the definitions, in exact arithmetic


def sign(x, eps=0):
    return 0 if abs(x) <= eps else (1 if x > 0 else -1)


def is_turning_point(rewards, k, config):
    """Def. 4.1 or 5.1 for k >= 2, Remark 5.2 for k = 1, of one trajectory R_0 … R_n."""
    n, eps = len(rewards) - 1, config.sign_eps

    def d(j):
        return sign(rewards[j] - rewards[j - 1], eps)

    def s(j):
        start = j - 1 if config.trend == "remaining" else 0
        return d(j) * sign(rewards[n] - rewards[start], eps)

    consistent = d(k) != 0 and d(k) == sign(rewards[n] - rewards[k], eps)
    if k == 1:
        return config.first_step and (consistent if config.consistent else s(1) > 0)
    turns = d(k - 1) * d(k) < 0 if config.trend == "any" else s(k - 1) < 0 and s(k) > 0
    if config.positive_only and sign(rewards[n] - rewards[0], eps) <= 0:
        return False
    return turns and (consistent or not config.consistent)


def balanced(candidates, value, eps):
    """App. D among the candidates [(row, k), …] of one scope, in row-major order."""
    positive = [place for place in candidates if sign(value[place], eps) > 0]
    negative = [place for place in candidates if sign(value[place], eps) < 0]
    count = min(len(positive), len(negative))
    if count == 0:
        return set(candidates)
    kept = set()
    for side in (positive, negative):
        kept.update(sorted(side, key=lambda place: (-abs(value[place]), place))[:count])
    return kept


def exact_credit(table, groups, config):
    """(turning points, step rewards, advantages) as nested lists, from rewards that are Fractions."""
    rows, n = range(len(table)), len(table[0]) - 1
    places = [(row, k) for row in rows for k in range(1, n + 1)]
    total = {(row, k): table[row][n] - table[row][0] for row, k in places}
    from_state = {(row, k): table[row][n] - table[row][k - 1] for row, k in places}
    bonus = from_state if config.aggregated == "from_state" else total

    turning = {place for place in places if is_turning_point(table[place[0]], place[1], config)}
    if config.balance is not None:
        value = bonus if config.balance_by == "aggregated" else total
        scope = {row: groups[row] if config.balance == "group" else 0 for row in rows}
        turning = set().union(
            *(
                balanced(
                    [place for place in places if place in turning and scope[place[0]] == one], value, config.sign_eps
                )
                for one in set(scope.values())
            )
        )

    reward = {}
    for row, k in places:
        d, a = table[row][k] - table[row][k - 1], Fraction(config.eta) * bonus[row, k]
        kept = (row, k) in turning and a != 0
        reward[row, k] = d if not kept else (a if config.turning == "replace" else d + a)

    def mean(values):
        return sum(values, Fraction(0)) / len(values)

    def std(values):
        return math.sqrt(mean([(x - mean(values)) ** 2 for x in values]))

    advantage = {}
    for row, k in places:
        group = [reward[other, k] for other in rows if groups[other] == groups[row]]
        spread = std(group if config.normalize == "group" else [reward[other, k] for other in rows])
        advantage[row, k] = float(reward[row, k] - mean(group)) / (spread + config.std_eps)
        if config.normalize == "none":
            advantage[row, k] = float(reward[row, k])

    def nested(of):
        return [[of(row, k) for k in range(1, n + 1)] for row in rows]

    return (
        nested(lambda row, k: (row, k) in turning),
        nested(lambda row, k: float(reward[row, k])),
        nested(lambda row, k: advantage[row, k]),
    )


# Quarters in a small range: ties, zeros and binary rewards are common, and float64 is exact.
quarters = st.integers(-6, 6).map(lambda quarter: Fraction(quarter, 4))
levels = st.one_of(quarters, st.sampled_from([Fraction(0), Fraction(1)]))


@st.composite
def batches(draw, max_rows=7, max_steps=6):
    n = draw(st.integers(1, max_steps))
    kind = draw(st.sampled_from([quarters, st.sampled_from([Fraction(0), Fraction(1)])]))
    table = draw(st.lists(st.lists(kind, min_size=n + 1, max_size=n + 1), min_size=1, max_size=max_rows))
    groups = draw(st.lists(st.sampled_from([-5, 0, 1 << 40]), min_size=len(table), max_size=len(table)))
    return table, groups


configs = st.builds(
    CreditConfig,
    consistent=st.booleans(),
    first_step=st.booleans(),
    trend=st.sampled_from(["global", "remaining", "any"]),
    positive_only=st.booleans(),
    turning=st.sampled_from(["replace", "add"]),
    aggregated=st.sampled_from(["from_state", "global"]),
    balance=st.sampled_from([None, "group", "batch"]),
    balance_by=st.sampled_from(["aggregated", "global"]),
    eta=st.sampled_from([1.0, 0.5, 0.0, -2.0]),
    sign_eps=st.sampled_from([0.0, 0.25, 0.3]),
    normalize=st.sampled_from(["group", "batch_std", "none"]),
)
trajectories = st.lists(levels, min_size=2, max_size=9)
properties = settings(max_examples=60)


def floats(table):
    return np.array(table, dtype=np.float64)


@pytest.mark.parametrize("backend", BACKENDS)
@given(batch=batches(), config=configs)
@properties
def test_credit_is_what_the_definitions_say(backend, batch, config):
    table, groups = batch
    credit = assign_credit(floats(table), groups, config, backend=backend)
    turning, step_rewards, advantages = exact_credit(table, groups, config)
    assert credit.turning_points.tolist() == turning
    assert credit.step_rewards.tolist() == step_rewards
    np.testing.assert_allclose(credit.advantages, advantages, rtol=1e-11, atol=1e-11)


# ------------------------------------------------------------------------------------------------------------- lemmas


def turning_points(trajectory, **config):
    """The turning points k >= 2 of a trajectory, with (d_k, a_k) of each."""
    n = len(trajectory) - 1
    found = assign_credit(floats([trajectory]), [0], CreditConfig(**config)).turning_points[0]
    return [
        (k, trajectory[k] - trajectory[k - 1], trajectory[n] - trajectory[k - 1])
        for k in range(1, n + 1)
        if found[k - 1]
    ]


@given(trajectory=trajectories)
@properties
def test_lemma_c1_equal_signs_under_the_remaining_trend(trajectory):
    for _, d, a in turning_points(trajectory, consistent=False, trend="remaining"):
        assert sign(d) == sign(a) != 0


def test_lemma_c1_fails_under_the_global_trend():
    trajectory = [Fraction(reward) for reward in ("0", "3", "2", "5/2", "1")]
    assert turning_points(trajectory, consistent=False, first_step=False) == [(3, Fraction(1, 2), -1)]
    assert turning_points(trajectory, consistent=True) == []


@given(trajectory=trajectories, trend=st.sampled_from(["global", "remaining", "any"]))
@properties
def test_lemmas_c2_c3_consistent_turning_points_have_larger_aggregated_rewards_of_the_same_sign(trajectory, trend):
    for _, d, a in turning_points(trajectory, consistent=True, trend=trend):
        assert sign(d) == sign(a) != 0
        assert abs(a) > abs(d)


@given(trajectory=trajectories)
@properties
def test_the_constraint_only_removes_turning_points(trajectory):
    constrained = {k for k, _, _ in turning_points(trajectory, consistent=True)}
    assert constrained <= {k for k, _, _ in turning_points(trajectory, consistent=False)}


@given(
    trajectory=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=9),
    trend=st.sampled_from(["global", "remaining", "any"]),
)
@properties
def test_lemmas_c2_c3_in_floats(trajectory, trend):
    rewards = np.array([trajectory], dtype=np.float32)
    credit = assign_credit(rewards, [0], CreditConfig(trend=trend))
    d, a = credit.incremental[credit.turning_points], credit.aggregated[credit.turning_points]
    assert (np.sign(d) == np.sign(a)).all()
    assert (abs(a) >= abs(d)).all()


# -------------------------------------------------------------------------------------------------------- invariances
# What holds for the torch reference holds for numba: the last test finds them equal bit for bit.


@given(batch=batches(), config=configs, data=st.data())
@properties
def test_group_ids_are_names_and_nothing_else(batch, config, data):
    table, groups = batch
    names = dict(zip((-5, 0, 1 << 40), data.draw(st.permutations([3, -1, 77])), strict=True))
    renamed = [names[group] for group in groups]
    one = assign_credit(floats(table), groups, config)
    other = assign_credit(floats(table), renamed, config)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("balance", [None, "group", "batch"])
def test_row_order_does_not_matter(balance, backend):
    rng = np.random.default_rng(3)
    rewards, groups = rng.normal(size=(30, 7)), np.arange(30) % 4  # distinct magnitudes: no ties
    for normalize, consistent in itertools.product(("group", "batch_std", "none"), (True, False)):
        config = CreditConfig(balance=balance, normalize=normalize, consistent=consistent)
        order = rng.permutation(30)
        plain = assign_credit(rewards, groups, config, backend=backend)
        permuted = assign_credit(rewards[order], groups[order], config, backend=backend)
        np.testing.assert_array_equal(permuted.turning_points, plain.turning_points[order])
        np.testing.assert_array_equal(permuted.step_rewards, plain.step_rewards[order])
        np.testing.assert_allclose(permuted.advantages, plain.advantages[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("balance", [None, "group"])
def test_a_group_has_the_same_bits_alone_and_among_others(balance, dtype, backend):
    rng = np.random.default_rng(4)
    groups = rng.permutation(np.repeat([5, -2, 9, 0], [24, 1, 7, 100]))
    rewards = rng.normal(size=(len(groups), 9)).astype(dtype)
    config = CreditConfig(balance=balance, consistent=False)
    together = assign_credit(rewards, groups, config, backend=backend)
    for group in (5, -2, 9, 0):
        members = groups == group
        alone = assign_credit(rewards[members], groups[members], config, backend=backend)
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(alone, field), getattr(together, field)[members])


@given(batch=batches(), config=configs, offset=st.integers(-8, 8))
@properties
def test_a_constant_added_to_a_trajectory_changes_nothing(batch, config, offset):
    table, groups = batch
    shifts = np.arange(len(table))[:, None] * 0.5 + offset  # another one for each row; all sums are exact
    one = assign_credit(floats(table), groups, config)
    other = assign_credit(floats(table) + shifts, groups, config)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


@given(batch=batches(), config=configs, log2=st.integers(-4, 4))
@properties
def test_a_positive_factor_scales_rewards_and_flips_nothing(batch, config, log2):
    table, groups = batch
    factor = 2.0**log2
    scaled = CreditConfig(
        **{name: getattr(config, name) for name in config.__slots__}
        | {"sign_eps": config.sign_eps * factor, "std_eps": config.std_eps * factor}
    )
    one = assign_credit(floats(table), groups, config)
    other = assign_credit(floats(table) * factor, groups, scaled)
    np.testing.assert_array_equal(other.turning_points, one.turning_points)
    np.testing.assert_array_equal(other.step_rewards, one.step_rewards * factor)
    weight = factor if config.normalize == "none" else 1
    np.testing.assert_allclose(other.advantages, one.advantages * weight, rtol=1e-12, atol=1e-12)


@given(batch=batches(), config=configs)
@properties
def test_negated_rewards_mirror_the_credit(batch, config):
    table, groups = batch
    mirrored = CreditConfig(**{name: getattr(config, name) for name in config.__slots__} | {"positive_only": False})
    one = assign_credit(floats(table), groups, mirrored)
    other = assign_credit(-floats(table), groups, mirrored)
    np.testing.assert_array_equal(other.turning_points, one.turning_points)
    np.testing.assert_array_equal(other.step_rewards, -one.step_rewards)
    np.testing.assert_allclose(other.advantages, -one.advantages, rtol=1e-12, atol=1e-12)


@given(batch=batches(), config=configs)
@properties
def test_balancing_evens_the_sides(batch, config):
    table, groups = batch
    credit = assign_credit(floats(table), groups, config)
    if config.balance is None:
        return
    steps = credit.turning_points.shape[1]
    total = np.repeat(credit.aggregated[:, :1], steps, axis=1)
    by_state = config.balance_by == "aggregated" and config.aggregated == "from_state"
    value = credit.aggregated if by_state else total
    scopes = np.array(groups) if config.balance == "group" else np.zeros(len(groups), int)
    for scope in set(scopes.tolist()):
        kept = value[scopes == scope][credit.turning_points[scopes == scope]]
        positive, negative = (kept > config.sign_eps).sum(), (kept < -config.sign_eps).sum()
        assert positive == negative or 0 in (positive, negative)


# ----------------------------------------------------------------------------------------------------------- backends


def test_numba_equals_torch_bit_for_bit_in_every_configuration():
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randint(-9, 10, (18, 6), generator=generator, dtype=torch.float64)
    kinds = [torch.randn(18, 6, generator=generator, dtype=torch.float64), coarse > 0, coarse % 3 / 3, coarse / 10]
    rewards = torch.cat(kinds)
    groups = torch.randint(0, 7, (len(rewards),), generator=generator)
    choices = {
        "consistent": (True, False),
        "first_step": (True, False),
        "trend": ("global", "remaining", "any"),
        "positive_only": (True, False),
        "scope": ((None, "aggregated"), *itertools.product(("group", "batch"), ("aggregated", "global"))),
        "sign_eps": (0.0, 0.1),
    }
    # What comes after the turning points varies along with them.
    later = itertools.cycle(
        [
            {"normalize": "group", "aggregated": "from_state"},
            {"normalize": "batch_std", "aggregated": "from_state", "eta": 0.3, "turning": "add"},
            {"normalize": "group", "aggregated": "global", "std_eps": 0.0, "turning": "add"},
            {"normalize": "batch_std", "aggregated": "global", "step_weights": (1.0, 0.3, 0.0, 2.0, 1.1)},
            {"normalize": "none", "aggregated": "global", "eta": 0.3},
            {"normalize": "group", "aggregated": "from_state", "eta": -0.7},
            {"normalize": "batch_std", "aggregated": "from_state", "std_eps": 0.0},
        ]
    )
    dtypes = itertools.cycle([torch.float32, torch.float64, torch.float32])
    for chosen in itertools.product(*choices.values()):
        fields = dict(zip(choices, chosen, strict=True))
        balance, balance_by = fields.pop("scope")
        config = CreditConfig(balance=balance, balance_by=balance_by, **fields, **next(later))
        table = rewards.to(next(dtypes))
        one = assign_credit(table, groups, config, backend="torch")
        other = assign_credit(table, groups, config, backend="numba")
        for field in FIELDS:
            assert torch.equal(getattr(one, field), getattr(other, field)), (field, config)
