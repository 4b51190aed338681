"""Samplers: in which order an epoch goes through the rows of a table.

A user adds one, in a file that the recipe names in `plugins`, as a function

    @register_sampler("longest_first")
    def longest_first(table, seed, epoch):
        return np.argsort([-len(ids) for ids in table["prompt_ids"].to_pylist()], kind="stable")

or as a class over `Sampler`, which can read `data.sampler` and learn from the scores of each step.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.config.schema.data import SamplerConfig
from megarl.data.files import lookup
from megarl.data.trajectories import list_lengths
from megarl.util.plugins import Registry

Order = Callable[[pa.Table, int, int], np.ndarray]
SAMPLERS: Registry[Any] = Registry("sampler", "data.sampler.name")
register_sampler = SAMPLERS.register

PROMPT_LENGTH = "prompt_length"
_EXTRA_INFO = "extra_info."


class Sampler(ABC):
    """The order of an epoch; a subclass that has an `update` is asked for the order again after each update."""

    def __init__(self, config: SamplerConfig) -> None:
        """`config`: section `data.sampler`; a sampler's own settings are its `options`."""
        self.config = config

    @abstractmethod
    def order(self, table: pa.Table, seed: int, epoch: int) -> np.ndarray:
        """Every row number of a prompt table once, in the order of an epoch (from 0).

        It must depend on the arguments and the contents of `state_dict` alone, or a resumed run continues with other rows.
        """

    def update(self, uids: Sequence[str], scores: np.ndarray) -> None:  # noqa: B027 (most do not learn)
        """Learn from a step: the prompt's uid and the score of each trajectory [trajectories]."""

    def state_dict(self) -> dict[str, Any]:
        """The state that `update` changes, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (nor have a state)
        """Restore the state of a `state_dict`."""

    @property
    def learns(self) -> bool:
        """Whether scores change the order."""
        return type(self).update is not Sampler.update


class FunctionSampler(Sampler):
    """A function of (table, seed, epoch) as a sampler."""

    def __init__(self, config: SamplerConfig, function: Order) -> None:
        super().__init__(config)
        self._function = function

    def order(self, table: pa.Table, seed: int, epoch: int) -> np.ndarray:
        return self._function(table, seed, epoch)


def make_sampler(config: SamplerConfig, shuffle: bool) -> Sampler:
    """The sampler of section `data.sampler`; without a name random or, without `shuffle`, sequential.

    Raises:
        ValueError: an unknown name, or a sampler that refuses its settings.
    """
    name = config.name or ("random" if shuffle else "sequential")
    entry, config = SAMPLERS[name], replace(config, name=name)
    return entry(config) if isinstance(entry, type) else FunctionSampler(config, entry)


def epoch_order(sampler: Sampler, table: pa.Table, seed: int, epoch: int) -> np.ndarray:
    """A sampler's order [rows]. ValueError: it does not have every row once."""
    order = np.asarray(sampler.order(table, seed, epoch))
    if order.shape != (table.num_rows,) or not np.array_equal(np.sort(order), np.arange(table.num_rows)):
        raise ValueError(
            f"data.sampler.name={sampler.config.name!r}: its order of epoch {epoch} has shape {order.shape} and is not "
            f"every row number from 0 to {table.num_rows - 1} once"
        )
    return order.astype(np.int64)


@register_sampler("random")
def random_order(table: pa.Table, seed: int, epoch: int) -> np.ndarray:
    """A new order each epoch."""
    return np.random.default_rng((seed, epoch)).permutation(table.num_rows)


@register_sampler("sequential")
def sequential_order(table: pa.Table, seed: int, epoch: int) -> np.ndarray:
    """The order of the table."""
    return np.arange(table.num_rows)


@register_sampler("curriculum")
class Curriculum(Sampler):
    """Rows sorted by a number that each has; rows of equal number, and all rows after warm_fraction, are shuffled."""

    def order(self, table: pa.Table, seed: int, epoch: int) -> np.ndarray:
        """ValueError: a row has no such number; names its uid."""
        config = self.config
        assert config.key is not None, "checked: data.sampler.key"
        numbers = row_numbers(table, config.key)
        shuffled = np.random.default_rng((seed, epoch)).permutation(table.num_rows)
        keys = numbers[shuffled]
        ordered = shuffled[np.argsort(-keys if config.descending else keys, kind="stable")]
        num_sorted = math.ceil(table.num_rows * config.warm_fraction)
        late = np.zeros(table.num_rows, dtype=np.bool_)
        late[ordered[num_sorted:]] = True
        return np.concatenate([ordered[:num_sorted], shuffled[late[shuffled]]])


def row_numbers(table: pa.Table, key: str) -> np.ndarray:
    """A number of each row of a prompt table [rows]: prompt_length, or a key of extra_info.

    Raises:
        ValueError: an unknown key, or a row where it is no number.
    """
    if key == PROMPT_LENGTH:
        return list_lengths(table, "prompt_ids").astype(np.float64)
    if not key.startswith(_EXTRA_INFO):
        raise ValueError(f"data.sampler.key={key!r} is unknown; it is {PROMPT_LENGTH} or {_EXTRA_INFO}<name>")
    numbers = np.empty(table.num_rows)
    for row, (uid, text) in enumerate(
        zip(table["uid"].to_pylist(), table["extra_info"].to_pylist(), strict=True)
    ):
        try:
            value = lookup({"extra_info": json.loads(text)}, key)
        except ValueError as error:
            raise ValueError(f"data.sampler.key={key!r}: prompt {uid}: {error}") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ValueError(f"data.sampler.key={key!r}: prompt {uid}: it must be a number, found {value!r}")
        numbers[row] = value
    return numbers
