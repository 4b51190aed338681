"""The prompts of section `data`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from megarl.config import (
    DataConfig,
    DPODataConfig,
    EvalConfig,
    EvalDataConfig,
    RMDataConfig,
    SamplingConfig,
    TrainConfig,
    TuningConfig,
    needs_rules,
    plays_turns,
    teacher_of_sources,
    val_set_sampling,
)
from megarl.data.files import resolve_files
from megarl.data.labels import LabelledKeys
from megarl.data.loader import BatchLoader, Feed, MixtureFeed, TableFeed
from megarl.data.preferences import PreferenceKeys
from megarl.data.prompts import ANSWER_KEY, SOURCE_KEY, PromptDataset, PromptReader
from megarl.data.samplers import make_sampler
from megarl.data.stream import StreamFeed, cut_pieces
from megarl.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECES_A_WINDOW = 4  # a window has rows from at least this many places in the files

Files = str | tuple[str, ...]
Check = Callable[[pa.Table], None]


def may_lack(config: TrainConfig | EvalConfig) -> frozenset[str]:
    """The columns that rows of prompts may lack, because no reward reads them.

    A column that the configuration gives another name than the usual one must be there.
    """
    reward = config.reward
    if not needs_rules(config):
        plays = isinstance(config, TrainConfig) and plays_turns(config.actor_rollout_ref.rollout)
        return frozenset((SOURCE_KEY,) if plays else (SOURCE_KEY, ANSWER_KEY))  # environments read answers
    is_one_for_all = (
        config.custom_reward_function.path is not None or reward.rule is not None or reward.gsm8k_rule_reward
    )
    return frozenset((SOURCE_KEY,) if is_one_for_all else ())


def reading(data: DataConfig | EvalDataConfig, several_turns: bool = False) -> dict[str, Any]:
    """The keywords of `PromptReader`; with several turns, chats continue after the prompt."""
    keywords: dict[str, Any] = {
        "max_prompt_length": data.max_prompt_length,
        "prompt_key": data.prompt_key,
        "data_source_key": data.reward_fn_key,
        "answer_key": data.answer_key,
        "chat_template_kwargs": data.apply_chat_template_kwargs,
        "tools_key": data.tools_key,
        "keep_template_kwargs": several_turns,
    }
    if isinstance(data, DataConfig):
        keywords["truncation"] = data.truncation
        keywords["filter_overlong_prompts"] = data.filter_overlong_prompts
        keywords["keep_messages"] = data.return_raw_input_ids
    else:
        keywords["keep_messages"] = several_turns
    return keywords


def training_reading(config: TrainConfig) -> dict[str, Any]:
    """Further keywords of `PromptReader` for training prompts."""
    data = config.data
    return {
        "teachers": teacher_of_sources(config),
        "teacher_key": data.teacher_key,
        "ref_prompt_key": data.ref_prompt_key,
        "given_response_key": data.given_response_key,
        "max_response_length": data.max_response_length,
    }


def text_reading(config: TuningConfig) -> dict[str, Any]:
    """How the texts of supervised training are read, as keywords of their data sets."""
    data, model = config.data, config.model
    return {
        "tokenizer": load_tokenizer(model.tokenizer_path, model.trust_remote_code),
        "max_length": data.max_length,
        "chat_template_kwargs": data.apply_chat_template_kwargs,
        "tools_key": data.tools_key,
    }


def preference_keys(data: RMDataConfig | DPODataConfig, margin: str | None = None) -> PreferenceKeys:
    """The columns of rankings; `margin`: the column of the margins, where the loss has them."""
    return PreferenceKeys(
        prompt=data.prompt_key,
        chosen=data.chosen_key,
        rejected=data.rejected_key,
        margin=margin,
        responses=data.responses_key,
        ranks=data.ranks_key,
        scores=data.scores_key,
    )


def labelled_keys(data: DPODataConfig) -> LabelledKeys:
    """The columns of examples with labels, and of pairs."""
    return LabelledKeys(
        prompt=data.prompt_key,
        response=data.response_key,
        label=data.label_key,
        chosen=data.chosen_key,
        rejected=data.rejected_key,
    )


def read_prompts(
    data: DataConfig | EvalDataConfig,
    files: Files,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int = -1,
    uid_prefix: str = "",
    may_lack: Collection[str] = (),
    several_turns: bool = False,
    **further: Any,
) -> PromptDataset:
    """All prompts of some files.

    Args:
        max_samples: how many rows are read, from the first on; -1: all.
        may_lack: columns that rows may lack, see the function `may_lack`.
        several_turns: an environment continues the chats (rollout.multi_turn).
        further: `training_reading`, for training prompts.

    Raises:
        ValueError: names the file and row that is wrong.
    """
    return PromptDataset(
        files,
        tokenizer,
        max_samples=None if max_samples == -1 else max_samples,
        uid_prefix=uid_prefix,
        may_lack=may_lack,
        **reading(data, several_turns),
        **further,
    )


def held_out_prompts(
    data: DataConfig | EvalDataConfig,
    max_samples: int,
    sampling: SamplingConfig,
    read: Callable[[Files, int], PromptDataset],
) -> list[tuple[str, PromptDataset, SamplingConfig]]:
    """Name, prompts and sampling of data.val_files, whose name is "", and of each of data.val_sets.

    Args:
        max_samples: the most rows of files and sets that name no number of their own; -1: all.
        sampling: likewise.
        read: reads a number of prompts of some files, from the first on.
    """
    found = []
    if data.val_files is not None:
        found.append(("", read(data.val_files, max_samples), sampling))
    for name, val_set in (data.val_sets or {}).items():
        most = max_samples if val_set.max_samples is None else val_set.max_samples
        found.append((name, read(val_set.files, most), val_set_sampling(val_set, sampling)))
    return found


def training_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    check: Check,
    may_lack: Collection[str] = (),
    several_turns: bool = False,
    **further: Any,
) -> tuple[BatchLoader, int]:
    """The loader of training prompts, and how many prompts were left out as too long.

    With data.streaming no prompt has been read yet, and none left out.

    Args:
        check: raises a ValueError for prompts that the run cannot use.
        may_lack: columns that rows may lack, see the function `may_lack`.
        several_turns: an environment continues the chats (rollout.multi_turn).
        further: `training_reading`.

    Raises:
        ValueError: names the key, file or row that is wrong.
    """
    batch_size = data.gen_batch_size or data.train_batch_size
    feed_of = partial(_feed, data, tokenizer, check, may_lack, several_turns, further)
    if data.mixture is None:
        assert data.train_files is not None, "checked: one of the two"
        feed, num_filtered = feed_of(data.train_files, data.train_max_samples, data.seed)
        return BatchLoader(feed, batch_size), num_filtered
    feeds: dict[str, Feed] = {}
    total_filtered = 0
    for name, part in data.mixture.items():
        seed = zlib.crc32(f"{data.seed}/{name}".encode())  # its order does not depend on the other data sets
        feeds[name], num_filtered = feed_of(part.files, -1, seed, f"{name}:")
        total_filtered += num_filtered
    weights = {name: part.weight for name, part in data.mixture.items()}
    return BatchLoader(MixtureFeed(feeds, weights, batch_size), batch_size), total_filtered


def _feed(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    check: Check,
    may_lack: Collection[str],
    several_turns: bool,
    further: Mapping[str, Any],
    files: Files,
    max_samples: int,
    seed: int,
    uid_prefix: str = "",
) -> tuple[Feed, int]:
    """The rows of some files in their order, and how many were left out as too long."""
    if not data.streaming:
        given = (files, tokenizer, max_samples, uid_prefix, may_lack, several_turns)
        dataset = read_prompts(data, *given, **further)
        check(dataset.table)
        return TableFeed(dataset.table, make_sampler(data.sampler, data.shuffle), seed), dataset.num_filtered
    limit = None if max_samples == -1 else max_samples
    piece_rows = max(1, data.stream_window_rows // PIECES_A_WINDOW)
    reader = PromptReader(
        tokenizer,
        may_lack=may_lack,
        **reading(data, several_turns),
        **further,
    )
    found = resolve_files(files)
    for file in found:
        reader.has_columns(file)
    reader.errors.raise_if_any()
    feed = StreamFeed(
        cut_pieces(found, piece_rows, limit, uid_prefix),
        reader,
        shuffle=(data.sampler.name or ("random" if data.shuffle else "sequential")) == "random",
        seed=seed,
        window_rows=data.stream_window_rows,
        check=check,
    )
    return feed, 0
