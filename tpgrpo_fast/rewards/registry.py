"""Names of rewards: what a name stands for, without importing anything heavy."""

from __future__ import annotations

import difflib

BUILTIN = {
    "shapes": "tpgrpo_fast.rewards.shapes:ShapesReward",
    "jpeg_compressibility": "tpgrpo_fast.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "tpgrpo_fast.rewards.jpeg:JpegIncompressibility",
}
"""Builtin name -> import path of its implementation."""


def split_import_path(name: str) -> tuple[str, str] | None:
    """Split `package.module:attribute` or `package.module.attribute`; None where it has neither form."""
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    parts = [*module.split("."), *attribute.split(".")]
    return (module, attribute) if all(part.isidentifier() for part in parts) else None


def name_problem(name: object) -> tuple[str, str] | None:
    """Return (reason, remedy) where `name` can be no reward; an import path is only checked for its form."""
    if isinstance(name, str) and (name in BUILTIN or split_import_path(name)):
        return None
    guess = difflib.get_close_matches(str(name), BUILTIN, n=1)
    remedy = f"did you mean {guess[0]}? " if guess else ""
    remedy += f"Known are {', '.join(BUILTIN)}; your own function goes by package.module:function"
    return "unknown reward", remedy
