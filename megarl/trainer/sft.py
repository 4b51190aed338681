"""Supervised fine-tuning: the loop."""

from __future__ import annotations

import pyarrow as pa

from megarl.cluster import WorkerGroup
from megarl.config import PoolConfig, SFTConfig, check_models
from megarl.data.sft import SftDataset, SftLoader
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import list_lengths
from megarl.hybrid_engine import check_hf_weights
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.trainer.dispatch import plan_rows
from megarl.trainer.export import FOLDER, export_hf
from megarl.trainer.ppo import due, epochs
from megarl.trainer.roles import open_pools
from megarl.trainer.run import Run, open_run
from megarl.trainer.specs import ModelSpec

WORKER = "megarl.trainer.sft_worker:SFTWorker"


def train(config: SFTConfig) -> str:
    """Fine-tune the model as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    model = read_model_config(config.model.path)
    check_models(config, model)
    check_hf_weights(config.model.path, model, mtp=config.model.mtp == "keep")
    training, validation = load_examples(config)
    loader = SftLoader(training, config.data.train_batch_size, config.data.shuffle, config.data.seed)
    num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    with open_run(config, num_steps) as run:
        if training.num_truncated:
            run.say(f"cut {training.num_truncated} examples to data.max_length")
        group, layout = start_group(config, run, num_steps)
        for step, batch in zip(range(1, num_steps + 1), epochs(loader), strict=False):
            with run.step(step) as metrics:
                with run.timed("update"):
                    metrics |= train_batch(config, run, group, layout, batch)
                if validation is not None and due(config.trainer.test_freq, step, num_steps):
                    with run.timed("validate"):
                        metrics |= validate(config, run, group, layout, validation)
        return export_hf(run, group, config.model, run.folder / FOLDER)


def load_examples(config: SFTConfig) -> tuple[SftDataset, pa.Table | None]:
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
            truncation=data.truncation,
            chat_template_kwargs=data.apply_chat_template_kwargs,
        )

    return dataset(data.train_files), dataset(data.val_files).table if data.val_files is not None else None


def start_group(config: SFTConfig, run: Run, num_steps: int) -> tuple[WorkerGroup, ParallelLayout]:
    trainer = config.trainer
    open_pools(run, {"global": PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)})
    pool = run.pools["global"]
    spec = ModelSpec(
        path=config.model.path,
        head="lm",
        megatron=config.megatron,
        optim=config.optim,
        num_updates=num_steps,
        timeout=trainer.collective_timeout,
    )
    with run.status("starting the model's ranks"):
        group = run.start(WorkerGroup("sft", WORKER, pool, len(pool), {"spec": spec}, run.log_dir))
        run.wait(group.started)
    return group, ParallelLayout.from_config(config.megatron, len(pool))


def train_batch(
    config: SFTConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, batch: pa.Table
) -> dict[str, float]:
    """One optimizer step on the mean loss over all learnt tokens of the batch."""
    plan = plan_rows(list_lengths(batch, "input_ids"), layout, config.max_token_len_per_gpu)
    return run.wait(group.call("train_examples", run.put(batch), plan, learnt_tokens(batch)))[0]


def validate(
    config: SFTConfig, run: Run, group: WorkerGroup, layout: ParallelLayout, examples: pa.Table
) -> dict[str, float]:
    """The mean loss over all learnt tokens of held-out examples."""
    plan = plan_rows(list_lengths(examples, "input_ids"), layout, config.max_token_len_per_gpu)
    sums = run.wait(group.call("sum_losses", run.put(examples), plan))
    return {"val/loss": sum(value for value in sums if value is not None) / learnt_tokens(examples)}


def learnt_tokens(batch: pa.Table) -> int:
    """Tokens that are learnt; the first token of an example is predicted by none."""
    return sum(sum(mask[1:]) for mask in batch["loss_mask"].to_pylist())
