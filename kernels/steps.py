"""The Triton backend of `tpgrpo_fast.ops`: the functions that every kernel backend has."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from tpgrpo_fast.kernels import grpo_loss, step_log_prob
from tpgrpo_fast.kernels import sde_step as step
from tpgrpo_fast.kernels._common import device_of

P = ParamSpec("P")
R = TypeVar("R")


def _on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """Runs `function` with the GPU of its first tensor as the current one."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        assert isinstance(args[0], torch.Tensor)
        with device_of(args[0]):
            return function(*args, **kwargs)

    return run


sde_step = _on_its_device(step.sde_step)
philox_normal = _on_its_device(step.philox_normal)
step_log_prob_forward = _on_its_device(step_log_prob.step_log_prob_forward)
step_log_prob_backward = _on_its_device(step_log_prob.step_log_prob_backward)
grpo_loss_forward = _on_its_device(grpo_loss.grpo_loss_forward)
grpo_loss_backward = _on_its_device(grpo_loss.grpo_loss_backward)
