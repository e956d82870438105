"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL_SUFFIX = ".partial"


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` when the `with` ends without an error."""
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replace_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def publish_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder into place once everything in it is on disk; an older one of the name is replaced."""
    for file in temporary.rglob("*"):
        if file.is_file():
            _sync(file)
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
