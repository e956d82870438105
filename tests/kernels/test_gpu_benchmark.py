"""`python -m benchmarks.gpu` runs from end to end; without a device it is interpreted and its times mean nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
def test_every_case_runs_and_is_correct(repository_root, tmp_path):
    # A process of its own: without a visible device, and with interpreted kernels whatever else this one has run.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=repository_root, env=os.environ | hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["failures"] == []
    assert len(report["cases"]) == 2 * 7 + 1 + 2
    assert all(row["error_of_allowed"] <= 1 for row in report["cases"])
    assert all(row["case"] in done.stdout for row in report["cases"])


def test_without_a_device_it_says_so(monkeypatch, capsys):
    from benchmarks import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no CUDA or ROCm device" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_the_device(repository_root, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=repository_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
