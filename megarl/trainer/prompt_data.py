"""The prompts that section `data` names, read as it says."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from megarl.config import DataConfig, DPODataConfig, EvalDataConfig, RMDataConfig
from megarl.data.loader import BatchLoader, Feed, TableFeed
from megarl.data.mixture import MixtureFeed
from megarl.data.preferences import PreferenceKeys
from megarl.data.prompts import PromptDataset, PromptReader
from megarl.data.samplers import make_sampler
from megarl.data.sources import resolve_files
from megarl.data.stream import StreamFeed, cut_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECES_A_WINDOW = 4  # a window has rows of at least so many places in the files

Files = str | tuple[str, ...]
Check = Callable[[pa.Table], None]


def reading(data: DataConfig | EvalDataConfig) -> dict[str, Any]:
    """The keywords of `PromptReader`."""
    keywords: dict[str, Any] = {
        "max_prompt_length": data.max_prompt_length,
        "prompt_key": data.prompt_key,
        "data_source_key": data.reward_fn_key,
        "chat_template_kwargs": data.apply_chat_template_kwargs,
    }
    if isinstance(data, DataConfig):
        keywords["truncation"] = data.truncation
        keywords["filter_overlong_prompts"] = data.filter_overlong_prompts
        keywords["keep_messages"] = data.return_raw_input_ids
    return keywords


def preference_keys(data: RMDataConfig | DPODataConfig, margin: str | None = None) -> PreferenceKeys:
    """The columns of rankings; `margin`: that of the margins, where the loss has them."""
    return PreferenceKeys(
        prompt=data.prompt_key,
        chosen=data.chosen_key,
        rejected=data.rejected_key,
        margin=margin,
        responses=data.responses_key,
        ranks=data.ranks_key,
        scores=data.scores_key,
    )


def read_prompts(
    data: DataConfig | EvalDataConfig,
    files: Files,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    uid_prefix: str = "",
) -> PromptDataset:
    """All prompts of some files.

    Args:
        max_samples: the first so many rows; -1: all.

    Raises:
        ValueError: names the file and row that is wrong.
    """
    return PromptDataset(
        [files] if isinstance(files, str) else list(files),
        tokenizer,
        max_samples=None if max_samples == -1 else max_samples,
        uid_prefix=uid_prefix,
        **reading(data),
    )


def training_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, check: Check
) -> tuple[BatchLoader, int]:
    """The loader of training prompts, and how many prompts were left out as too long.

    With data.streaming no prompt has been read yet, and none left out.

    Args:
        check: raises a ValueError for prompts that the run cannot use.

    Raises:
        ValueError: names the key, file or row that is wrong.
    """
    batch_size = data.gen_batch_size or data.train_batch_size
    if data.mixture is None:
        assert data.train_files is not None, "checked: one of the two"
        feed, num_filtered = _feed(
            data, data.train_files, data.train_max_samples, data.seed, "", tokenizer, check
        )
        return BatchLoader(feed, batch_size), num_filtered
    feeds: dict[str, Feed] = {}
    total_filtered = 0
    for name, part in data.mixture.items():
        seed = zlib.crc32(f"{data.seed}/{name}".encode())  # its order does not depend on the other data sets
        feeds[name], num_filtered = _feed(data, part.files, -1, seed, f"{name}:", tokenizer, check)
        total_filtered += num_filtered
    weights = {name: part.weight for name, part in data.mixture.items()}
    return BatchLoader(MixtureFeed(feeds, weights, batch_size), batch_size), total_filtered


def _feed(
    data: DataConfig,
    files: Files,
    max_samples: int,
    seed: int,
    uid_prefix: str,
    tokenizer: PreTrainedTokenizerBase,
    check: Check,
) -> tuple[Feed, int]:
    if not data.streaming:
        dataset = read_prompts(data, files, tokenizer, max_samples, uid_prefix)
        check(dataset.table)
        return TableFeed(dataset.table, make_sampler(data.sampler, data.shuffle), seed), dataset.num_filtered
    limit = None if max_samples == -1 else max_samples
    piece_rows = max(1, data.stream_window_rows // PIECES_A_WINDOW)
    pieces = cut_pieces(resolve_files(files), piece_rows, limit, uid_prefix)
    feed = StreamFeed(
        pieces,
        PromptReader(tokenizer, **reading(data)),
        shuffle=(data.sampler.name or ("random" if data.shuffle else "sequential")) == "random",
        seed=seed,
        window_rows=data.stream_window_rows,
        check=check,
    )
    return feed, 0
