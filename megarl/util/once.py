"""Results that are worked out once for all who ask with the same key."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """A memo that lives as long as the objects that its results were worked out from."""

    def __init__(self) -> None:
        self._results: dict[object, Any] = {}

    def __call__(self, key: object, make: Callable[[], T]) -> T:
        """The result of `make`, which is called on a key's first use only."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]
