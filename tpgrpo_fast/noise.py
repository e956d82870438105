"""Counter-based noise: every normal is a pure function of (seed, iteration, row uid, stream, step, element).

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) followed by Box-Muller. Nothing
here has state, so noise does not depend on the number of ranks, on how rows are batched, or on where a run resumed.

    key     = (seed mod 2^32, seed div 2^32)
    counter = (element div 4, stream | step, row uid, iteration)            four uint32 words

The four words of a block serve elements 4q … 4q+3, in two Box-Muller pairs:

    u1 = (word_0 div 2^8 + 1) / 2^24  in (0, 1],   u2 = (word_1 div 2^8) / 2^24  in [0, 1)
    normal_0 = sqrt(-2 ln u1) cos(2 pi u2),        normal_1 = sqrt(-2 ln u1) sin(2 pi u2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Stream(IntEnum):
    """What a random number is for. Streams never share a counter; steps stay below 2^28."""

    STEP = 0 << 28
    INITIAL = 1 << 28
    EVALUATION = 2 << 28
    PROMPTS = 3 << 28
    WINDOWS = 4 << 28
    REPLAY = 5 << 28


def philox_4x32(
    counter: Sequence[torch.Tensor | int], key: tuple[int, int], *, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """Philox-4x32-10 on int64 tensors that hold uint32 words.

    Args:
        counter: four words, ints or int64 tensors that broadcast against each other.
        key: two words.
        device: device of words given as ints.

    Returns:
        Four int64 tensors of the broadcast shape, each word in [0, 2^32).
    """
    words = torch.broadcast_tensors(*(torch.as_tensor(w, dtype=torch.int64, device=device) & _MASK for w in counter))
    c0, c1, c2, c3 = words
    k0, k1 = key[0] & _MASK, key[1] & _MASK
    for _ in range(_ROUNDS):
        # An int64 product of two uint32 words wraps modulo 2^64, which keeps both of its halves intact.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _KEY_INCREMENTS[0]) & _MASK, (k1 + _KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3


def split_seed(seed: int) -> tuple[int, int]:
    """The two key words of a seed in [0, 2^64).

    Raises:
        ValueError: the seed is outside that range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed = {seed} is outside [0, 2^64): choose a non-negative seed below 2^64")
    return seed & _MASK, seed >> 32


def check_counter(*, iteration: int, row_uid: torch.Tensor | Sequence[int], step: int | torch.Tensor) -> None:
    """Refuse counters that would wrap around into other rows' or other streams' noise; tensors on a GPU are not read.

    Raises:
        ValueError: naming the first one out of range.
    """
    for name, value, bits in (("iteration", iteration, 32), ("row_uid", row_uid, 32), ("step", step, 28)):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            continue
        numbers = torch.as_tensor(value).flatten()
        if numbers.numel() and not (0 <= int(numbers.min()) and int(numbers.max()) < 1 << bits):
            raise ValueError(f"{name} = {value} is outside [0, 2^{bits}): the noise counter would wrap around")


def philox_bits(
    blocks: int, *, seed: int, iteration: int, row_uid: torch.Tensor, stream_step: int | torch.Tensor
) -> torch.Tensor:
    """Random words `[N, blocks, 4]` (int64 in [0, 2^32)) of the rows `row_uid [N]`.

    `stream_step` is `stream | step`, one for all rows or `[N]`.
    """
    device = row_uid.device
    rows = row_uid.to(torch.int64).reshape(-1, 1)
    if isinstance(stream_step, torch.Tensor):
        stream_step = stream_step.to(device=device, dtype=torch.int64).reshape(-1, 1)
    block = torch.arange(blocks, dtype=torch.int64, device=device).reshape(1, -1)
    words = philox_4x32((block, stream_step, rows, iteration), split_seed(seed), device=device)
    return torch.stack(words, dim=-1)


def normal(
    shape: Sequence[int],
    *,
    seed: int,
    iteration: int,
    row_uid: torch.Tensor | Sequence[int],
    step: int | torch.Tensor = 0,
    stream: Stream = Stream.STEP,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Standard normals of `shape = [N, ...]`, float32; row `i` belongs to `row_uid[i]`.

    The transcendentals run in float64 and are rounded once: this is what other backends are measured against.

    Args:
        shape: `[N, ...]`; elements of a row are counted in row-major order.
        seed: the run's seed, in [0, 2^64).
        iteration: the training iteration, in [0, 2^32).
        row_uid: `[N]` global row indices, in [0, 2^32).
        step: denoising step, one for all rows or `[N]`, in [0, 2^28).
        stream: what the noise is for.
        device: where to compute; by default the device of `row_uid`, or the CPU.

    Raises:
        ValueError: a length or a range is off.
    """
    rows = torch.as_tensor(row_uid, dtype=torch.int64)
    rows = rows.to(device) if device is not None else rows
    if len(shape) == 0 or rows.dim() != 1 or rows.numel() != shape[0]:
        raise ValueError(f"row_uid has shape {list(rows.shape)}, but shape = {list(shape)} asks for one uid a row")
    check_counter(iteration=iteration, row_uid=row_uid, step=step)
    if isinstance(step, torch.Tensor) and step.dim() > 0:
        if step.shape != rows.shape:
            raise ValueError(f"step has shape {list(step.shape)}: give one int, or one for each of {len(rows)} rows")
        stream_step: int | torch.Tensor = step.to(torch.int64) | int(stream)
    else:
        stream_step = int(step) | int(stream)
    elements = math.prod(shape[1:])
    words = philox_bits(-(-elements // 4), seed=seed, iteration=iteration, row_uid=rows, stream_step=stream_step)
    uniform = (words >> 8).to(torch.float64)
    radius = torch.sqrt(-2.0 * torch.log((uniform[..., 0::2] + 1.0) * 2.0**-24))
    angle = uniform[..., 1::2] * (2.0 * math.pi * 2.0**-24)
    pairs = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return pairs.flatten(1)[:, :elements].to(torch.float32).reshape(tuple(shape))


def uniform_words(count: int, *, seed: int, stream: Stream, iteration: int = 0, row: int = 0) -> list[int]:
    """`count` random uint32 words on the host: for permutations, windows and other decisions of a run."""
    words = philox_bits(
        -(-count // 4), seed=seed, iteration=iteration, row_uid=torch.tensor([row]), stream_step=int(stream)
    )
    return words.flatten()[:count].tolist()


def permutation(count: int, *, seed: int, stream: Stream, iteration: int = 0, row: int = 0) -> list[int]:
    """A random permutation of `range(count)`, a pure function of its arguments."""
    words = torch.tensor(
        uniform_words(2 * count, seed=seed, stream=stream, iteration=iteration, row=row), dtype=torch.int64
    )
    # 62 random bits a key; a stable sort makes the result the same everywhere even if two keys were equal.
    keys = (words[0::2] << 30) ^ words[1::2]
    return torch.argsort(keys, stable=True).tolist()
