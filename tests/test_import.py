"""Importing the package is cheap: it loads no heavy library and touches no device."""

import subprocess
import sys

import pytest

LAZY = {"accelerate", "deepspeed", "diffusers", "matplotlib", "numba", "peft", "tensorboard", "transformers", "triton"}


def test_import_loads_no_heavy_library_and_no_device(repository_root):
    code = f"""
import sys

import pytest
import torch
before = set(sys.modules)
import tpgrpo_fast
print(sorted({LAZY!r} & (set(sys.modules) - before)), torch.cuda.is_initialized())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repository_root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[] False"


def test_public_names_are_found_in_the_package():
    import tpgrpo_fast

    assert set(tpgrpo_fast.__all__) == set(tpgrpo_fast._HOME)
    for name in tpgrpo_fast.__all__:
        assert getattr(tpgrpo_fast, name).__name__ == name
        assert name in dir(tpgrpo_fast)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tpgrpo_fast.nothing  # noqa: B018
