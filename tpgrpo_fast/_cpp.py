"""The C++ kernels for CPU tensors: one shared library without a torch or Python interface, loaded with ctypes.

`available()` says whether it was built, the other functions raise a RuntimeError with the remedy when it was not.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_tpgrpo_cpp.so")
ABI_VERSION = 1
ISA_NAMES = ("baseline", "avx2", "avx512")

_REMEDY = (
    "Install a C++17 compiler (for example `apt-get install g++`) and reinstall from the checkout with "
    "`pip install --force-reinstall --no-deps --no-cache-dir .`; to build inside the checkout without installing, run "
    "`python setup.py build_ext --inplace`. Or choose backend 'torch'."
)

_POINTER, _I64, _U64, _U32, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
_SIGNATURES = {
    "tpgrpo_abi_version": (_INT, []),
    "tpgrpo_best_isa": (_INT, []),
    "tpgrpo_has_openmp": (_INT, []),
    "tpgrpo_philox_bits": (None, [_POINTER, _U64, _I64, _POINTER]),
    "tpgrpo_philox_normal": (None, [_POINTER, _I64, _I64, _U64, _POINTER, _U32, _POINTER, _INT, _INT]),
}


@cache
def load() -> ctypes.CDLL:
    """The library with its signatures declared.

    Raises:
        RuntimeError: it was not built, cannot be loaded, or is older or newer than this package.
    """
    if not LIBRARY.exists():
        raise RuntimeError(f"backend 'cpp' is missing: {LIBRARY.name} was not built at install. {_REMEDY}")
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name, (restype, argtypes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"backend 'cpp' cannot be loaded: {error}. {_REMEDY}") from error
    if (found := library.tpgrpo_abi_version()) != ABI_VERSION:
        raise RuntimeError(f"backend 'cpp' has interface version {found}, this package needs {ABI_VERSION}. {_REMEDY}")
    return library


@cache
def available() -> bool:
    """Whether the library was built and loads."""
    try:
        load()
    except RuntimeError:
        return False
    return True


def instruction_set() -> str:
    """The instruction set that the kernels use on this CPU: one of `ISA_NAMES`."""
    return ISA_NAMES[load().tpgrpo_best_isa()]


def philox_bits(counters: torch.Tensor, key: int) -> torch.Tensor:
    """Philox-4x32-10 of raw counters.

    Args:
        counters: int64 [M, 4], each a 32-bit word (higher bits are ignored).
        key: 64-bit integer, its low word being the first key word.

    Returns:
        int64 [M, 4], each in [0, 2^32).
    """
    _check_uint("key", key, 64)
    counters = _cpu_int64("counters", counters)
    if counters.ndim != 2 or counters.shape[1] != 4:
        raise ValueError(f"counters must have shape [M, 4], got {list(counters.shape)}")
    out = torch.empty_like(counters)
    load().tpgrpo_philox_bits(counters.data_ptr(), key, len(counters), out.data_ptr())
    return out


def philox_normal(
    out: torch.Tensor,
    seed: int,
    row_uid: torch.Tensor,
    iteration: int,
    stream_step: int | torch.Tensor,
    *,
    num_threads: int | None = None,
    max_isa: str = ISA_NAMES[-1],
) -> torch.Tensor:
    """Fills `out` with the standard normals of its rows, within 1e-6 of the float64 formula.

    The values do not depend on the number of rows or threads, and on the instruction set to the last bits only.

    Args:
        out: float32 [N, ...], contiguous, on the CPU; written in place.
        seed: the Philox key, in [0, 2^64).
        row_uid: int64 [N]; the low 32 bits count.
        iteration: in [0, 2^32).
        stream_step: the counter's second word, in [0, 2^32), one for all rows or int64 [N].
        num_threads: `torch.get_num_threads()` by default.
        max_isa: the highest of `ISA_NAMES` to use (what the CPU lacks is never used).

    Returns:
        `out`.
    """
    if out.device.type != "cpu" or out.dtype != torch.float32 or not out.is_contiguous() or out.ndim < 1:
        raise ValueError(
            "out must be a contiguous float32 CPU tensor [N, ...], got "
            f"{out.dtype} {list(out.shape)} on {out.device}, contiguous: {out.is_contiguous()}"
        )
    if max_isa not in ISA_NAMES:
        raise ValueError(f"max_isa must be one of {', '.join(ISA_NAMES)}, got {max_isa!r}")
    _check_uint("seed", seed, 64)
    _check_uint("iteration", iteration, 32)
    rows = len(out)
    row_uid = _cpu_int64("row_uid", row_uid)
    if isinstance(stream_step, int):
        _check_uint("stream_step", stream_step, 32)
        stream_step = torch.full((rows,), stream_step, dtype=torch.int64)
    stream_step = _cpu_int64("stream_step", stream_step)
    for name, tensor in (("row_uid", row_uid), ("stream_step", stream_step)):
        if tensor.shape != (rows,):
            raise ValueError(f"{name} must have one entry for each of the {rows} rows, got {list(tensor.shape)}")
    load().tpgrpo_philox_normal(
        out.data_ptr(),
        rows,
        out.numel() // rows if rows else 0,
        seed,
        row_uid.data_ptr(),
        iteration,
        stream_step.data_ptr(),
        num_threads or torch.get_num_threads(),
        ISA_NAMES.index(max_isa),
    )
    return out


def _check_uint(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} must be in [0, 2^{bits}), got {value}")


def _cpu_int64(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be an int64 CPU tensor, got {tensor.dtype} on {tensor.device}")
    return tensor.contiguous()
