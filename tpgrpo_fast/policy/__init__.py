"""Model families: `load` turns a diffusers pipeline, a folder or a hub name into a `Policy`.

A family is one file here and one line in `FAMILIES`.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from tpgrpo_fast.policy.base import Conditioning, Grid, Policy

__all__ = ["FAMILIES", "Conditioning", "Grid", "Policy", "load"]

FAMILIES: dict[str, str] = {"StableDiffusion3Pipeline": "tpgrpo_fast.policy.sd3:StableDiffusion3Policy"}
"""Pipeline class name -> policy class, imported when it is needed."""


class ModelNotFoundError(RuntimeError):
    """The weights of a recipe's model are not on this machine and could not be downloaded."""


def load(
    pipeline_or_path: Any,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    max_text_length: int | None = None,
    revision: str | None = None,
    variant: str | None = None,
    decoder_dtype: torch.dtype | None = torch.float32,
) -> Policy:
    """A policy around a diffusers pipeline.

    Args:
        pipeline_or_path: a pipeline object, a folder, a hub name, or `shapes` for the embedded model.
        dtype: dtype of transformer and text encoders; by default as loaded.
        device: where to put everything; by default where it is.
        max_text_length: T5 tokens (SD3's `max_sequence_length`); by default the pipeline's own.
        revision, variant: passed on to diffusers.
        decoder_dtype: dtype of the image decoder.

    Raises:
        ModelNotFoundError: the weights are missing; the message says what to download.
        ValueError: no family for this pipeline; the message lists those that exist.
    """
    pipeline = pipeline_or_path
    if isinstance(pipeline_or_path, (str, os.PathLike)):
        pipeline = _from_pretrained(os.fspath(pipeline_or_path), dtype, revision, variant)
    name = type(pipeline).__name__
    if name not in FAMILIES:
        raise ValueError(
            f"model.path: pipelines of type {name} are not supported. Supported: {', '.join(sorted(FAMILIES))}. "
            "To add one, subclass tpgrpo_fast.policy.Policy and enter it in tpgrpo_fast.policy.FAMILIES"
        )
    module, _, attribute = FAMILIES[name].partition(":")
    policy = getattr(importlib.import_module(module), attribute)(pipeline, max_text_length=max_text_length)
    if dtype is not None and policy.dtype != dtype:
        pipeline.to(dtype=dtype)
    vae = getattr(pipeline, "vae", None)
    if decoder_dtype is not None and vae is not None and vae.dtype != decoder_dtype:
        vae.to(dtype=decoder_dtype)
    if device is not None:
        pipeline.to(device)
    return policy


def _absent_components(path: str) -> dict[str, None]:
    """Components a saved pipeline goes without (SD3's T5, say): diffusers wants them named."""
    index = Path(path).expanduser() / "model_index.json"
    if not index.is_file():
        return {}
    entries = json.loads(index.read_text(encoding="utf-8")).items()
    return {name: None for name, entry in entries if entry == [None, None]}


def _from_pretrained(path: str, dtype: torch.dtype | None, revision: str | None, variant: str | None) -> Any:
    if path == "shapes":
        from tpgrpo_fast.shapes import pipeline_path

        path = str(pipeline_path())
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    # A line for every optional component that is absent, and a bar for every file: not what a run has to say.
    transformers_logging.set_verbosity_error()
    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    is_folder = Path(path).expanduser().is_dir()
    if is_folder and not (Path(path).expanduser() / "model_index.json").is_file():
        raise ModelNotFoundError(
            f"model.path = {path!r} is a folder without model_index.json, so it is not a diffusers pipeline.\n"
            "Point model.path at the folder that `pipeline.save_pretrained` wrote."
        )
    try:
        pipeline = DiffusionPipeline.from_pretrained(
            str(Path(path).expanduser()) if is_folder else path,
            dtype=dtype or torch.float32,
            revision=revision,
            variant=variant,
            **_absent_components(path),
        )
    except (OSError, ValueError) as error:
        if is_folder:
            raise ModelNotFoundError(
                f"model.path = {path!r}: the pipeline folder could not be loaded: {error}\n"
                "Download or save it again; every component listed in model_index.json must be there."
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"model.path = {path!r}: the weights are neither in the local cache nor downloadable ({reason}).\n"
            f"On a machine with internet access, accept the model's licence on its hub page, then run\n"
            f"    hf auth login && hf download {path}\n"
            "and copy the cache over, or set model.path to a local pipeline folder."
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
