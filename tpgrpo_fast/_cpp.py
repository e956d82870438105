"""The C++ kernels for CPU tensors: one shared library without a torch or Python interface, loaded with ctypes.

`available()` says whether it was built, the other functions raise a RuntimeError with the remedy when it was not.

The step kernels take big tensors `[N, E]`, contiguous, float32, bfloat16 or float16 each, and per-row ones `[N]`, and
compute in float32. They round a state to its storage dtype first and score what is stored; rows with c = 0 get log-prob
0, use no noise and pass no gradient to it. Results do not depend on the number of threads.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_tpgrpo_cpp.so")
ABI_VERSION = 4
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
    "tpgrpo_sde_step": (None, [_POINTER]),
    "tpgrpo_step_log_prob": (None, [_POINTER]),
    "tpgrpo_grpo_loss": (None, [_POINTER]),
    "tpgrpo_gradients": (None, [_POINTER]),
}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# The records of csrc/steps.h, field by field.
class _Array(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("dtype", _I64)]


class _Step(ctypes.Structure):
    _fields_ = [
        *[(name, _I64) for name in ("rows", "elements")],
        *[(name, _Array) for name in ("velocity", "velocity_uncond", "sample")],
        *[(name, _POINTER) for name in "abc"],
        ("guidance_scale", ctypes.c_double),
        *[(name, ctypes.c_int32) for name in ("unscaled", "reduce_sum", "num_threads", "max_isa")],
    ]


class _SdeStep(ctypes.Structure):
    _fields_ = [
        ("step", _Step),
        ("noise", _Array),
        ("seed", _U64),
        ("iteration", _I64),
        *[(name, _POINTER) for name in ("row_uid", "stream_step")],
        ("next_sample", _Array),
        ("mean", _Array),
        ("ode_rows", _I64),
        ("b_ode", _POINTER),
        ("ode_first", _Array),
        ("log_prob", _POINTER),
    ]


class _LogProb(ctypes.Structure):
    _fields_ = [("step", _Step), ("next_sample", _Array), ("log_prob", _POINTER)]


class _Loss(ctypes.Structure):
    _fields_ = [
        ("step", _Step),
        *[(name, _Array) for name in ("next_sample", "velocity_ref")],
        *[(name, _POINTER) for name in ("inv_two_var_kl", "old_log_prob", "advantage", "weight")],
        *[(name, ctypes.c_double) for name in ("clip_range", "adv_clip")],
        *[(name, _POINTER) for name in ("ratio", "policy", "kl", "grad_log_prob")],
    ]


class _Gradient(ctypes.Structure):
    _fields_ = [
        ("step", _Step),
        *[(name, _Array) for name in ("next_sample", "velocity_ref")],
        *[(name, _POINTER) for name in ("inv_two_var_kl", "grad_log_prob", "grad_kl")],
        *[(name, _Array) for name in ("grad_velocity", "grad_velocity_uncond")],
    ]


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
    isa = _isa_index(max_isa)
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
        isa,
    )
    return out


def sde_step(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    noise: torch.Tensor | None,
    seed: int,
    iteration: int,
    row_uid: torch.Tensor | None,
    stream_step: torch.Tensor | None,
    out_dtype: torch.dtype,
    unscaled: bool,
    reduce_sum: bool,
    want_mean: bool = False,
    b_ode: torch.Tensor | None = None,
    *,
    num_threads: int | None = None,
    max_isa: str = ISA_NAMES[-1],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """One sampler step x' = a x + b v + c eps, rounded to `out_dtype` and scored as stored.

    Args:
        velocity, velocity_uncond, sample: `[N, E]`; v = v_uncond + guidance_scale (v_cond - v_uncond).
        guidance_scale: used with `velocity_uncond` only.
        a, b, c: `[N]` coefficients, in float64 if possible: c enters log-probs as 1 / c^2.
        noise: `[N, E]`; by default drawn from the counters (seed, iteration, row_uid, stream_step).
        seed, iteration, row_uid, stream_step: as in `philox_normal`, `[N]` each; unused with `noise`, and in rows with
            c = 0.
        out_dtype: of the states returned.
        unscaled: log-probs without variance and constants.
        reduce_sum: sum log-probs over elements; the default is their mean.
        want_mean: also return the means.
        b_ode: `[M]`, M <= N; also return the ODE step `sample + b_ode v` of the first M rows.
        num_threads, max_isa: as in `philox_normal`.

    Returns:
        `(next_sample [N, E], log_prob [N], mean [N, E] | None, ode_first [M, E] | None)`: the states in `out_dtype`,
        the rest in float32.
    """
    inputs = _Inputs(num_threads, max_isa)
    step = inputs.step(velocity, velocity_uncond, guidance_scale, sample, a, b, c, unscaled, reduce_sum)
    if noise is None and bool(c.any()):
        if row_uid is None or stream_step is None:
            raise ValueError("rows with c != 0 need noise: pass noise, or row_uid and stream_step")
        _check_uint("seed", seed, 64)
        _check_uint("iteration", iteration, 32)
    next_sample = torch.empty_like(sample, dtype=out_dtype)
    log_prob = torch.empty(step.rows)
    mean = torch.empty_like(sample, dtype=torch.float32) if want_mean else None
    ode_rows = 0 if b_ode is None else len(b_ode)
    if ode_rows > step.rows:
        raise ValueError(f"b_ode has {ode_rows} rows, but sample has {step.rows}")
    ode_first = torch.empty((ode_rows, step.elements), dtype=out_dtype) if b_ode is not None else None
    arguments = _SdeStep(
        step=step,
        noise=inputs.array("noise", noise),
        seed=seed,
        iteration=iteration,
        row_uid=inputs.per_row("row_uid", row_uid, torch.int64),
        stream_step=inputs.per_row("stream_step", stream_step, torch.int64),
        next_sample=inputs.array("next_sample", next_sample),
        mean=inputs.array("mean", mean),
        ode_rows=ode_rows,
        b_ode=inputs.per_row("b_ode", b_ode, torch.float64, rows=ode_rows),
        ode_first=inputs.array("ode_first", ode_first, rows=ode_rows),
        log_prob=log_prob.data_ptr(),
    )
    load().tpgrpo_sde_step(ctypes.byref(arguments))
    return next_sample, log_prob, mean, ode_first


def step_log_prob_forward(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
    *,
    num_threads: int | None = None,
    max_isa: str = ISA_NAMES[-1],
) -> torch.Tensor:
    """Log-probability, float32 `[N]`, of the stored states `next_sample [N, E]`; the rest as in `sde_step`."""
    inputs = _Inputs(num_threads, max_isa)
    step = inputs.step(velocity, velocity_uncond, guidance_scale, sample, a, b, c, unscaled, reduce_sum)
    log_prob = torch.empty(step.rows)
    arguments = _LogProb(step=step, next_sample=inputs.array("next_sample", next_sample), log_prob=log_prob.data_ptr())
    load().tpgrpo_step_log_prob(ctypes.byref(arguments))
    return log_prob


def step_log_prob_backward(
    grad_log_prob: torch.Tensor,
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    unscaled: bool,
    reduce_sum: bool,
    *,
    num_threads: int | None = None,
    max_isa: str = ISA_NAMES[-1],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients in the velocities, `[N, E]` in their dtypes, from `grad_log_prob [N]`."""
    return grpo_loss_backward(
        grad_log_prob,
        None,
        velocity,
        velocity_uncond,
        guidance_scale,
        sample,
        next_sample,
        None,
        a,
        b,
        c,
        None,
        unscaled,
        reduce_sum,
        num_threads=num_threads,
        max_isa=max_isa,
    )


