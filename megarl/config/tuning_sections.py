"""What the commands share that fit one Megatron model to examples: supervised fine-tuning, reward models."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.options import option, section
from megarl.config.saving_section import SavingConfig
from megarl.config.sections import (
    DEFAULT_LOGGERS,
    IDLE_TIMEOUT_HELP,
    LOGGER_HELP,
    LOGGERS,
    PHASE_TIMEOUT_HELP,
    RELAYS_FROM_HELP,
    MegatronConfig,
    OptimConfig,
    TrainedModelConfig,
)
from megarl.config.tracing_section import TracingConfig


@dataclass(frozen=True, kw_only=True)
class TuningTrainerConfig(SavingConfig, TracingConfig):
    """The run."""

    project_name: str = option("First folder of the default run folder.", "megarl")
    experiment_name: str = option("Second folder of the default run folder.", "sft")
    default_local_dir: str | None = option(
        "The run folder; null: outputs/<project_name>/<experiment_name>.", None, is_path=True
    )
    total_epochs: int = option("Passes over the data.", 1, ge=1)
    total_training_steps: int | None = option("Steps; null: from total_epochs.", None, ge=1)
    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices a node: GPUs, or processes where there are none.", 1, ge=1)
    test_freq: int = option("Validate every so many steps, and after the last; -1: never.", -1, ge=-1)
    save_best: bool = option(
        "The model of the lowest val/loss is written into <run folder>/best/hf, whole or not at all, whenever a validation "
        "is the best so far; best/best.json beside it says of which step it is, and its metrics.",
        False,
    )
    early_stop_patience: int | None = option(
        "The run ends after so many validations in a row without a lower val/loss; null: never.", None, ge=1
    )
    early_stop_min_delta: float = option(
        "How much lower than the lowest one so far it must be for that.", 0.0, ge=0
    )
    logger: tuple[str, ...] = option(LOGGER_HELP, DEFAULT_LOGGERS, choices=LOGGERS)
    seed: int = option("Of everything that has no seed of its own.", 1, ge=0)
    ray_address: str | None = option("A running Ray cluster; null: one is started.", None)
    collective_timeout: float = option("Seconds that ranks wait for each other.", 600.0, gt=0)
    phase_timeout: float | None = option(PHASE_TIMEOUT_HELP, 7200.0, gt=0)
    idle_timeout: float | None = option(IDLE_TIMEOUT_HELP, 60.0, gt=0)
    relays_from: int | None = option(RELAYS_FROM_HELP, 64, ge=1)


@dataclass(frozen=True, kw_only=True)
class TuningDataConfig:
    """Where examples come from, and how many a step has."""

    train_files: str | tuple[str, ...] = option(
        "Parquet or JSON lines files: a path, a glob, a URL that fsspec can open, or a list of them.",
        is_path=True,
    )
    val_files: str | tuple[str, ...] | None = option(
        "The same for validation; null: no validation.", None, is_path=True
    )
    max_length: int = option("Tokens of an example's text, chat template included.", ge=1)
    train_batch_size: int = option("Examples a step.", ge=1)
    tools_key: str | None = option(
        "Column of a row's tools, a list of JSON schemas (or JSON text) that the chat template is given; null: rows have none. "
        "Parquet files may lack a column of the usual name, but not one that is named otherwise.",
        "tools",
    )
    apply_chat_template_kwargs: dict[str, Any] | None = option(
        "What the chat template is given besides the messages, for example enable_thinking: false, or tools: [...] for all "
        "rows. A row's own tools, and keywords in its column chat_template_kwargs, take their place.",
        None,
    )
    shuffle: bool = option("A new order each epoch.", True)
    seed: int = option("Of that order.", 1, ge=0)


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """A model that is fitted to examples, and the run that does it."""

    data: TuningDataConfig = section("Examples.")
    model: TrainedModelConfig = section("The model that is trained.")
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig = section("The layout.", MegatronConfig)
    max_token_len_per_gpu: int = option("Tokens of a micro-batch.", ge=1)
    trainer: TuningTrainerConfig = section("The run.", TuningTrainerConfig)
