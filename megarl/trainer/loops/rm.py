"""Training of a reward model on preferences: the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from megarl.algorithms.preference import preference_loss, ranking_metrics
from megarl.checkpoints.hf.export import one_label_fields
from megarl.cluster import ClusterSetup
from megarl.config import RMConfig, RMDataConfig
from megarl.data.loader import TableLoader
from megarl.data.preferences import (
    PreferenceDataset,
    best_answers,
    ranking_lengths,
    read_answers,
    texts_of,
)
from megarl.models import ModelConfig
from megarl.trainer.loops.supervised import (
    Ranks,
    check_tokens,
    open_ranks,
    read_model,
    run_steps,
    validation_metrics,
)
from megarl.trainer.stages.prompt_data import preference_keys, text_reading
from megarl.trainer.stages.reward_model import FILE, measure_normalization, score_lists
from megarl.trainer.workers.dispatch import compared_texts


def train(config: RMConfig, cluster_setup: ClusterSetup | None) -> str:
    """Train the reward model as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    # Mistakes in the data are found before any process starts.
    model, data = read_model(config, "value"), config.data
    check_class(config.model.path, model)
    texts = text_reading(config)
    read = partial(
        PreferenceDataset,
        **texts,
        max_tokens=config.max_token_len_per_gpu,
        keys=preference_keys(data, data.margin_key),
        truncation=data.truncation,
        end_at_eos=data.end_at_eos,
    )
    training = read(data.train_files)
    validation = None if data.val_files is None else read(data.val_files).table
    answers = load_answers(data, training.table, read, texts)
    check_tokens(config, model, training.table, validation, answers)
    loader = TableLoader(training, data.train_batch_size, data.shuffle, data.seed)
    counts = training.table.num_rows, None if validation is None else validation.num_rows
    found = {"cut {} texts": training.num_truncated, "left out {} rows": training.num_dropped}
    notes = [f"{text.format(number)} over data.max_length" for text, number in found.items() if number]
    init = config.model.head_init
    with open_ranks(config, cluster_setup, "rm", model, counts, len(loader), notes, head_init=init) as ranks:
        return run_steps(
            ranks,
            loader,
            update=partial(train_batch, ranks),
            validate=None if validation is None else partial(validate, ranks, validation),
            export=partial(
                export, ranks, data.normalize, answers, classifier_fields(model, texts["tokenizer"])
            ),
        )


def load_answers(
    data: RMDataConfig, training: pa.Table, read: Callable[..., PreferenceDataset], texts: Mapping[str, Any]
) -> pa.Table | None:
    """The reference answers; None: none are configured.

    Args:
        training: the training rankings.
        read: the rankings of files.
        texts: `text_reading`.
    """
    if data.normalize == "none":
        return None
    num = None if data.normalize_max_samples == -1 else data.normalize_max_samples
    files = data.normalize_files
    if files is None:
        return best_answers(training, num)
    if data.normalize_response_key is None:
        return best_answers(read(files).table, num)
    answers = read_answers(
        files,
        **texts,
        prompt_key=data.prompt_key,
        response_key=data.normalize_response_key,
        end_at_eos=data.end_at_eos,
    )
    return answers if num is None else answers.slice(0, num)


def train_batch(ranks: Ranks, batch: pa.Table) -> dict[str, float]:
    """One optimizer step on the mean loss over all rankings of the batch."""
    return ranks.call("train_rankings", batch, ranking_lengths(batch))[0]


def validate(ranks: Ranks, rankings: pa.Table) -> dict[str, float]:
    """Loss, accuracy and margin on any number of held-out rankings; mean and deviation of rewards."""
    rewards = torch.from_numpy(score_lists(ranks.run, ranks.role, token_lists(texts_of(rankings))))
    _, sums = preference_loss(rewards, *compared_texts(rankings), rankings.num_rows)
    found = ranking_metrics({name: value.item() for name, value in sums.items()}, rankings.num_rows)
    return {
        **validation_metrics(found),
        "val/reward_mean": rewards.double().mean().item(),
        "val/reward_std": rewards.double().std(correction=0).item(),
    }


def export(
    ranks: Ranks, normalize: str, answers: pa.Table | None, fields: dict[str, Any], folder: Path
) -> str:
    """Write the reward model, with the shift that makes the mean reward of the reference answers 0; returns the folder's path.

    Args:
        normalize: see `measure_normalization`.
        answers: column `input_ids`; None: rewards are not shifted.
        fields: of config.json.
    """
    files, say = {}, ranks.run.say
    if answers is not None:
        outputs = score_lists(ranks.run, ranks.role, token_lists(answers))
        found = measure_normalization(outputs, normalize)
        say(
            f"{found.num_answers} reference answers: mean reward {found.mean:.6g}, standard deviation {outputs.std():.6g}; "
            f"{FILE} takes {found.mean:.6g} off, and divides by {found.std:.6g}"
        )
        files[FILE] = found.to_json()
    if fields["pad_token_id"] is None:
        say(
            "the tokenizer has no padding token of its own, so config.json names none: transformers scores one text at a time"
        )
    return ranks.export(folder, fields=fields, files=files)


def classifier_fields(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """See `one_label_fields`. Where the end token is also the padding token, transformers would score a text at an earlier token, so no
    padding token is named."""
    pad = tokenizer.pad_token_id
    return one_label_fields(model, None if pad == tokenizer.eos_token_id else pad)


def check_class(path: str, model: ModelConfig) -> None:
    """ValueError: transformers has no class for the reward model that would be written."""
    if model.is_nested or model.family == "qwen3_5_moe":
        raise ValueError(
            f"model.path={path!r}: a reward model is written as one for sequence classification, and transformers 5.12.1 has such a class for "
            f"qwen3_5_text models alone among Qwen3.5's, not for model_type={model.hf['model_type']!r}; take a dense language model without a "
            "vision tower"
        )


def token_lists(texts: pa.Table) -> list[np.ndarray]:
    """The token ids of each text."""
    return [np.array(ids, dtype=np.int32) for ids in texts["input_ids"].to_pylist()]
