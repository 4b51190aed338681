"""The keys of `megarl train` and `megarl eval`; the keys of supervised training are in `supervised`.

Every key is read somewhere; a key that is not here is refused. Batch sizes count over all ranks, `_per_gpu`
sizes on one device.
"""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import option, optional_section, section
from megarl.config.schema.algorithm import KL_KINDS, LOSS_AGG_MODES, AlgorithmConfig, PolicyLossConfig
from megarl.config.schema.data import (
    ANSWER_KEY_HELP,
    REWARD_FN_KEY_HELP,
    TEMPLATE_HELP,
    TOOLS_KEY_HELP,
    DataConfig,
    ValSetConfig,
)
from megarl.config.schema.models import (
    NO_OTHER_STRATEGY,
    NO_PADDING,
    LoraConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    TrainedModelConfig,
)
from megarl.config.schema.rewards import CustomRewardConfig, RewardConfig, RewardModelConfig
from megarl.config.schema.rollout import RolloutConfig, TeacherEngineConfig
from megarl.config.schema.run import (
    DEFAULT_LOGGERS,
    LOGGER_HELP,
    LOGGERS,
    HealthConfig,
    PoolConfig,
    RunConfig,
    TimeoutConfig,
)

POLICY = "actor_rollout_ref"
"""The section of the policy: actor, rollout engines and reference."""
MODES = ("sync", "partial_rollouts", "one_step_off", "fully_async")
STREAMED = ("partial_rollouts", "fully_async")  # their responses go on from step to step
CONCURRENT = "concurrent"
EVAL_MODES = ("blocking", CONCURRENT)


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy that is trained."""

    strategy: str = option("What trains it.", "megatron", choices=("megatron",), refused=NO_OTHER_STRATEGY)
    ppo_mini_batch_size: int = option(
        "Prompts of a mini-batch (an optimizer step); divides train_batch_size.", ge=1
    )
    ppo_max_token_len_per_gpu: int | None = option(
        "Tokens of a micro-batch (or the next key); null here and there: as many as the memory of GPUs holds by the formulas "
        "of `megarl plan memory`, elsewhere 4 of the longest trajectories, up to 16384 tokens.",
        None,
        ge=1,
    )
    ppo_micro_batch_size_per_gpu: int | None = option("Trajectories of a micro-batch.", None, ge=1)
    use_dynamic_bsz: bool | None = option(
        "true: micro-batches are cut by tokens, false: by trajectories, whatever the other size says; "
        "null: by the one that is given, by tokens if none is.",
        None,
    )
    share_prompts: bool = option(
        "true: the n trajectories of a prompt compute its tokens once, in actor, critic and reference; "
        "plain torch attention only, no context parallelism, experts or dropout.",
        False,
    )
    router_replay: str | None = option(
        "For models with experts. rollout: routers choose the experts that the engine chose for each token when it generated it, in the "
        "pass for old log-probs and in the updates; trainer: the updates choose those of the pass for old log-probs; null: neither.",
        None,
        choices=("rollout", "trainer"),
    )
    expert_bias_update_rate: float = option(
        "For models whose routers have a bias an expert (DeepSeek-V3, GLM-4.5): after each mini-batch the bias of an expert with more "
        "tokens than the mean is lowered by this, that of one with fewer raised; 0: biases stay as they were loaded.",
        0.0,
        ge=0,
        formula="b_e += rate sign(mean load - load_e)",
    )
    router_z_loss_coef: float = option(
        "For models with experts: of the router z-loss, which keeps the logits of routers small; a mean over the tokens that a mini-batch "
        "learns from, for each layer.",
        0.0,
        ge=0,
        formula="coef mean(logsumexp(logits)^2)",
    )
    ppo_epochs: int = option("Passes over a step's trajectories.", 1, ge=1)
    shuffle: bool = option("A new order of the trajectories for each pass.", False)
    clip_ratio: float = option(
        "The probability ratio is clipped to 1 -+ this.",
        0.2,
        gt=0,
        formula="max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high))",
    )
    clip_ratio_low: float | None = option("The lower side of it; null: clip_ratio.", None, gt=0)
    clip_ratio_high: float | None = option("The upper side of it; null: clip_ratio.", None, gt=0)
    clip_range: tuple[float, float] | None = option(
        "clip_ratio_low and clip_ratio_high in one; null: as these say.", None, gt=0
    )
    clip_ratio_c: float = option(
        "Bound of the ratio at negative advantages (dual clip).",
        3.0,
        gt=1,
        formula="where A < 0, the loss is at most -A clip_ratio_c",
    )
    policy_loss: PolicyLossConfig = section("The objective.", PolicyLossConfig)
    tau_pos: float = option("sapo: sharpness of the gate at positive advantages.", 1.0, gt=0)
    tau_neg: float = option("sapo: at negative ones.", 1.05, gt=0)
    loss_agg_mode: str | None = option(
        "What the loss is a mean of; null: token-mean, of gspo, gmpo and sapo seq-mean-token-mean, of topr "
        "seq-mean-token-sum. token-sum: no mean. "
        "seq-mean-token-sum-norm: the mean over trajectories of their sums, divided by loss_scale_factor.",
        None,
        choices=LOSS_AGG_MODES,
    )
    loss_scale_factor: float | None = option(
        "seq-mean-token-sum-norm: what the sums are divided by; null: data.max_response_length.", None, gt=0
    )
    target_kl: float | None = option(
        "The step's remaining updates of the actor are left out once ppo_kl (nats a token) of a mini-batch is over "
        "this; null: never.",
        None,
        gt=0,
    )
    pg_loss_coef: float = option(
        "Weight of the policy loss; 0: it does not count, as where a teacher alone is learnt from.",
        1.0,
        ge=0,
        formula="pg_loss_coef policy loss - entropy_coeff entropy + kl_loss_coef KL",
    )
    entropy_coeff: float = option("Weight of the entropy bonus.", 0.0)
    use_kl_loss: bool = option("Add the KL to the reference policy to the loss.", False)
    kl_loss_coef: float = option("Its weight.", 0.001, ge=0)
    kl_loss_end_coef: float | None = option(
        "The weight moves from kl_loss_coef to this on a straight line; null: it stays.", None, ge=0
    )
    kl_loss_schedule_steps: int | None = option("Steps of that line; null: the run.", None, ge=1)
    kl_loss_type: str = option(
        "Its estimator. full: none, the whole vocabulary; top_k: the reference's most likely tokens, and all others together.",
        "low_var_kl",
        choices=(*KL_KINDS, "top_k"),
    )
    kl_loss_top_k: int = option("top_k: how many tokens.", 64, ge=1, le=1024)
    kl_loss_beta: float = option(
        "full and top_k: which divergence. 1: KL(policy || reference), which seeks one of its modes; 0: KL(reference || policy), which "
        "covers all of them; between: the generalised Jensen-Shannon divergence.",
        1.0,
        ge=0,
        le=1,
        formula="beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p (arXiv:2306.13649, equation 1; p the policy, q the reference)",
    )
    ptx_coef: float = option(
        "Weight of the likelihood of the texts in data.ptx (PPO-ptx, arXiv:2203.02155, equation 2); 0: none.",
        0.0,
        ge=0,
        formula="loss - ptx_coef mean log pi(token), over the learnt tokens of the mini-batch's texts",
    )
    resource_pool: str | None = option("Where it lives; null: the only pool, or the one named global.", None)
    grad_clip: float | None = option("Another name of optim.clip_grad; null: as that says.", None, ge=0)
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig = section("The layout.", MegatronConfig)


@dataclass(frozen=True, kw_only=True)
class RefModelConfig:
    """The model of the reference policy."""

    path: str | None = option(
        "Folder of another model, a teacher for on-policy distillation, or its id on the Hub; it has the policy's tokens, and any size. null: the "
        "policy's own.",
        None,
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The reference policy, made where a KL to it is used: the actor's weights before the run, without adapters, or a teacher."""

    model: RefModelConfig = section("The model.", RefModelConfig)
    strategy: str = option(
        "What runs it, where engine is null.",
        "megatron",
        choices=("megatron",),
        refused={
            **NO_OTHER_STRATEGY,
            "sglang": "give the section engine beside it ({}: with its defaults), and leave the key out",
        },
    )
    log_prob_max_token_len_per_gpu: int | None = option(
        "Tokens of a micro-batch; null here and in the next key: as many as one of the actor may have.",
        None,
        ge=1,
    )
    log_prob_micro_batch_size_per_gpu: int | None = option(
        "Trajectories of a micro-batch (instead of tokens).", None, ge=1
    )
    log_prob_use_dynamic_bsz: bool | None = option(
        "As the actor's use_dynamic_bsz, for these two sizes; null: the actor's, if that is given.", None
    )
    megatron: MegatronConfig | None = optional_section(
        "The layout; null: the actor's. With the actor's layout and pool ref lives in the actor's processes, and with LoRA and no folder of "
        "its own it is then the actor itself, its adapters switched off; each of several teachers has processes of its own."
    )
    engine: TeacherEngineConfig | None = optional_section(
        "SGLang engines that judge in Megatron's place, by sampled tokens or their most likely ones, in a resource_pool of their own; "
        "null: Megatron."
    )
    resource_pool: str | None = option("Where it lives; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(RefConfig):
    """One of several teachers; the keys are those of `actor_rollout_ref.ref`. It has processes of its own in any layout, or engines."""

    sources: tuple[str, ...] | None = option(
        "The values of data.teacher_key in the rows that it judges; null: its name.", None
    )


@dataclass(frozen=True, kw_only=True)
class ActorRolloutRefConfig:
    """The policy: its model, its training, its rollouts, its reference."""

    hybrid_engine: bool = option(
        "The actor's weights go into the engines shard to shard, before every rollout.",
        True,
        refused={
            False: "megarl has one way to its rollout engines, the hybrid engine; to have them on devices of their own, set "
            "resource_pools and actor_rollout_ref.rollout.resource_pool (with trainer.mode one_step_off or fully_async they generate "
            "while models learn)"
        },
    )
    model: TrainedModelConfig = section("The model that is trained.")
    actor: ActorConfig = section("The policy that is trained.")
    ref: RefConfig = section("The reference policy.", RefConfig)
    teachers: dict[str, TeacherConfig] | None = option(
        "Several teachers by name in place of ref, each of which judges the trajectories of its rows alone (data.teacher_key), by "
        "sampled tokens or its most likely ones. null: ref judges all.",
        None,
    )
    rollout: RolloutConfig = section("The engines that generate responses.", RolloutConfig)


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    """The critic's first weights."""

    path: str | None = option(
        "Folder of a Hugging Face model, or its id on the Hub; null: the actor's.", None, is_path=True
    )
    use_remove_padding: bool = option("Sequences are packed.", True, refused={False: NO_PADDING})
    enable_gradient_checkpointing: bool | None = option(
        "true: megatron.recompute_granularity=full, false: null; null: as that says.", None
    )
    lora: LoraConfig = section("Low-rank adapters; the value head is trained whole beside them.", LoraConfig)
    share_base: bool = option(
        "The critic is adapters and a value head on the actor's own frozen weights, in the actor's processes: both models "
        "have LoRA then.",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model (adv_estimator gae)."""

    strategy: str = option("What trains it.", "megatron", choices=("megatron",), refused=NO_OTHER_STRATEGY)
    model: CriticModelConfig = section("The critic's first weights.", CriticModelConfig)
    grad_clip: float | None = option("Another name of optim.clip_grad; null: as that says.", None, ge=0)
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig | None = optional_section("The layout; null: the actor's.")
    ppo_mini_batch_size: int | None = option("As the actor's; null: the actor's.", None, ge=1)
    ppo_max_token_len_per_gpu: int | None = option(
        "As the actor's; null here and in the next key: the actor's.", None, ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = option("As the actor's.", None, ge=1)
    use_dynamic_bsz: bool | None = option("As the actor's; null: the actor's, if that is given.", None)
    ppo_epochs: int | None = option("As the actor's; null: the actor's.", None, ge=1)
    cliprange_value: float = option(
        "Values may move this far from the old ones.",
        0.5,
        gt=0,
        formula="0.5 max((v - R)^2, (clip(v, v_old - cliprange_value, v_old + cliprange_value) - R)^2)",
    )
    vf_coef: float = option(
        "Factor of the critic's loss, and so of its gradient, which clip_grad then sees; AdamW's step alone does not "
        "change with it.",
        1.0,
        gt=0,
        formula="vf_coef x loss",
    )
    warmup_steps: int = option("First steps in which the critic alone is trained.", 0, ge=0)
    resource_pool: str | None = option("Where it lives; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class _TrainerKeys(RunConfig):
    val_before_train: bool = option("Validate before the first step.", False)
    eval_mode: str = option(
        "blocking: training waits for each validation. concurrent: training waits only while engines in a pool of their own "
        "(eval_resource_pool) take the weights; these answer while it goes on, and the results belong to the step whose weights they used.",
        "blocking",
        choices=EVAL_MODES,
    )
    eval_resource_pool: str | None = option(
        "eval_mode=concurrent: where these engines live, as many as it holds, with the settings of actor_rollout_ref.rollout; no other role "
        "may have it. null: the pool named eval.",
        None,
    )
    logger: tuple[str, ...] = option(LOGGER_HELP, DEFAULT_LOGGERS, choices=LOGGERS)
    log_val_generations: int = option(
        "Answers of each validation, and of the first step, that tensorboard, wandb, mlflow, swanlab and trackio are given to show; "
        "console shows one of them; 0: none.",
        1,
        ge=0,
    )
    log_train_generations: int = option("The same of the trajectories of each step; 0: none.", 0, ge=0)
    on_nonfinite: str = option(
        "What NaN or infinity in log-probs, values, advantages, a loss or a gradient does: stop the run, or skip the rest of the "
        "step. Its trajectories go into <run folder>/failures, for megarl replay. A reward that is not finite costs its sample "
        "alone.",
        "stop",
        choices=("stop", "skip"),
    )
    mode: str = option(
        "sync: generate, then train, with the newest weights. partial_rollouts: so, but more prompts are answered than a step "
        "needs; it goes on when enough are, and the other responses go on in the next step, from their last token. one_step_off: "
        "the engines, in a pool of their own, generate the next step's batch while the models learn from this one, with weights "
        "that are one update step older. fully_async: these engines never stop; new weights interrupt responses for a moment, and a "
        "step takes finished groups.",
        "sync",
        choices=MODES,
    )
    max_staleness: int | None = option(
        "With partial_rollouts and fully_async: most steps between the one whose weights began a response and the one that trains "
        "on it; prompts of so many steps more than one are in flight. null: 1.",
        None,
        ge=1,
    )
    rollout_only: bool = option(
        "Train nothing: each step's trajectories are generated, scored and written into rollout_data_dir.",
        False,
    )
    train_only: str | None = option(
        "Generate nothing: step n is trained on step-<n>.parquet of this folder, trajectories as rollout_data_dir has them; null: "
        "on what is generated.",
        None,
        is_path=True,
    )
    seed: int = option("Of everything that has no seed of its own.", 1, ge=0)
    ray_address: str | None = option("A running Ray cluster; null: one is started.", None)
    rollout_data_dir: str | None = option(
        "Each step's trajectories and each validation's answers as Parquet; null: <run folder>/rollouts.",
        None,
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TimeoutConfig, _TrainerKeys):
    """The run."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`megarl train`: PPO, GRPO and their kin."""

    data: DataConfig = section("Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = section("The policy.")
    critic: CriticConfig | None = optional_section("The value model; null without one (grpo).")
    algorithm: AlgorithmConfig = section("Advantages and the KL in the reward.", AlgorithmConfig)
    custom_reward_function: CustomRewardConfig = section(
        "A reward function of one's own.", CustomRewardConfig
    )
    reward: RewardConfig = section("Rule rewards, and where rewards run.", RewardConfig)
    reward_model: RewardModelConfig = section("A model that scores trajectories.", RewardModelConfig)
    resource_pools: dict[str, PoolConfig] | None = option(
        "Sets of devices by name; null: one, `global`, of trainer.nnodes x trainer.n_gpus_per_node.", None
    )
    trainer: TrainerConfig = section("The run.", TrainerConfig)
    health: HealthConfig = section("When the run is warned about, stopped or steered.", HealthConfig)
    plugins: tuple[str, ...] = option(
        "Python files that are imported first; what they register becomes known by its name.",
        (),
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """Problems."""

    val_files: str | tuple[str, ...] | None = option(
        "Parquet or JSON lines files: a path, a glob, a URL that fsspec can open, or a list of them; null: val_sets alone.",
        None,
        is_path=True,
    )
    val_sets: dict[str, ValSetConfig] | None = option(
        "More problems by name, each set with its own sampling; their scores are <name>/...", None
    )
    prompt_key: str = option("Column of the prompt: chat messages, or a text (the user's message).", "prompt")
    reward_fn_key: str = option(REWARD_FN_KEY_HELP, "data_source")
    answer_key: str | None = option(ANSWER_KEY_HELP, "reward_model.ground_truth")
    tools_key: str | None = option(TOOLS_KEY_HELP, "tools")
    apply_chat_template_kwargs: dict[str, Any] | None = option(TEMPLATE_HELP, None)
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
    reward: RewardConfig = section("Rule rewards, and where rewards run.", RewardConfig)
    trainer: EvalTrainerConfig = section("The run.", EvalTrainerConfig)
    plugins: tuple[str, ...] = option(
        "Python files that are imported first; what they register becomes known by its name.",
        (),
        is_path=True,
    )


def rollout_section(config: TrainConfig | EvalConfig) -> tuple[str, RolloutConfig]:
    """The dotted key and the section of the policy's engines."""
    if isinstance(config, TrainConfig):
        return f"{POLICY}.rollout", config.actor_rollout_ref.rollout
    return "rollout", config.rollout
