"""The command `tpgrpo train|evaluate|sample|report`, and how errors meant for the user reach the screen."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

COMMANDS = ("train", "evaluate", "sample", "report")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `tpgrpo`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        asked = f"unknown command {words[0]!r}; " if words and words[0] not in ("-h", "--help") else ""
        print(f"{asked}usage: tpgrpo {'|'.join(COMMANDS)} [options]; `tpgrpo COMMAND --help` lists them")
        raise SystemExit(0 if not asked and words else 2)
    module = importlib.import_module(f"tpgrpo_fast.{words[0]}")
    run(lambda: module.main(words[1:]))


def run(command: Callable[[], None]) -> None:
    """Run a command; an error that names a setting and its remedy is printed alone, without a traceback.

    Exits with 2 for bad settings, input or files, with 1 where training itself cannot go on.
    """
    from tpgrpo_fast.policy import ModelNotFoundError
    from tpgrpo_fast.update import TrainingError

    try:
        command()
    except (ValueError, ModelNotFoundError, TrainingError) as error:
        if not _is_for_users(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, TrainingError) else 2) from None


def _is_for_users(error: BaseException) -> bool:
    """Whether this package itself raised the error: others' errors keep their traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # Not the module's name: that of a module run with `python -m` is __main__.
    package = "" if traceback is None else traceback.tb_frame.f_globals.get("__package__") or ""
    return package.split(".")[0] == "tpgrpo_fast"
