"""The configuration: a user's settings, read, checked and filled in before anything else starts.

What this room promises: `load_config` returns a typed, frozen configuration or one ValueError that lists every
unknown key (with the nearest valid one), wrong type and missing value; `check_config` does the same for values
that do not fit each other, the devices or the files, `check_models` for layouts that do not fit the model;
`resolve` and `resolve_batches` derive what follows from it, so that no other room does.

A configuration is resolved once, by `check_config`; all else takes the resolved one.

    config = check_config(load_config(TrainConfig, "recipe:quickstart_ppo", ["trainer.total_epochs=2"]))
    plan = resolve_batches(config)

What it must not know: torch, or any other room.
"""

from megarl.config.batches import (
    BatchPlan,
    TuningBatchPlan,
    batch_summary,
    batch_table,
    resolve_batches,
    save_batch_plan,
    trajectories_per_mini_batch,
    trajectories_per_step,
    updates_of_run,
    updates_per_step,
)
from megarl.config.checks import check_config, config_problems
from megarl.config.checks.training import check_decays
from megarl.config.loading import load_config, save_config, to_dict
from megarl.config.model_fit import (
    check_model,
    check_models,
    fit_problems,
    position_warnings,
)
from megarl.config.resolve import (
    all_references,
    eval_rollout,
    evaluates,
    full_kl_in_loss,
    full_kl_in_reward,
    has_teacher,
    is_single_update,
    leaves_tokens_out,
    needs_old_log_probs,
    needs_ref_log_probs,
    needs_reference,
    needs_rules,
    overlaps,
    plays_turns,
    pool_devices,
    reference_in_actor,
    reference_is_actor,
    reference_key,
    references,
    resolve,
    served_references,
    taught_references,
    teacher_of_sources,
    top_k_in_loss,
    validates_concurrently,
)
from megarl.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    RolloutCorrectionConfig,
)
from megarl.config.schema.commands import (
    ActorConfig,
    CriticConfig,
    EvalConfig,
    EvalDataConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    PoolConfig,
    RefConfig,
    RolloutConfig,
    TrainConfig,
    TrainedModelConfig,
)
from megarl.config.schema.data import DataConfig, ValSetConfig, val_set_sampling
from megarl.config.schema.models import LoraConfig
from megarl.config.schema.rewards import (
    JudgeConfig,
    OverlongBufferConfig,
    RewardModelConfig,
)
from megarl.config.schema.rollout import SamplingConfig
from megarl.config.schema.supervised import (
    DPOConfig,
    DPODataConfig,
    DPOLossConfig,
    RMConfig,
    RMDataConfig,
    SFTConfig,
    TuningConfig,
    TuningTrainerConfig,
    learns_rankings,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "BatchPlan",
    "CriticConfig",
    "DPOConfig",
    "DPODataConfig",
    "DPOLossConfig",
    "DataConfig",
    "EvalConfig",
    "EvalDataConfig",
    "FilterGroupsConfig",
    "JudgeConfig",
    "LoraConfig",
    "MegatronConfig",
    "ModelPathConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PoolConfig",
    "RMConfig",
    "RMDataConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SFTConfig",
    "SamplingConfig",
    "TrainConfig",
    "TrainedModelConfig",
    "TuningBatchPlan",
    "TuningConfig",
    "TuningTrainerConfig",
    "ValSetConfig",
    "all_references",
    "batch_summary",
    "batch_table",
    "check_config",
    "check_decays",
    "check_model",
    "check_models",
    "config_problems",
    "eval_rollout",
    "evaluates",
    "fit_problems",
    "full_kl_in_loss",
    "full_kl_in_reward",
    "has_teacher",
    "is_single_update",
    "learns_rankings",
    "leaves_tokens_out",
    "load_config",
    "needs_old_log_probs",
    "needs_ref_log_probs",
    "needs_reference",
    "needs_rules",
    "overlaps",
    "plays_turns",
    "pool_devices",
    "position_warnings",
    "reference_in_actor",
    "reference_is_actor",
    "reference_key",
    "references",
    "resolve",
    "resolve_batches",
    "save_batch_plan",
    "save_config",
    "served_references",
    "taught_references",
    "teacher_of_sources",
    "to_dict",
    "top_k_in_loss",
    "trajectories_per_mini_batch",
    "trajectories_per_step",
    "updates_of_run",
    "updates_per_step",
    "val_set_sampling",
    "validates_concurrently",
]
