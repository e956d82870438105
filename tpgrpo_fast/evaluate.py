"""Evaluation: images by the ODE from noise that never changes, scored by the run's rewards.

python -m tpgrpo_fast.evaluate --config RUN/config.yaml --model.lora.path RUN/checkpoints/iteration-000020/adapter
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tpgrpo_fast.config import Config, load_config
from tpgrpo_fast.distributed import World
from tpgrpo_fast.images import save_grid
from tpgrpo_fast.policy.base import Policy
from tpgrpo_fast.prompts import evaluation_prompts, load_prompts
from tpgrpo_fast.rewards import RewardSet
from tpgrpo_fast.rollout import PromptCache, sample

SAMPLE_BATCH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Scores of the evaluation images."""

    reward: float
    """Mean total reward."""
    parts: dict[str, float]
    """Mean of each reward and of its parts."""
    images: torch.Tensor
    """`[K, 3, H, W]` images of the first prompts of this process."""
    prompts: tuple[str, ...]
    """Their K prompts."""


def evaluate(
    policy: Policy,
    prompts: Sequence[str],
    rewards: RewardSet,
    config: Config,
    world: World,
    *,
    keep_images: int = 16,
    cache: PromptCache | None = None,
) -> Evaluation:
    """Score one image a prompt; noise depends on the seed and the prompt's place alone, so any two evaluations compare.

    Args:
        policy: the model with the weights to evaluate.
        prompts: M prompts; processes share them.
        rewards: what to score with.
        config: the whole configuration; `rollout.eval_steps`, guidance and size are used.
        world: this process.
        keep_images: how many images to return.
        cache: conditioning of prompts encoded before.
    """
    count = len(prompts)
    share = -(-count // world.world_size)
    # Processes draw equally many; places past the end repeat the first prompts and are dropped after the gather.
    places = [(world.rank * share + j) % count for j in range(share)]
    scores, kept = [], []
    names: list[str] = []
    for start in range(0, share, SAMPLE_BATCH):
        batch = places[start : start + SAMPLE_BATCH]
        texts = [prompts[place] for place in batch]
        images = sample(
            policy,
            texts,
            config.rollout,
            seed=config.run.seed,
            row_uid=batch,
            negative_prompt=config.model.negative_prompt,
            cache=cache,
        )
        result = rewards.score(images, texts, allow_nonfinite=config.credit.drop_nonfinite)
        names = list(result.parts)
        scores.append(torch.stack([result.total, *result.parts.values()], dim=1))
        if start < keep_images:
            kept.append(images[: keep_images - start].cpu())
    table = world.gather_rows(torch.cat(scores))[:count]
    # A reward that fails on an image says nothing about the others.
    means = table.double().nanmean(dim=0).tolist()
    shown = torch.cat(kept)
    return Evaluation(
        reward=means[0],
        parts=dict(zip(names, means[1:], strict=True)),
        images=shown,
        prompts=tuple(prompts[place] for place in places[: len(shown)]),
    )


def heldout_prompts(config: Config) -> list[str]:
    """The evaluation prompts of a configuration."""
    return evaluation_prompts(load_prompts(config.data.eval_prompts or config.data.prompts), config.data.eval_count)


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m tpgrpo_fast.evaluate`: print the mean rewards of a model, with or without an adapter."""
    from tpgrpo_fast.assemble import build_policy

    parser = argparse.ArgumentParser(prog="python -m tpgrpo_fast.evaluate", allow_abbrev=False, description=__doc__)
    parser.add_argument("--config", help="recipe name or YAML file (a run's config.yaml)")
    parser.add_argument("--images", type=Path, help="write the first images as a PNG grid")
    options, overrides = parser.parse_known_args(arguments)
    config = load_config(options.config, overrides)
    prompts = heldout_prompts(config)
    rewards = RewardSet.from_config(config.reward)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    world = World(rank=0, world_size=1, local_rank=0, device=device)
    policy = build_policy(config, device, trainable=config.model.lora.path is not None)
    result = evaluate(policy, prompts, rewards, config, world)
    print(f"{len(prompts)} images, {config.rollout.eval_steps} steps, seed {config.run.seed}")
    for name, value in {"reward": result.reward, **result.parts}.items():
        print(f"  {name:32s} {value:.4f}")
    if options.images is not None:
        save_grid(result.images, options.images)
        print(f"images: {options.images}")


if __name__ == "__main__":
    from tpgrpo_fast.cli import run

    run(main)
