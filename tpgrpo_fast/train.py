"""TurningPoint-GRPO training: `python -m tpgrpo_fast.train [--config RECIPE] [--deepspeed ds_config.json]`.

One iteration, top to bottom: prompts, rollout with ODE completions, rewards, credit, update. Deviations from the paper
(arXiv 2602.06422) and its released code, all on purpose:

* the ODE baseline R_0 starts from the rollout's own initial noise;
* prompts, windows and noise are functions of (seed, iteration, global row), whatever the number of processes;
* turning points are balanced within the prompt group or the whole batch, never within one device's share;
* a state is rounded to its storage dtype before it is scored, in the rollout and in training alike;
* averaged weights advance with optimizer updates, not with micro batches.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tpgrpo_fast import checkpoint, distributed, metrics
from tpgrpo_fast.assemble import build_policy
from tpgrpo_fast.checkpoint import CONFIG_FILE
from tpgrpo_fast.completions import pass_rows
from tpgrpo_fast.config import Config, load_config
from tpgrpo_fast.credit import Credit, assign_credit
from tpgrpo_fast.distributed import World
from tpgrpo_fast.evaluate import Evaluation, evaluate, heldout_prompts
from tpgrpo_fast.files import write_text
from tpgrpo_fast.images import save_grid
from tpgrpo_fast.prompts import load_prompts, prompts_of_iteration
from tpgrpo_fast.rewards import RewardSet
from tpgrpo_fast.rollout import PromptCache, Rollout, peak_memory, rollout
from tpgrpo_fast.update import Learner, UpdateStats, fill_deepspeed, read_deepspeed


@dataclass(frozen=True, slots=True)
class Task:
    """Everything that is checked before the model is loaded."""

    config: Config
    """The resolved configuration."""
    deepspeed: dict
    """The DeepSpeed configuration as given."""
    prompts: list[str]
    """Training prompts."""
    heldout: list[str]
    """Evaluation prompts."""
    rewards: RewardSet
    """What images are scored with."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(
        prog="python -m tpgrpo_fast.train",
        allow_abbrev=False,
        description="Fine-tune a flow-matching text-to-image model with TurningPoint-GRPO.",
        epilog="Any key of the configuration is an option too: --rollout.steps 10 --train.learning_rate 1e-4",
    )
    parser.add_argument("--config", help="recipe name or YAML file; by default the embedded `shapes` recipe")
    parser.add_argument("--deepspeed", help="DeepSpeed JSON file; by default a packaged ZeRO-2 one")
    parser.add_argument("--resume", help="`auto` for the run's newest checkpoint, or a checkpoint folder")
    parser.add_argument(
        "--allow-config-change", action="append", default=[], metavar="KEY", help="key that may differ on resuming"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args(arguments)
    task = prepare(load_config(options.config, overrides), deepspeed=options.deepspeed)
    world = distributed.start(options.local_rank)
    folder, resume = world.from_main(lambda: run_folder(task.config, options.resume, options.allow_config_change))
    try:
        train(task, world, folder, resume)
    finally:
        # A run that failed before its first record gives its folder back.
        if world.is_main and not (folder / metrics.METRICS_FILE).exists():
            (folder / CONFIG_FILE).unlink(missing_ok=True)


def prepare(config: Config, *, deepspeed: str | None = None) -> Task:
    """Check everything that needs no model and no folder: prompts, rewards, loggers, the DeepSpeed file.

    Raises:
        ValueError: (or a subclass) naming the setting and the remedy.
    """
    settings = read_deepspeed(deepspeed)
    if _single(settings):
        # The device is not looked at yet: missing weights are reported first, on any machine.
        fill_deepspeed(settings, config, world_size=1, cuda=True)
    metrics.check_loggers(config)
    prompts = load_prompts(config.data.prompts)
    heldout = heldout_prompts(config)
    prompts_of_iteration(prompts, config.data.prompts_per_iteration, config.run.seed, 0)
    rewards = RewardSet.from_config(config.reward)
    rewards.check(
        prompts,
        height=config.rollout.height or 64,
        width=config.rollout.width or 64,
        allow_nonfinite=config.credit.drop_nonfinite,
    )
    return Task(config, settings, prompts, heldout, rewards)


def train(task: Task, world: World, folder: Path, resume: Path | None) -> None:
    """The run: a table of contents of what the library does.

    Args:
        task: what to train.
        world: this process.
        folder: the run folder.
        resume: checkpoint to go on from.
    """
    config = task.config
    if config.run.deterministic:
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory it has not written; filling DeepSpeed's buffers would take a second each.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    clock = metrics.Clock()
    with clock.phase("start"):
        policy = build_policy(config, world.device)
        learner = Learner(policy, config, world, task.deepspeed)
        done = 0 if resume is None else checkpoint.load(resume, learner, world)
    log = None
    if world.is_main:
        write_text(folder / CONFIG_FILE, config.to_yaml())
        log = metrics.MetricsLog(folder, config, resumed_at=None if resume is None else done)
        _announce(config, learner, folder, done)
    cache: PromptCache = {}

    def record(iteration: int, values: dict[str, float | int], evaluation: Evaluation | None) -> None:
        if log is None:
            return
        values = {"iteration": iteration, **values}
        if evaluation is not None:
            values |= {"eval/reward": evaluation.reward}
            values |= {f"eval/{name}": value for name, value in evaluation.parts.items()}
            save_grid(evaluation.images, folder / "images" / f"iteration-{iteration:06d}.png")
            log.images("eval", evaluation.images, iteration)
        values |= clock.finish()
        values |= {"memory/peak": peak_memory(world.device)}
        if "rollout/samples" in values:
            values["samples_per_second"] = values["rollout/samples"] / values["seconds/total"]
        log.write(values)
        tqdm.write(metrics.line(values, config.run.iterations))

    def evaluation_of(iteration: int) -> Evaluation | None:
        every, last = config.run.eval_every, iteration == config.run.iterations
        if iteration and not last and (every == 0 or iteration % every):
            return None
        with clock.phase("eval"), learner.averaged():
            return evaluate(policy, task.heldout, task.rewards, config, world, cache=_cache(cache, config))

    if resume is None:
        record(0, {}, evaluation_of(0))
    for iteration in range(done, config.run.iterations):
        with clock.phase("rollout"):
            drawn, groups = draw(task, learner, world, iteration, _cache(cache, config))
        with clock.phase("reward"):
            rewards, parts = score(drawn, task, world)
        with clock.phase("credit"):
            credit = assign_credit(rewards, groups, config.credit, num_steps=config.rollout.window_size)
        with clock.phase("update"), _bar(world, "update", None) as bar:
            stats = learner.update(drawn, credit.advantages, iteration=iteration, on_micro_batch=bar.update)
        values = _values(drawn, rewards, parts, credit, stats)
        if stats.ratio_max_dev > config.train.clip_range and config.train.old_log_prob == "rollout" and world.is_main:
            tqdm.write(
                f"warning: before the first update |ratio - 1| reaches {stats.ratio_max_dev:.1e}, beyond "
                f"train.clip_range = {config.train.clip_range:g}: rollout and training disagree in rounding. Use "
                "float32, raise train.clip_range, or set train.old_log_prob recompute"
            )
        finished = iteration + 1
        evaluation = evaluation_of(finished)
        last = finished == config.run.iterations
        if last or (config.run.save_every and finished % config.run.save_every == 0):
            with clock.phase("save"):
                saved = checkpoint.save(folder / "checkpoints", learner, config, world, iteration=finished)
        record(finished, values, evaluation)
        if last and world.is_main:
            tqdm.write(f"checkpoint: {saved}\nplots: python -m tpgrpo_fast.report {folder}")
    if log is not None:
        log.close()


def draw(
    task: Task, learner: Learner, world: World, iteration: int, cache: PromptCache | None
) -> tuple[Rollout, torch.Tensor]:
    """This process's rollout of an iteration, and the prompt group of every row of all processes (int64 `[N]`)."""
    config = task.config
    size = config.data.group_size
    chosen = prompts_of_iteration(task.prompts, config.data.prompts_per_iteration, config.run.seed, iteration)
    groups = torch.arange(len(chosen)).repeat_interleave(size)
    mine = torch.arange(len(groups))[list(world.rows(len(groups)))]
    with _bar(world, "rollout", len(_planned_rows(config))) as bar:
        drawn = rollout(
            learner.policy,
            [task.prompts[chosen[group]] for group in groups[mine]],
            config.rollout,
            iteration=iteration,
            seed=config.run.seed,
            row_uid=mine,
            # A group's shared noise is that of its first row, wherever that row is drawn.
            initial_uid=groups[mine] * size if config.rollout.same_noise else mine,
            complete=_needs_completions(config),
            negative_prompt=config.model.negative_prompt,
            cache=cache,
            on_pass=bar.update,
        )
    return drawn, groups


def score(drawn: Rollout, task: Task, world: World) -> tuple[torch.Tensor, dict[str, float]]:
    """Rewards of every completed state of all rows, `[N, n+1]` (`[N, 1]` without completions), and mean parts."""
    columns = [k for k, latents in enumerate(drawn.clean) if latents is not None]
    allow = task.config.credit.drop_nonfinite
    scores = [task.rewards.score(drawn.images(k), drawn.prompts, allow_nonfinite=allow) for k in columns]
    names = list(scores[-1].parts)
    own = torch.stack([*(s.total for s in scores), *scores[-1].parts.values()], dim=1)
    table = world.gather_rows(own)
    parts = table[:, len(columns) :].double().nanmean(dim=0).tolist()
    return table[:, : len(columns)], dict(zip(names, parts, strict=True))


def _values(
    drawn: Rollout, rewards: torch.Tensor, parts: dict[str, float], credit: Credit, stats: UpdateStats
) -> dict[str, float | int]:
    final = rewards[:, -1].double()
    return {
        "reward/mean": float(final.nanmean()),
        "reward/std": float(final[final.isfinite()].std(correction=0)),
        **{f"reward/{name}": value for name, value in parts.items()},
        "credit/turning_point_fraction": float(torch.as_tensor(credit.turning_points).double().mean()),
        "ratio/max_dev": stats.ratio_max_dev,
        "ratio/clip_fraction": stats.clip_fraction,
        "loss": stats.loss,
        "policy_loss": stats.policy_loss,
        "kl": stats.kl,
        "grad_norm": stats.grad_norm,
        "learning_rate": stats.learning_rate,
        "update/steps": stats.updates,
        "update/pairs": stats.pairs,
        "update/skipped_pairs": stats.skipped_pairs,
        "rollout/window_start": drawn.window.start,
        "rollout/passes": drawn.stats.passes,
        "rollout/rows": drawn.stats.rows,
        "rollout/samples": len(rewards),
    }


def run_folder(config: Config, resume: str | None, allowed_changes: Sequence[str]) -> tuple[Path, Path | None]:
    """The folder to write to, made and found writable, and the checkpoint to resume from.

    Args:
        config: the whole configuration.
        resume: `auto`, a checkpoint folder, or None for a new run.
        allowed_changes: keys that may differ from the resumed run's.

    Raises:
        ValueError: nothing to resume from, a changed configuration, or a folder that cannot be written.
    """
    base = config.run.folder
    source: Path | None = None
    if resume is not None and resume != "auto":
        checkpoint.read_state(Path(resume))
        source = Path(resume).resolve()
        folder = source.parent.parent
    else:
        taken = _existing(base)
        if resume == "auto":
            sources = [found[-1] for run in taken if (found := checkpoint.found(run / "checkpoints"))]
            source = sources[-1] if sources else None
            if source is None:
                print(f"--resume auto: no checkpoint of {base} yet, a new run starts")
        # An earlier run is never written over: the next one gets a number.
        number = _number(taken[-1], base) + 1 if taken else 1
        folder = _numbered(base, number) if source is None else source.parent.parent
    try:
        # The new folder is taken at once, so that a run that starts at the same moment takes the next number.
        while source is None and not _claim(folder):
            number += 1
            folder = _numbered(base, number)
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_text(folder / ".writable", "")
        (folder / ".writable").unlink()
    except OSError as error:
        raise ValueError(
            f"run.dir = {config.run.dir!r}: the run folder {folder} cannot be written ({error.strerror}); "
            "set run.dir to a folder you may write to"
        ) from error
    if source is not None:
        checkpoint.check_config(source, config, list(allowed_changes))
    return folder, source


def _claim(folder: Path) -> bool:
    """Whether this process is the first to put a configuration into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / CONFIG_FILE).open("x").close()
    except FileExistsError:
        # A path component that is a file raises the same error; then there is no folder to number.
        if not folder.is_dir():
            raise
        return False
    return True


def _numbered(base: Path, number: int) -> Path:
    return base if number == 1 else base.with_name(f"{base.name}-{number}")


def _existing(base: Path) -> list[Path]:
    """Run folders `NAME`, `NAME-2`, `NAME-3`, … that hold a run, oldest first."""
    if not base.parent.is_dir():
        return []
    pattern = re.compile(re.escape(base.name) + r"(-\d+)?")
    runs = [path for path in base.parent.iterdir() if pattern.fullmatch(path.name) and (path / CONFIG_FILE).is_file()]
    return sorted(runs, key=lambda path: _number(path, base))


def _number(path: Path, base: Path) -> int:
    suffix = path.name[len(base.name) :]
    return int(suffix[1:]) if suffix else 1


def _single(settings: dict) -> bool:
    """Whether the DeepSpeed file's batch numbers can be checked without knowing the number of processes."""
    return settings.get("train_batch_size", "auto") == "auto"


def _needs_completions(config: Config) -> bool:
    return config.credit.method != "outcome"


def _planned_rows(config: Config) -> list[int]:
    """Rows a sample of each pass of a rollout whose window starts at 0."""
    window, schedule = range(config.rollout.window_size), config.rollout.schedule
    return list(pass_rows(config.rollout.steps, window, complete=_needs_completions(config), schedule=schedule))


def _cache(cache: PromptCache, config: Config) -> PromptCache | None:
    return cache if config.model.cache_prompt_embeddings else None


def _bar(world: World, name: str, total: int | None) -> tqdm:
    # `disable=None` shows bars on terminals only, so that logs hold one line an iteration.
    return tqdm(total=total, desc=name, leave=False, disable=None if world.is_main else True)


def _announce(config: Config, learner: Learner, folder: Path, done: int) -> None:
    rows = config.data.prompts_per_iteration * config.data.group_size
    trained = sum(p.numel() for p in learner.parameters)
    row_forwards = _planned_rows(config)
    zero = learner.settings.get("zero_optimization", {}).get("stage", 0)
    what = "all weights" if config.model.full_finetune else f"LoRA rank {config.model.lora.rank}"
    print(
        f"{folder}: {config.credit.method} credit, {rows} samples an iteration, {what} ({trained:,} parameters), "
        f"ZeRO-{zero} on {learner.world.world_size} x {learner.world.device.type}"
        + (f", resumed after iteration {done}" if done else "")
    )
    print(f"rollout: {len(row_forwards)} passes and {sum(row_forwards)} row-forwards a sample at w = 0", flush=True)


if __name__ == "__main__":
    from tpgrpo_fast.cli import run

    run(main)
