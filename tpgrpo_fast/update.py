"""The policy update: DeepSpeed engine, packed replay of (row, step) pairs, averaged weights."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpgrpo_fast import adapters, ops, replay, transitions
from tpgrpo_fast.config import Config, TrainConfig
from tpgrpo_fast.distributed import World, import_deepspeed
from tpgrpo_fast.policy.base import Policy
from tpgrpo_fast.rollout import Rollout

DEFAULT_DEEPSPEED = Path(__file__).parent / "recipes" / "deepspeed" / "zero2.json"
DEFAULT_MICRO_BATCH = 32
ADAM_EPS = 1e-8
MAX_BUCKET = 500_000_000  # elements: DeepSpeed's own default


class TrainingError(RuntimeError):
    """The update cannot go on; the message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """What an iteration's updates did; means are over pairs of all processes."""

    loss: float
    """Policy loss + beta KL, averaged over the updates."""
    policy_loss: float
    """Clipped surrogate."""
    kl: float
    """KL to the model without adapter; 0 where beta is 0."""
    clip_fraction: float
    """Share of trained pairs whose ratio lies outside the clip range."""
    ratio_max_dev: float
    """max |ratio - 1| before the first optimizer step after the rollout: 0 but for rounding."""
    grad_norm: float
    """Gradient norm before clipping, averaged over the updates; NaN where DeepSpeed keeps none (ZeRO stage 0)."""
    learning_rate: float
    """At the last update."""
    updates: int
    """Optimizer steps taken."""
    pairs: int
    """(row, step) pairs trained on."""
    skipped_pairs: int
    """Pairs left out since their advantage is 0."""


