"""Two processes train as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tpgrpo_fast import train
from tpgrpo_fast.metrics import read_metrics

pytestmark = pytest.mark.slow


def launch(folder: Path, processes: int, *extra: str) -> Path:
    name = f"ranks-{processes}-{'-'.join(extra) or 'plain'}".replace("/", "")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("-m", "tpgrpo_fast.train", "--model.path", "pipeline", "--data.prompts", "prompts.txt"),
        *("--data.eval_prompts", "null", "--data.eval_count", "3", "--data.prompts_per_iteration", "3"),
        *("--data.group_size", "4", "--reward.shapes", "null", "--reward.user_rewards:red", "1.0"),
        *("--model.max_text_length", "4", "--model.lora.rank", "2", "--train.learning_rate", "0.01"),
        *("--rollout.steps", "4", "--rollout.window_size", "2", "--rollout.window_range", "[0, 3]"),
        *("--run.iterations", "3", "--run.eval_every", "1", "--run.loggers", "[jsonl]", "--run.name", name, *extra),
    ]
    root = Path(train.__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / name


@pytest.mark.parametrize("extra", [(), ("--rollout.same_noise", "true"), ("--train.beta", "0.01")])
def test_two_processes_equal_one(tmp_path, tiny_sd3, extra):
    """Three groups of four on two processes: the middle group spans both."""
    tiny_sd3.save_pretrained(tmp_path / "pipeline")
    (tmp_path / "prompts.txt").write_text("a\nb\nc\na b\n", encoding="utf-8")
    # A smooth reward: a byte count would jump where a pixel's rounding does.
    (tmp_path / "user_rewards.py").write_text("def red(images, prompts):\n    return images[:, 0].mean(dim=(1, 2))\n")
    one, two = launch(tmp_path, 1, *extra), launch(tmp_path, 2, *extra)
    for alone, shared in zip(read_metrics(one), read_metrics(two), strict=True):
        for key in ("reward/mean", "reward/std", "eval/reward", "loss", "grad_norm", "update/pairs"):
            assert (key in shared) == (key in alone)
            if key in alone:
                assert shared[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), key
    adapters = [load_file(run / "checkpoints/iteration-000003/adapter/adapter_model.safetensors") for run in (one, two)]
    for name, weight in adapters[0].items():
        difference = torch.linalg.vector_norm(adapters[1][name] - weight)
        assert difference <= 1e-3 * torch.linalg.vector_norm(weight), name