def grpo_loss_forward(
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    inv_two_var_kl: torch.Tensor | None,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    clip_range: float,
    adv_clip: float,
    unscaled: bool,
    reduce_sum: bool,
    *,
    num_threads: int | None = None,
    max_isa: str = ISA_NAMES[-1],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows of the GRPO loss, each weighted and not yet divided by the number of pairs.

    Args:
        velocity, velocity_uncond, guidance_scale, sample, a, b, c, unscaled, reduce_sum: as in `sde_step`.
        next_sample: `[N, E]` stored states.
        velocity_ref: `[N, E]` reference velocity, guided already.
        inv_two_var_kl: `[N]`, 1 / (2 v) of the KL's variance v; needed with `velocity_ref`.
        old_log_prob, advantage, weight: `[N]`; the advantage is clamped to ±`adv_clip`.
        clip_range, adv_clip: of the ratio, of the advantage.

    Returns:
        `(ratio, policy, kl, grad_log_prob)`, float32 `[N]`: weight max(-A r, -A clip(r)), weight mean((mu - mu_ref)^2)
        / (2 v), which is 0 without `velocity_ref`, and the derivative of `policy` in the log-prob.
    """
    inputs = _Inputs(num_threads, max_isa)
    step = inputs.step(velocity, velocity_uncond, guidance_scale, sample, a, b, c, unscaled, reduce_sum)
    _check_reference(velocity_ref, inv_two_var_kl=inv_two_var_kl)
    ratio, policy, kl, grad_log_prob = (torch.empty(step.rows) for _ in range(4))
    arguments = _Loss(
        step=step,
        next_sample=inputs.array("next_sample", next_sample),
        velocity_ref=inputs.array("velocity_ref", velocity_ref),
        inv_two_var_kl=inputs.per_row("inv_two_var_kl", inv_two_var_kl, torch.float64),
        old_log_prob=inputs.per_row("old_log_prob", old_log_prob),
        advantage=inputs.per_row("advantage", advantage),
        weight=inputs.per_row("weight", weight),
        clip_range=clip_range,
        adv_clip=adv_clip,
        ratio=ratio.data_ptr(),
        policy=policy.data_ptr(),
        kl=kl.data_ptr(),
        grad_log_prob=grad_log_prob.data_ptr(),
    )
    load().tpgrpo_grpo_loss(ctypes.byref(arguments))
    return ratio, policy, kl, grad_log_prob


def grpo_loss_backward(
    grad_log_prob: torch.Tensor,
    grad_kl: torch.Tensor | None,
    velocity: torch.Tensor,
    velocity_uncond: torch.Tensor | None,
    guidance_scale: float,
    sample: torch.Tensor,
    next_sample: torch.Tensor,
    velocity_ref: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    inv_two_var_kl: torch.Tensor | None,
    unscaled: bool,
    reduce_sum: bool,
    *,
    num_threads: int | None = None,
    max_isa: str = ISA_NAMES[-1],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of sum(grad_log_prob log_prob + grad_kl kl) in both velocities, recomputed from the forward's inputs.

    Args:
        grad_log_prob: `[N]`.
        grad_kl: `[N]`, for the KL without weight, mean((mu - mu_ref)^2) / (2 v); needed with `velocity_ref`.
        velocity, ..., reduce_sum: as in `grpo_loss_forward`.

    Returns:
        `(grad_velocity, grad_velocity_uncond | None)`, `[N, E]` in the velocities' dtypes.
    """
    inputs = _Inputs(num_threads, max_isa)
    step = inputs.step(velocity, velocity_uncond, guidance_scale, sample, a, b, c, unscaled, reduce_sum)
    _check_reference(velocity_ref, inv_two_var_kl=inv_two_var_kl, grad_kl=grad_kl)
    grad_velocity = torch.empty_like(velocity)
    grad_velocity_uncond = torch.empty_like(velocity_uncond) if velocity_uncond is not None else None
    arguments = _Gradient(
        step=step,
        next_sample=inputs.array("next_sample", next_sample),
        velocity_ref=inputs.array("velocity_ref", velocity_ref),
        inv_two_var_kl=inputs.per_row("inv_two_var_kl", inv_two_var_kl, torch.float64),
        grad_log_prob=inputs.per_row("grad_log_prob", grad_log_prob),
        grad_kl=inputs.per_row("grad_kl", grad_kl),
        grad_velocity=inputs.array("grad_velocity", grad_velocity),
        grad_velocity_uncond=inputs.array("grad_velocity_uncond", grad_velocity_uncond),
    )
    load().tpgrpo_gradients(ctypes.byref(arguments))
    return grad_velocity, grad_velocity_uncond


class _Inputs:
    """Checks tensors against one shape and hands out pointers; keeps converted copies alive while the call runs."""

    def __init__(self, num_threads: int | None, max_isa: str) -> None:
        self._num_threads = num_threads or torch.get_num_threads()
        self._max_isa = _isa_index(max_isa)
        self._alive: list[torch.Tensor] = []

    def step(
        self,
        velocity: torch.Tensor,
        velocity_uncond: torch.Tensor | None,
        guidance_scale: float,
        sample: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        unscaled: bool,
        reduce_sum: bool,
    ) -> _Step:
        if sample.ndim != 2:
            raise ValueError(f"sample must have shape [N, E], got {list(sample.shape)}")
        self._rows, self._elements = sample.shape
        return _Step(
            rows=self._rows,
            elements=self._elements,
            velocity=self.array("velocity", velocity),
            velocity_uncond=self.array("velocity_uncond", velocity_uncond),
            sample=self.array("sample", sample),
            a=self.per_row("a", a, torch.float64),
            b=self.per_row("b", b, torch.float64),
            c=self.per_row("c", c, torch.float64),
            guidance_scale=guidance_scale,
            unscaled=unscaled,
            reduce_sum=reduce_sum,
            num_threads=self._num_threads,
            max_isa=self._max_isa,
        )

    def array(self, name: str, tensor: torch.Tensor | None, rows: int | None = None) -> _Array:
        if tensor is None:
            return _Array(None, 0)
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPES or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous float32, bfloat16 or float16 CPU tensor, got {tensor.dtype} on "
                f"{tensor.device}, contiguous: {tensor.is_contiguous()}"
            )
        if tensor.shape != (self._rows if rows is None else rows, self._elements):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but sample has {[self._rows, self._elements]}")
        return _Array(tensor.data_ptr(), DTYPES.index(tensor.dtype))

    def per_row(
        self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32, rows: int | None = None
    ) -> int | None:
        rows = self._rows if rows is None else rows
        if tensor is None:
            return None
        if tensor.device.type != "cpu" or tensor.shape != (rows,):
            raise ValueError(
                f"{name} must be a CPU tensor with one entry for each of the {rows} rows, got "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        if tensor.dtype != dtype or not tensor.is_contiguous():
            tensor = tensor.detach().to(dtype).contiguous()
            self._alive.append(tensor)
        return tensor.data_ptr()


def _check_reference(velocity_ref: torch.Tensor | None, **needed: torch.Tensor | None) -> None:
    for name, value in needed.items():
        if velocity_ref is not None and value is None:
            raise ValueError(f"velocity_ref needs {name}")


def _isa_index(name: str) -> int:
    if name not in ISA_NAMES:
        raise ValueError(f"max_isa must be one of {', '.join(ISA_NAMES)}, got {name!r}")
    return ISA_NAMES.index(name)


def _check_uint(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} must be in [0, 2^{bits}), got {value}")


def _cpu_int64(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be an int64 CPU tensor, got {tensor.dtype} on {tensor.device}")
    return tensor.contiguous()
