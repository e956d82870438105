"""Sampler steps as affine Gaussian transitions: formulas, identities, and accuracy on Gaussian data.

With x = (1 - sigma) x0 + sigma eps and the exact velocity v = eps - x0, a transition's mean is A x0 + B eps with

    A = a (1 - sigma) - b,      B = a sigma + b,

and a step that keeps the marginals has A = 1 - sigma' and B^2 + c^2 = sigma'^2.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpgrpo_fast import ops, transitions
from tpgrpo_fast.transitions import concat, make

GRID = [1.0, 0.9, 0.75, 0.5, 0.2, 0.01, 0.0]
STEPS = range(len(GRID) - 1)
NOISY = ("sde", "cps", "dance", "dance_euler")

sigma_pairs = st.tuples(st.floats(0.01, 0.999), st.floats(0.0, 0.998)).filter(lambda pair: pair[1] < pair[0] - 1e-4)
noise_levels = st.floats(0.0, 1.0)
repeatable = settings(derandomize=True, deadline=None)


def flat(transition):
    return transition.a, transition.b, transition.c, transition.std_dev_t


def exact(values):
    return pytest.approx(values, rel=1e-12, abs=1e-14)


# --- formulas -------------------------------------------------------------------------------------------------------


def mean_and_std_from_the_definition(kind, sigma, sigma_next, noise_level, x, v, *, sigma_hat):
    """Each sampler from its own story: predicted image and noise (cps), reverse-time SDE with the score (the rest)."""
    dt = sigma_next - sigma
    image, noise = x - sigma * v, x + (1 - sigma) * v
    if kind == "cps":
        angle = noise_level * math.pi / 2
        return (1 - sigma_next) * image + sigma_next * math.cos(angle) * noise, sigma_next * math.sin(angle)
    diffusion = {"ode": 0.0, "sde": noise_level * math.sqrt(sigma / (1 - sigma_hat))}.get(kind, noise_level)
    score = -(x - (1 - sigma) * image) / sigma**2
    correction = 0.0 if kind == "dance_euler" else 0.5 * diffusion**2 * score
    return x + (v - correction) * dt, diffusion * math.sqrt(-dt)


@pytest.mark.parametrize("kind", ["ode", *NOISY])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("noise_level", [0.0, 0.3, 0.8, 1.0])
def test_formulas(kind, step, noise_level):
    transition = make(kind, GRID, step, noise_level)
    sigma_hat = GRID[1] if GRID[step] == 1.0 else GRID[step]
    for x, v in ((1.0, 0.0), (0.0, 1.0), (-0.7, 1.9)):
        mean, std = mean_and_std_from_the_definition(
            kind, GRID[step], GRID[step + 1], noise_level, x, v, sigma_hat=sigma_hat
        )
        assert transition.a * x + transition.b * v == pytest.approx(mean, rel=1e-10, abs=1e-10)
        assert transition.c == exact(std)


@pytest.mark.parametrize("step", STEPS)
def test_std_dev_t_is_flow_grpo_s(step):
    dt = GRID[step + 1] - GRID[step]
    sde = make("sde", GRID, step, 0.7)
    assert sde.c == exact(sde.std_dev_t * math.sqrt(-dt))
    for kind in ("cps", "dance", "dance_euler"):
        transition = make(kind, GRID, step, 0.7)
        assert transition.std_dev_t == transition.c


def test_sde_replaces_sigma_only_where_it_is_one():
    grid = [0.999, 0.9, 0.0]
    assert make("sde", grid, 0, 0.7).std_dev_t == exact(0.7 * math.sqrt(0.999 / 0.001))
    assert make("sde", [1.0, *grid[1:]], 0, 0.7).std_dev_t == exact(0.7 * math.sqrt(1 / 0.1))
    assert all(map(math.isfinite, flat(make("sde", [1.0, 0.0], 0, 0.7))))


def test_cps_has_no_noise_in_the_last_step_and_only_noise_at_level_one():
    assert make("cps", GRID, 5, 0.8).c == 0.0
    full = make("cps", GRID, 2, 1.0)
    sigma, sigma_next = GRID[2], GRID[3]
    assert full.c == exact(sigma_next)
    # All noise is redrawn: the mean is the predicted image alone.
    assert (full.a, full.b) == exact((1 - sigma_next, -sigma * (1 - sigma_next)))


# --- identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOISY)
@repeatable
@given(pair=sigma_pairs)
def test_without_noise_every_sampler_is_euler(kind, pair):
    transition = make(kind, pair, 0, 0.0)
    assert (transition.a, transition.b) == exact((1.0, pair[1] - pair[0]))
    assert transition.c == transition.std_dev_t == 0.0
    assert not transition.has_noise(3).any()


@pytest.mark.parametrize("kind", ["ode", *NOISY])
@repeatable
@given(pair=sigma_pairs, noise_level=noise_levels)
def test_the_image_keeps_its_share(kind, pair, noise_level):
    """A = 1 - sigma', at any noise level: a known image is carried along exactly."""
    sigma, sigma_next = pair
    transition = make(kind, pair, 0, noise_level)
    share = transition.a * (1 - sigma) - transition.b
    assert share == pytest.approx(1 - sigma_next, rel=1e-9, abs=1e-9)


