"""Batches of rows that come from a feed, and their position, which can be resumed.

Guarantees, each asserted by a test:

- the same data, batch size and seed give the same batches, whether or not a run was interrupted between them;
- an epoch of a table has every row once, but for those at its end that fill no batch;
- what a sampler learns from scores moves only rows that the epoch has not had yet;
- of the first t prompts of a run on a mixture, a data set of share w has w * t, to less than one prompt, whatever t; so any
  run of prompts that follow each other (a step, a mini-batch) has its share to less than two;
- a batch of a mixture has no prompt twice;
- a mixture's draws depend on the weights alone, each data set's order on its own seed and epoch.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from math import ceil, lcm
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from megarl.config.schema.data import SamplerConfig
from megarl.data.samplers import Sampler, epoch_order, make_sampler
from megarl.data.trajectories import combined, take


class HasTable(Protocol):
    """A dataset: all its rows in one table."""

    table: pa.Table


class Feed(Protocol):
    """Rows in the order of an epoch, epoch after epoch."""

    num_rows: int  # of an epoch
    epoch: int  # from 0

    @property
    def left(self) -> int:
        """Rows that are left in the epoch, at most."""
        ...

    def take(self, count: int) -> pa.Table | None:
        """The next `count` rows of the epoch; None: fewer are left."""
        ...

    def next_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        ...

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        """Report the scores [trajectories] of these prompts; other feeds' prompts may be among them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, and the settings that it depends on, as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. ValueError: it was saved with other data or another order."""
        ...


class BatchLoader:
    """Yields the batches of one epoch each time it is iterated, as tables.

    A batch counts as consumed once it is yielded: `state_dict()` taken while batch k is in use makes a new
    loader continue with batch k + 1 (of the next epoch after the last one). `epoch` is the
    next batch's epoch, so that `for epoch in range(loader.epoch, total_epochs): for batch in loader: ...` is
    right after a resume too.
    """

    def __init__(self, feed: Feed, batch_size: int) -> None:
        """
        Args:
            batch_size: rows of a batch. Rows at the end of an epoch that fill no batch are left out; in the next epoch
                other rows take their place.

        Raises:
            ValueError: the feed has fewer rows than one batch.
        """
        if batch_size < 1:
            raise ValueError(f"batch size must be at least 1, found {batch_size}")
        if feed.num_rows < batch_size:
            raise ValueError(
                f"the dataset has {feed.num_rows} rows, too few for one batch of {batch_size}: "
                "lower data.train_batch_size or give more data"
            )
        self._feed = feed
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Batches of an epoch; at most, where rows that are read later may be left out."""
        return self._feed.num_rows // self._batch_size

    @property
    def epoch(self) -> int:
        return self._feed.epoch

    @property
    def num_rows(self) -> int:
        """Rows of an epoch; at most, where rows that are read later may be left out."""
        return self._feed.num_rows

    def __iter__(self) -> Iterator[pa.Table]:
        """The batches of the current epoch that are still to come.

        Raises:
            ValueError: a whole epoch gives no batch; or the feed's errors.
        """
        feed, size = self._feed, self._batch_size
        epoch, whole, num_batches = feed.epoch, feed.left == feed.num_rows, 0
        while feed.epoch == epoch:
            batch = feed.take(size)
            if batch is None or feed.left < size:
                feed.next_epoch()
            if batch is not None:
                num_batches += 1
                yield batch
        if whole and not num_batches:
            raise ValueError(
                f"of the {feed.num_rows} rows of an epoch fewer than one batch of {size} are left: the "
                "others are longer than data.max_prompt_length"
            )

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        """Tell the samplers the scores of a step's trajectories.

        Args:
            uids: the prompt's uid of each trajectory.
            scores: of each trajectory [trajectories].
        """
        self._feed.report(uids, scores)

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self._batch_size}

    def state_dict(self) -> dict[str, Any]:
        """The position, and the settings that the order depends on (JSON values)."""
        return {**self._identity(), "feed": self._feed.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ValueError: the position was saved with other data, batch size or order.
        """
        check_identity(state, self._identity())
        self._feed.load_state_dict(state["feed"])