def read_deepspeed(path: str | Path | None) -> dict[str, Any]:
    """A DeepSpeed configuration file; the packaged ZeRO-2 one by default.

    Raises:
        ValueError: the file is missing or is not a JSON object.
    """
    file = DEFAULT_DEEPSPEED if path is None else Path(path)
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--deepspeed {file}: cannot be read ({error.strerror}); give a DeepSpeed JSON file"
        ) from error
    except ValueError as error:
        raise ValueError(f"--deepspeed {file}: is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"--deepspeed {file}: must hold one JSON object")
    return settings


def fill_deepspeed(
    settings: dict[str, Any], config: Config, *, world_size: int, cuda: bool, trained_parameters: int = MAX_BUCKET
) -> dict[str, Any]:
    """Replace every `auto` of a DeepSpeed configuration by the recipe's value.

    A micro batch counts (row, step) pairs. Accumulation boundaries are set by this library, at the end of each update.

    Raises:
        ValueError: fp16 on a CPU, a dtype that contradicts the recipe, or batch numbers that contradict each other.
    """
    filled = json.loads(json.dumps(settings))
    rows = config.data.prompts_per_iteration * config.data.group_size
    pairs = max(1, rows * config.rollout.window_size // (config.train.updates_per_iteration * world_size))
    micro = filled.get("train_micro_batch_size_per_gpu", "auto")
    if micro == "auto":
        micro = min(pairs, DEFAULT_MICRO_BATCH)
    if not isinstance(micro, int) or micro < 1:
        raise ValueError(f"train_micro_batch_size_per_gpu = {micro!r} in the DeepSpeed file: give a count or 'auto'")
    accumulation = filled.get("gradient_accumulation_steps", "auto")
    if accumulation == "auto":
        accumulation = -(-pairs // micro)
    batch = filled.get("train_batch_size", "auto")
    if batch == "auto":
        batch = micro * accumulation * world_size
    if batch != micro * accumulation * world_size:
        raise ValueError(
            f"DeepSpeed file: train_batch_size = {batch}, but micro batch {micro} x accumulation {accumulation} x "
            f"{world_size} processes = {micro * accumulation * world_size}. An update of this recipe has {pairs} pairs "
            "a process. Set the three to 'auto', or make them agree"
        )
    filled.update(
        train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation, train_batch_size=batch
    )
    if filled.get("gradient_clipping", "auto") == "auto":
        filled["gradient_clipping"] = config.train.max_grad_norm or 0.0
    filled.setdefault("steps_per_print", 10**9)
    zero = filled.setdefault("zero_optimization", {})
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        # DeepSpeed allocates whole buckets, gigabytes by default; an adapter fits into a small one.
        if zero.get(bucket, "auto") == "auto":
            zero[bucket] = max(1, min(trained_parameters, MAX_BUCKET))
    for section, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        wanted = config.model.dtype == dtype
        given = filled.setdefault(section, {})
        enabled = given.get("enabled", "auto")
        if enabled == "auto":
            given["enabled"] = wanted
        elif enabled != wanted:
            raise ValueError(
                f"DeepSpeed file: {section}.enabled = {str(enabled).lower()}, but model.dtype = {config.model.dtype}: "
                f"set {section}.enabled to 'auto', or change model.dtype"
            )
    if filled["fp16"]["enabled"] and not cuda:
        raise ValueError("model.dtype = float16 needs a GPU in DeepSpeed: use float32 or bfloat16 on a CPU")
    optimizer = filled.get("optimizer")
    if optimizer is not None:
        defaults = {
            "lr": config.train.learning_rate,
            "betas": list(config.train.betas),
            "eps": ADAM_EPS,
            "weight_decay": config.train.weight_decay,
        }
        params = optimizer.setdefault("params", {})
        params.update({name: value for name, value in defaults.items() if params.get(name, "auto") == "auto"})
        if not cuda:
            # DeepSpeed's own CPU Adam is compiled at the first start, for minutes.
            params.setdefault("torch_adam", True)
    return filled


def learning_rate_factor(config: TrainConfig, total_updates: int) -> Callable[[int], float]:
    """Factor of the peak learning rate at update 0, 1, …: linear warm-up, then the schedule."""

    def factor(update: int) -> float:
        if update < config.warmup:
            return (update + 1) / config.warmup
        if config.lr_schedule == "constant":
            return 1.0
        left = max(0.0, 1.0 - (update - config.warmup) / max(1, total_updates - config.warmup))
        return left if config.lr_schedule == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))

    return factor


class Learner:
    """The trained weights with their optimizer: a DeepSpeed engine around the policy's transformer.

    Args:
        policy: the model, made trainable by `adapters.prepare`.
        config: the whole configuration.
        world: this process.
        deepspeed: a DeepSpeed configuration, `auto` values allowed.
    """

    def __init__(self, policy: Policy, config: Config, world: World, deepspeed: dict[str, Any]) -> None:
        self.policy = policy
        self.config = config
        self.world = world
        parameters = self.parameters
        self.settings = fill_deepspeed(
            deepspeed,
            config,
            world_size=world.world_size,
            cuda=world.device.type == "cuda",
            trained_parameters=sum(p.numel() for p in parameters),
        )
        stage = self.settings.get("zero_optimization", {}).get("stage", 0)
        if stage == 3:
            raise ValueError("DeepSpeed file: zero_optimization.stage = 3 is not supported yet: use 0, 1 or 2")
        train = config.train
        optimizer = None
        if "optimizer" not in self.settings:
            optimizer = torch.optim.AdamW(
                parameters, lr=train.learning_rate, betas=train.betas, eps=ADAM_EPS, weight_decay=train.weight_decay
            )
        total = config.run.iterations * train.updates_per_iteration * train.inner_epochs
        factor = learning_rate_factor(train, total)
        self.engine, _, _, _ = import_deepspeed().initialize(
            model=policy.transformer,
            model_parameters=parameters,
            optimizer=optimizer,
            lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, factor),
            config=self.settings,
        )
        self.ema = None
        if train.ema_decay is not None:
            from diffusers.training_utils import EMAModel

            self.ema = EMAModel(parameters, decay=train.ema_decay)
            # Rounding a slow average to bfloat16 would freeze it.
            self.ema.to(device=world.device, dtype=torch.float32)
        self.updates = 0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters."""
        return list(adapters.trainable(self.policy.transformer).values())

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights, if there are any, in place of the trained ones inside the `with`."""
        if self.ema is None or self.updates == 0:
            yield
            return
        parameters = self.parameters
        self.ema.store(parameters)
        self.ema.copy_to(parameters)
        try:
            yield
        finally:
            self.ema.restore(parameters)

    def update(
        self,
        rollout: Rollout,
        advantages: torch.Tensor,
        *,
        iteration: int,
        on_micro_batch: Callable[[], None] | None = None,
    ) -> UpdateStats:
        """All optimizer updates of one iteration.

        Args:
            rollout: this process's samples.
            advantages: `[N, n]` of all processes' rows, in global order.
            iteration: counter of the replay order.
            on_micro_batch: called after each micro batch (a progress bar).

        Raises:
            TrainingError: a loss or gradient that is not finite.
        """
        train = self.config.train
        rows = self.world.rows(advantages.shape[0])
        mine = advantages[rows.start : rows.stop]
        old = rollout.log_probs if train.old_log_prob == "rollout" else self._recompute(rollout)
        totals = torch.zeros(4, dtype=torch.float64)
        norms: list[float] = []
        max_dev, steps, trained, pairs = 0.0, 0, 0, 0
        for update in self.plan(advantages, iteration):
            pairs += update.pairs
            trained += update.trained
            for place, batch in enumerate(update.micro_batches):
                result = self._loss(rollout, batch, old, mine, normalizer=update.pairs)
                deviation = (result.ratio - 1).abs().max()
                # One read of the device a micro batch.
                values = (
                    torch.stack([result.loss.detach(), result.policy_loss, result.kl, result.clip_fraction, deviation])
                    .double()
                    .cpu()
                )
                if not torch.isfinite(values[:3]).all():
                    raise TrainingError(
                        f"the loss is not finite (iteration {iteration}, policy loss {float(values[1])}, KL "
                        f"{float(values[2])}): lower train.learning_rate or train.clip_range, or check the reward"
                    )
                self.engine.set_gradient_accumulation_boundary(place == len(update.micro_batches) - 1)
                # DeepSpeed averages gradients over processes; this loss is a mean over all processes' pairs already.
                self.engine.backward(result.loss * self.world.world_size, scale_wrt_gas=False)
                self.engine.step()
                if not batch.padding:
                    totals[:3] += values[:3]
                    totals[3] += values[3] * len(batch.rows)
                    if steps == 0:
                        max_dev = max(max_dev, float(values[4]))
                if on_micro_batch is not None:
                    on_micro_batch()
            if update.micro_batches:
                steps += 1
                self.updates += 1
                norm = self.engine.get_global_grad_norm()
                if norm is not None:  # DeepSpeed keeps none without ZeRO
                    norms.append(float(norm))
                    if not math.isfinite(norms[-1]):
                        raise TrainingError(
                            f"the gradient norm is {norms[-1]} (iteration {iteration}): lower train.learning_rate, set "
                            "train.max_grad_norm, or use another model.dtype"
                        )
                if self.ema is not None and self.updates % train.ema_every == 0:
                    self.ema.step(self.parameters)
        sums = self.world.gather_rows(torch.cat([totals, torch.tensor([max_dev])]).unsqueeze(0))
        loss, policy_loss, kl, clipped = (sums[:, :4].sum(dim=0)).tolist()
        planned = max(1, train.updates_per_iteration * train.inner_epochs)
        return UpdateStats(
            loss=loss / planned,
            policy_loss=policy_loss / planned,
            kl=kl / planned,
            clip_fraction=clipped / max(1, trained),
            ratio_max_dev=float(sums[:, 4].max()),
            grad_norm=sum(norms) / len(norms) if norms else math.nan,
            learning_rate=float(self.engine.get_lr()[0]),
            updates=steps,
            pairs=trained,
            skipped_pairs=pairs - trained,
        )

    def plan(self, advantages: torch.Tensor, iteration: int) -> list[replay.Update]:
        """The iteration's updates on this process."""
        train = self.config.train
        return list(
            replay.plan(
                advantages,
                rank=self.world.rank,
                world_size=self.world.world_size,
                updates=train.updates_per_iteration,
                epochs=train.inner_epochs,
                micro_batch=self.settings["train_micro_batch_size_per_gpu"],
                seed=self.config.run.seed,
                iteration=iteration,
                skip_zero=train.skip_zero_advantage and train.beta == 0,
            )
        )

    def _velocities(
        self, rollout: Rollout, rows: torch.Tensor, steps: torch.Tensor, module: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Velocities of the pairs, with the rollout's own states, timesteps, conditioning and guidance."""
        device = self.policy.device
        table = torch.tensor(rollout.grid.timesteps, dtype=torch.float32, device=device)
        rows, steps = rows.to(device), steps.to(device)
        return self.policy.guided_pair(
            rollout.states[rows, steps],
            table[steps + rollout.window.start],
            rollout.conditioning.rows(rollout.prompt_index.to(device)[rows]),
            rollout.unconditional if self.config.train.guidance else None,
            module=module,
        )

    def _transition(self, rollout: Rollout, steps: torch.Tensor) -> transitions.Transition:
        config = self.config.rollout
        return transitions.make(config.sde_type, rollout.sigmas, steps.cpu() + rollout.window.start, config.noise_level)

    def _loss(
        self,
        rollout: Rollout,
        batch: replay.MicroBatch,
        old_log_prob: torch.Tensor,
        advantages: torch.Tensor,
        *,
        normalizer: int,
    ) -> ops.GrpoLoss:
        train, device = self.config.train, self.policy.device
        rows, steps = batch.rows.to(device), batch.steps.to(device)
        guidance_scale = self.config.rollout.guidance_scale
        velocity_ref = None
        if train.beta > 0:
            with torch.no_grad(), adapters.reference(self.policy):
                cond, uncond = self._velocities(rollout, rows, steps, None)
                velocity_ref = ops.guided(cond, uncond, guidance_scale)
        velocity, velocity_uncond = self._velocities(rollout, rows, steps, self.engine)
        return ops.grpo_loss(
            velocity,
            rollout.states[rows, steps],
            rollout.states[rows, steps + 1],
            self._transition(rollout, batch.steps),
            old_log_prob[rows, steps],
            advantages[batch.rows, batch.steps].to(device),
            velocity_uncond=velocity_uncond,
            guidance_scale=guidance_scale,
            velocity_ref=velocity_ref,
            clip_range=train.clip_range,
            adv_clip=train.adv_clip,
            beta=train.beta,
            kl=train.kl,
            weight=torch.zeros(len(rows), device=device) if batch.padding else None,
            normalizer=normalizer,
        )

    @torch.no_grad()
    def _recompute(self, rollout: Rollout) -> torch.Tensor:
        """Log-probs `[N, n]` of the rollout under the present policy, with training's guidance."""
        count, steps = rollout.log_probs.shape
        pairs = torch.cartesian_prod(torch.arange(count), torch.arange(steps))
        scores = []
        for chunk in pairs.split(self.settings["train_micro_batch_size_per_gpu"]):
            rows, at = chunk[:, 0], chunk[:, 1]
            cond, uncond = self._velocities(rollout, rows, at, None)
            on = rows.to(self.policy.device), at.to(self.policy.device)
            scores.append(
                ops.step_log_prob(
                    cond,
                    rollout.states[on],
                    rollout.states[on[0], on[1] + 1],
                    self._transition(rollout, at),
                    velocity_uncond=uncond,
                    guidance_scale=self.config.rollout.guidance_scale,
                )
            )
        return torch.cat(scores).reshape(count, steps)
