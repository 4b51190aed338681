"""Supervised fine-tuning: the loop."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from megarl.cluster import ClusterSetup
from megarl.config import SFTConfig
from megarl.costs.flops import model_flops
from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset, trained_tokens
from megarl.data.trajectories import list_lengths
from megarl.trainer.loops.supervised import (
    VAL_LOSS,
    Ranks,
    check_tokens,
    end_notes,
    open_ranks,
    read_model,
    run_steps,
)
from megarl.trainer.stages.prompt_data import text_reading
from megarl.trainer.workers.dispatch import rows_to_share


def train(config: SFTConfig, cluster_setup: ClusterSetup | None) -> str:
    """Fine-tune the model as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    model, data = read_model(config), config.data
    texts = text_reading(config)
    read = partial(
        SftDataset,
        **texts,
        prompt_key=data.prompt_key,
        response_key=data.response_key,
        text_key=data.text_key,
        append_eos=data.append_eos,
        truncation=data.truncation,
    )
    training, validation = read(data.train_files), None if data.val_files is None else read(data.val_files)
    check_tokens(config, model, training.table, None if validation is None else validation.table)
    loader = TableLoader(training, data.train_batch_size, data.shuffle, data.seed)
    counts = len(training), None if validation is None else len(validation)
    ends = data.text_key is None or data.append_eos
    notes = end_notes(config, model, training.table, texts["tokenizer"]) if ends else []
    if training.num_truncated:
        notes.append(f"cut {training.num_truncated} examples to data.max_length")
    if training.num_split:
        notes.append(
            f"split {training.num_split} texts that are longer than data.max_length: {len(training)} examples in all"
        )
    with open_ranks(config, cluster_setup, "sft", model, counts, len(loader), notes) as ranks:
        return run_steps(
            ranks,
            loader,
            update=partial(train_batch, ranks, model_flops(model).pair_share),
            validate=None if validation is None else partial(validate, ranks, validation.table),
        )


def train_batch(ranks: Ranks, pair_share: float, batch: pa.Table) -> dict[str, float]:
    """One optimizer step on the mean loss over all trained tokens of the batch; `pair_share`: see `sequence_costs`."""
    lengths, count = list_lengths(batch, "input_ids"), trained_tokens(batch)
    return ranks.call("train_examples", batch, lengths, count, pair_share=pair_share)[0]


def validate(ranks: Ranks, examples: pa.Table) -> dict[str, float]:
    """The mean loss over all trained tokens of any number of held-out examples."""
    shared = with_idle_rows(examples, rows_to_share(examples.num_rows, ranks.role.layout))
    sums = ranks.call("sum_losses", shared, list_lengths(shared, "input_ids"))
    return {VAL_LOSS: sum(value for value in sums if value is not None) / trained_tokens(examples)}


def with_idle_rows(examples: pa.Table, num_rows: int) -> pa.Table:
    """The examples, filled up to `num_rows` with copies of the shortest one that have no trained token."""
    shortest = examples.slice(int(list_lengths(examples, "input_ids").argmin()), 1)
    idle = shortest.set_column(
        shortest.schema.get_field_index("loss_mask"),
        "loss_mask",
        pa.array([[False] * len(shortest["input_ids"][0])], examples.schema.field("loss_mask").type),
    )
    return pa.concat_tables([examples, *[idle] * (num_rows - examples.num_rows)])