@repeatable
@given(pair=sigma_pairs, noise_level=noise_levels)
def test_cps_keeps_the_noise_level_exactly(pair, noise_level):
    sigma, sigma_next = pair
    transition = make("cps", pair, 0, noise_level)
    kept = transition.a * sigma + transition.b
    assert kept**2 + transition.c**2 == pytest.approx(sigma_next**2, rel=1e-9, abs=1e-12)
    assert kept >= -1e-12


@pytest.mark.parametrize("kind", ["sde", "dance"])
@repeatable
@given(pair=sigma_pairs, noise_level=noise_levels)
def test_sde_and_dance_keep_the_noise_level_to_first_order(kind, pair, noise_level):
    """B = sigma' + s^2 dt / (2 sigma), so B^2 + c^2 exceeds sigma'^2 by s^2 dt^2 / sigma + (s^2 dt / (2 sigma))^2."""
    sigma, sigma_next = pair
    dt = sigma_next - sigma
    transition = make(kind, pair, 0, noise_level)
    s = transition.std_dev_t if kind == "sde" else noise_level
    kept = transition.a * sigma + transition.b
    excess = s**2 * dt**2 / sigma + (s**2 * dt / (2 * sigma)) ** 2
    assert kept**2 + transition.c**2 == pytest.approx(sigma_next**2 + excess, rel=1e-9, abs=1e-9)


@repeatable
@given(pair=sigma_pairs, noise_level=noise_levels)
def test_sde_is_dance_with_flow_grpo_s_as_eta(pair, noise_level):
    sde = make("sde", pair, 0, noise_level)
    dance = make("dance", pair, 0, sde.std_dev_t)
    assert (sde.a, sde.b, sde.c) == pytest.approx((dance.a, dance.b, dance.c), rel=1e-9, abs=1e-9)


@repeatable
@given(pair=sigma_pairs, eta=noise_levels)
def test_dance_euler_differs_from_dance_in_the_drift_alone(pair, eta):
    plain, full, euler = make("dance_euler", pair, 0, eta), make("dance", pair, 0, eta), make("ode", pair, 0, 0.0)
    assert (plain.a, plain.b) == (euler.a, euler.b)
    assert plain.c == full.c


@repeatable
@given(sigma=st.floats(0.3, 0.9), diffusion=st.floats(0.2, 0.8))
def test_cps_agrees_with_dance_to_first_order(sigma, diffusion):
    """With c the same, the coefficients differ by O(dt^2): halving dt divides the difference by four."""

    def difference(dt):
        sigma_next = sigma - dt
        noise_level = 2 / math.pi * math.asin(diffusion * math.sqrt(dt) / sigma_next)
        cps, dance = make("cps", (sigma, sigma_next), 0, noise_level), make("dance", (sigma, sigma_next), 0, diffusion)
        assert cps.c == exact(dance.c)
        return cps.a - dance.a

    coarse, fine = difference(1e-3), difference(5e-4)
    assume(abs(coarse) > 1e-9)
    assert 3.8 < coarse / fine < 4.2


# --- accuracy on Gaussian data --------------------------------------------------------------------------------------

MEAN, STD = 1.5, 0.6