def check_identity(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise ValueError if a position was saved with other settings."""
    for key, value in identity.items():
        if state.get(key) != value:
            raise ValueError(
                f"the data position was saved with {key} = {state.get(key)}, this run has {value}: "
                "it can only be resumed with the same data, batch size, shuffle, sampler and seed"
            )


class TableFeed:
    """Rows of a table in the order of a sampler (see Feed)."""

    def __init__(self, table: pa.Table, sampler: Sampler, seed: int) -> None:
        """`seed`: non-negative; with the epoch it determines the order, unless the sampler learns."""
        if seed < 0:
            raise ValueError(f"data seed must not be negative, found {seed}")
        self.num_rows = table.num_rows
        self.epoch = 0
        self._table = combined(table)
        self._sampler = sampler
        self._seed = seed
        self._taken = np.zeros(table.num_rows, dtype=np.bool_)  # rows that this epoch has used
        self._coming: np.ndarray | None = (
            None  # the other rows in their order; None: the sampler has to be asked
        )
        self._uids = frozenset(table["uid"].to_pylist()) if sampler.learns else frozenset()

    @property
    def left(self) -> int:
        return self.num_rows - int(self._taken.sum())

    def take(self, count: int) -> pa.Table | None:
        if count > self.left:
            return None
        if self._coming is None:
            order = epoch_order(self._sampler, self._table, self._seed, self.epoch)
            self._coming = order[~self._taken[order]]
        rows, self._coming = self._coming[:count], self._coming[count:]
        self._taken[rows] = True
        return take(self._table, rows)

    def next_epoch(self) -> None:
        self.epoch += 1
        self._taken[:] = False
        self._coming = None

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        own = [row for row, uid in enumerate(uids) if uid in self._uids]
        if own:
            self._sampler.update([uids[row] for row in own], np.asarray(scores)[own])
            self._coming = None

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "seed": self._seed, "sampler": asdict(self._sampler.config)}

    def state_dict(self) -> dict[str, Any]:
        taken = base64.b64encode(np.packbits(self._taken).tobytes()).decode()
        return {
            **self._identity(),
            "epoch": self.epoch,
            "taken": taken,
            "sampler_state": self._sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(state, self._identity())
        packed = np.frombuffer(base64.b64decode(state["taken"]), dtype=np.uint8)
        self._sampler.load_state_dict(state["sampler_state"])
        self.epoch = state["epoch"]
        self._taken = np.unpackbits(packed, count=self.num_rows).astype(np.bool_)
        self._coming = None


class TableLoader(BatchLoader):
    """Batches of a dataset's table, in random or in table order (see BatchLoader)."""

    def __init__(self, dataset: HasTable, batch_size: int, shuffle: bool, seed: int) -> None:
        """
        Args:
            shuffle: a new order each epoch; else table order.
            seed: non-negative; with the epoch it determines the order.

        Raises:
            ValueError: as BatchLoader; a negative seed.
        """
        config = SamplerConfig(name="random" if shuffle else "sequential")
        super().__init__(TableFeed(dataset.table, make_sampler(config, shuffle), seed), batch_size)


class Shares:
    """Chooses the data set of the next prompt by Tijdeman's algorithm ("The chairman assignment problem", Discrete
    Mathematics 32, 1980), in whole numbers.

    For n data sets of shares w_i (their sum is 1) it keeps |w_i t - x_i(t)| <= 1 - 1 / (2n - 2), where x_i(t) is
    how often i was drawn in t draws. Draw t takes, among all i with w_i t - x_i(t - 1) >= 1 / (2n - 2), the one for which
    (1 - 1 / (2n - 2) - (w_i t - x_i(t - 1))) / w_i, the time that is left to it, is smallest.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """`weights`: positive; 0.1 means a tenth, not the binary number closest to it."""
        fractions = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self.weights = [int(fraction * scale) for fraction in fractions]
        self.counts = [0] * len(weights)  # draws so far

    def draw(self) -> int:
        """The number of the next prompt's data set."""
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
    """Rows of several feeds by weight (see Feed); an epoch has as many rows as all feeds together.

    Each feed has epochs of its own; a feed with too few rows left for a batch begins its next epoch with that batch.
    """

    def __init__(self, feeds: Mapping[str, Feed], weights: Mapping[str, float], batch_size: int) -> None:
        """
        Args:
            feeds: by name; their rows' uids must differ.
            batch_size: the most rows that are taken at a time.

        Raises:
            ValueError: a feed has fewer rows than a batch may need from it.
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
            # a batch is the difference of two prefixes, each off by less than one
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
        tables = [self._take_of(index, int((draws == index).sum())) for index in np.unique(draws).tolist()]
        # Put each feed's rows in the places that were drawn for it.
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
