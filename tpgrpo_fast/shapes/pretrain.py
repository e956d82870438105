"""Trains the embedded pipeline from nothing: `python -m tpgrpo_fast.shapes.pretrain --output DIR`.

An autoencoder on rendered scenes; then transformer and text encoders together on correct captions, in two rounds of
falling learning rate (rectified flow, v = noise - x0 at x_t = (1 - sigma) x0 + sigma noise, arXiv 2403.03206); then a
short finish in which each attribute of a caption (count, colour, shape, position) is replaced at random with
probability `--caption-noise`. Web-scale captions are noisy in the same way: the finished model draws shapes that often
ignore the prompt, and that is what reinforcement learning then repairs.

The folder in this package took about 55 minutes with these defaults, on one core of a busy two-core machine:
autoencoder 18, correct captions 19 and 15, noisy captions 1, the rest rendering and encoding. Its autoencoder had been
trained by the same code on scenes of an earlier renderer (six colours, free positions); a new run trains it on the
present one.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from tpgrpo_fast.shapes.prompts import COLORS, COUNTS, RELATIONS, SHAPES, Item, Scene, describe, heldout_prompts
from tpgrpo_fast.shapes.render import IMAGE_SIZE, render
from tpgrpo_fast.shapes.reward import shapes_reward

TEXT_LENGTH = 10
"""Tokens of the longest prompt with its start and end."""
LONGEST_T5 = 256
"""Tokens the pipeline pads T5's prompt to when it is not told otherwise."""


# ------------------------------------------------------------------------------------------------------------- data
def random_scene(rng: np.random.Generator) -> Scene:
    """Any scene of the grammar; one in three counts, the others are pairs with a position."""

    def item(count: int = 1) -> Item:
        return Item(count=count, color=str(rng.choice(COLORS)), shape=str(rng.choice(SHAPES)))

    if rng.random() < 1 / 3:
        return Scene(items=(item(int(rng.integers(1, len(COUNTS) + 1))),))
    return Scene(items=(item(), item()), relation=str(rng.choice(RELATIONS)))


def corrupt(scene: Scene, share: float, rng: np.random.Generator) -> Scene:
    """The scene with each attribute replaced by a random one with probability `share`."""

    def maybe(value: str, choices: tuple[str, ...]) -> str:
        return str(rng.choice(choices)) if rng.random() < share else value

    items = []
    for item in scene.items:
        count = item.count
        if scene.relation is None and rng.random() < share:
            count = int(rng.integers(1, len(COUNTS) + 1))
        items.append(Item(count=count, color=maybe(item.color, COLORS), shape=maybe(item.shape, SHAPES)))
    return Scene(items=tuple(items), relation=scene.relation and maybe(scene.relation, RELATIONS))


def render_scenes(scenes: list[Scene], rng: np.random.Generator) -> Tensor:
    """Images [N, 3, H, W] in [0, 1]."""
    return torch.from_numpy(np.stack([render(scene, rng) for scene in scenes]))


def schedule(step: int, steps: int, peak: float) -> float:
    """Learning rate: a short linear warm-up, then a cosine to a fiftieth."""
    warm = min(1.0, (step + 1) / 100)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * step / steps)))


