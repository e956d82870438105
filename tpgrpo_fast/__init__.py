"""TurningPoint-GRPO for flow-matching text-to-image models.

The parts serve on their own: `tpgrpo_fast.ops` and `tpgrpo_fast.transitions` (sampler steps, log-probs, loss),
`tpgrpo_fast.rollout` (samples with ODE completions), `tpgrpo_fast.credit` (turning points and advantages).

Importing the package is cheap: it loads no heavy library and touches no device; its names are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tpgrpo_fast.config import Config, ConfigError, RolloutConfig, load_config
    from tpgrpo_fast.credit import Credit, CreditConfig, assign_credit
    from tpgrpo_fast.policy import Policy
    from tpgrpo_fast.rollout import Rollout
    from tpgrpo_fast.transitions import Transition

_HOME = {
    "Config": "config",
    "ConfigError": "config",
    "Credit": "credit",
    "CreditConfig": "credit",
    "Policy": "policy",
    "Rollout": "rollout",
    "RolloutConfig": "config",
    "Transition": "transitions",
    "assign_credit": "credit",
    "load_config": "config",
}

__all__ = [
    "Config",
    "ConfigError",
    "Credit",
    "CreditConfig",
    "Policy",
    "Rollout",
    "RolloutConfig",
    "Transition",
    "assign_credit",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
