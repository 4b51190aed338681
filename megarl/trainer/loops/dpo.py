"""The loop of direct preference optimization, and of KTO, which learns from examples with labels.

The reference is the policy before the first step: its log-probs of all chats are computed once, before training, so that no
second copy of the weights is held. SimPO and ORPO have no reference. KTO's baseline takes a pass of the policy over a batch's prompts with
other responses before each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.preference import (
    WITHOUT_REFERENCE,
    DPOOptions,
    KTOOptions,
    dpo_loss,
    kto_baseline,
    kto_loss,
    labelled_metrics,
    ranking_metrics,
)
from megarl.cluster import ClusterSetup
from megarl.config import DPOConfig, DPOLossConfig, learns_rankings
from megarl.data.labels import LabelledChats, mismatched_chats
from megarl.data.loader import TableLoader
from megarl.data.preferences import PreferenceChats, ranking_lengths, texts_of
from megarl.data.trajectories import list_lengths
from megarl.trainer.loops.supervised import (
    Ranks,
    check_tokens,
    end_notes,
    open_ranks,
    read_model,
    run_steps,
    validation_metrics,
)
from megarl.trainer.stages.prompt_data import labelled_keys, preference_keys, text_reading
from megarl.trainer.workers.dispatch import compared_chats, labels, rows_to_share

ROWS_AT_ONCE = 512  # chats of a data parallel rank that a call computes: their tokens stay on its device until the end of the call


def train(config: DPOConfig, cluster_setup: ClusterSetup | None) -> str:
    """Train the policy as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    model, data = read_model(config), config.data
    labelled = not learns_rankings(config)
    dataset: Callable[..., LabelledChats | PreferenceChats]
    if labelled:
        dataset = partial(LabelledChats, keys=labelled_keys(data))
    else:
        most = config.max_token_len_per_gpu
        dataset = partial(PreferenceChats, keys=preference_keys(data), max_tokens=most)
    texts = text_reading(config)
    read = partial(dataset, **texts, truncation=data.truncation)
    training, validation = read(data.train_files), None if data.val_files is None else read(data.val_files)
    check_tokens(config, model, training.table, None if validation is None else validation.table)

    def loader_of(table: pa.Table) -> TableLoader:
        return TableLoader(SimpleNamespace(table=table), data.train_batch_size, data.shuffle, data.seed)

    counts = training.table.num_rows, None if validation is None else validation.table.num_rows
    dropped, per_epoch = training.num_dropped, len(loader_of(training.table))
    chats = training.table if labelled else texts_of(training.table)
    notes = end_notes(config, model, chats, texts["tokenizer"])
    notes += [f"left out {dropped} rows over data.max_length"] if dropped else []
    with open_ranks(config, cluster_setup, "dpo", model, counts, per_epoch, notes) as ranks:
        compared = partial(labelled_with_reference if labelled else with_reference, ranks)
        if config.dpo.loss_type in WITHOUT_REFERENCE:
            compared = without_reference
        step, check = (train_labelled, validate_labelled) if labelled else (train_batch, validate)
        with ranks.run.status("the reference's log-probs"):
            table = compared(training.table)
            held_out = None if validation is None else compared(validation.table)
        return run_steps(
            ranks,
            loader_of(table),
            update=partial(step, ranks, config.dpo),
            validate=None if held_out is None else partial(check, ranks, config.dpo, held_out),
        )


def chat_sums(ranks: Ranks, chats: pa.Table) -> np.ndarray:
    """The policy's log-prob of each chat's trained tokens, for any number of chats (`input_ids`, `loss_mask`): [chats]."""
    most = ROWS_AT_ONCE * ranks.role.layout.dp
    parts = [np.arange(start, min(start + most, chats.num_rows)) for start in range(0, chats.num_rows, most)]
    return np.concatenate([_sums(ranks, chats.take(pa.array(rows))) for rows in parts])


def _sums(ranks: Ranks, chats: pa.Table) -> np.ndarray:
    """`chat_sums` in one call of the ranks."""
    # Data parallel ranks get equal numbers of chats: copies of the shortest one make up the number.
    filling = chats.slice(int(list_lengths(chats, "input_ids").argmin()), 1)
    missing = rows_to_share(chats.num_rows, ranks.role.layout) - chats.num_rows
    shared = pa.concat_tables([chats, *[filling] * missing])
    sums = np.full(shared.num_rows, np.nan)
    for part in ranks.call("token_log_probs", shared, list_lengths(shared, "input_ids")):
        if part is not None:
            rows, columns = part
            values, offsets = columns["log_probs"]
            sums[rows] = [
                np.float32(values[a:b].sum(dtype=np.float64)) for a, b in itertools.pairwise(offsets)
            ]
    assert not np.isnan(sums).any(), "each chat is computed"
    return sums[: chats.num_rows]


def with_reference(ranks: Ranks, rankings: pa.Table) -> pa.Table:
    """The rankings with the current policy's log-prob of each chat as `ref_log_probs`."""
    bounds = np.cumsum([0, *(len(own) for own in rankings["scores"])])
    sums = chat_sums(ranks, texts_of(rankings))
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
    chats = texts_of(rankings)
    log_ratios = torch.from_numpy(chat_sums(ranks, chats)).float() - reference
    count, masks = rankings.num_rows, chats["loss_mask"].to_pylist()
    lengths = torch.tensor([float(sum(mask)) for mask in masks])
    options = DPOOptions(how.beta, how.label_smoothing, how.loss_type, how.gamma)
    _, sums = dpo_loss(log_ratios, lengths, pairs, count, options)
    return validation_metrics(ranking_metrics({name: value.item() for name, value in sums.items()}, count))


def labelled_with_reference(ranks: Ranks, examples: pa.Table) -> pa.Table:
    """The examples with the current policy's log-probs of their chats (`ref_log_prob`) and of the mismatched chats (`ref_kl_log_prob`)."""
    for name, chats in (("ref_log_prob", examples), ("ref_kl_log_prob", mismatched_chats(examples))):
        examples = examples.append_column(name, pa.array(chat_sums(ranks, chats), pa.float32()))
    return examples


def baseline_of(ranks: Ranks, examples: pa.Table) -> float:
    """KTO's baseline of a batch, by the current policy."""
    sums = chat_sums(ranks, mismatched_chats(examples)) - examples["ref_kl_log_prob"].to_numpy()
    return kto_baseline(torch.from_numpy(sums))


def train_labelled(ranks: Ranks, how: DPOLossConfig, batch: pa.Table) -> dict[str, float]:
    """One optimizer step on KTO's mean loss over all examples of the batch."""
    lengths = list_lengths(batch, "input_ids")
    return ranks.call("train_labelled", batch, lengths, how, baseline_of(ranks, batch))[0]


def validate_labelled(ranks: Ranks, how: DPOLossConfig, examples: pa.Table) -> dict[str, float]:
    """Loss, baseline and implicit rewards of any number of held-out examples."""
    desirable, reference = labels(examples)
    log_ratios = torch.from_numpy(chat_sums(ranks, examples)).float() - reference
    options = KTOOptions(how.beta, how.desirable_weight, how.undesirable_weight)
    baseline, count = baseline_of(ranks, examples), examples.num_rows
    _, sums = kto_loss(log_ratios, desirable, baseline, count, options)
    found = labelled_metrics({name: value.item() for name, value in sums.items()}, count, baseline)
    return validation_metrics(found)
