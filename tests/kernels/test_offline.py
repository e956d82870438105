"""The kernels compile for GPUs that are not here: no spills, no more traffic than needed, and as the table says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Compilation happens in a process of its own: in this one the kernels are interpreted.
ALL = ["--targets", "sm_80", "sm_90", "sm_100", "gfx942"]
QUICK = ["--targets", "sm_90", "--dtypes", "float32", "bfloat16", "--variants", "guided|guided, KL|balanced|"]


def compile_offline(arguments: list[str], root: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "benchmarks.offline", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [pytest.param(QUICK, 17, id="quick"), pytest.param(ALL, 228, id="all", marks=pytest.mark.slow)],
)
def test_kernels_compile_as_the_table_says(arguments, kernels, repository_root, tmp_path):
    done = compile_offline(arguments, repository_root, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f"{kernels} kernels, 0 differences")


def test_the_table_covers_every_kernel_target_and_dtype(repository_root):
    table = json.loads((repository_root / "benchmarks" / "offline.json").read_text())["kernels"]
    found = {tuple(key.split(" / ")[:3]) for key in table}
    per_dtype = {
        "sde_step_fwd_kernel", "log_prob_kernel", "step_log_prob_fwd_kernel", "step_log_prob_bwd_kernel",
        "grpo_loss_fwd_kernel", "grpo_loss_rows_kernel", "grpo_loss_bwd_kernel",
    }  # fmt: skip
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        for dtype in ("float32", "bfloat16", "float16"):
            assert {kernel for t, d, kernel in found if (t, d) == (target, dtype)} >= per_dtype
        assert {(target, "float32", "credit_fwd_kernel"), (target, "float32", "philox_normal_fwd_kernel")} <= found
    assert not any(usage["spills"] for usage in table.values())
