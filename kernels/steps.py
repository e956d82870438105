"""The Triton backend of `tpgrpo_fast.ops`: the functions that every kernel backend has."""

from tpgrpo_fast.kernels.grpo_loss import grpo_loss_backward, grpo_loss_forward
from tpgrpo_fast.kernels.sde_step import philox_normal, sde_step
from tpgrpo_fast.kernels.step_log_prob import step_log_prob_backward, step_log_prob_forward

__all__ = [
    "grpo_loss_backward",
    "grpo_loss_forward",
    "philox_normal",
    "sde_step",
    "step_log_prob_backward",
    "step_log_prob_forward",
]
