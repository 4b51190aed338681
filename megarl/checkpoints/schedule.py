"""When to save: after so many steps, after so many minutes, and before the time of the job is over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

Reason = Literal["steps", "minutes", "deadline"]


@dataclass
class SaveSchedule:
    """Asked after each step whether to save; told how long steps and saves took.

    Attributes:
        every_steps: save after each step whose number is a multiple; None: not for this reason.
        every_minutes: save when so long was not saved; None: not for this reason.
        max_run_minutes: how long the job may run, the last save included; None: no limit.
        margin: how many times the longest step and save so far must still fit in before that.
        started: when the job's time began, by `clock`; None: now.
        clock: seconds that pass evenly.
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
        """A step was done, without its save, in so many seconds."""
        self._longest_step = max(self._longest_step, seconds)

    def saved(self, seconds: float) -> None:
        """A save has ended that kept the run waiting for so many seconds."""
        self._longest_save = max(self._longest_save, seconds)
        self._saved_at = self.clock()

    def due(self, step: int) -> Reason | None:
        """Why to save after `step`; None: not now. After a save for the deadline the run has to end."""
        reason: Reason | None = None
        if self.every_steps is not None and step % self.every_steps == 0:
            reason = "steps"
        elif self.every_minutes is not None and self.clock() - self._saved_at >= 60 * self.every_minutes:
            reason = "minutes"
        # Until it is asked again: the save that is due now, if any, and a step. Then there must be time for a save.
        num_saves = 1 if reason is None else 2
        if self.seconds_left < self.margin * (self._longest_step + num_saves * self._longest_save):
            return "deadline"
        return reason

    @property
    def seconds_left(self) -> float:
        """Until the time of the job is over; infinite without a limit, negative afterwards."""
        if self.max_run_minutes is None:
            return float("inf")
        return self._started + 60 * self.max_run_minutes - self.clock()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with: how long steps and saves take. The time of a job is its own."""
        return {"longest_step": self._longest_step, "longest_save": self._longest_save}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` said."""
        self._longest_step = float(state["longest_step"])
        self._longest_save = float(state["longest_save"])
