"""Draw images from a model, with or without a trained adapter.

python -m tpgrpo_fast.sample "two red circles" --lora runs/shapes/checkpoints/iteration-000020/adapter --output out.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from tpgrpo_fast.assemble import build_policy
from tpgrpo_fast.config import load_config
from tpgrpo_fast.images import save_grid
from tpgrpo_fast.rollout import sample


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the sampler."""
    parser = argparse.ArgumentParser(prog="python -m tpgrpo_fast.sample", allow_abbrev=False, description=__doc__)
    parser.add_argument("prompts", nargs="+", help="one or more prompts")
    parser.add_argument("--config", help="recipe name or YAML file (a run's config.yaml)")
    parser.add_argument("--lora", help="adapter folder of a checkpoint")
    parser.add_argument("--count", type=int, default=4, help="images a prompt")
    parser.add_argument("--output", type=Path, default=Path("samples.png"), help="PNG grid, a row for each prompt")
    options, overrides = parser.parse_known_args(arguments)
    if options.count < 1:
        raise ValueError(f"--count = {options.count}: give at least 1")
    if options.lora is not None:
        overrides += ["--model.lora.path", options.lora]
    config = load_config(options.config, overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = build_policy(config, device, trainable=config.model.lora.path is not None)
    prompts = [prompt for prompt in options.prompts for _ in range(options.count)]
    images = sample(
        policy,
        prompts,
        config.rollout,
        seed=config.run.seed,
        row_uid=range(len(prompts)),
        negative_prompt=config.model.negative_prompt,
    )
    save_grid(images, options.output, columns=options.count)
    print(f"{len(prompts)} images: {options.output}")


if __name__ == "__main__":
    from tpgrpo_fast.cli import run

    run(main)
