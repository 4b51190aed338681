"""A limit of requests per minute: a token bucket, which holds the requests of one minute."""

from __future__ import annotations

from collections.abc import Callable


class Rate:
    """At most `per_minute` requests at once, and as many a minute in the long run; None: any number."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._per_minute, self._clock = per_minute, clock
        self._left, self._counted_at = float(per_minute or 0), clock()

    def take(self) -> float:
        """Count a request; 0.0, or the seconds until one may come, in which case it is not counted."""
        if self._per_minute is None:
            return 0.0
        now, per_second = self._clock(), self._per_minute / 60
        self._left = min(self._left + (now - self._counted_at) * per_second, self._per_minute)
        self._counted_at = now
        if self._left < 1:
            return (1 - self._left) / per_second
        self._left -= 1
        return 0.0
