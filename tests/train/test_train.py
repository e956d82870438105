"""The trainer as a user runs it, on a tiny random SD3 pipeline: files, resume, methods, bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpgrpo_fast import checkpoint, cli, train
from tpgrpo_fast.config import load_config
from tpgrpo_fast.metrics import read_metrics

REWARDS = """
import torch

def red(images, prompts):
    return images[:, 0].mean(dim=(1, 2))

def nan(images, prompts):
    return torch.full((len(images),), float("nan"))

def short(images, prompts):
    return [0.0]

def sometimes(images, prompts):
    values = images[:, 0].mean(dim=(1, 2))
    return torch.where(values > values.median(), values, torch.nan) if len(images) > 2 else values
"""


@pytest.fixture
def project(tmp_path, monkeypatch, tiny_sd3):
    """A folder with a pipeline, prompts and rewards, and the process inside it."""
    tiny_sd3.save_pretrained(tmp_path / "pipeline")
    (tmp_path / "prompts.txt").write_text("a\nb\nc\na b\n", encoding="utf-8")
    (tmp_path / "user_rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("user_rewards", None)
    return tmp_path


def arguments(*extra, reward="user_rewards:red"):
    return [
        *("--model.path", "pipeline", "--data.prompts", "prompts.txt", "--data.eval_prompts", "null"),
        *("--data.eval_count", "4", "--data.prompts_per_iteration", "2", "--data.group_size", "4"),
        *("--reward.shapes", "null", f"--reward.{reward}", "1.0", "--model.max_text_length", "4"),
        *("--rollout.steps", "4", "--rollout.window_size", "2", "--rollout.window_range", "[0, 3]"),
        *("--run.iterations", "3", "--run.save_every", "1", "--run.eval_every", "1", "--model.lora.rank", "2"),
        *("--train.learning_rate", "0.01", "--run.loggers", "[jsonl]", "--rollout.eval_steps", "4"),
        *("--train.lr_schedule", "constant", *extra),
    ]


def adapter_of(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / f"checkpoints/iteration-{iteration:06d}/adapter/adapter_model.safetensors")


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_run_folder_holds_what_the_documentation_says(project):
    train.main(arguments("--run.loggers", "[jsonl, tensorboard]", "--run.name", "first"))
    folder = Path("runs/first")
    assert load_config(folder / "config.yaml").run.name == "first"
    records = read_metrics(folder)
    assert [record["iteration"] for record in records] == [0, 1, 2, 3]
    assert set(records[0]) >= {"eval/reward", "seconds/eval", "seconds/total"}
    assert "reward/mean" not in records[0]
    expected = {
        *("reward/mean", "reward/std", "reward/user_rewards:red", "eval/reward", "credit/turning_point_fraction"),
        *("ratio/max_dev", "loss", "kl", "grad_norm", "rollout/passes", "rollout/rows", "samples_per_second"),
        *("seconds/rollout", "seconds/reward", "seconds/credit", "seconds/update", "seconds/total", "memory/peak"),
    }
    assert expected <= set(records[1])
    assert all(record["ratio/max_dev"] < 1e-5 for record in records[1:])
    assert all(record["rollout/passes"] == 4 for record in records[1:])
    phases = [sum(v for k, v in r.items() if k.startswith("seconds/") and k != "seconds/total") for r in records[1:]]
    assert all(phase <= record["seconds/total"] for phase, record in zip(phases, records[1:], strict=True))
    for iteration in range(4):
        assert (folder / f"images/iteration-{iteration:06d}.png").stat().st_size > 100
    assert list((folder / "tensorboard").iterdir())
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["iteration-000001", "iteration-000002", "iteration-000003"]
    assert not list(folder.rglob("*.partial"))
    assert not equal(adapter_of(folder, 1), adapter_of(folder, 3))


def test_the_same_seed_gives_the_same_run_and_another_does_not(project):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        train.main(arguments("--run.name", name, "--run.seed", str(seed), "--run.deterministic"))
    adapters = [adapter_of(Path("runs") / name, 3) for name in ("one", "two", "three")]
    assert equal(adapters[0], adapters[1])
    assert not equal(adapters[0], adapters[2])


@pytest.mark.parametrize("ema", ["null", "0.9"])
def test_resume_goes_on_exactly(project, ema):
    settings = ["--train.ema_decay", ema, "--train.ema_every", "1", "--run.keep_checkpoints", "null"]
    train.main(arguments("--run.name", "whole", *settings))
    train.main(arguments("--run.name", "parts", "--run.iterations", "2", *settings))
    train.main(arguments("--run.name", "parts", "--resume", "auto", *settings))
    assert equal(adapter_of(Path("runs/whole"), 3), adapter_of(Path("runs/parts"), 3))
    whole, parts = read_metrics(Path("runs/whole")), read_metrics(Path("runs/parts"))
    assert [record["iteration"] for record in parts] == [0, 1, 2, 3]
    for key in ("reward/mean", "eval/reward", "loss", "grad_norm"):
        assert [r.get(key) for r in whole] == [r.get(key) for r in parts]
    # From an older checkpoint the later records are dropped and written anew.
    train.main(arguments("--run.name", "parts", "--resume", "runs/parts/checkpoints/iteration-000001", *settings))
    assert [record["iteration"] for record in read_metrics(Path("runs/parts"))] == [0, 1, 2, 3]
    assert equal(adapter_of(Path("runs/whole"), 3), adapter_of(Path("runs/parts"), 3))


def test_a_changed_configuration_does_not_resume_unasked(project):
    train.main(arguments("--run.iterations", "1", "--run.name", "kept"))
    change = arguments("--run.name", "kept", "--resume", "auto", "--rollout.noise_level", "0.5")
    with pytest.raises(ValueError, match=r"rollout\.noise_level = 0\.5: the run was started with 0\.7"):
        train.main(change)
    train.main([*change, "--allow-config-change", "rollout.noise_level"])
    assert read_metrics(Path("runs/kept"))[-1]["iteration"] == 3


def test_more_iterations_under_a_falling_learning_rate_are_asked_for(project):
    falling = ("--train.lr_schedule", "linear", "--run.name", "falling")
    train.main(arguments("--run.iterations", "1", *falling))
    with pytest.raises(ValueError, match=r"run\.iterations = 3"):
        train.main(arguments("--resume", "auto", *falling))
    train.main(arguments("--resume", "auto", "--allow-config-change", "run.iterations", *falling))


def test_an_unfinished_last_record_does_not_block_a_resume(project):
    train.main(arguments("--run.iterations", "2", "--run.name", "torn"))
    file = Path("runs/torn/metrics.jsonl")
    file.write_text(file.read_text()[:-30])
    train.main(arguments("--run.name", "torn", "--resume", "auto"))
    assert read_metrics(Path("runs/torn"))[-1]["iteration"] == 3
    file.write_text("{\n" + file.read_text())
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1 is not JSON"):
        read_metrics(Path("runs/torn"))


def test_resume_without_a_checkpoint_starts_beside_what_is_there(project, capsys):
    train.main(arguments("--run.iterations", "1", "--resume", "auto"))
    assert "a new run starts" in capsys.readouterr().out
    (Path("runs/shapes/checkpoints/iteration-000001/state.json")).unlink()
    before = Path("runs/shapes/metrics.jsonl").read_text()
    train.main(arguments("--run.iterations", "1", "--resume", "auto"))
    assert Path("runs/shapes/metrics.jsonl").read_text() == before
    assert read_metrics(Path("runs/shapes-2"))[-1]["iteration"] == 1


def test_runs_that_start_together_take_folders_of_their_own(project):
    config = load_config("shapes")
    folders = [train.run_folder(config, None, [])[0] for _ in range(3)]
    assert [folder.name for folder in folders] == ["shapes", "shapes-2", "shapes-3"]


def test_a_run_that_fails_to_start_gives_its_folder_back(project):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="absent"):
            train.main(arguments("--model.path", "absent"))
    train.main(arguments("--run.iterations", "1"))
    assert [path.name for path in Path("runs").iterdir()] == ["shapes"]


def test_a_finished_run_is_never_written_over(project):
    for _ in range(3):
        train.main(arguments("--run.iterations", "1"))
    assert sorted(path.name for path in Path("runs").iterdir()) == ["shapes", "shapes-2", "shapes-3"]


def test_old_checkpoints_are_removed(project):
    train.main(arguments("--run.keep_checkpoints", "2"))
    names = sorted(path.name for path in Path("runs/shapes/checkpoints").iterdir())
    assert names == ["iteration-000002", "iteration-000003"]


@pytest.mark.parametrize(
    "method",
    [
        ("--credit.method", "turning_point", "--credit.consistent", "false"),
        ("--credit.method", "turning_point", "--credit.balance", "group"),
        ("--credit.method", "incremental"),
        ("--credit.method", "outcome"),
        ("--rollout.window", "sliding"),
        ("--rollout.window", "fixed", "--rollout.sde_type", "cps"),
        ("--rollout.schedule", "sequential"),
        ("--rollout.same_noise", "true", "--rollout.guidance_scale", "2.0"),
        ("--model.full_finetune", "true", "--train.beta", "0"),
        ("--train.beta", "0.1", "--rollout.sde_type", "dance", "--train.updates_per_iteration", "2"),
        ("--model.gradient_checkpointing", "true", "--rollout.latent_dtype", "bfloat16", "--train.clip_range", "0.1"),
        ("--model.dtype", "bfloat16", "--train.clip_range", "0.1"),
    ],
    ids=lambda method: " ".join(method).replace("--", ""),
)
def test_methods_are_a_matter_of_configuration(project, method):
    train.main(arguments("--run.iterations", "2", *method))
    records = read_metrics(Path("runs/shapes"))
    assert records[-1]["iteration"] == 2
    rows = 8 * (4 if "outcome" in method else 4 + 3 + 2 if records[1]["rollout/window_start"] == 0 else 0)
    if rows and "sequential" not in method:
        assert records[1]["rollout/rows"] == rows
    if "true" in method and "--model.full_finetune" in method:
        assert (Path("runs/shapes/checkpoints/iteration-000002/transformer/config.json")).is_file()


def test_warm_start_from_a_saved_adapter(project):
    train.main(arguments("--run.name", "first"))
    saved = "runs/first/checkpoints/iteration-000003/adapter"
    train.main(arguments("--run.name", "second", "--model.lora.path", saved, "--run.iterations", "1"))
    assert read_metrics(Path("runs/second"))[0]["eval/reward"] == pytest.approx(
        read_metrics(Path("runs/first"))[-1]["eval/reward"], abs=1e-6
    )


def test_lora_loads_in_diffusers_without_this_package(project):
    """A process that never imports tpgrpo_fast draws the trainer's own evaluation images."""
    train.main(arguments("--run.name", "export", "--train.learning_rate", "0.05"))
    from tpgrpo_fast.completions import initial_noise
    from tpgrpo_fast.noise import Stream
    from tpgrpo_fast.policy import load

    policy = load("pipeline", max_text_length=4)
    noise = initial_noise(policy, 16, 16, seed=0, iteration=0, uid=torch.arange(4), stream=Stream.EVALUATION)
    torch.save(noise, "noise.pt")
    script = """
import sys, numpy, torch
from PIL import Image
from diffusers import StableDiffusion3Pipeline
pipeline = StableDiffusion3Pipeline.from_pretrained("pipeline", text_encoder_3=None, tokenizer_3=None)
def draw():
    images = pipeline(prompt=["a", "b", "c", "a b"], latents=torch.load("noise.pt"), num_inference_steps=4,
                      guidance_scale=1.0, height=16, width=16, max_sequence_length=4, output_type="np").images
    return (images * 255).round().astype("uint8")
before = draw()
pipeline.load_lora_weights("runs/export/checkpoints/iteration-000003")
after = draw()
assert "tpgrpo_fast" not in sys.modules
numpy.savez("drawn.npz", before=before, after=after)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=project, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    import numpy
    from PIL import Image

    drawn = numpy.load("drawn.npz")
    grid = numpy.asarray(Image.open("runs/export/images/iteration-000003.png"))
    tiles = numpy.stack([grid[:, 18 * k : 18 * k + 16] for k in range(4)]).astype(int)
    assert numpy.abs(tiles - drawn["after"]).max() <= 1
    assert numpy.abs(tiles - drawn["before"]).max() > 1


def test_rows_with_failed_rewards_are_left_out_on_request(project):
    train.main(arguments("--credit.drop_nonfinite", "true", "--run.iterations", "1", reward="user_rewards:sometimes"))
    record = read_metrics(Path("runs/shapes"))[-1]
    assert record["update/skipped_pairs"] > 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--rollout.stepz", "3"), r"rollout\.stepz.*did you mean rollout\.steps"),
        (("--rollout.window_size", "9"), r"rollout\.window_size = 9"),
        (("--rollout.sde_type", "cps", "--rollout.window_range", "[0, 4]", "--rollout.window_size", "4"), "c = 0"),
        (("--data.group_size", "1"), r"data\.group_size = 1"),
        (("--data.prompts", "empty.txt"), r"empty\.txt"),
        (("--data.prompts", "latin.txt"), "UTF-8"),
        (("--data.prompts", "absent.txt"), r"absent\.txt"),
        (("--model.path", "absent"), r"model\.path = 'absent'"),
        (("--reward.user_rewards:nan", "1.0"), "user_rewards:nan: nan"),
        (("--reward.user_rewards:short", "1.0"), r"user_rewards:short: returned values of shape \[1\]"),
        (("--reward.nothing:here", "1.0"), "importing nothing failed"),
        (("--run.dir", "prompts.txt"), r"run\.dir = 'prompts\.txt'"),
        (("--run.dir", "/proc/runs"), r"run\.dir = '/proc/runs'.*cannot be written"),
        (("--data.prompts_per_iteration", "5"), r"data\.prompts_per_iteration"),
        (("--deepspeed", "absent.json"), r"--deepspeed absent\.json"),
        (("--resume", "nowhere"), r"--resume nowhere"),
        (("--model.lora.path", "pipeline"), r"model\.lora\.path = 'pipeline'"),
        (("--model.lora.target_modules", "[nothing]"), r"model\.lora\.target_modules"),
        (("--rollout.height", "18", "--rollout.width", "18"), r"rollout\.height"),
        (("--run.loggers", "[wandb]"), r"pip install .*wandb"),
        (("--config", "no-such-recipe"), "no-such-recipe"),
        (("--model.dtype", "float16", "--model.path", "some/model"), "hf download some/model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_screen_that_names_the_setting(project, capsys, extra, message):
    import re

    Path("empty.txt").write_text("\n\n")
    Path("latin.txt").write_bytes("café\n".encode("latin-1"))
    with pytest.raises(SystemExit) as stopped:
        cli.run(lambda: train.main(arguments(*extra)))
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert re.search(message, shown, re.DOTALL), shown
    assert len(shown.splitlines()) <= 24 and "Traceback" not in shown
    assert not list(Path("runs").glob("*/metrics.jsonl")) if Path("runs").exists() else True


def test_checkpoints_are_whole_or_absent(project, monkeypatch):
    train.main(arguments("--run.iterations", "1", "--run.name", "cut"))
    folder = Path("runs/cut/checkpoints")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "publish_folder", fail)
    with pytest.raises(OSError, match="disk full"):
        train.main(arguments("--run.name", "cut", "--resume", "auto"))
    assert [path.name for path in checkpoint.found(folder)] == ["iteration-000001"]
    monkeypatch.undo()
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    train.main(arguments("--run.name", "cut", "--resume", "auto"))
    assert not list(folder.glob("*.partial"))


def test_report_and_sample_and_evaluate_commands(project, capsys):
    from tpgrpo_fast import evaluate, report, sample

    train.main(arguments("--run.name", "shown"))
    report.main(["runs/shown"])
    assert Path("runs/shown/report.png").stat().st_size > 10_000
    lora = "runs/shown/checkpoints/iteration-000003/adapter"
    sample.main(["a", "b", "--config", "runs/shown/config.yaml", "--lora", lora, "--count", "2", "--output", "out.png"])
    assert Path("out.png").stat().st_size > 100
    capsys.readouterr()
    evaluate.main(["--config", "runs/shown/config.yaml", "--model.lora.path", lora])
    shown = capsys.readouterr().out
    reward = float(shown.split("reward", 1)[1].split()[0])
    assert reward == pytest.approx(read_metrics(Path("runs/shown"))[-1]["eval/reward"], abs=1e-3)
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist"):
        report.main(["runs"])


def test_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["paint"])
    assert stopped.value.code == 2
    assert "train|evaluate|sample|report" in capsys.readouterr().out


@pytest.mark.parametrize("launcher", [[], ["--local_rank=0"]])
def test_module_entry_point(project, launcher):
    """The documented command in a process of its own."""
    command = [sys.executable, "-m", "tpgrpo_fast.train", *launcher, *arguments("--run.iterations", "1")]
    if launcher:
        command += ["--run.name", "launched"]
    root = Path(train.__file__).resolve().parent.parent
    done = subprocess.run(
        command, cwd=project, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 1/1" in done.stdout
    last = (project / "runs" / ("launched" if launcher else "shapes") / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["iteration"] == 1
