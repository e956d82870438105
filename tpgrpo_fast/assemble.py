"""From a configuration to a model on a device: shared by training, evaluation and sampling."""

from __future__ import annotations

import torch

from tpgrpo_fast import adapters
from tpgrpo_fast import policy as policies
from tpgrpo_fast.config import Config, check_window
from tpgrpo_fast.policy.base import Policy
from tpgrpo_fast.rollout import image_size


def build_policy(config: Config, device: torch.device, *, trainable: bool = True) -> Policy:
    """Load the model of `config` and check what only the model can tell: its image size and its scheduler's grid.

    Args:
        config: the whole configuration.
        device: where the model goes.
        trainable: whether to attach the adapter (or unfreeze the transformer) as `model` says.

    Raises:
        ModelNotFoundError: the weights are missing.
        ValueError: the pipeline's family, size, grid or adapter does not fit the configuration.
    """
    model = config.model
    policy = policies.load(
        model.path,
        dtype=getattr(torch, model.dtype),
        device=device,
        max_text_length=model.max_text_length,
        revision=model.revision,
        variant=model.variant,
    )
    height, width = image_size(policy, config.rollout)
    policy.latent_shape(height, width)
    check_window(config, policy.grid(config.rollout.steps, height, width).sigmas)
    policy.transformer.eval()
    if trainable:
        adapters.prepare(policy, model, seed=config.run.seed)
    else:
        policy.transformer.requires_grad_(False)
    return policy
