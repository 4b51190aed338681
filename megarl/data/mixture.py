"""Batches drawn from several data sets in fixed shares.

Guarantees, each asserted by a test:

- of the first t prompts of a run, a data set of share w has w * t, to less than one prompt, whatever t; so any run of
  prompts that follow each other (a step, a mini-batch) has its share to less than two;
- a batch has no prompt twice;
- the draws depend on the weights alone, each data set's order on its own seed and epoch.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, lcm
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.data.loader import Feed, check_identity


class Shares:
    """Which data set the next prompt is of: Tijdeman's algorithm ("The chairman assignment problem", Discrete
    Mathematics 32, 1980), in whole numbers.

    For n data sets of shares w_i (their sum is 1) it keeps |w_i t - x_i(t)| <= 1 - 1 / (2n - 2), where x_i(t) is
    how often i was drawn in t draws: draw t is of the i among those with w_i t - x_i(t - 1) >= 1 / (2n - 2) for which
    (1 - 1 / (2n - 2) - (w_i t - x_i(t - 1))) / w_i, the time that is left to it, is smallest.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: positive; 0.1 means a tenth, not the binary number closest to it."""
        fractions = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self.weights = [int(fraction * scale) for fraction in fractions]
        self.counts = [0] * len(weights)  # draws so far

    def draw(self) -> int:
        """The number of the data set that the next prompt is of."""
        chosen = self._next()
        self.counts[chosen] += 1
        return chosen

    def _next(self) -> int:
        num, total, time = len(self.weights), sum(self.weights), sum(self.counts) + 1
        if num == 1:
            return 0
        parts = 2 * num - 2
        # w_i t - x_i, in units of 1 / (parts * total)
        behind = [
            parts * (weight * time - count * total)
            for weight, count in zip(self.weights, self.counts, strict=True)
        ]
        ready = [index for index in range(num) if behind[index] >= total]
        return min(
            ready,
            key=lambda index: (Fraction((parts - 1) * total - behind[index], self.weights[index]), index),
        )


class MixtureFeed:
    """Rows of several feeds by weight (see Feed), as many an epoch as all have together.

    Each feed has epochs of its own: one that has not enough rows left for a batch begins its next epoch with it.
    """

    def __init__(self, feeds: Mapping[str, Feed], weights: Mapping[str, float], batch_size: int) -> None:
        """
        Args:
            feeds: by name; their rows' uids must differ.
            batch_size: most rows that are taken at a time.

        Raises:
            ValueError: a feed has fewer rows than a batch may need of it.
        """
        assert feeds and feeds.keys() == weights.keys(), (list(feeds), list(weights))
        self.num_rows = sum(feed.num_rows for feed in feeds.values())
        self.epoch = 0
        self._names = list(feeds)
        self._feeds = [feeds[name] for name in self._names]
        self._shares = Shares([weights[name] for name in self._names])
        self._taken = 0  # of the epoch
        for name, feed, weight in zip(self._names, self._feeds, self._shares.weights, strict=True):
            share = Fraction(weight * batch_size, sum(self._shares.weights))
            # two prefixes, each off by less than one
            most = batch_size if len(feeds) == 1 else min(batch_size, ceil(share + 2) - 1)
            if feed.num_rows < most:
                raise ValueError(
                    f"data.mixture.{name} has {feed.num_rows} rows, too few: by its weight a batch of {batch_size} prompts may "
                    f"need {most} different ones; lower its weight or data.train_batch_size, or give more data"
                )

    @property
    def left(self) -> int:
        return self.num_rows - self._taken

    def take(self, count: int) -> pa.Table | None:
        """ValueError: a feed has not enough rows for its share in a whole epoch, or a row is wrong."""
        if count > self.left:
            return None
        draws = np.array([self._shares.draw() for _ in range(count)])
        self._taken += count
        tables = [self._take_of(index, int((draws == index).sum())) for index in range(len(self._feeds))]
        # each feed's rows to the places that were drawn for it
        places = np.argsort(draws, kind="stable")
        rows = np.empty(count, dtype=np.int64)
        rows[places] = np.arange(count)
        return pa.concat_tables(tables).take(pa.array(rows)).combine_chunks()

    def _take_of(self, index: int, count: int) -> pa.Table:
        feed = self._feeds[index]
        table = feed.take(count)
        if table is None:
            feed.next_epoch()
            table = feed.take(count)
        if table is None:
            raise ValueError(
                f"data.mixture.{self._names[index]}: a whole epoch has fewer prompts than the {count} that its weight asks for "
                "in one batch: its others are longer than data.max_prompt_length"
            )
        return table

    def next_epoch(self) -> None:
        self.epoch += 1
        self._taken = 0

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        for feed in self._feeds:
            feed.report(uids, scores)

    def _identity(self) -> dict[str, Any]:
        return {"data sets": self._names, "weights": self._shares.weights}

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._identity(),
            "epoch": self.epoch,
            "taken": self._taken,
            "counts": list(self._shares.counts),
            "feeds": [feed.state_dict() for feed in self._feeds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity())
        self.epoch, self._taken = state["epoch"], state["taken"]
        self._shares.counts = list(state["counts"])
        for feed, saved in zip(self._feeds, state["feeds"], strict=True):
            feed.load_state_dict(saved)
