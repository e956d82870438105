"""`python -m benchmarks.gpu` runs from end to end; without a device it is interpreted and its times mean nothing."""

import json
import os
import subprocess
import sys

import pytest


def run(root, arguments, **environment):
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)


def test_every_case_runs_and_is_correct(repository_root, tmp_path):
    done = run(repository_root, ["--tiny", "--out", str(tmp_path / "gpu.json")], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["failures"] == []
    assert len(report["cases"]) == 2 * 7 + 1 + 2
    assert all(row["error_of_allowed"] <= 1 for row in report["cases"])
    assert all(row["case"] in done.stdout for row in report["cases"])


def test_without_a_device_it_says_so(repository_root):
    done = run(repository_root, [])
    assert done.returncode == 2
    assert "no CUDA or ROCm device" in done.stderr


@pytest.mark.gpu
def test_on_the_device(repository_root, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=repository_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
