import os
from pathlib import Path

# Nothing here may reach a model hub or a display; set before anything imports those libraries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings

# The same examples in every run: a failure is a failure, not luck.
settings.register_profile("tpgrpo_fast", derandomize=True, deadline=None)
settings.load_profile("tpgrpo_fast")


@pytest.fixture(scope="session")
def repository_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