def gaussian_velocity(sigma, mean=MEAN, std=STD):
    """(alpha, beta) of the exact velocity E[eps - x0 | x] = alpha + beta x for x0 ~ N(mean, std^2)."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    beta = (sigma - (1 - sigma) * std**2) / variance
    return -mean - beta * (1 - sigma) * mean, beta


def grid_of(steps, shift=3.0):
    return [shift * s / (1 + (shift - 1) * s) for s in (1 - i / steps for i in range(steps + 1))]


def sampled_moments(kind, steps, noise_level, *, std=STD):
    """Mean and std of what the sampler draws, exactly: an affine map of a Gaussian stays one."""
    sigmas = grid_of(steps)
    m, variance = 0.0, 1.0
    for step in range(steps):
        transition = make(kind, sigmas, step, noise_level)
        alpha, beta = gaussian_velocity(sigmas[step], std=std)
        gain = transition.a + transition.b * beta
        m, variance = gain * m + transition.b * alpha, gain**2 * variance + transition.c**2
    return m, math.sqrt(variance)


@pytest.mark.parametrize(
    ("kind", "noise_level"), [("ode", 0.0), ("dance", 0.3), ("dance", 1.0), ("sde", 0.7), ("sde", 1.0)]
)
def test_samplers_converge_to_the_data_distribution(kind, noise_level):
    errors = []
    for steps in (10, 40, 160, 640):
        m, std = sampled_moments(kind, steps, noise_level)
        assert m == pytest.approx(MEAN, abs=1e-9)
        errors.append(abs(std - STD))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 3e-3
    if kind != "sde":  # its diffusion is singular at sigma = 1; the others show Euler's first order
        assert 3.5 < errors[-2] / errors[-1] < 4.5


@pytest.mark.parametrize("strength", [0.5, 1.0, 2.0])
def test_cps_converges_when_its_noise_shrinks_with_the_step(strength):
    def error(steps):
        return abs(sampled_moments("cps", steps, 2 / math.pi * math.asin(strength / math.sqrt(steps)))[1] - STD)

    assert error(640) < 3e-3
    assert 3.5 < error(160) / error(640) < 4.5


@pytest.mark.parametrize("noise_level", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_cps_is_exact_for_a_known_image_at_any_number_of_steps(noise_level, steps):
    m, std = sampled_moments("cps", steps, noise_level, std=0.0)
    assert m == pytest.approx(MEAN, abs=1e-9)
    assert std == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "noise_level", "narrower"), [("cps", 0.8, True), ("dance_euler", 0.3, False), ("dance_euler", 1.0, False)]
)
def test_known_bias_of_the_samplers_that_do_not_converge(kind, noise_level, narrower):
    """Flow-CPS at a fixed level narrows the data (it redraws the same share each step); DanceGRPO's Euler widens it."""
    for steps in (160, 640):
        bias = sampled_moments(kind, steps, noise_level)[1] - STD
        assert (bias < -0.05) if narrower else (bias > 0.05)


@pytest.mark.parametrize(
    ("kind", "noise_level"), [("ode", 0.0), ("sde", 0.7), ("cps", 0.8), ("dance", 0.3), ("dance_euler", 0.3)]
)
def test_sampled_states_have_the_moments_of_the_recursion(kind, noise_level):
    # End to end through sde_step with counter-based noise: 32,768 draws against their exact mean and std.
    rows, elements, steps = 32, 1024, 12
    sigmas, uid = grid_of(steps), torch.arange(rows)
    x = ops.philox_normal((rows, elements), seed=1, iteration=1, row_uid=uid, step=0)
    for step in range(steps):
        alpha, beta = gaussian_velocity(sigmas[step])
        transition = make(kind, sigmas, step, noise_level)
        x = ops.sde_step(alpha + beta * x, x, transition, seed=1, iteration=0, row_uid=uid, step=step).next_sample
    m, std = sampled_moments(kind, steps, noise_level)
    count = rows * elements
    assert abs(x.double().mean().item() - m) < 5 * std / math.sqrt(count)
    assert abs(x.double().std().item() - std) < 5 * std / math.sqrt(2 * count)


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ode", *NOISY])
def test_rows_at_different_steps_equal_single_steps(kind):
    steps = torch.tensor([3, 0, 5, 0, 4])
    table = make(kind, GRID, steps, 0.8)
    for column in flat(table):
        assert column.dtype == torch.float64
        assert column.shape == (5,)
    for row, step in enumerate(steps.tolist()):
        assert tuple(column[row].item() for column in flat(table)) == flat(make(kind, GRID, step, 0.8))


def test_has_noise_row_by_row():
    assert make("cps", GRID, torch.tensor([5, 0, 5]), 0.8).has_noise(3).tolist() == [False, True, False]
    assert make("sde", GRID, 5, 0.8).has_noise(2).tolist() == [True, True]
    assert make("ode", GRID, 0, 0.8).has_noise(2).tolist() == [False, False]


def test_no_rows():
    empty = make("sde", GRID, torch.zeros(0, dtype=torch.int64), 0.7)
    assert all(column.shape == (0,) for column in flat(empty))
    assert empty.has_noise(0).shape == (0,)


def test_rows_expands_and_checks():
    transition = make("cps", GRID, 1, 0.8)
    table = transition.rows(3)
    assert all(column.tolist() == [value] * 3 for column, value in zip(flat(table), flat(transition), strict=True))
    assert (table.sde_type, table.log_prob_convention) == ("cps", "flow_grpo")
    with pytest.raises(ValueError, match=r"\[3\].*4 rows"):
        table.rows(4)


def test_grids_may_be_lists_tensors_or_arrays():
    expected = flat(make("sde", GRID, 2, 0.7))
    tensor = torch.tensor(GRID, dtype=torch.float64)
    for grid in (tuple(GRID), tensor, tensor.numpy()):
        assert flat(make("sde", grid, 2, 0.7)) == expected
    assert flat(make("sde", tensor, torch.tensor(2), 0.7)) == expected
    assert flat(make("sde", tensor.float(), 2, 0.7)) == pytest.approx(expected, rel=1e-6)


