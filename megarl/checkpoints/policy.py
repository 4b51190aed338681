"""When checkpoints are saved, and which are kept.

Saved: after so many steps, after so many minutes, and before the time of the job is over. Kept: the latest ones and the best, which a
run remembers in a file.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from megarl.util.files import whole_file

Reason = Literal["steps", "minutes", "deadline"]


@dataclass
class SaveSchedule:
    """Decides after each step whether to save; is told how long steps and saves took.

    Attributes:
        every_steps: save after each step whose number is a multiple; None: not for this reason.
        every_minutes: save after so many minutes without a save; None: not for this reason.
        max_run_minutes: how long the job may run, the last save included; None: no limit.
        margin: how many times the longest step and save so far must fit into the time that is left.
        started: when the job's time began, by `clock`; None: now.
        clock: returns seconds that pass evenly.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    max_run_minutes: float | None = None
    margin: float = 1.5
    started: float | None = None
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        assert self.every_steps is None or self.every_steps >= 1, self.every_steps
        assert self.margin >= 1, self.margin
        self._saved_at = self.clock()
        self._started = self._saved_at if self.started is None else self.started
        self._longest_step = self._longest_save = 0.0  # seconds

    def stepped(self, seconds: float) -> None:
        """Record a step that took so many seconds, without its save."""
        self._longest_step = max(self._longest_step, seconds)

    def saved(self, seconds: float) -> None:
        """Record the end of a save that took so many seconds."""
        self._longest_save = max(self._longest_save, seconds)
        self._saved_at = self.clock()

    def due(self, step: int, *, last: bool = False) -> Reason | None:
        """The reason to save after `step`; None: not now. After a save for the deadline the run has to end.

        last: whether no step follows; there is no deadline then, as time for a save was left before this step.
        """
        reason: Reason | None = None
        if self.every_steps is not None and step % self.every_steps == 0:
            reason = "steps"
        elif self.every_minutes is not None and self.clock() - self._saved_at >= 60 * self.every_minutes:
            reason = "minutes"
        if last:
            return reason
        # The next call comes after the save that is due now, if any, and a step. Then there must be time for a save.
        num_saves = 1 if reason is None else 2
        if self.seconds_left < self.margin * (self._longest_step + num_saves * self._longest_save):
            return "deadline"
        return reason

    @property
    def seconds_left(self) -> float:
        """Seconds until the time of the job is over; infinite without a limit, negative afterwards."""
        if self.max_run_minutes is None:
            return float("inf")
        return self._started + 60 * self.max_run_minutes - self.clock()

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run: how long steps and saves take. Each job has a time limit of its own."""
        return {"longest_step": self._longest_step, "longest_save": self._longest_save}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the state of `state_dict`."""
        self._longest_step = float(state["longest_step"])
        self._longest_save = float(state["longest_save"])


STATE_FILE = "state.json"


@dataclass(frozen=True)
class Keep:
    """The checkpoints kept in addition to the newest, which is always kept.

    Attributes:
        last: how many of the newest, that one included; None: all.
        every: also keep steps that are a multiple of this; None: no further ones.
        best: also the best so far.
    """

    last: int | None = None
    every: int | None = None
    best: bool = True

    def __post_init__(self) -> None:
        assert self.last is None or self.last >= 1, self.last
        assert self.every is None or self.every >= 1, self.every


def kept_steps(steps: Iterable[int], keep: Keep, best: int | None) -> set[int]:
    """The steps of `steps` that are kept; `best` is the step of the best checkpoint so far."""
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
        OSError: it cannot be written; the former value is still there.
    """
    with whole_file(root / STATE_FILE) as path, open(path, "w") as file:
        json.dump({"best": step}, file)
        file.flush()
        os.fsync(file.fileno())


def read_best(root: Path, say: Callable[[str], None]) -> int | None:
    """The step that `write_best` wrote last; None: none yet, or the file is damaged, which `say` reports."""
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
        ValueError: the content is not as `write_best` writes it.
    """
    document = json.loads(content)
    if not isinstance(document, dict) or not isinstance(document.get("best"), int | None):
        raise ValueError(f"no state of checkpoints: {document!r}")
    return document["best"]
