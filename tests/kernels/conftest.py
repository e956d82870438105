"""Kernel tests run on `cpu`, where Triton interprets the kernels, and with `-m gpu` on the device.

Triton decides when a kernel's module is imported whether it is interpreted, so one process does one or the other.
"""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a test's tensors, with the Triton kernels ready for it."""
    interpreted = request.param == "cpu"
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from triton.runtime.interpreter import InterpretedFunction

    from tpgrpo_fast.kernels import _common

    if isinstance(_common.log_prob_kernel, InterpretedFunction) is not interpreted:
        pytest.fail("this process has imported the kernels for the other device: run `pytest -m gpu` by itself")
    return request.param


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or a number nobody expects: what a kernel does not write shows."""

    def poison(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def created(*args, **kwargs) -> torch.Tensor:
            tensor = create(*args, **kwargs)
            if tensor.device.type == "meta" or torch.compiler.is_compiling():
                return tensor
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 99)

        return created

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def check_error() -> Callable[..., None]:
    """`check_error(actual, reference, truth)`: the error against float64 is at most twice that of the reference.

    Where the reference happens to be exact, `slack` last places of the largest value are left.
    """

    def check(
        actual: torch.Tensor, reference: torch.Tensor, truth: torch.Tensor, what: str = "", *, slack: int = 1
    ) -> None:
        assert actual.shape == reference.shape == truth.shape, what
        assert actual.dtype == reference.dtype, what
        actual, reference, truth = (x.detach().double().cpu() for x in (actual, reference, truth))
        if not truth.numel():
            return
        bound = 2 * (reference - truth).abs().max() + slack * 2.0**-23 * truth.abs().max()
        error = (actual - truth).abs()
        bad = ~(error <= bound)
        if bad.any():
            place = tuple(
                int(i) for i in torch.nonzero(error.nan_to_num(torch.inf) == error.nan_to_num(torch.inf).max())[0]
            )
            pytest.fail(
                f"{what}: {100 * bad.double().mean():.3g} % beyond {bound:.3g}, worst at {place}: "
                f"{actual[place]:.9g}, truth {truth[place]:.9g}, reference {reference[place]:.9g}"
            )

    return check
