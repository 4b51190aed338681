"""Batches of a table's rows: their order depends on (seed, epoch) alone, and their position can be resumed."""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa


class HasTable(Protocol):
    """A dataset: all its rows in one table."""

    table: pa.Table


class TableLoader:
    """Yields the batches of one epoch each time it is iterated, as tables.

    A batch counts as consumed once it is yielded: `state_dict()` taken while batch k is in use makes a new
    loader continue with batch k + 1 (of the next epoch after the last one). `epoch` is the epoch that the
    next batch is of, so that `for epoch in range(loader.epoch, total_epochs): for batch in loader: ...` is
    right after a resume too.
    """

    def __init__(
        self, dataset: HasTable, batch_size: int, shuffle: bool, seed: int, drop_last: bool = True
    ) -> None:
        """
        Args:
            dataset: anything with a `table`.
            batch_size: rows of a batch.
            shuffle: a new order each epoch; else table order.
            seed: non-negative; with the epoch it determines the order.
            drop_last: leave out the rows at the end of an epoch that fill no batch (others take their place
                next epoch); else they come as a smaller batch.

        Raises:
            ValueError: the dataset has fewer rows than one batch (drop_last), or none.
        """
        self._table = dataset.table.combine_chunks()
        if batch_size < 1:
            raise ValueError(f"batch size must be at least 1, found {batch_size}")
        if seed < 0:
            raise ValueError(f"data seed must not be negative, found {seed}")
        num_rows = self._table.num_rows
        if num_rows < (batch_size if drop_last else 1):
            raise ValueError(
                f"the dataset has {num_rows} rows, too few for one batch of {batch_size}: "
                "lower data.train_batch_size or give more data"
            )
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._batch = 0  # the next batch of the epoch

    def __len__(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self._table.num_rows, self._batch_size)
        return full if self._drop_last else full + bool(rest)

    @property
    def epoch(self) -> int:
        return self._epoch

    def __iter__(self) -> Iterator[pa.Table]:
        """The batches of the current epoch that are still to come."""
        epoch = self._epoch
        order = self._order(epoch)
        for batch in range(self._batch, len(self)):
            last = batch + 1 == len(self)
            self._epoch, self._batch = (epoch + 1, 0) if last else (epoch, batch + 1)
            rows = order[batch * self._batch_size : (batch + 1) * self._batch_size]
            yield self._table.take(pa.array(rows))

    def _order(self, epoch: int) -> np.ndarray:
        num_rows = self._table.num_rows
        if not self._shuffle:
            return np.arange(num_rows)
        return np.random.default_rng((self._seed, epoch)).permutation(num_rows)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": self._table.num_rows,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    def state_dict(self) -> dict[str, Any]:
        """Position, and what the order depends on (JSON values)."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            ValueError: the position was saved with other data, batch size or order, in which it means other
                rows.
        """
        for key, value in self._identity().items():
            if state[key] != value:
                raise ValueError(
                    f"the data position was saved with {key} = {state[key]}, this run has {value}: "
                    "it can only be resumed with the same data, batch size, shuffle and seed"
                )
        self._epoch, self._batch = state["epoch"], state["batch"]
