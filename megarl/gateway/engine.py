"""What the gateway needs of an engine."""

from collections.abc import Callable, Sequence
from typing import Protocol

from megarl.rollout.engine import Generation, SamplingParams

Heard = Callable[[Sequence[int]], None]
"""Called with tokens of a response as they come: each token once, in order, some time before the response."""


class TokenEngine(Protocol):
    """Answers token ids by token ids (`SGLangEngine`)."""

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its response."""

    @property
    def longest_input(self) -> int:
        """Most tokens of a prompt."""

    async def answer(
        self,
        uid: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        experts_from: int = 0,
        heard: Heard | None = None,
    ) -> Generation:
        """One response, its end token included. A request whose coroutine is cancelled is aborted.

        Args:
            experts_from: the first token of the prompt whose experts the generation has, if the engine returns them.
        """
