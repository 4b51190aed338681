"""How long a run will still take, by its last steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

RECENT = 20  # steps


@dataclass
class Pace:
    """The time from the end of one step to that of the next, of the `RECENT` last ones: with checkpoints, validations and all.

    Their median is what a step takes, so that a few which wait for a validation or a checkpoint do not count.
    """

    last: float | None = None  # when the last step ended
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def ended(self, now: float, step_seconds: float | None) -> None:
        """A step ended. `step_seconds`: its own time, which counts where none ended before it."""
        taken = step_seconds if self.last is None else now - self.last
        if taken is not None:
            self.seconds.append(taken)
        self.last = now

    def left(self, num_steps: int) -> str | None:
        """What `num_steps` more steps take, such as 0:48 or 26:02:05; None: no step has ended, or none is left."""
        if not self.seconds or num_steps <= 0:
            return None
        minutes, seconds = divmod(round(median(self.seconds) * num_steps), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
