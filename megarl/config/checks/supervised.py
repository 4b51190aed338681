"""Checks of the commands that fit a model to examples: supervised fine-tuning, reward models."""

from collections.abc import Iterator

from megarl.config.checks.data import file_problems, template_problems
from megarl.config.checks.layout import layout_problems, update_problems
from megarl.config.checks.lora import lora_problems
from megarl.config.checks.numerics import checkpointing_problems, numerics_problems, optim_problems
from megarl.config.checks.saving import saving_problems
from megarl.config.checks.tracing import tracing_problems
from megarl.config.loading.hub import model_problems, tokenizer_problems
from megarl.config.resolve import resolve
from megarl.config.schema.supervised import DPOConfig, RMConfig, SFTConfig, TuningConfig


def tuning_problems(config: TuningConfig, data_files: bool = True) -> Iterator[str]:
    """Of a configuration that may be unresolved. `data_files`: whether its files must be there."""
    yield from checkpointing_problems(
        "model", "", config.model.enable_gradient_checkpointing, config.megatron
    )
    yield from layout_problems(resolve(config))
    yield from update_problems(resolve(config))
    yield from optim_problems("optim", config.optim)
    yield from numerics_problems(config)
    yield from lora_problems(config)
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if getattr(config.megatron, name) is not None:
            yield f"megatron.{name} is for runs with rollout engines: fine-tuning uses all it has all the time; leave it out"
    yield from model_problems("model.path", config.model.path)
    yield from tokenizer_problems("model.tokenizer_path", config.model.tokenizer_path)
    if data_files:
        yield from file_problems("data.train_files", config.data.train_files)
        yield from file_problems("data.val_files", config.data.val_files)
        if isinstance(config, RMConfig):
            yield from file_problems("data.normalize_files", config.data.normalize_files)
    yield from template_problems(config.data.apply_chat_template_kwargs, config.data.tools_key)
    yield from _validation_problems(config)
    yield from saving_problems(config.trainer, config.trainer.test_freq)
    yield from tracing_problems(config.trainer)
    if isinstance(config, SFTConfig):
        yield from _text_problems(config)
    if isinstance(config, RMConfig):
        yield from _reward_model_problems(config)
    if isinstance(config, DPOConfig) and config.dpo.loss_type == "ipo" and config.dpo.label_smoothing > 0:
        yield f"dpo.label_smoothing={config.dpo.label_smoothing:g} is of dpo.loss_type=sigmoid; leave it out"


def _validation_problems(config: TuningConfig) -> Iterator[str]:
    trainer = config.trainer
    if config.data.val_files is None and trainer.test_freq > 0:
        yield f"trainer.test_freq={trainer.test_freq} needs data.val_files"
    if trainer.test_freq > 0:
        return
    if trainer.save_best:
        yield "trainer.save_best=true needs trainer.test_freq: the best model is that of the lowest val/loss"
    if trainer.early_stop_patience is not None:
        yield (
            f"trainer.early_stop_patience={trainer.early_stop_patience} counts validations: it needs trainer.test_freq"
        )


def _text_problems(config: SFTConfig) -> Iterator[str]:
    data = config.data
    if data.text_key is None:
        if data.truncation == "split":
            yield "data.truncation=split is for plain text (data.text_key): a chat is not cut into several"
        return
    for name in ("response_key", "apply_chat_template_kwargs"):
        if getattr(data, name) is not None:
            yield f"data.{name} is of chats, but data.text_key={data.text_key!r} reads plain text; give one of them"


def _reward_model_problems(config: RMConfig) -> Iterator[str]:
    data = config.data
    if data.normalize_max_samples == 0:
        yield "data.normalize_max_samples=0: it must be -1 (all) or at least 1"
    if data.normalize == "none" and data.normalize_files is not None:
        yield "data.normalize_files: data.normalize=none uses no reference answers; leave one of them out"
    if data.normalize_response_key is not None and data.normalize_files is None:
        yield (
            f"data.normalize_response_key={data.normalize_response_key!r} is a column of data.normalize_files, which is null"
        )
    if config.model.mtp == "keep":
        yield "model.mtp=keep: a reward model predicts no tokens, so it has no such layers; leave it out"
