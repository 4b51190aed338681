"""Supervised fine-tuning: the loop."""

from __future__ import annotations

import pyarrow as pa

from megarl.checkpoints.hf.load import check_hf_weights
from megarl.cluster import ClusterSetup, WorkerGroup
from megarl.config import SFTConfig, check_models, position_warnings
from megarl.costs.flops import model_flops
from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset
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
from megarl.trainer.workers.dispatch import plan_rows, rows_to_share

WORKER = "megarl.trainer.workers.supervised:SFTWorker"


def train(config: SFTConfig, cluster_setup: ClusterSetup | None) -> str:
    """Fine-tune the model as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    model = read_model_config(config.model.path)
    check_models(config, model)
    check_adapters(config, model)
    check_hf_weights(config.model.path, model, mtp=config.model.mtp == "keep")
    training, validation = load_examples(config)
    loader = TableLoader(training, config.data.train_batch_size, config.data.shuffle, config.data.seed)
    num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    counts = len(training), None if validation is None else len(validation)
    with open_run(config, num_steps, cluster_setup, facts=supervised_facts(config, model, *counts)) as run:
        for warning in position_warnings(config, model):
            run.say(warning)
        if training.num_truncated:
            run.say(f"cut {training.num_truncated} examples to data.max_length")
        if training.num_split:
            run.say(
                f"split {training.num_split} texts that are longer than data.max_length: {len(training)} examples in all"
            )
        group, layout = start_group(config, run, num_steps, "sft", WORKER, "lm")
        pair_share = model_flops(model).pair_share
        stages = Stages(
            update=lambda batch: train_batch(config, run, group, layout, batch, pair_share),
            validate=None
            if validation is None
            else lambda: validate(config, run, group, layout, validation.table),
            export=lambda folder: export_hf(run, group, config.model, folder),
        )
        return run_steps(config.trainer, run, loader, num_steps, stages, group)


def load_examples(config: SFTConfig) -> tuple[SftDataset, SftDataset | None]:
    """The training and the validation examples."""
    data, model = config.data, config.model
    tokenizer = load_tokenizer(model.tokenizer_path, model.trust_remote_code)

    def dataset(files: str | tuple[str, ...]) -> SftDataset:
        return SftDataset(
            files if isinstance(files, str) else list(files),
            tokenizer,
            max_length=data.max_length,
            prompt_key=data.prompt_key,
            response_key=data.response_key,
            text_key=data.text_key,
            append_eos=data.append_eos,
            truncation=data.truncation,
            chat_template_kwargs=data.apply_chat_template_kwargs,
            tools_key=data.tools_key,
        )

    return dataset(data.train_files), None if data.val_files is None else dataset(data.val_files)


def train_batch(
    config: SFTConfig,
    run: Run,
    group: WorkerGroup,
    layout: ParallelLayout,
    batch: pa.Table,
    pair_share: float,
) -> dict[str, float]:
    """One optimizer step on the mean loss over all trained tokens of the batch; `pair_share`: see `sequence_costs`."""
    lengths = list_lengths(batch, "input_ids")
    plan = plan_rows(lengths, layout, config.max_token_len_per_gpu, pair_share=pair_share)
    return run.wait(group.call("train_examples", run.put(batch), run.put(plan), trained_tokens(batch)))[0]


def validate(
    config: SFTConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, examples: pa.Table
) -> dict[str, float]:
    """The mean loss over all trained tokens of any number of held-out examples."""
    shared = with_idle_rows(examples, rows_to_share(examples.num_rows, layout))
    plan = plan_rows(list_lengths(shared, "input_ids"), layout, config.max_token_len_per_gpu)
    sums = run.wait(group.call("sum_losses", run.put(shared), run.put(plan)))
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


def trained_tokens(batch: pa.Table) -> int:
    """The number of trained tokens; no token predicts the first one of an example."""
    return sum(sum(mask[1:]) for mask in batch["loss_mask"].to_pylist())
