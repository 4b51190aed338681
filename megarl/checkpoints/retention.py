"""Which checkpoints are kept, and what a run remembers of that: which one is the best so far."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.util.files import whole_file

STATE_FILE = "state.json"


@dataclass(frozen=True)
class Keep:
    """What is kept beside the newest checkpoint, which always is.

    Attributes:
        last: how many of the newest, that one included; None: all.
        every: also those whose step is a multiple of this; None: no further ones.
        best: also the best so far.
    """

    last: int | None = None
    every: int | None = None
    best: bool = True

    def __post_init__(self) -> None:
        assert self.last is None or self.last >= 1, self.last
        assert self.every is None or self.every >= 1, self.every


def kept_steps(steps: Iterable[int], keep: Keep, best: int | None) -> set[int]:
    """Those of `steps` that are kept; `best` is the step of the best checkpoint so far."""
    steps = sorted(steps)
    kept = set(steps if keep.last is None else steps[-keep.last :])
    if keep.every is not None:
        kept.update(step for step in steps if step % keep.every == 0)
    if keep.best and best in steps:
        kept.add(best)
    return kept


def write_best(root: Path, step: int | None) -> None:
    """Remember on the disk which step's checkpoint is the best so far; None: none is known.

    Raises:
        OSError: it cannot be written; what was remembered before still is.
    """
    with whole_file(root / STATE_FILE) as path, open(path, "w") as file:
        json.dump({"best": step}, file)
        file.flush()
        os.fsync(file.fileno())


def read_best(root: Path, say: Callable[[str], None]) -> int | None:
    """The step that `write_best` wrote last; None: none yet, or the file is damaged, which is said."""
    path = root / STATE_FILE
    if not path.exists():
        return None
    try:
        return parse_best(path.read_bytes())
    except (ValueError, OSError):
        say(f"Warning: {path} cannot be read; which checkpoint was the best so far is not known")
        return None


def parse_best(content: bytes) -> int | None:
    """The best step of a state file's content; None: none is known.

    Raises:
        ValueError: it is not as it was written.
    """
    document = json.loads(content)
    if not isinstance(document, dict) or not isinstance(document.get("best"), int | None):
        raise ValueError(f"no state of checkpoints: {document!r}")
    return document["best"]
