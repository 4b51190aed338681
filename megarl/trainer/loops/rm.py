"""Training of a reward model on preferences: the loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from megarl.algorithms.preference import preference_loss, ranking_metrics
from megarl.checkpoints.hf.load import check_hf_weights
from megarl.cluster import ClusterSetup, WorkerGroup
from megarl.config import RMConfig, check_models, position_warnings
from megarl.data.loader import TableLoader
from megarl.data.preferences import (
    PreferenceDataset,
    best_answers,
    ranking_lengths,
    read_answers,
    texts_of,
)
from megarl.data.tokenizer import load_tokenizer
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, read_model_config
from megarl.trainer.loops.supervised import VAL_LOSS, Stages, run_steps, start_group
from megarl.trainer.roles.adapters import check_adapters
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.run.export import export_hf
from megarl.trainer.run.facts import supervised_facts
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.stages.prompt_data import preference_keys
from megarl.trainer.stages.reward_model import FILE, measure_normalization, score_lists
from megarl.trainer.workers.dispatch import MicroBatching, compared_texts, plan_rows

WORKER = "megarl.trainer.workers.supervised:RMWorker"


@dataclass(frozen=True)
class RMInputs:
    """The inputs of a run, read before any process starts.

    Attributes:
        validation: `PREFERENCE_SCHEMA`; None: there is none.
        answers: the reference answers, whose mean reward becomes 0: column `input_ids`; None: rewards are not shifted.
    """

    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    training: PreferenceDataset
    validation: pa.Table | None
    answers: pa.Table | None


def train(config: RMConfig, cluster_setup: ClusterSetup | None) -> str:
    """Train the reward model as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    inputs = load_inputs(config)
    data = config.data
    loader = TableLoader(inputs.training, data.train_batch_size, data.shuffle, data.seed)
    num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    counts = inputs.training.table.num_rows, None if inputs.validation is None else inputs.validation.num_rows
    with open_run(
        config, num_steps, cluster_setup, facts=supervised_facts(config, inputs.model, *counts)
    ) as run:
        for warning in position_warnings(config, inputs.model):
            run.say(warning)
        for number, done in (
            (inputs.training.num_truncated, "cut"),
            (inputs.training.num_dropped, "left out"),
        ):
            if number:
                run.say(f"{done} {number} {'texts' if done == 'cut' else 'rows'} over data.max_length")
        group, layout = start_group(
            config, run, num_steps, "rm", WORKER, "value", head_init=config.model.head_init
        )
        role = Role(group, layout, MicroBatching(data.train_batch_size, config.max_token_len_per_gpu, None))
        validation = inputs.validation
        stages = Stages(
            update=lambda batch: train_batch(config, run, group, layout, batch),
            validate=None if validation is None else lambda: validate(run, role, validation),
            export=lambda folder: export(config, run, role, inputs, folder),
        )
        return run_steps(config.trainer, run, loader, num_steps, stages, group)


def load_inputs(config: RMConfig) -> RMInputs:
    """Model facts, tokenizer and data, all checked.

    Raises:
        ValueError: names the file or row that is wrong.
    """
    data, path = config.data, config.model.path
    model = read_model_config(path)
    check_models(config, model)
    check_adapters(config, model)
    check_hf_weights(path, model, head="value")
    tokenizer = load_tokenizer(config.model.tokenizer_path, config.model.trust_remote_code)
    training = load_preferences(config, data.train_files, tokenizer)
    validation = None
    if data.val_files is not None:
        validation = load_preferences(config, data.val_files, tokenizer).table
    return RMInputs(model, tokenizer, training, validation, load_answers(config, training.table, tokenizer))


def load_preferences(
    config: RMConfig, files: str | tuple[str, ...], tokenizer: PreTrainedTokenizerBase
) -> PreferenceDataset:
    data = config.data
    return PreferenceDataset(
        files if isinstance(files, str) else list(files),
        tokenizer,
        max_length=data.max_length,
        max_tokens=config.max_token_len_per_gpu,
        keys=preference_keys(data, data.margin_key),
        truncation=data.truncation,
        end_at_eos=data.end_at_eos,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        tools_key=data.tools_key,
    )


def load_answers(config: RMConfig, training: pa.Table, tokenizer: PreTrainedTokenizerBase) -> pa.Table | None:
    """The reference answers; None: none are configured.

    Args:
        training: the training rankings.
    """
    data = config.data
    if data.normalize == "none":
        return None
    num = None if data.normalize_max_samples == -1 else data.normalize_max_samples
    files = data.normalize_files
    if files is None:
        return best_answers(training, num)
    if data.normalize_response_key is None:
        return best_answers(load_preferences(config, files, tokenizer).table, num)
    answers = read_answers(
        files if isinstance(files, str) else list(files),
        tokenizer,
        prompt_key=data.prompt_key,
        response_key=data.normalize_response_key,
        max_length=data.max_length,
        end_at_eos=data.end_at_eos,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        tools_key=data.tools_key,
    )
    return answers if num is None else answers.slice(0, num)


def train_batch(
    config: RMConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, batch: pa.Table
) -> dict[str, float]:
    """One optimizer step on the mean loss over all rankings of the batch."""
    plan = plan_rows(ranking_lengths(batch), layout, config.max_token_len_per_gpu)
    return run.wait(group.call("train_rankings", run.put(batch), run.put(plan)))[0]


def validate(run: Run, role: Role, rankings: pa.Table) -> dict[str, float]:
    """Loss, accuracy and margin on any number of held-out rankings; mean and deviation of rewards."""
    rewards = torch.from_numpy(score_lists(run, role, token_lists(texts_of(rankings))))
    _, sums = preference_loss(rewards, *compared_texts(rankings), rankings.num_rows)
    found = ranking_metrics({name: value.item() for name, value in sums.items()}, rankings.num_rows)
    return {
        VAL_LOSS: found.pop("loss"),
        **{f"val/{name}": value for name, value in found.items()},
        "val/reward_mean": rewards.double().mean().item(),
        "val/reward_std": rewards.double().std(correction=0).item(),
    }


def export(config: RMConfig, run: Run, role: Role, inputs: RMInputs, folder: Path) -> str:
    """Write the reward model, with the shift that makes the mean reward of the reference answers 0; returns the folder's path."""
    files = {}
    if inputs.answers is not None:
        outputs = score_lists(run, role, token_lists(inputs.answers))
        found = measure_normalization(outputs, config.data.normalize)
        run.say(
            f"{found.num_answers} reference answers: mean reward {found.mean:.6g}, standard deviation {outputs.std():.6g}; "
            f"{FILE} takes {found.mean:.6g} off, and divides by {found.std:.6g}"
        )
        files[FILE] = found.to_json()
    fields = classifier_fields(inputs.model, inputs.tokenizer)
    if fields["pad_token_id"] is None:
        run.say(
            "the tokenizer has no padding token of its own, so config.json names none: transformers scores one text at a time"
        )
    return export_hf(run, role.group, config.model, folder, fields=fields, files=files)


def classifier_fields(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The fields of config.json that make a language model one for sequence classification with one label.

    transformers scores a text at its last token that is not padding: where the end token is also the padding it would take an
    earlier token, so no padding is named then.
    """
    pad = tokenizer.pad_token_id
    return {
        "architectures": [model.architecture.replace("ForCausalLM", "ForSequenceClassification")],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": None if pad == tokenizer.eos_token_id else pad,
    }


def token_lists(texts: pa.Table) -> list[np.ndarray]:
    """The token ids of each text."""
    return [np.array(ids, dtype=np.int32) for ids in texts["input_ids"].to_pylist()]
