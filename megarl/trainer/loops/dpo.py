"""Direct preference optimization: the loop.

The reference is the policy before the first step: its log-probs of all chats are computed once, before training, so that no
second copy of the weights is held. SimPO and ORPO have none.
"""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.preference import WITHOUT_REFERENCE, DPOOptions, dpo_loss, ranking_metrics
from megarl.cluster import ClusterSetup
from megarl.config import DPOConfig, DPOLossConfig
from megarl.data.loader import TableLoader
from megarl.data.preferences import PreferenceChats, ranking_lengths, texts_of
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import list_lengths
from megarl.trainer.loops.supervised import Ranks, open_ranks, read_model, run_steps, validation_metrics
from megarl.trainer.stages.prompt_data import preference_keys
from megarl.trainer.workers.dispatch import compared_chats, rows_to_share


def train(config: DPOConfig, cluster_setup: ClusterSetup | None) -> str:
    """Train the policy as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    model, data = read_model(config), config.data
    training, validation = load_preferences(config)

    def loader_of(table: pa.Table) -> TableLoader:
        return TableLoader(SimpleNamespace(table=table), data.train_batch_size, data.shuffle, data.seed)

    counts = training.table.num_rows, None if validation is None else validation.table.num_rows
    dropped, per_epoch = training.num_dropped, len(loader_of(training.table))
    notes = [f"left out {dropped} rows over data.max_length"] if dropped else []
    with open_ranks(config, cluster_setup, "dpo", model, counts, per_epoch, notes) as ranks:
        compared = without_reference
        if config.dpo.loss_type not in WITHOUT_REFERENCE:
            compared = partial(with_reference, ranks)
        with ranks.run.status("the reference's log-probs"):
            table = compared(training.table)
            held_out = None if validation is None else compared(validation.table)
        return run_steps(
            ranks,
            loader_of(table),
            update=partial(train_batch, ranks, config.dpo),
            validate=None if held_out is None else partial(validate, ranks, config.dpo, held_out),
        )


def load_preferences(config: DPOConfig) -> tuple[PreferenceChats, PreferenceChats | None]:
    """The training and the validation preferences.

    Raises:
        ValueError: names the file or row that is wrong.
    """
    data = config.data
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.trust_remote_code)

    def dataset(files: str | tuple[str, ...]) -> PreferenceChats:
        return PreferenceChats(
            files if isinstance(files, str) else list(files),
            tokenizer,
            max_length=data.max_length,
            max_tokens=config.max_token_len_per_gpu,
            keys=preference_keys(data),
            truncation=data.truncation,
            chat_template_kwargs=data.apply_chat_template_kwargs,
            tools_key=data.tools_key,
        )

    return dataset(data.train_files), None if data.val_files is None else dataset(data.val_files)


def chat_sums(ranks: Ranks, rankings: pa.Table) -> np.ndarray:
    """The policy's log-prob of the trained tokens of each chat of any number of rankings: [chats]."""
    chats = texts_of(rankings)
    # Data parallel ranks get equal numbers of chats: copies of the shortest one fill up.
    filling = chats.slice(int(list_lengths(chats, "input_ids").argmin()), 1)
    missing = rows_to_share(chats.num_rows, ranks.role.layout) - chats.num_rows
    shared = pa.concat_tables([chats, *[filling] * missing])
    sums = np.full(shared.num_rows, np.nan)
    for part in ranks.call("token_log_probs", shared, list_lengths(shared, "input_ids")):
        if part is not None:
            rows, columns = part
            values, offsets = columns["log_probs"]
            sums[rows] = [values[a:b].sum() for a, b in itertools.pairwise(offsets)]
    assert not np.isnan(sums).any(), "each chat is computed"
    return sums[: chats.num_rows]


def with_reference(ranks: Ranks, rankings: pa.Table) -> pa.Table:
    """The rankings with the current policy's log-prob of each chat as `ref_log_probs`."""
    bounds = np.cumsum([0, *(len(own) for own in rankings["scores"])])
    sums = chat_sums(ranks, rankings)
    lists = [sums[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    return rankings.append_column("ref_log_probs", pa.array(lists, pa.list_(pa.float32())))


def without_reference(rankings: pa.Table) -> pa.Table:
    """The rankings with 0 as each chat's `ref_log_probs`."""
    lists = [[0.0] * len(own) for own in rankings["scores"]]
    return rankings.append_column("ref_log_probs", pa.array(lists, pa.list_(pa.float32())))


def train_batch(ranks: Ranks, how: DPOLossConfig, batch: pa.Table) -> dict[str, float]:
    """One optimizer step on the mean loss over all rankings of the batch."""
    return ranks.call("train_preferences", batch, ranking_lengths(batch), how)[0]


def validate(ranks: Ranks, how: DPOLossConfig, rankings: pa.Table) -> dict[str, float]:
    """Loss, accuracy, margin and implicit rewards on any number of held-out rankings."""
    pairs, reference = compared_chats(rankings)
    log_ratios = torch.from_numpy(chat_sums(ranks, rankings)).float() - reference
    count, masks = rankings.num_rows, texts_of(rankings)["loss_mask"].to_pylist()
    lengths = torch.tensor([float(sum(mask)) for mask in masks])
    options = DPOOptions(how.beta, how.label_smoothing, how.loss_type, how.gamma)
    _, sums = dpo_loss(log_ratios, lengths, pairs, count, options)
    return validation_metrics(ranking_metrics({name: value.item() for name, value in sums.items()}, count))
