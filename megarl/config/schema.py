"""The keys of each command: `TrainConfig`, `SFTConfig`, `EvalConfig`.

Every key is read by someone; a key that is not here is refused. Batch sizes count over all ranks, `_per_gpu`
sizes on one device.
"""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.algorithm_sections import KL_KINDS, LOSS_AGG_MODES, AlgorithmConfig
from megarl.config.data_sections import DataConfig
from megarl.config.options import option, optional_section, section
from megarl.config.reward_sections import CustomRewardConfig
from megarl.config.sections import (
    LOGGERS,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    PoolConfig,
    RolloutConfig,
    TrainedModelConfig,
)


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy that is trained."""

    ppo_mini_batch_size: int = option(
        "Prompts of a mini-batch (an optimizer step); divides train_batch_size.", ge=1
    )
    ppo_max_token_len_per_gpu: int | None = option("Tokens of a micro-batch (or the next key).", None, ge=1)
    ppo_micro_batch_size_per_gpu: int | None = option("Trajectories of a micro-batch.", None, ge=1)
    ppo_epochs: int = option("Passes over a step's trajectories.", 1, ge=1)
    shuffle: bool = option("A new order of the trajectories for each pass.", False)
    clip_ratio: float = option("The probability ratio is clipped to 1 -+ this.", 0.2, gt=0)
    clip_ratio_low: float | None = option("The lower side of it; null: clip_ratio.", None, gt=0)
    clip_ratio_high: float | None = option("The upper side of it; null: clip_ratio.", None, gt=0)
    clip_ratio_c: float = option("Bound of the ratio at negative advantages (dual clip).", 3.0, gt=1)
    loss_agg_mode: str = option("What the loss is a mean of.", "token-mean", choices=LOSS_AGG_MODES)
    entropy_coeff: float = option("Weight of the entropy bonus.", 0.0)
    use_kl_loss: bool = option("Add the KL to the reference policy to the loss.", False)
    kl_loss_coef: float = option("Its weight.", 0.001, ge=0)
    kl_loss_type: str = option("Its estimator.", "low_var_kl", choices=KL_KINDS)
    resource_pool: str | None = option("Where it lives; null: the only pool, or the one named global.", None)
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig = section("The layout.", MegatronConfig)


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The reference policy, made where a KL to it is used: the actor's weights before the run."""

    log_prob_max_token_len_per_gpu: int | None = option(
        "Tokens of a micro-batch; null: as many as one of the actor may have.", None, ge=1
    )
    megatron: MegatronConfig | None = optional_section(
        "The layout; null: the actor's. With the actor's layout and pool it lives in the actor's processes."
    )
    resource_pool: str | None = option("Where it lives; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig:
    """The policy: its model, its training, its rollouts, its reference."""

    model: TrainedModelConfig = section("The model that is trained.")
    actor: ActorConfig = section("The policy that is trained.")
    ref: RefConfig = section("The reference policy.", RefConfig)
    rollout: RolloutConfig = section("The engines that generate responses.", RolloutConfig)


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """The critic's first weights."""

    path: str | None = option("Folder of a Hugging Face model; null: the actor's.", None, is_path=True)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model (adv_estimator gae)."""

    model: CriticModelConfig = section("The critic's first weights.", CriticModelConfig)
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig | None = optional_section("The layout; null: the actor's.")
    ppo_mini_batch_size: int | None = option("As the actor's; null: the actor's.", None, ge=1)
    ppo_max_token_len_per_gpu: int | None = option(
        "As the actor's; null here and in the next key: the actor's.", None, ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = option("As the actor's.", None, ge=1)
    ppo_epochs: int | None = option("As the actor's; null: the actor's.", None, ge=1)
    cliprange_value: float = option("Values may move this far from the old ones.", 0.5, gt=0)
    warmup_steps: int = option("First steps in which the critic alone is trained.", 0, ge=0)
    resource_pool: str | None = option("Where it lives; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run."""

    project_name: str = option("First folder of the default run folder.", "megarl")
    experiment_name: str = option("Second folder of the default run folder.", "ppo")
    default_local_dir: str | None = option(
        "The run folder; null: outputs/<project_name>/<experiment_name>.", None, is_path=True
    )
    total_epochs: int = option("Passes over the training prompts.", 1, ge=1)
    total_training_steps: int | None = option("Steps; null: from total_epochs.", None, ge=1)
    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices a node: GPUs, or processes where there are none.", 1, ge=1)
    test_freq: int = option("Validate every so many steps; -1: never.", -1, ge=-1)
    val_before_train: bool = option("Validate before the first step.", False)
    logger: tuple[str, ...] = option("Where metrics go, besides metrics.jsonl.", LOGGERS, choices=LOGGERS)
    seed: int = option("Of everything that has no seed of its own.", 1, ge=0)
    ray_address: str | None = option("A running Ray cluster; null: one is started.", None)
    rollout_data_dir: str | None = option(
        "Each step's trajectories and each validation's answers as Parquet; null: <run folder>/rollouts.",
        None,
        is_path=True,
    )
    collective_timeout: float = option("Seconds that ranks wait for each other.", 600.0, gt=0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`megarl train`: PPO and GRPO."""

    data: DataConfig = section("Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = section("The policy.")
    critic: CriticConfig | None = optional_section("The value model; null without one (grpo).")
    algorithm: AlgorithmConfig = section("Advantages and the KL in the reward.", AlgorithmConfig)
    custom_reward_function: CustomRewardConfig = section(
        "A reward function of one's own.", CustomRewardConfig
    )
    resource_pools: dict[str, PoolConfig] | None = option(
        "Sets of devices by name; null: one, `global`, of trainer.nnodes x trainer.n_gpus_per_node.", None
    )
    trainer: TrainerConfig = section("The run.", TrainerConfig)
    plugins: tuple[str, ...] = option(
        "Python files that are imported first; what they register becomes known by its name.",
        (),
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig:
    """Examples."""

    train_files: str | tuple[str, ...] = option(
        "Parquet or JSON lines files: a path, a glob, or a list.", is_path=True
    )
    val_files: str | tuple[str, ...] | None = option(
        "The same for validation; null: no validation.", None, is_path=True
    )
    max_length: int = option("Tokens of an example, chat template included.", ge=1)
    truncation: str = option("What happens to longer ones.", "error", choices=("error", "right"))
    train_batch_size: int = option("Examples a step.", ge=1)
    prompt_key: str = option("Column of the prompt (with response_key).", "prompt")
    response_key: str | None = option(
        "Column of the response; null: the assistant's messages in the column messages.", None
    )
    shuffle: bool = option("A new order each epoch.", True)
    seed: int = option("Of that order.", 1, ge=0)


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig:
    """The run."""

    project_name: str = option("First folder of the default run folder.", "megarl")
    experiment_name: str = option("Second folder of the default run folder.", "sft")
    default_local_dir: str | None = option(
        "The run folder; null: outputs/<project_name>/<experiment_name>.", None, is_path=True
    )
    total_epochs: int = option("Passes over the examples.", 1, ge=1)
    total_training_steps: int | None = option("Steps; null: from total_epochs.", None, ge=1)
    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices a node: GPUs, or processes where there are none.", 1, ge=1)
    test_freq: int = option("Validate every so many steps; -1: never.", -1, ge=-1)
    logger: tuple[str, ...] = option("Where metrics go, besides metrics.jsonl.", LOGGERS, choices=LOGGERS)
    seed: int = option("Of everything that has no seed of its own.", 1, ge=0)
    ray_address: str | None = option("A running Ray cluster; null: one is started.", None)
    collective_timeout: float = option("Seconds that ranks wait for each other.", 600.0, gt=0)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """`megarl sft`: supervised fine-tuning."""

    data: SFTDataConfig = section("Examples.")
    model: TrainedModelConfig = section("The model that is trained.")
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig = section("The layout.", MegatronConfig)
    max_token_len_per_gpu: int = option("Tokens of a micro-batch.", ge=1)
    trainer: SFTTrainerConfig = section("The run.", SFTTrainerConfig)


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """Problems."""

    val_files: str | tuple[str, ...] = option("Parquet files: a path, a glob, or a list.", is_path=True)
    prompt_key: str = option("Column of the chat messages.", "prompt")
    max_prompt_length: int = option("Tokens of a prompt, chat template included.", ge=1)
    max_response_length: int = option("Most tokens of a response.", ge=1)
    max_samples: int | None = option("The first so many problems; null: all.", None, ge=1)


@dataclass(frozen=True, kw_only=True)
class EvalTrainerConfig:
    """The run."""

    nnodes: int = option("Nodes.", 1, ge=1)
    n_gpus_per_node: int = option("Devices a node: GPUs, or processes where there are none.", 1, ge=1)
    default_local_dir: str = option("The run folder.", "outputs/eval", is_path=True)
    ray_address: str | None = option("A running Ray cluster; null: one is started.", None)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """`megarl eval`: accuracy of a model on problems, sampled as rollout.val_kwargs says."""

    model: ModelPathConfig = section("The model.")
    data: EvalDataConfig = section("Problems.")
    rollout: RolloutConfig = section("The engines that generate responses.", RolloutConfig)
    custom_reward_function: CustomRewardConfig = section(
        "A reward function of one's own.", CustomRewardConfig
    )
    trainer: EvalTrainerConfig = section("The run.", EvalTrainerConfig)
    plugins: tuple[str, ...] = option(
        "Python files that are imported first; what they register becomes known by its name.",
        (),
        is_path=True,
    )
