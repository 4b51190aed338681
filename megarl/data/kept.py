"""Kept tokens: the tokens of the vocabulary that a token of a response was drawn from, where top_p, top_k or min_p leave others out.

In a table of trajectories they are two columns of int32 lists: `kept_counts` has the number of kept tokens of each token of the response, and
`kept_ids` these tokens, one token of the response after the other: 4 bytes a token and 4 bytes a kept one. A token that was not drawn, such as an
environment's, has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT_IDS, KEPT_COUNTS = "kept_ids", "kept_counts"


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The kept tokens of some tokens of a response.

    Attributes:
        ids: int32 [sum of counts].
        counts: int32 [tokens].
    """

    ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def none(cls, num_tokens: int) -> KeptTokens:
        """The kept tokens of tokens that were not drawn: none."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens, np.int32))

    @classmethod
    def joined(cls, parts: Sequence[KeptTokens]) -> KeptTokens:
        """The kept tokens of several texts, one text after the other."""
        none = cls.none(0)
        return cls(
            np.concatenate([none.ids, *(part.ids for part in parts)]),
            np.concatenate([none.counts, *(part.counts for part in parts)]),
        )

    def first(self, num_tokens: int) -> KeptTokens:
        """The kept tokens of the first tokens alone."""
        counts = self.counts[:num_tokens]
        return KeptTokens(self.ids[: counts.sum(dtype=np.int64)], counts)


def kept_of(kept: KeptTokens | None, num_tokens: int) -> KeptTokens:
    """The kept tokens of a text of so many tokens; `kept` None: they were not drawn."""
    return KeptTokens.none(num_tokens) if kept is None else kept
