"""Importing the package is cheap: it loads no heavy library and touches no device."""

import subprocess
import sys

LAZY = {"accelerate", "deepspeed", "diffusers", "matplotlib", "numba", "peft", "tensorboard", "transformers", "triton"}


def test_import_loads_no_heavy_library_and_no_device(repository_root):
    code = f"""
import sys
import torch
before = set(sys.modules)
import tpgrpo_fast
print(sorted({LAZY!r} & (set(sys.modules) - before)), torch.cuda.is_initialized())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repository_root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] False"
