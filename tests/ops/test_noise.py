"""Counter-based noise: known answers, distribution, independence, purity.

Every draw below has a fixed counter, so each statistic is one number, the same on every machine; its bound is the
statistic's own sampling error times five or so.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tpgrpo_fast import noise, ops
from tpgrpo_fast.noise import Stream

U32 = (1 << 32) - 1


def philox_4x32_by_hand(counter, key):
    """Philox-4x32-10 in Python's unbounded integers, from the paper's definition of a round."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for i in range(10):
        key0, key1 = (k0 + i * 0x9E3779B9) & U32, (k1 + i * 0xBB67AE85) & U32
        high0, low0 = divmod(0xD2511F53 * x0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 1 << 32)
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
    return x0, x1, x2, x3


def normal_by_hand(element, *, seed, iteration, row_uid, stream_step):
    """One normal in double precision, from the counter layout that the module documents."""
    words = philox_4x32_by_hand((element // 4, stream_step, row_uid, iteration), (seed & U32, seed >> 32))
    first, second = words[2 * (element % 4 // 2) :][:2]
    radius = math.sqrt(-2 * math.log(((first >> 8) + 1) / 2**24))
    angle = 2 * math.pi * (second >> 8) / 2**24
    return radius * (math.cos(angle) if element % 2 == 0 else math.sin(angle))


def draw(rows=4, elements=8, *, seed=7, iteration=3, first_row=0, step=2, stream=Stream.STEP):
    uid = torch.arange(first_row, first_row + rows)
    return noise.normal((rows, elements), seed=seed, iteration=iteration, row_uid=uid, step=step, stream=stream)


# --- Philox ---------------------------------------------------------------------------------------------------------

KNOWN_ANSWERS = [  # Random123's kat_vectors
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((U32, U32, U32, U32), (U32, U32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(word) for word in noise.philox_4x32(counter, key)) == expected
    assert philox_4x32_by_hand(counter, key) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    counter=st.tuples(*[st.integers(0, U32)] * 4),
    key=st.tuples(*[st.integers(0, U32)] * 2),
)
def test_philox_equals_unbounded_integer_arithmetic(counter, key):
    assert tuple(int(word) for word in noise.philox_4x32(counter, key)) == philox_4x32_by_hand(counter, key)


def test_philox_broadcasts_tensors_against_ints():
    rows, blocks = torch.tensor([[0], [U32]]), torch.tensor([[0, 1, U32]])
    words = noise.philox_4x32((blocks, 5, rows, 9), (1, 2))
    assert all(word.shape == (2, 3) for word in words)
    for i, j in itertools.product(range(2), range(3)):
        expected = philox_4x32_by_hand((int(blocks[0, j]), 5, int(rows[i, 0]), 9), (1, 2))
        assert tuple(int(word[i, j]) for word in words) == expected


# --- seeds and counters ---------------------------------------------------------------------------------------------


def test_split_seed():
    assert noise.split_seed(0) == (0, 0)
    assert noise.split_seed((5 << 32) | 9) == (9, 5)
    assert noise.split_seed((1 << 64) - 1) == (U32, U32)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_outside_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match="seed = "):
        noise.split_seed(seed)
    with pytest.raises(ValueError, match="seed = "):
        draw(seed=seed)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("iteration", {"iteration": 1 << 32}),
        ("iteration", {"iteration": -1}),
        ("row_uid", {"first_row": -1}),
        ("row_uid", {"first_row": (1 << 32) - 1}),
        ("step", {"step": 1 << 28}),
        ("step", {"step": -1}),
        ("step", {"step": torch.tensor([0, 1, 1 << 28, 2])}),
    ],
)
def test_a_counter_that_would_wrap_into_another_one_is_refused(name, arguments):
    with pytest.raises(ValueError, match=name):
        draw(**arguments)


@pytest.mark.parametrize("seed", [0, 1, 123456789, (1 << 64) - 1, 1 << 32])
def test_normals_follow_the_documented_counter_layout(seed):
    rows, step, iteration = [0, 3, U32], 6, 11
    actual = noise.normal((3, 7), seed=seed, iteration=iteration, row_uid=rows, step=step, stream=Stream.EVALUATION)
    expected = [
        [
            normal_by_hand(e, seed=seed, iteration=iteration, row_uid=row, stream_step=Stream.EVALUATION | step)
            for e in range(7)
        ]
        for row in rows
    ]
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_extreme_words_give_finite_normals():
    # u1 in (0, 1]: the largest normal a 24-bit uniform can give is sqrt(48 ln 2), and none is infinite.
    values = noise.normal((64, 4096), seed=1, iteration=0, row_uid=torch.arange(64))
    assert torch.isfinite(values).all()
    assert 4.0 < values.abs().max() <= math.sqrt(48 * math.log(2)) + 1e-6


def test_every_stream_leaves_room_for_steps_below_2_to_28():
    assert len({int(stream) for stream in Stream}) == len(Stream)
    assert all(int(stream) % (1 << 28) == 0 and int(stream) < 1 << 32 for stream in Stream)


def test_no_two_counters_share_a_block():
    # Any aliasing between row, step, iteration and stream (a swapped or added counter word) would repeat a block.
    seen = {}
    for seed, iteration, step, stream in itertools.product((0, 1), range(4), range(4), Stream):
        words = noise.philox_bits(
            4, seed=seed, iteration=iteration, row_uid=torch.arange(4), stream_step=step | stream
        ).reshape(-1, 4)
        for block in words.tolist():
            assert tuple(block) not in seen, (seed, iteration, step, stream, seen[tuple(block)])
            seen[tuple(block)] = (seed, iteration, step, stream)
    assert len(seen) == 2 * 4 * 4 * len(Stream) * 4 * 4


def test_words_are_uniform_bit_by_bit():
    words = noise.philox_bits(1 << 14, seed=5, iteration=0, row_uid=torch.arange(2), stream_step=0).flatten()
    assert int(words.min()) >= 0
    assert int(words.max()) <= U32
    share = torch.stack([(words >> bit & 1).double().mean() for bit in range(32)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(len(words))


# --- distribution ---------------------------------------------------------------------------------------------------


def test_moments_are_those_of_a_standard_normal():
    values = draw(16, 1 << 14, seed=11).double().flatten()
    count = len(values)
    # Standard errors of the sample moments of a normal: Var x^k = E x^2k - (E x^k)^2.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10395 - 225)):
        error = (values.pow(power).mean() - moment).abs().item()
        assert error < 5 * math.sqrt(variance / count), (power, error)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("position", ["all", 0, 1, 2, 3])
def test_kolmogorov_smirnov(seed, position):
    # Each place in a block of four has its own path through Box-Muller: cosine or sine, first or second pair.
    values = draw(8, 1 << 13, seed=seed)
    values = values if position == "all" else values[:, position::4]
    assert stats.kstest(values.flatten().numpy(), "norm").pvalue > 1e-3


def test_tail_masses():
    values = draw(16, 1 << 14, seed=21).flatten()
    for bound in (1.0, 2.0, 3.0, 3.5):
        mass = 2 * stats.norm.sf(bound)
        share = (values.abs() > bound).double().mean().item()
        assert abs(share - mass) < 5 * math.sqrt(mass * (1 - mass) / len(values)), bound


# --- independence ---------------------------------------------------------------------------------------------------

ELEMENTS = 1 << 15
VARIANTS = {
    "row": {"first_row": 1},
    "far row": {"first_row": 1 << 31},
    "step": {"step": 3},
    "iteration": {"iteration": 4},
    "seed": {"seed": 8},
    "seed, high word": {"seed": 7 | 1 << 32},
    "initial": {"stream": Stream.INITIAL},
    "evaluation": {"stream": Stream.EVALUATION},
    "replay": {"stream": Stream.REPLAY},
    "row and iteration swapped": {"first_row": 3, "iteration": 0},
}


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_other_counters_give_uncorrelated_noise(change):
    base, other = draw(1, ELEMENTS).double().flatten(), draw(1, ELEMENTS, **change).double().flatten()
    bound = 5 / math.sqrt(ELEMENTS)
    for f in (lambda x: x, lambda x: (x.square() - 1) / math.sqrt(2)):  # values, and magnitudes
        assert (f(base) * f(other)).mean().abs() < bound
    # Nor at a shift: block q of one must not be block q + 1 of the other.
    for lag in (1, 2, 3, 4, 8):
        assert (base[lag:] * other[:-lag]).mean().abs() < bound


def test_elements_of_a_row_are_uncorrelated():
    values = draw(1, ELEMENTS, seed=3).double().flatten()
    squares = (values.square() - 1) / math.sqrt(2)
    for lag in (1, 2, 3, 4, 5, 8, 16, 64, 1024):
        for series in (values, squares):
            assert (series[lag:] * series[:-lag]).mean().abs() < 5 / math.sqrt(ELEMENTS - lag), lag


def test_covariance_across_many_rows_and_steps_is_the_identity():
    # 8 rows x 8 steps as 64 variables; the largest of 64 * 63 / 2 correlations stays within five standard errors.
    count = 1 << 13
    table = torch.cat([draw(8, count, step=step) for step in range(8)]).double()
    covariance = table @ table.T / count - torch.eye(64, dtype=torch.float64)
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() < 5 / math.sqrt(count)
    assert covariance.diagonal().abs().max() < 5 * math.sqrt(2 / count)


# --- purity ---------------------------------------------------------------------------------------------------------


def test_noise_does_not_depend_on_batch_split_or_row_order():
    whole = draw(8, 10)
    assert torch.equal(whole, torch.cat([draw(3, 10), draw(4, 10, first_row=3), draw(1, 10, first_row=7)]))
    order = torch.tensor([5, 0, 7, 2, 2])
    shuffled = noise.normal((5, 10), seed=7, iteration=3, row_uid=order, step=2)
    assert torch.equal(shuffled, whole[order])


def test_noise_leaves_no_state_and_reads_none():
    torch.manual_seed(0)
    first, state = draw(), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(draw(), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 5), (2, 3, 5), (4, 1, 1, 7)])
def test_trailing_shape_only_arranges_the_row_major_elements(shape):
    elements = math.prod(shape)
    actual = noise.normal((2, *shape), seed=7, iteration=3, row_uid=[0, 1], step=2)
    assert actual.shape == (2, *shape)
    assert actual.dtype == torch.float32
    assert torch.equal(actual.reshape(2, elements), draw(2, elements))


@pytest.mark.parametrize("elements", range(1, 10))
def test_a_shorter_row_is_a_prefix_of_a_longer_one(elements):
    assert torch.equal(draw(3, elements), draw(3, 64)[:, :elements])


def test_no_rows():
    assert noise.normal((0, 3, 4), seed=0, iteration=0, row_uid=[]).shape == (0, 3, 4)


def test_steps_row_by_row():
    steps = torch.tensor([4, 0, 9])
    actual = noise.normal((3, 6), seed=1, iteration=2, row_uid=[10, 11, 10], step=steps, stream=Stream.INITIAL)
    expected = [
        noise.normal((1, 6), seed=1, iteration=2, row_uid=[uid], step=int(step), stream=Stream.INITIAL)
        for uid, step in zip((10, 11, 10), steps, strict=True)
    ]
    assert torch.equal(actual, torch.cat(expected))


@pytest.mark.parametrize("row_uid", [[0], [0, 1, 2], [[0, 1]]])
def test_row_uid_of_the_wrong_length_is_refused(row_uid):
    with pytest.raises(ValueError, match="row_uid"):
        noise.normal((2, 3), seed=0, iteration=0, row_uid=row_uid)


def test_an_empty_shape_is_refused():
    with pytest.raises(ValueError, match="shape"):
        noise.normal((), seed=0, iteration=0, row_uid=[])


@pytest.mark.parametrize("length", [1, 3])
def test_steps_of_the_wrong_length_are_refused(length):
    with pytest.raises(ValueError, match="step"):
        noise.normal((2, 3), seed=0, iteration=0, row_uid=[0, 1], step=torch.zeros(length, dtype=torch.int64))


def test_philox_normal_is_the_step_stream():
    counter = {"seed": 9, "iteration": 1, "row_uid": [4, 0, 6], "step": 3}
    expected = noise.normal((3, 2, 5), **counter)
    assert torch.equal(ops.philox_normal((3, 2, 5), **counter, backend="torch"), expected)
    torch.testing.assert_close(ops.philox_normal((3, 2, 5), **counter), expected, rtol=0, atol=2e-6)


# --- permutations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_a_permutation_holds_every_index_once(count):
    assert sorted(noise.permutation(count, seed=3, stream=Stream.PROMPTS)) == list(range(count))


def test_a_permutation_is_a_pure_function_of_seed_iteration_and_stream():
    def permutation(seed=1, iteration=0, stream=Stream.PROMPTS):
        return noise.permutation(50, seed=seed, iteration=iteration, stream=stream)

    assert permutation() == permutation()
    others = [permutation(seed=2), permutation(iteration=1), permutation(stream=Stream.WINDOWS)]
    assert all(other != permutation() for other in others)


def test_permutations_are_uniform():
    # 24 orders of four things over 600 iterations: chi-square with 23 degrees of freedom.
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for iteration in range(600):
        counts[tuple(noise.permutation(4, seed=0, iteration=iteration, stream=Stream.PROMPTS))] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_uniform_words_are_the_first_words_of_the_row():
    words = noise.uniform_words(6, seed=4, stream=Stream.WINDOWS, iteration=2, row=5)
    expected = [philox_4x32_by_hand((block, Stream.WINDOWS, 5, 2), (4, 0)) for block in range(2)]
    assert words == [*expected[0], *expected[1][:2]]
    assert noise.uniform_words(0, seed=4, stream=Stream.WINDOWS) == []
