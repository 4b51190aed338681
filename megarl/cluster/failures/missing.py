"""Says now and then who has not answered yet, while many are waited for."""

import time
from collections.abc import Callable, Sequence

from megarl.cluster.ranks import RankProcess

_MOST_NAMED = 8


class Missing:
    """To be told again and again who is still waited for; `say` gets a line each `every` seconds."""

    def __init__(self, say: Callable[[str], None], what: str, of: int, every: float = 20.0) -> None:
        """`what`: what is waited for, as in "to come up"; `of`: how many processes were at the beginning."""
        self._say, self._what, self._of, self._every = say, what, of, every
        self._begun = self._said = time.monotonic()

    def __call__(self, processes: Sequence[RankProcess]) -> None:
        now = time.monotonic()
        if not processes or now - self._said < self._every:
            return
        self._said = now
        names = ", ".join(f"{process.name} ({process.host})" for process in processes[:_MOST_NAMED])
        more = f" and {len(processes) - _MOST_NAMED} more" if len(processes) > _MOST_NAMED else ""
        self._say(
            f"  after {now - self._begun:.0f} s {len(processes)} of {self._of} processes have yet {self._what}: {names}{more}"
        )
