"""Prompts that a Python program gives, as the tables that a run reads from files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.config import DataConfig
from megarl.data.files import find
from megarl.data.loader import BatchLoader, TableFeed
from megarl.data.prompts import ANSWER_KEY, PromptReader, Row
from megarl.data.samplers import make_sampler
from megarl.data.sources import DataFile
from megarl.data.trajectories import PROMPT_SCHEMA
from megarl.trainer.loops.ppo import epochs
from megarl.trainer.stages.prompt_data import reading

DATA_SOURCE = "python"  # of prompts that name none


class HasTable(Protocol):
    """A data set, such as a PromptDataset."""

    table: pa.Table


Prompts: TypeAlias = Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]] | pa.Table | HasTable


class PromptSupply:
    """Batches of the prompts that are given, which go on where they ended when the same are given again."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        check: Callable[[pa.Table], None],
        several_turns: bool = False,
    ) -> None:
        """`check`: raises a ValueError for prompts that the run cannot use; `several_turns`: see `read_prompts`."""
        self._data, self._tokenizer, self._check = data, tokenizer, check
        self._several_turns = several_turns
        self._given: Any = None
        self._digest: str | None = None  # of the prompts that were given last
        self._loader: BatchLoader | None = None  # None: they are fewer than a batch
        self._batches: Iterator[pa.Table] = iter(())
        self._resumed: dict[str, Any] = {}  # a state that waits for its prompts

    def batches(self, prompts: Prompts) -> Iterator[pa.Table]:
        """Batches without end, each of `data.gen_batch_size` (or else train_batch_size) prompts.

        Fewer prompts than a batch are repeated within it.

        Raises:
            ValueError: no prompts, or a wrong one, by its number.
        """
        if not isinstance(prompts, pa.Table) and not hasattr(prompts, "table"):
            prompts = list(prompts)  # so that what the caller changes in it later is seen
        if not _same(prompts, self._given):
            table = self._table(prompts)
            digest = _digest(table)
            if digest != self._digest:
                self._begin(table, digest)
            self._given = prompts
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Which prompts were given last, and the position in them, as JSON values; empty before there were any."""
        if self._digest is None:
            return self._resumed
        position = self._loader.state_dict() if self._loader is not None else None
        return {"prompts": self._digest, "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position if the prompts that are given next are the same."""
        assert self._digest is None, "prompts were given already"
        self._resumed = state

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        """Tell a sampler that learns what the prompts of these uids scored [trajectories]."""
        if self._loader is not None:
            self._loader.report(uids, scores)

    def _table(self, prompts: Prompts) -> pa.Table:
        data = self._data
        if isinstance(prompts, pa.Table) or hasattr(prompts, "table"):
            table = prompts if isinstance(prompts, pa.Table) else prompts.table
            missing = [name for name in PROMPT_SCHEMA.names if name not in table.column_names]
            if missing:
                raise ValueError(
                    f"prompts: the table lacks the columns {', '.join(missing)} of a prompt table, such as a "
                    "PromptDataset's; give rows as a list of dicts instead (table.to_pylist())"
                )
        else:
            keywords = reading(data, self._several_turns)
            reader = PromptReader(self._tokenizer, may_lack=(ANSWER_KEY,), **keywords)
            file = DataFile("prompts")
            rows = [
                Row(file, number, f"prompt:{number}", _row(number, prompt, data))
                for number, prompt in enumerate(prompts)
            ]
            table = reader.table(rows)
            reader.errors.raise_if_any()
        if not table.num_rows:
            raise ValueError("prompts: there are none (or all are longer than data.max_prompt_length)")
        self._check(table)
        return table

    def _begin(self, table: pa.Table, digest: str) -> None:
        """Other prompts than before: at the position that was saved with them, or at their beginning."""
        data = self._data
        size = data.gen_batch_size or data.train_batch_size
        loader = None
        if table.num_rows >= size:
            feed = TableFeed(table, make_sampler(data.sampler, data.shuffle), data.seed)
            loader = BatchLoader(feed, size)
            if self._resumed.get("prompts") == digest:
                loader.load_state_dict(self._resumed["position"])
        self._batches = _repeated(table, size) if loader is None else epochs(loader)
        self._digest, self._loader, self._resumed = digest, loader, {}


def _repeated(table: pa.Table, size: int) -> Iterator[pa.Table]:
    """Batches of `size` rows out of fewer."""
    batch = pa.concat_tables([table] * -(-size // table.num_rows)).slice(0, size)
    while True:
        yield batch.combine_chunks()


def _digest(table: pa.Table) -> str:
    """SHA-256 of a prompt table's rows."""
    digest = hashlib.sha256()
    for batch in table.select(PROMPT_SCHEMA.names).combine_chunks().to_batches():
        digest.update(batch.replace_schema_metadata().serialize())
    return digest.hexdigest()


def _same(prompts: Prompts, given: Any) -> bool:
    if isinstance(prompts, list):
        return isinstance(given, list) and prompts == given
    return prompts is given


def _row(number: int, prompt: Any, data: DataConfig) -> dict[str, Any]:
    """A prompt as a row of a prompt file with the columns that `data` names; what is wrong with its values the reader says.

    A dict may have its ground truth as `ground_truth`, whatever data.answer_key is.

    Raises:
        ValueError: a dict that has no prompt.
    """
    row = dict(prompt) if isinstance(prompt, Mapping) else {data.prompt_key: prompt}
    if find(row, data.prompt_key) is None:
        raise ValueError(
            f"prompts: number {number} is a dict without {data.prompt_key!r} (keys: {', '.join(map(str, row))}); "
            "name it so, or set data.prompt_key"
        )
    if find(row, data.reward_fn_key) is None:
        row[data.reward_fn_key] = DATA_SOURCE
    if data.answer_key is not None and find(row, data.answer_key) is None and "ground_truth" in row:
        row[data.answer_key] = row["ground_truth"]
    return row