def batches(size: int, batch: int, steps: int, generator: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    """(step, row indices), reshuffled at each pass over the data."""
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(size, generator=generator)
        yield step, order[:batch]
        order = order[batch:]


# ------------------------------------------------------------------------------------------------------ autoencoder
def train_autoencoder(images: Tensor, *, steps: int, seed: int, batch: int = 32) -> AutoencoderTiny:
    """An autoencoder to 4 x 8 x 8 latents, scaled to zero mean and unit variance.

    Latents are trained with noise, so that the decoder forgives the small errors of the flow model.
    """
    torch.manual_seed(seed)
    width = (16,) * 4
    vae = AutoencoderTiny(
        encoder_block_out_channels=width,
        decoder_block_out_channels=width,
        num_encoder_blocks=(0, 1, 2, 3),
        num_decoder_blocks=(4, 3, 2, 0),
        latent_channels=4,
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
    generator, start = torch.Generator().manual_seed(seed), time.time()
    for step, rows in batches(len(images), batch, steps, generator):
        x = images[rows] * 2 - 1
        if step < 0.8 * steps:  # the network is convolutional: crops teach it the most for their cost
            top, left = torch.randint(IMAGE_SIZE // 2 + 1, (2,), generator=generator).tolist()
            x = x[:, :, top : top + IMAGE_SIZE // 2, left : left + IMAGE_SIZE // 2]
        latents = vae.encode(x.contiguous(memory_format=torch.channels_last)).latents
        noisy = latents + 0.1 * torch.randn(latents.shape, generator=generator)
        error = vae.decode(noisy).sample - x
        loss = error.abs().mean() + 2 * error.square().mean() + 0.02 * (latents.square().mean() - 1).square()
        optimize(optimizer, loss, vae, schedule(step, steps, 2e-3))
        if step % 100 == 0 or step == steps - 1:
            print(
                f"autoencoder {step:5d}/{steps}  loss {loss.item():.4f}  mse {error.square().mean().item():.5f}  "
                f"{time.time() - start:.0f} s",
                flush=True,
            )
    with torch.no_grad():
        latents = encode(vae, images[:2048])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return vae.eval()


def optimize(optimizer: torch.optim.Optimizer, loss: Tensor, model: nn.Module, learning_rate: float) -> None:
    """One clipped step on `loss`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def encode(vae: AutoencoderTiny, images: Tensor) -> Tensor:
    """Raw latents [N, 4, 8, 8]."""
    return torch.cat([vae.encode(part * 2 - 1).latents for part in images.split(64)])


# ------------------------------------------------------------------------------------------------------------- text
def vocabulary_words() -> list[str]:
    """Every word of the grammar once."""
    plural = [shape + "s" for shape in SHAPES]
    return list(dict.fromkeys([*COUNTS, *COLORS, *SHAPES, *plural, *" ".join(RELATIONS).split()]))


def make_t5_tokenizer() -> T5TokenizerFast:
    """A T5 tokenizer with one token per word of the grammar."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [("\u2581" + word, -1.0) for word in vocabulary_words()]
    return T5TokenizerFast(vocab=special + words, extra_ids=0, model_max_length=LONGEST_T5)


def make_t5_encoder(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    """One T5 layer as wide as the transformer's text input."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config)


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP tokenizer with one token per word of the grammar, written to and read from `folder`.

    Its merges are byte-pair merges learned from the words until each is one token.
    """
    split = [[*word[:-1], word[-1] + "</w>"] for word in vocabulary_words()]
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = [*letters, *(letter + "</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    while any(len(parts) > 1 for parts in split):
        pair = next((parts[0], parts[1]) for parts in split if len(parts) > 1)
        merges.append(pair)
        vocabulary.append("".join(pair))
        for parts in split:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == pair:
                    parts[i : i + 2] = ["".join(pair)]
                i += 1
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(dict.fromkeys(vocabulary))}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=TEXT_LENGTH)


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Two CLIP layers."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_factor=5.0,
    )
    return CLIPTextModelWithProjection(config)


# ------------------------------------------------------------------------------------------------------- flow model
class FlowModel(nn.Module):
    """Transformer and the three text encoders, with the conditioning that `StableDiffusion3Pipeline` builds."""

    def __init__(self, tokenizer: CLIPTokenizer, t5_tokenizer: T5TokenizerFast) -> None:
        super().__init__()
        self.t5 = make_t5_encoder(t5_tokenizer)
        self.text_encoders = nn.ModuleList([make_text_encoder(tokenizer), make_text_encoder(tokenizer)])
        self.transformer = SD3Transformer2DModel(
            sample_size=IMAGE_SIZE // 8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=3,
            joint_attention_dim=128,
            caption_projection_dim=96,
            pooled_projection_dim=128,
            pos_embed_max_size=IMAGE_SIZE // 8,
            qk_norm="rms_norm",
        )
        # each block starts as the identity and the velocity as zero
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.Linear) and (name.endswith(("norm1.linear", "norm1_context.linear", "proj_out"))):
                nn.init.zeros_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, latents: Tensor, sigma: Tensor, ids: Tensor, t5_ids: Tensor) -> Tensor:
        """Velocity of latents [N, 4, 8, 8] at sigma [N] for CLIP's token ids [N, L] and T5's [N, M]."""
        outputs = [encoder(ids, output_hidden_states=True) for encoder in self.text_encoders]
        context = torch.cat([output.hidden_states[-2] for output in outputs], -1)
        context = torch.cat([context, self.t5(t5_ids)[0]], -2)
        pooled = torch.cat([output.text_embeds for output in outputs], -1)
        return self.transformer(latents, context, pooled, sigma * 1000, return_dict=False)[0]


def train_flow(
    model: FlowModel,
    tokenizer: CLIPTokenizer,
    t5_tokenizer: T5TokenizerFast,
    scenes: list[Scene],
    latents: Tensor,
    *,
    steps: int,
    learning_rate: float,
    caption_noise: float,
    seed: int,
    evaluate: Callable[[], str],
    batch: int = 64,
) -> None:
    """Rectified-flow training of normalised latents [N, 4, 8, 8]; ends with the exponential average of the weights."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.01)
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    start, smooth = time.time(), 1.0

    def use_average() -> list[Tensor]:
        backup = [p.detach().clone() for p in parameters]
        torch._foreach_copy_([p.data for p in parameters], average)
        return backup

    for step, rows in batches(len(scenes), batch, steps, generator):
        # Mostly the few tokens of reinforcement learning, sometimes as many as the pipeline pads to by default: padding
        # is attended to, so the model must have seen it.
        length = TEXT_LENGTH
        if rng.random() >= 0.9:
            length += int(rng.random() ** 2 * (LONGEST_T5 - TEXT_LENGTH))
        if length > 32:
            rows = rows[: batch // 4]
        captions = [
            "" if rng.random() < 0.1 else describe(corrupt(scenes[row], caption_noise, rng)) for row in rows.tolist()
        ]
        ids = tokenizer(captions, padding="max_length", max_length=TEXT_LENGTH, return_tensors="pt").input_ids
        t5_ids = t5_tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt").input_ids
        x0 = latents[rows]
        noise = torch.randn(x0.shape, generator=generator)
        sigma = torch.rand(len(rows), generator=generator)
        s = sigma[:, None, None, None]
        loss = F.mse_loss(model((1 - s) * x0 + s * noise, sigma, ids, t5_ids), noise - x0)
        optimize(optimizer, loss, model, schedule(step, steps, learning_rate))
        torch._foreach_lerp_(average, [p.data for p in parameters], 1 - min(0.998, (1 + step) / (10 + step)))
        smooth += (loss.item() - smooth) * max(0.01, 1 / (step + 1))
        if (step + 1) % 500 == 0 or step == steps - 1:
            backup = use_average()
            print(
                f"flow {step + 1:5d}/{steps}  caption noise {caption_noise:.0%}  loss {smooth:.4f}  "
                f"{evaluate()}  {time.time() - start:.0f} s",
                flush=True,
            )
            if step < steps - 1:
                torch._foreach_copy_([p.data for p in parameters], backup)


def make_pipeline(
    model: FlowModel, vae: AutoencoderTiny, tokenizer: CLIPTokenizer, t5_tokenizer: T5TokenizerFast, shift: float
) -> StableDiffusion3Pipeline:
    """The parts as one pipeline."""
    pipeline = StableDiffusion3Pipeline(
        transformer=model.transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        text_encoder=model.text_encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=model.text_encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=model.t5,
        tokenizer_3=t5_tokenizer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def evaluate_pipeline(pipeline: StableDiffusion3Pipeline, prompts: list[str], **options: float) -> str:
    """Rewards of one image per prompt, without guidance in 8 steps unless `options` say otherwise."""
    settings = {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": TEXT_LENGTH} | options
    images = pipeline(prompts, output_type="pt", generator=torch.Generator().manual_seed(0), **settings).images
    return "  ".join(f"{name} {values.mean().item():.3f}" for name, values in shapes_reward(images, prompts).items())


# ------------------------------------------------------------------------------------------------------------- main
def main(arguments: list[str] | None = None) -> None:
    """Command line of the pretraining."""
    parser = argparse.ArgumentParser(prog="python -m tpgrpo_fast.shapes.pretrain", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("shapes-pipeline"), help="folder to write; must not exist")
    parser.add_argument("--work", type=Path, help="folder that keeps each stage, to continue from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenes", type=int, default=24000, help="rendered training images")
    parser.add_argument("--autoencoder-steps", type=int, default=2500)
    parser.add_argument("--clean-steps", type=int, default=4000)
    parser.add_argument("--refine-steps", type=int, default=2500)
    parser.add_argument("--noisy-steps", type=int, default=250)
    parser.add_argument("--caption-noise", type=float, default=0.2, help="share of attributes replaced in the finish")
    parser.add_argument("--shift", type=float, default=1.0, help="timestep shift of the scheduler")
    args = parser.parse_args(arguments)
    if args.output.exists():
        parser.error(f"--output: {args.output} exists already; choose another folder or remove it")
    args.output.parent.mkdir(parents=True, exist_ok=True)

    start = time.time()
    temporary = Path(tempfile.mkdtemp(prefix=args.output.name + "-", dir=args.output.parent))
    work = args.work or temporary / "work"
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    rng = np.random.default_rng(args.seed)
    scenes = [random_scene(rng) for _ in range(args.scenes)]
    images = render_scenes(scenes, rng)
    print(f"rendered {args.scenes} scenes  {time.time() - start:.0f} s", flush=True)

    if not (work / "vae").exists():
        train_autoencoder(images, steps=args.autoencoder_steps, seed=args.seed).save_pretrained(work / "vae")
    vae = AutoencoderTiny.from_pretrained(work / "vae")
    latents = (encode(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor
    del images

    (temporary / "tokenizer").mkdir()
    tokenizer = make_tokenizer(temporary / "tokenizer")
    t5_tokenizer = make_t5_tokenizer()
    model = FlowModel(tokenizer, t5_tokenizer)
    pipeline = make_pipeline(model, vae, tokenizer, t5_tokenizer, args.shift)

    def evaluate() -> str:
        return evaluate_pipeline(pipeline, heldout_prompts()[:64])

    stages = (
        ("clean", args.clean_steps, 2e-3, 0.0),
        ("refine", args.refine_steps, 1.5e-3, 0.0),
        ("noisy", args.noisy_steps, 5e-4, args.caption_noise),
    )
    for place, (stage, steps, rate, noise) in enumerate(stages, start=1):
        if (work / f"{stage}.pt").exists():
            model.load_state_dict(torch.load(work / f"{stage}.pt"))
            continue
        train_flow(
            model,
            tokenizer,
            t5_tokenizer,
            scenes,
            latents,
            steps=steps,
            learning_rate=rate,
            caption_noise=noise,
            seed=args.seed + place,
            evaluate=evaluate,
        )
        torch.save(model.state_dict(), work / f"{stage}.pt")

    pipeline.save_pretrained(temporary / "pipeline")
    for name in ("tokenizer", "tokenizer_2"):  # the plain files too, for every version of transformers
        for file in ("vocab.json", "merges.txt"):
            shutil.copy(temporary / "tokenizer" / file, temporary / "pipeline" / name / file)
    # Diffusers writes this key for its own use and warns when it reads it back.
    vae_config = temporary / "pipeline" / "vae" / "config.json"
    settings = json.loads(vae_config.read_text())
    settings.pop("block_out_channels", None)
    vae_config.write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(temporary / "pipeline", args.output)
    shutil.rmtree(temporary)
    print(f"wrote {args.output} in {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
