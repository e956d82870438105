"""Prompts: the files they come from, and which of them an iteration samples."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tpgrpo_fast.noise import Stream, permutation

_PROMPT_DIR = Path(__file__).parent / "recipes" / "prompts"


def _shapes() -> list[str]:
    from tpgrpo_fast.shapes import train_prompts

    return train_prompts()


def _shapes_heldout() -> list[str]:
    from tpgrpo_fast.shapes import heldout_prompts

    return heldout_prompts()


BUILTIN: dict[str, Callable[[], list[str]]] = {
    "shapes": _shapes,
    "shapes-heldout": _shapes_heldout,
    "animals": lambda: load_prompts(_PROMPT_DIR / "simple_animals.txt"),
}
"""Builtin name -> function that returns the prompts."""


def load_prompts(source: str | Path) -> list[str]:
    """Read a list of prompts.

    Args:
        source: a builtin name, a .txt file with one prompt a line (blank lines are skipped), or a .jsonl file with one
            object a line whose key "prompt" holds the text.

    Returns:
        The prompts in the order of the source, without surrounding blanks; never empty.

    Raises:
        ValueError: there is no such source, it holds no prompt, it is not UTF-8, or a line is not what it should be.
    """
    if isinstance(source, str) and source in BUILTIN:
        return BUILTIN[source]()
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        guess = difflib.get_close_matches(str(source), BUILTIN, n=1)
        raise ValueError(
            f"prompts {str(source)!r}: neither a builtin name nor a .txt or .jsonl file"
            + (f"; did you mean {guess[0]}?" if guess else "")
            + f"\n    -> set data.prompts to a file or to one of {', '.join(BUILTIN)}"
        )
    lines = _read_lines(path)
    read = _from_jsonl if path.suffix == ".jsonl" else lambda _path, _number, line: line.strip()
    prompts = [read(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompt\n    -> put one prompt on each line")
    return prompts


def _read_lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"prompt file {path} does not exist\n    -> check data.prompts and data.eval_prompts; "
            f"a relative path starts at {Path.cwd()}"
        ) from None
    except OSError as error:
        raise ValueError(f"prompt file {path} cannot be read: {error.strerror}\n    -> check its permissions") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Offsets count from the start of the file; a byte order mark is stripped before decoding.
        offset = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        line = data.count(b"\n", 0, offset) + 1
        raise ValueError(
            f"prompt file {path} is not UTF-8: byte {offset} (line {line}) is 0x{data[offset]:02x}"
            f"\n    -> save it as UTF-8, for example: iconv -f latin1 -t utf-8 {path} > fixed{path.suffix}"
        ) from None
    # Not splitlines(): a prompt may hold rarer separators, such as U+2028, that do not end a line of the file.
    return text.replace("\r\n", "\n").split("\n")


def _from_jsonl(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"prompt file {path}, line {number}: not valid JSON ({error.msg} at column {error.colno})"
            '\n    -> write one object a line, such as {"prompt": "a photo of a cat"}'
        ) from None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            f'prompt file {path}, line {number}: no text under the key "prompt"'
            '\n    -> write one object a line, such as {"prompt": "a photo of a cat"}'
        )
    return prompt.strip()


def prompts_of_iteration(prompts: Sequence[str] | int, count: int, seed: int, iteration: int) -> list[int]:
    """Return the indices of the `count` distinct prompts of an iteration, a pure function of (seed, iteration).

    Iterations walk through one seeded permutation after the other, so no prompt repeats before all have been seen once.
    Where an iteration straddles two permutations, the second is reordered so that no prompt repeats within it.

    Args:
        prompts: the prompts, or their number.
        count: prompts of one iteration.
        seed: the run's seed.
        iteration: the iteration, from 0.

    Raises:
        ValueError: there are fewer than `count` prompts.
    """
    total = prompts if isinstance(prompts, int) else len(prompts)
    if not 1 <= count <= total:
        raise ValueError(
            f"data.prompts_per_iteration = {count}, but data.prompts holds {total} prompts"
            f"\n    -> set data.prompts_per_iteration to at most {total}, or give more prompts"
        )
    epoch, start = divmod(iteration * count, total)
    chosen = _epoch_order(total, count, seed, epoch)[start : start + count]
    if len(chosen) < count:
        chosen += _epoch_order(total, count, seed, epoch + 1)[: count - len(chosen)]
    return chosen


def _epoch_order(total: int, count: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation whose head avoids what the straddling iteration has already taken."""
    order = permutation(total, seed=seed, stream=Stream.PROMPTS, iteration=epoch)
    taken_before = epoch * total % count
    if not taken_before:
        return order
    # Only the first `count` places are reordered. The tail of an epoch can be among them only where total < 2 count;
    # the recursion then ends within `count` epochs, at one that starts with an iteration of its own.
    if total >= 2 * count:
        previous = permutation(total, seed=seed, stream=Stream.PROMPTS, iteration=epoch - 1)
    else:
        previous = _epoch_order(total, count, seed, epoch - 1)
    taken = set(previous[-taken_before:])
    return sorted(order[:count], key=taken.__contains__) + order[count:]


def evaluation_prompts(prompts: Sequence[str], count: int) -> list[str]:
    """Return the prompts of `count` evaluation images: evenly spaced picks, or all of them over again where fewer."""
    total = len(prompts)
    return [prompts[i * total // count if count < total else i % total] for i in range(count)]