def test_a_transition_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make("ode", GRID, 0, 0.0).a = 2.0


# --- concat ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOISY)
def test_concat_joins_ode_and_noisy_rows_in_order(kind):
    noisy, table = make(kind, GRID, 2, 0.7), make(kind, GRID, torch.tensor([1, 3]), 0.7)
    ode = make("ode", GRID, 4, 0.0)
    joined = concat([(ode, 2), (noisy, 1), (make("ode", GRID, 1, 0.0), 0), (table, 2), (ode, 1)])
    expected = [flat(ode)] * 2 + [flat(noisy)] + [flat(make(kind, GRID, step, 0.7)) for step in (1, 3)] + [flat(ode)]
    assert list(zip(*(column.tolist() for column in flat(joined)), strict=True)) == expected
    assert joined.sde_type == kind
    assert joined.log_prob_convention == noisy.log_prob_convention
    assert joined.has_noise(6).tolist() == [False, False, True, True, True, False]


def test_concat_of_ode_rows_alone():
    joined = concat([(make("ode", GRID, 0, 0.0), 1), (make("ode", GRID, 1, 0.0), 2)])
    assert joined.sde_type == "ode"
    assert joined.b.tolist() == exact([-0.1, -0.15, -0.15])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (make("sde", GRID, 1, 0.7), make("cps", GRID, 1, 0.7)),
        (make("dance", GRID, 1, 0.7), make("dance_euler", GRID, 1, 0.7)),
        (make("cps", GRID, 1, 0.7), make("cps", GRID, 1, 0.7, log_prob_convention="gaussian")),
    ],
    ids=["sde-cps", "dance-dance_euler", "cps conventions"],
)
def test_concat_refuses_two_samplers(first, second):
    with pytest.raises(ValueError, match="mix"):
        concat([(first, 1), (second, 1)])


@pytest.mark.parametrize("parts", [[], [(make("ode", GRID, 0, 0.0), 0)]], ids=["nothing", "no rows"])
def test_concat_of_nothing_is_refused(parts):
    with pytest.raises(ValueError, match="concat"):
        concat(parts)


def test_concat_checks_the_number_of_rows():
    with pytest.raises(ValueError, match="rows"):
        concat([(make("sde", GRID, torch.tensor([0, 1]), 0.7), 3)])


# --- conventions and errors -----------------------------------------------------------------------------------------


def test_log_prob_conventions():
    assert make("cps", GRID, 1, 0.7).log_prob_convention == "flow_grpo"
    assert make("cps", GRID, 1, 0.7).unscaled_log_prob
    assert not make("cps", GRID, 1, 0.7, log_prob_convention="gaussian").unscaled_log_prob
    for kind in ("ode", "sde", "dance", "dance_euler"):
        assert make(kind, GRID, 1, 0.7).log_prob_convention == "gaussian"
        assert not make(kind, GRID, 1, 0.7, log_prob_convention="flow_grpo").unscaled_log_prob


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sde_type": "ddim"}, "sde_type = 'ddim'.*ode, sde, cps, dance"),
        ({"log_prob_convention": "plain"}, "log_prob_convention = 'plain'.*flow_grpo"),
        ({"step": 6}, "step = 6.*0 … 5"),
        ({"step": -1}, "step = -1"),
        ({"step": torch.tensor([0, 6])}, "step = 6"),
        ({"sigmas": [1.0, 0.5, 0.5, 0.0]}, r"sigmas\[1\] = 0.5 and sigmas\[2\] = 0.5"),
        ({"sigmas": [0.0, 0.5, 1.0]}, r"sigmas\[1\] = 0.5"),
        ({"sigmas": [1000.0, 500.0, 250.0]}, r"sigmas\[1\] = 500"),
        ({"sigmas": [1.0, 0.5, -0.1]}, r"sigmas\[2\] = -0.1"),
        ({"sigmas": [1.0, 0.5, math.nan]}, r"sigmas\[2\] = nan"),
        ({"noise_level": -0.1}, "noise_level = -0.1"),
        ({"noise_level": math.nan}, "noise_level = nan"),
        ({"noise_level": math.inf}, "noise_level = inf"),
        ({"sde_type": "cps", "noise_level": 1.1}, "noise_level = 1.1.*cps"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    good = {"sde_type": "sde", "sigmas": GRID, "step": 1, "noise_level": 0.7}
    make(**good)
    with pytest.raises(ValueError, match=message):
        make(**good | arguments)


def test_the_kinds_tested_here_are_all_there_are():
    assert set(transitions.get_args(transitions.SdeType)) == {"ode", *NOISY}
