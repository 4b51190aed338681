"""Direct preference optimization: the loop.

The reference is the policy before the first step: its log-probs of all chats are computed once, before training, so that no
second copy of the weights is held.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.preference import dpo_loss, ranking_metrics
from megarl.checkpoints.hf.load import check_hf_weights
from megarl.cluster import ClusterSetup, WorkerGroup
from megarl.config import DPOConfig, check_models, position_warnings
from megarl.data.loader import TableLoader
from megarl.data.preferences import PreferenceChats, ranking_lengths, texts_of
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import list_lengths
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.trainer.loops.supervised import VAL_LOSS, Stages, run_steps, start_group
from megarl.trainer.roles.adapters import check_adapters
from megarl.trainer.run.export import export_hf
from megarl.trainer.run.facts import supervised_facts
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.stages.prompt_data import preference_keys
from megarl.trainer.workers.dispatch import compared_chats, plan_rows, rows_to_share

WORKER = "megarl.trainer.workers.supervised:DPOWorker"


def train(config: DPOConfig, cluster_setup: ClusterSetup | None) -> str:
    """Train the policy as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    model, data = read_model_config(config.model.path), config.data
    check_models(config, model)
    check_adapters(config, model)
    check_hf_weights(config.model.path, model, mtp=config.model.mtp == "keep")
    training, validation = load_preferences(config)
    steps_of_epoch = len(TableLoader(training, data.train_batch_size, data.shuffle, data.seed))
    num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * steps_of_epoch
    counts = training.table.num_rows, None if validation is None else validation.table.num_rows
    with open_run(config, num_steps, cluster_setup, facts=supervised_facts(config, model, *counts)) as run:
        for warning in position_warnings(config, model):
            run.say(warning)
        if training.num_dropped:
            run.say(f"left out {training.num_dropped} rows over data.max_length")
        group, layout = start_group(config, run, num_steps, "dpo", WORKER, "lm")
        with run.status("the reference's log-probs"):
            table = with_reference(config, run, group, layout, training.table)
            held_out = (
                None if validation is None else with_reference(config, run, group, layout, validation.table)
            )
        stages = Stages(
            update=lambda batch: train_batch(config, run, group, layout, batch),
            validate=None if held_out is None else lambda: validate(config, run, group, layout, held_out),
            export=lambda folder: export_hf(run, group, config.model, folder),
        )
        loader = TableLoader(SimpleNamespace(table=table), data.train_batch_size, data.shuffle, data.seed)
        return run_steps(config.trainer, run, loader, num_steps, stages, group)


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


def chat_sums(
    config: DPOConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, rankings: pa.Table
) -> np.ndarray:
    """The policy's log-prob of the trained tokens of each chat of any number of rankings: [chats]."""
    chats = texts_of(rankings)
    lengths = list_lengths(chats, "input_ids")
    # Data parallel ranks get equal numbers of chats: copies of the shortest one fill up.
    filling = chats.slice(int(lengths.argmin()), 1)
    shared = pa.concat_tables([chats, *[filling] * (rows_to_share(chats.num_rows, layout) - chats.num_rows)])
    plan = plan_rows(list_lengths(shared, "input_ids"), layout, config.max_token_len_per_gpu)
    sums = np.full(shared.num_rows, np.nan)
    for part in run.wait(group.call("token_log_probs", run.put(shared), run.put(plan))):
        if part is not None:
            rows, columns = part
            values, offsets = columns["log_probs"]
            sums[rows] = [values[a:b].sum() for a, b in itertools.pairwise(offsets)]
    assert not np.isnan(sums).any(), "each chat is computed"
    return sums[: chats.num_rows]


def with_reference(
    config: DPOConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, rankings: pa.Table
) -> pa.Table:
    """The rankings with the current policy's log-prob of each chat as `ref_log_probs`."""
    bounds = np.cumsum([0, *(len(own) for own in rankings["scores"])])
    sums = chat_sums(config, run, group, layout, rankings)
    lists = [sums[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    return rankings.append_column("ref_log_probs", pa.array(lists, pa.list_(pa.float32())))


def train_batch(
    config: DPOConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, batch: pa.Table
) -> dict[str, float]:
    """One optimizer step on the mean loss over all rankings of the batch."""
    plan = plan_rows(ranking_lengths(batch), layout, config.max_token_len_per_gpu)
    return run.wait(group.call("train_preferences", run.put(batch), run.put(plan), config.dpo))[0]


def validate(
    config: DPOConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, rankings: pa.Table
) -> dict[str, float]:
    """Loss, accuracy, margin and implicit rewards on any number of held-out rankings."""
    pairs, reference = compared_chats(rankings)
    log_ratios = torch.from_numpy(chat_sums(config, run, group, layout, rankings)).float() - reference
    how, count = config.dpo, rankings.num_rows
    _, sums = dpo_loss(log_ratios, pairs, count, how.beta, how.label_smoothing, how.loss_type)
    found = ranking_metrics({name: value.item() for name, value in sums.items()}, count)
    return {VAL_LOSS: found.pop("loss"), **{f"val/{name}": value for name, value in found.items()}}
