"""What is trained: a LoRA adapter through peft, or the whole transformer; how it is saved, loaded and switched off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpgrpo_fast.config import ModelConfig
from tpgrpo_fast.policy.base import Policy

ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."


def prepare(policy: Policy, config: ModelConfig, *, seed: int) -> None:
    """Make the transformer trainable as `config` says: a new adapter, a saved one, or all weights.

    Args:
        policy: the loaded model; changed in place.
        config: the `model` section.
        seed: of the adapter's initial weights (gaussian A, zero B, so a cold adapter is the identity).

    Raises:
        ValueError: target modules that the transformer does not have, or an adapter folder that does not fit it.
    """
    transformer = policy.transformer
    transformer.requires_grad_(config.full_finetune)
    if config.attention_backend is not None:
        transformer.set_attention_backend(config.attention_backend)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    if config.full_finetune:
        return
    if config.lora.path is not None:
        _load(transformer, Path(config.lora.path))
        return
    from peft import LoraConfig

    targets = list(config.lora.target_modules or policy.default_lora_targets)
    lora = LoraConfig(
        r=config.lora.rank, lora_alpha=config.lora.alpha, init_lora_weights="gaussian", target_modules=targets
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            transformer.add_adapter(lora, adapter_name=ADAPTER)
        except ValueError as error:
            raise ValueError(f"model.lora.target_modules = {targets}: {error}") from error


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name, in a fixed order."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def reference(policy: Policy) -> Iterator[None]:
    """The model without its adapter, inside the `with`."""
    policy.transformer.disable_adapters()
    try:
        yield
    finally:
        policy.transformer.enable_adapters()


def save(policy: Policy, folder: Path) -> None:
    """Write the present weights below `folder`.

    An adapter goes to `adapter/` (peft) and `pytorch_lora_weights.safetensors` (diffusers' `load_lora_weights`); a
    fully fine-tuned transformer to `transformer/` (`from_pretrained`).
    """
    transformer = policy.transformer
    if not getattr(transformer, "peft_config", None):
        transformer.save_pretrained(folder / "transformer")
        return
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = transformer.peft_config[ADAPTER]
    weights = {
        name: value.detach().cpu().contiguous()
        for name, value in get_peft_model_state_dict(transformer, adapter_name=ADAPTER).items()
    }
    adapter = folder / "adapter"
    adapter.mkdir(parents=True)
    config.save_pretrained(str(adapter))
    save_file({_PEFT_PREFIX + name: value for name, value in weights.items()}, adapter / "adapter_model.safetensors")
    # The metadata carry rank and alpha; without them diffusers would scale the adapter by 1.
    policy.pipeline.save_lora_weights(
        str(folder), transformer_lora_layers=weights, transformer_lora_adapter_metadata=config.to_dict()
    )


def _load(transformer: Any, folder: Path) -> None:
    from peft import LoraConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    weights_file = folder / "adapter_model.safetensors"
    for file in (folder / "adapter_config.json", weights_file):
        if not file.is_file():
            raise ValueError(
                f"model.lora.path = {str(folder)!r}: {file.name} is missing; "
                "give the `adapter` folder of a checkpoint (peft's format)"
            )
    config = LoraConfig.from_pretrained(str(folder))
    config.inference_mode = False
    transformer.add_adapter(config, adapter_name=ADAPTER)
    weights = {name.removeprefix(_PEFT_PREFIX): value for name, value in load_file(weights_file).items()}
    try:
        result = set_peft_model_state_dict(transformer, weights, adapter_name=ADAPTER)
    except RuntimeError as error:
        raise ValueError(f"model.lora.path = {str(folder)!r}: the adapter does not fit this model: {error}") from error
    missing = [name for name in result.missing_keys if "lora_" in name]
    if result.unexpected_keys or missing:
        odd = [*result.unexpected_keys, *missing]
        raise ValueError(
            f"model.lora.path = {str(folder)!r}: the adapter was made for another model; {len(odd)} weights do not "
            f"match, the first is {odd[0]}"
        )
