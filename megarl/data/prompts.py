"""Prompts from Parquet files in the GSM8K schema that verl's users have.

Columns: `data_source` string; `prompt` list of {role, content}; `reward_model` struct {style, ground_truth};
`extra_info` struct (optional, whatever it holds; kept as JSON).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from megarl.data.files import RowErrors, check_messages, iter_rows, lookup, num_rows, resolve_files
from megarl.data.loader import TableLoader
from megarl.data.tokenizer import encode_texts, render_text
from megarl.data.trajectories import PROMPT_SCHEMA

Truncation = Literal["error", "left", "right", "middle"]
TRUNCATIONS: tuple[str, ...] = ("error", "left", "right", "middle")

TOKENIZE_BLOCK_ROWS = 1024
PROGRESS_FROM_ROWS = 20_000  # below this, tokenising takes a few seconds


class PromptDataset:
    """All prompts of some files, tokenised when the dataset is made: a wrong row ends a run before it starts.

    Attributes:
        table: the prompt table (`PROMPT_SCHEMA`), rows in file order. `uid` is "<file stem>:<row in file>"; a
            second file of the same stem gets "<stem>#2".
        num_filtered: rows left out as longer than `max_prompt_length`.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        truncation: Truncation = "error",
        filter_overlong_prompts: bool = False,
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both.
            max_prompt_length: tokens, chat template included.
            prompt_key: the column of the messages; may be dotted.
            truncation: what is done with longer prompts: "error" refuses, "left" / "right" / "middle" cuts
                there.
            filter_overlong_prompts: leave longer prompts out instead.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows left.
        """
        if truncation not in TRUNCATIONS:
            raise ValueError(f"truncation must be one of {', '.join(TRUNCATIONS)}, found {truncation!r}")
        if max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1, found {max_prompt_length}")
        self._tokenizer = tokenizer
        self._prompt_key = prompt_key
        self._max_length = max_prompt_length
        self._truncation = truncation
        self._filter = filter_overlong_prompts
        self._errors = RowErrors()
        self.num_filtered = 0
        paths = resolve_files(files)
        self.table = self._read(paths)
        self._errors.raise_if_any()
        if not self.table.num_rows:
            raise ValueError(
                f"no prompts in {', '.join(map(str, paths))}"
                + (
                    f": all {self.num_filtered} rows are longer than max_prompt_length {max_prompt_length}"
                    if self.num_filtered
                    else ": the files have no rows"
                )
            )

    def __len__(self) -> int:
        return self.table.num_rows

    def _read(self, paths: list[Path]) -> pa.Table:
        total = sum(num_rows(path) or 0 for path in paths)
        columns = [
            *{self._prompt_key, self._prompt_key.split(".")[0]},
            "data_source",
            "reward_model",
            "extra_info",
        ]
        columns = list(dict.fromkeys(columns))
        tables = [PROMPT_SCHEMA.empty_table()]
        with Progress(transient=True, disable=total < PROGRESS_FROM_ROWS) as progress:
            task = progress.add_task("tokenising prompts", total=total)
            for path, name in zip(paths, unique_stems(paths), strict=True):
                block: list[dict[str, Any]] = []
                for number, row in iter_rows(path, columns):
                    parsed = self._parse(path, number, row)
                    if parsed is not None:
                        block.append({"uid": f"{name}:{number}", "path": path, "row": number, **parsed})
                    if len(block) == TOKENIZE_BLOCK_ROWS:
                        tables.append(self._tokenize(block))
                        progress.advance(task, len(block))
                        block = []
                tables.append(self._tokenize(block))
                progress.advance(task, len(block))
        return pa.concat_tables(tables).combine_chunks()

    def _parse(self, path: Path, number: int, row: dict[str, Any]) -> dict[str, str] | None:
        """One row with its prompt rendered to `text`, or None after noting what is wrong with it."""
        try:
            data_source = lookup(row, "data_source")
            if not isinstance(data_source, str) or not data_source:
                raise ValueError(f"'data_source' must be a string, found {data_source!r}")
            messages = check_messages(lookup(row, self._prompt_key), self._prompt_key)
            return {
                "data_source": data_source,
                "ground_truth": _ground_truth(lookup(row, "reward_model.ground_truth")),
                "extra_info": _to_json(row.get("extra_info") or {}, "extra_info"),
                "text": render_text(self._tokenizer, messages, add_generation_prompt=True),
            }
        except ValueError as error:
            self._errors.add(path, number, str(error))
            return None

    def _tokenize(self, block: list[dict[str, Any]]) -> pa.Table:
        kept = []
        for row, ids in zip(
            block, encode_texts(self._tokenizer, [row["text"] for row in block]), strict=True
        ):
            if not ids:
                # an engine given an empty prompt does not answer with an error, it dies
                self._errors.add(row["path"], row["row"], "the chat template renders the prompt to no tokens")
            elif len(ids) <= self._max_length:
                kept.append({**row, "prompt_ids": ids})
            elif self._filter:
                self.num_filtered += 1
            elif self._truncation == "error":
                self._errors.add(
                    row["path"],
                    row["row"],
                    f"the prompt has {len(ids)} tokens, more than max_prompt_length {self._max_length}; "
                    "raise it, set filter_overlong_prompts, or choose a truncation",
                )
            else:
                kept.append({**row, "prompt_ids": truncate(ids, self._max_length, self._truncation)})
        return pa.table(
            {name: [row[name] for row in kept] for name in PROMPT_SCHEMA.names}, schema=PROMPT_SCHEMA
        )


class PromptLoader(TableLoader):
    """Batches of prompts: tables of `PROMPT_SCHEMA` (see TableLoader)."""


def truncate(ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Cut token ids to max_length: on the left, on the right, or in the middle (both ends stay)."""
    if len(ids) <= max_length:
        return ids
    if truncation == "left":
        return ids[-max_length:]
    if truncation == "right":
        return ids[:max_length]
    assert truncation == "middle", truncation
    head = max_length // 2
    return ids[:head] + ids[len(ids) - (max_length - head) :]


def unique_stems(paths: Sequence[Path]) -> list[str]:
    """File names without suffix, with "#2", "#3", ... after the second, third, ... of the same name."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path.stem] = seen.get(path.stem, 0) + 1
        names.append(path.stem if seen[path.stem] == 1 else f"{path.stem}#{seen[path.stem]}")
    return names


def _ground_truth(value: Any) -> str:
    """Strings as they are, other values (numbers, lists of accepted answers) as JSON."""
    if value is None:
        raise ValueError("'reward_model.ground_truth' is null")
    return value if isinstance(value, str) else _to_json(value, "reward_model.ground_truth")


def _to_json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"{name!r} cannot be kept as JSON: {error}") from error
