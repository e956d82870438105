"""The C++ library: known answers of Philox, accuracy of the normals, independence of threads and of the batch."""

import math

import pytest
import torch

from tpgrpo_fast import _cpp, noise

built = pytest.mark.skipif(not _cpp.available(), reason="the C++ library is not built here (no compiler at install)")

# Counter, key and output of the Philox authors' known-answer file (Random123, kat_vectors, philox4x32 10).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEED = 0x9E3779B97F4A7C15
ROW_UID = torch.tensor([0, 5, 2**32 - 1])
STREAM_STEP = torch.tensor([7, int(noise.Stream.INITIAL), int(noise.Stream.EVALUATION) | 3])


def exact_normals(elements: int) -> torch.Tensor:
    """The definition in float64: [3, elements]."""
    words = noise.philox_bits(-(-elements // 4), seed=SEED, iteration=11, row_uid=ROW_UID, stream_step=STREAM_STEP)
    uniform = (words >> 8).double()
    radius = (-2 * ((uniform[..., 0::2] + 1) * 2.0**-24).log()).sqrt()
    angle = 2 * torch.pi * uniform[..., 1::2] * 2.0**-24
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(1)[:, :elements]


def cpp_normals(elements: int, **options) -> torch.Tensor:
    out = torch.full((3, elements), torch.nan)
    return _cpp.philox_normal(out, SEED, ROW_UID, 11, STREAM_STEP, **options)


@built
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    bits = _cpp.philox_bits(torch.tensor([counter]), key[1] << 32 | key[0])
    assert tuple(bits[0].tolist()) == answer


@built
@pytest.mark.parametrize("isa", _cpp.ISA_NAMES)
@pytest.mark.parametrize("elements", [1, 2, 3, 4, 5, 255, 256, 257, 4096, 200_003])
def test_normals_are_within_1e_6_of_float64(isa, elements):
    torch.testing.assert_close(
        cpp_normals(elements, max_isa=isa).double(), exact_normals(elements), rtol=0, atol=1e-6, equal_nan=False
    )


@built
def test_normals_do_not_depend_on_threads_or_batch():
    whole = cpp_normals(100_001, num_threads=1)
    assert torch.equal(whole, cpp_normals(100_001, num_threads=2))
    assert torch.equal(whole, cpp_normals(100_001, num_threads=5))
    row = torch.empty(1, 4099)
    _cpp.philox_normal(row, SEED, ROW_UID[1:2], 11, STREAM_STEP[1:2])
    assert torch.equal(row[0], whole[1, :4099])


@built
def test_normals_keep_trailing_shapes_and_take_one_step_for_all_rows():
    out = torch.full((3, 2, 5, 7), torch.nan)
    assert _cpp.philox_normal(out, SEED, ROW_UID, 11, 7) is out
    flat = _cpp.philox_normal(torch.empty(3, 70), SEED, ROW_UID, 11, torch.full((3,), 7))
    assert torch.equal(out.flatten(1), flat)


@built
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty_output(shape):
    uid = torch.arange(shape[0])
    assert _cpp.philox_normal(torch.empty(shape), 0, uid, 0, 0).shape == shape


@built
@pytest.mark.parametrize("isa", _cpp.ISA_NAMES)
@pytest.mark.parametrize(
    ("row_uid", "pair", "radius"),
    [
        (45, 2 * 235114 + 1, math.sqrt(48 * math.log(2))),
        (44, 2 * 571925, 0.0),
    ],  # u1 = 2^-24 and u1 = 1, found by search
)
def test_extreme_uniforms(isa, row_uid, pair, radius):
    out = torch.empty(1, 2 * pair + 2)
    _cpp.philox_normal(out, 0, torch.tensor([row_uid]), 0, 0, max_isa=isa)
    assert out[0, -2:].double().norm().item() == pytest.approx(radius, abs=1e-6)


@built
def test_moments_are_standard():
    x = _cpp.philox_normal(torch.empty(4, 1_000_000), 1, torch.arange(4), 0, 0).double()
    assert x.mean().abs() < 5 / x.numel() ** 0.5
    assert (x.var() - 1).abs() < 5 * (2 / x.numel()) ** 0.5
    assert (x**4).mean().sub(3).abs() < 5 * (96 / x.numel()) ** 0.5


@built
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.empty(3, 8, dtype=torch.float64)}, "out must be a contiguous float32 CPU tensor"),
        ({"out": torch.empty(8, 3).T}, "out must be a contiguous float32 CPU tensor"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**64}, "seed must be in"),
        ({"iteration": 2**32}, "iteration must be in"),
        ({"stream_step": -1}, "stream_step must be in"),
        ({"stream_step": torch.tensor([1, 2])}, "stream_step must have one entry"),
        ({"row_uid": torch.arange(4)}, "row_uid must have one entry"),
        ({"row_uid": torch.arange(3.0)}, "row_uid must be an int64 CPU tensor"),
        ({"max_isa": "sse9"}, "max_isa must be one of"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"out": torch.empty(3, 8), "seed": 0, "row_uid": torch.arange(3), "iteration": 0, "stream_step": 0}
    with pytest.raises(ValueError, match=message):
        _cpp.philox_normal(**(arguments | change))


def test_missing_library_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(_cpp, "LIBRARY", tmp_path / "_tpgrpo_cpp.so")
    with pytest.raises(RuntimeError, match=r"was not built at install\. .*pip install --force-reinstall"):
        _cpp.load.__wrapped__()


def test_foreign_file_is_refused(monkeypatch, tmp_path):
    foreign = tmp_path / "_tpgrpo_cpp.so"
    foreign.write_bytes(b"not a library")
    monkeypatch.setattr(_cpp, "LIBRARY", foreign)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: .*python setup\.py build_ext --inplace"):
        _cpp.load.__wrapped__()
