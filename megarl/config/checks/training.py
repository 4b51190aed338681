"""Checks of how models are trained: estimators, losses and the KL, number formats, optimizers, low-rank adapters, loggers, health."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config.batches import trajectories_per_step, updates_of_run
from megarl.config.checks.teachers import (
    reference_problems,
    served_reference_problems,
    teacher_problems,
)
from megarl.config.checks.values import given_keys, registered_problems
from megarl.config.resolve import (
    full_kl_in_loss,
    full_kl_in_reward,
    reference_in_actor,
    top_k_in_loss,
)
from megarl.config.schema.algorithm import (
    ADV_ESTIMATORS,
    GROUP_ESTIMATORS,
    POLICY_LOSSES,
    AlgorithmConfig,
)
from megarl.config.schema.commands import (
    POLICY,
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    CriticModelConfig,
    TrainConfig,
)
from megarl.config.schema.models import LoraConfig, MegatronConfig, OptimConfig, TrainedModelConfig
from megarl.config.schema.run import TRACKERS
from megarl.config.schema.supervised import DPOConfig, TuningConfig

_LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


@dataclass(frozen=True)
class _Trained:
    """A model that is trained: where its keys stand, its sections."""

    prefix: str  # of the keys of optim and megatron
    model_key: str
    model: TrainedModelConfig | CriticModelConfig
    optim: OptimConfig
    megatron: MegatronConfig


def _trained(config: TrainConfig | TuningConfig) -> list[_Trained]:
    if isinstance(config, TuningConfig):
        return [_Trained("", "model", config.model, config.optim, config.megatron)]
    policy, critic = config.actor_rollout_ref, config.critic
    found = [
        _Trained(
            f"{POLICY}.actor.", f"{POLICY}.model", policy.model, policy.actor.optim, policy.actor.megatron
        )
    ]
    if critic is not None:
        assert critic.megatron is not None, "resolved"
        found.append(_Trained("critic.", "critic.model", critic.model, critic.optim, critic.megatron))
    return found


def training_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    for name, install in TRACKERS.items():
        if name in config.trainer.logger and find_spec(name) is None:
            yield f"trainer.logger has {name}, which is not installed: {install} (or leave it out)"
    # Checks of a model that is trained, whatever the command.
    for role in _trained(config):
        yield from _checkpointing_problems(role)
        yield from _optim_problems(role)
        yield from _muon_problems(role)
        yield from _loss_scale_problems(role)
        yield from _fsdp_problems(role)
        yield from _lora_problems(f"{role.model_key}.lora", role.model.lora)
        if isinstance(role.model, TrainedModelConfig):
            yield from _prediction_problems(role, role.model)
            yield from _indexer_problems(role, role.model)
    if isinstance(config, DPOConfig) and config.model.mtp == "train":
        yield (
            "model.mtp=train: preferences have responses that are not to be predicted; give keep, and train the layers by megarl sft"
        )
    if isinstance(config, DPOConfig) and config.model.indexer == "train":
        yield (
            "model.indexer=train: preferences are a loss of whole responses, and indexers learn by the token; leave it out, and train them by "
            "megarl sft or with the policy"
        )
    if isinstance(config, TuningConfig):
        return
    # From here on checks of reinforcement learning alone: the policy, its references and its critic.
    for name in ("mtp", "indexer"):
        if config.trainer.rollout_only and getattr(config.actor_rollout_ref.model, name) == "train":
            yield f"{POLICY}.model.{name}=train: with trainer.rollout_only no model changes; leave it out"
    yield from _algorithm_problems(config)
    yield from _replay_problems(config.actor_rollout_ref.actor)
    yield from _frozen_router_problems(config.actor_rollout_ref)
    yield from _full_kl_problems(config)
    yield from reference_problems(config)
    yield from teacher_problems(config)
    yield from served_reference_problems(config)
    yield from _health_problems(config)
    lora, reference = config.actor_rollout_ref.model.lora, config.actor_rollout_ref.ref.megatron
    actor = config.actor_rollout_ref.actor
    for name, off in (("router_replay", None), ("expert_bias_update_rate", 0.0), ("router_z_loss_coef", 0.0)):
        if getattr(actor, name) != off and actor.megatron.fsdp is not None:
            yield (
                f"{POLICY}.actor.megatron.fsdp={actor.megatron.fsdp} with {POLICY}.actor.{name}={getattr(actor, name)} has not been "
                "tried; leave out one of them"
            )
    if lora.blocks is not None and reference is not None and reference.fsdp is not None:
        yield (
            f"{POLICY}.ref.megatron.fsdp={reference.fsdp} goes without {POLICY}.model.lora.base_dtype=float8: layers would make "
            "their weights from shares; leave out one of them"
        )
    if lora.rank and lora.dropout:
        yield (
            f"{POLICY}.model.lora.dropout={lora.dropout:g}: the policy that is trained would not be the one that generated, "
            "and the ratio of the first update not 1; leave it out"
        )
    if config.critic is not None and config.critic.model.share_base:
        yield from _shared_base_problems(config, config.critic)


def _algorithm_problems(config: TrainConfig) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    yield from registered_problems(config, "algorithm.adv_estimator", algorithm.adv_estimator, ADV_ESTIMATORS)
    yield from _loss_problems(config, config.actor_rollout_ref.actor)
    yield from _correction_problems(config)
    yield from _idle_problems(config)
    estimator = f"algorithm.adv_estimator={algorithm.adv_estimator!r}"
    if algorithm.adv_estimator == "gae" and config.critic is None:
        yield (
            f"critic.optim.lr is required: {estimator} trains a critic, but there is no section critic "
            "(grpo needs none)"
        )
    yield from _reward_weight_problems(algorithm)
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2:
        yield (
            f"{POLICY}.rollout.n={rollout.n}: {estimator} compares the responses to one prompt and needs at least 2"
        )
    if algorithm.adv_estimator == "gigpo" and not rollout.multi_turn.enable:
        yield (
            f"{estimator} compares turns with an environment and needs {POLICY}.rollout.multi_turn.enable=true; with one turn it would be "
            "grpo: use that"
        )
    # An estimator of the user's own may have a critic.
    if (
        algorithm.adv_estimator in ADV_ESTIMATORS
        and algorithm.adv_estimator != "gae"
        and config.critic is not None
    ):
        yield f"critic: {estimator} has no critic; leave the section out (or critic=null)"
    control, trajectories = algorithm.kl_ctrl, trajectories_per_step(config)
    # The coefficient's least factor in a step, 1 - 0.2 * trajectories / horizon, must stay positive.
    if (
        algorithm.use_kl_in_reward
        and control.type == "adaptive"
        and 0.2 * trajectories >= control.horizon > 0
    ):
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon:g} is too short for {trajectories} trajectories a step: the "
            f"coefficient could change sign; it must be over {0.2 * trajectories:g}"
        )
    if control.type == "linear" and control.end_kl_coef is None:
        yield "algorithm.kl_ctrl.end_kl_coef is required: algorithm.kl_ctrl.type='linear' moves the coefficient to it"


def _reward_weight_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    key, weights = "algorithm.reward_weights", algorithm.reward_weights
    if algorithm.adv_estimator != "gdpo":
        if weights:
            yield f"{key} needs algorithm.adv_estimator=gdpo beside it; nothing reads it otherwise"
        return
    if not weights:
        yield f"{key} is required: algorithm.adv_estimator='gdpo' compares these rewards; give their names and weights, {{score: 1.0, ...}}"
    for name, weight in (weights or {}).items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            yield f"{key}.{name}={weight!r} is no number"
    if algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward=true: algorithm.adv_estimator='gdpo' compares rewards by themselves, without a KL in them; use "
            f"{POLICY}.actor.use_kl_loss"
        )


def _idle_problems(config: TrainConfig) -> Iterator[str]:
    """Keys that were given where nothing would read them."""
    actor, control = config.actor_rollout_ref.actor, config.algorithm.kl_ctrl
    correction, norm = config.algorithm.rollout_correction, "seq-mean-token-sum-norm"
    actor_key, correction_key = f"{POLICY}.actor", "algorithm.rollout_correction"
    thresholds = ("rollout_rs_threshold", "rollout_rs_threshold_lower")
    sections: tuple[tuple[bool, str, Any, tuple[str, ...], str], ...] = (
        (
            control.type != "linear",
            "algorithm.kl_ctrl",
            control,
            ("end_kl_coef", "schedule_steps"),
            "type=linear",
        ),
        (
            not (full_kl_in_loss(config) or top_k_in_loss(config)),
            actor_key,
            actor,
            ("kl_loss_beta",),
            "use_kl_loss=true and kl_loss_type=full or top_k",
        ),
        (
            not top_k_in_loss(config),
            actor_key,
            actor,
            ("kl_loss_top_k",),
            "use_kl_loss=true and kl_loss_type=top_k",
        ),
        (not actor.use_kl_loss, actor_key, actor, ("kl_loss_end_coef",), "use_kl_loss=true"),
        (actor.kl_loss_end_coef is None, actor_key, actor, ("kl_loss_schedule_steps",), "kl_loss_end_coef"),
        (
            config.algorithm.adv_estimator != "gigpo",
            "algorithm",
            config.algorithm,
            ("step_advantage_weight",),
            "adv_estimator=gigpo",
        ),
        (
            config.algorithm.adv_estimator != "spiral",
            "algorithm",
            config.algorithm,
            ("baseline_decay",),
            "adv_estimator=spiral",
        ),
        (actor.loss_agg_mode != norm, actor_key, actor, ("loss_scale_factor",), f"loss_agg_mode={norm}"),
        (correction.rollout_rs is None, correction_key, correction, thresholds, "rollout_rs"),
        (
            correction.rollout_rs == "second_moment",
            correction_key,
            correction,
            thresholds[1:],
            "rollout_rs=token, sequence or geometric",
        ),
    )
    for is_idle, key, section, names, needs in sections:
        for name in given_keys(section, names) if is_idle else ():
            yield f"{key}.{name}={getattr(section, name):g} needs {needs} beside it; nothing reads it otherwise"


def _loss_problems(config: TrainConfig, actor: ActorConfig) -> Iterator[str]:
    loss, key = actor.policy_loss, f"{POLICY}.actor.policy_loss"
    yield from registered_problems(config, f"{key}.loss_mode", loss.loss_mode, POLICY_LOSSES)
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield f"{key}.clip_cov_lb={loss.clip_cov_lb:g} must be less than {key}.clip_cov_ub={loss.clip_cov_ub:g}"
    # At 1 or more the ratio's lower bound would be 0 or negative, and clip nothing.
    if loss.loss_mode in ("vanilla", "gspo", "clip_cov") and (actor.clip_ratio_low or 0) >= 1:
        yield (
            f"{POLICY}.actor.clip_ratio_low={actor.clip_ratio_low:g}: loss_mode {loss.loss_mode!r} clips the ratio to "
            "1 - this, so it must be less than 1"
        )


def _frozen_router_problems(policy: ActorRolloutRefConfig) -> Iterator[str]:
    for name in ("expert_bias_update_rate", "router_z_loss_coef"):
        value = getattr(policy.actor, name)
        if value and policy.model.lora.rank:
            yield (
                f"{POLICY}.actor.{name}={value:g} with {POLICY}.model.lora.rank={policy.model.lora.rank}: all but the adapters "
                "is frozen, and the reference has the same routers; leave out one of them"
            )


def _replay_problems(actor: ActorConfig) -> Iterator[str]:
    if actor.router_replay is not None and (actor.megatron.override_transformer_config or {}).get(
        "moe_router_fusion"
    ):
        yield (
            f"{POLICY}.actor.router_replay={actor.router_replay}: routers must be given their choice, and Transformer Engine's kernel makes its "
            f"own; leave {POLICY}.actor.megatron.override_transformer_config.moe_router_fusion=true out"
        )


def _correction_problems(config: TrainConfig) -> Iterator[str]:
    section, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if section.bypass_mode and config.actor_rollout_ref.actor.router_replay == "trainer":
        yield (
            f"{POLICY}.actor.router_replay=trainer with {key}.bypass_mode=true: there is no pass for old log-probs whose experts could "
            "be replayed; choose rollout"
        )
    if section.bypass_mode:
        for name in ("rollout_is", "rollout_rs"):
            if getattr(section, name) is not None:
                yield (
                    f"{key}.{name}={getattr(section, name)!r} with {key}.bypass_mode=true: the old log-probs are then "
                    "the engine's own, and every ratio is 1; leave one of them out"
                )
    upper = section.rollout_rs_threshold or section.rollout_is_threshold
    lower = section.rollout_rs_threshold_lower
    if section.rollout_rs not in (None, "second_moment") and (1 / upper if lower is None else lower) >= upper:
        yield (
            f"{key}: the largest ratio that stays (rollout_rs_threshold, or rollout_is_threshold) is {upper:g}, which "
            f"must be greater than the smallest, {1 / upper if lower is None else lower:g}"
        )


def _loss_scale_problems(role: _Trained) -> Iterator[str]:
    prefix, optim, megatron = role.prefix, role.optim, role.megatron
    if megatron.dtype != "float16":
        for name in given_keys(optim, _LOSS_SCALING):
            yield (
                f"{prefix}optim.{name}={getattr(optim, name):g} is for {prefix}megatron.dtype=float16, which is "
                f"{megatron.dtype or 'null'}: losses are not scaled; leave it out"
            )
    elif optim.min_loss_scale > optim.initial_loss_scale:
        yield (
            f"{prefix}optim.min_loss_scale={optim.min_loss_scale:g} is greater than "
            f"{prefix}optim.initial_loss_scale={optim.initial_loss_scale:g}"
        )


def _full_kl_problems(config: TrainConfig) -> Iterator[str]:
    uses = {
        f"{POLICY}.actor.kl_loss_type": full_kl_in_loss(config),
        "algorithm.kl_penalty": full_kl_in_reward(config),
    }
    for key, used in uses.items():
        policy = config.actor_rollout_ref
        elsewhere = policy.teachers is not None or policy.ref.engine is not None  # checks/teachers.py has it
        if used and not reference_in_actor(config) and not elsewhere:
            yield (
                f"{key}='full' compares whole distributions, so policy and reference must be in the same processes: give "
                f"{POLICY}.ref neither a layout (megatron) nor a resource_pool of its own, or choose low_var_kl"
            )
    reference = config.actor_rollout_ref.actor.megatron
    if any(uses.values()) and reference is not None and reference.fsdp == "optim_grads_params":
        yield (
            f"{POLICY}.actor.megatron.fsdp=optim_grads_params frees the reference's head after its pass, which the exact KL reads "
            "beside the policy's; choose low_var_kl, or fsdp=optim_grads"
        )
    if full_kl_in_reward(config) and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "algorithm.kl_penalty='full' needs the policy's forward pass, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out; choose low_var_kl, or leave bypass_mode out"
        )


def _health_problems(config: TrainConfig) -> Iterator[str]:
    health = config.health
    if not health.enable and (health.early_stop or health.auto_action):
        yield "health.early_stop and health.auto_action need health.enable=true"
    if (
        health.ppo_kl_low is not None
        and health.ppo_kl_high is not None
        and health.ppo_kl_low >= health.ppo_kl_high
    ):
        yield f"health.ppo_kl_low={health.ppo_kl_low:g} must be less than health.ppo_kl_high={health.ppo_kl_high:g}"
    if "stagnation" in health.early_stop and config.trainer.test_freq < 1:
        yield (
            "health.early_stop has stagnation, which is seen by validations: set trainer.test_freq (and data.val_files or "
            "data.val_sets)"
        )


def _checkpointing_problems(role: _Trained) -> Iterator[str]:
    """enable_gradient_checkpointing and recompute_granularity must not contradict each other."""
    granularity, checkpointing = role.megatron.recompute_granularity, role.model.enable_gradient_checkpointing
    if granularity is not None and checkpointing is not None and checkpointing != (granularity == "full"):
        yield (
            f"{role.model_key}.enable_gradient_checkpointing={str(checkpointing).lower()} contradicts "
            f"{role.prefix}megatron.recompute_granularity={granularity}; give one of them"
        )


def _optim_problems(role: _Trained) -> Iterator[str]:
    key, optim = f"{role.prefix}optim", role.optim
    if optim.min_lr > optim.lr:
        yield f"{key}.min_lr={optim.min_lr:g} is greater than {key}.lr={optim.lr:g}"
    if optim.lr_decay_steps is not None and optim.lr_warmup_steps >= optim.lr_decay_steps:
        yield (
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps} must be less than "
            f"{key}.lr_decay_steps={optim.lr_decay_steps}"
        )
    if optim.optimizer_cpu_offload and role.megatron.optimizer_offload is False:
        yield (
            f"{key}.optimizer_cpu_offload=true has the optimizer's states on the host, "
            f"{role.prefix}megatron.optimizer_offload=false on the devices: leave out one of them"
        )


def check_decays(config: TrainConfig | TuningConfig, num_steps: int) -> None:
    """Check schedules whose decay ends with the run, since the data decide its length.

    Args:
        config: resolved and checked.
        num_steps: of the run.

    Raises:
        ValueError: a warm-up leaves no optimizer step for the decay.
    """
    for role in _trained(config):
        optim, key = role.optim, f"{role.prefix}optim"
        if optim.lr_decay_style == "constant" or optim.lr_decay_steps is not None:
            continue
        updates = num_steps
        if isinstance(config, TrainConfig):
            section = config.critic if role.prefix == "critic." else config.actor_rollout_ref.actor
            assert section is not None
            updates = updates_of_run(config, section, num_steps)
        if optim.lr_warmup_steps >= updates:
            raise ValueError(
                f"{key}.lr_warmup_steps={optim.lr_warmup_steps} must be less than the run's {updates} optimizer steps, over whose "
                f"rest {key}.lr_decay_style={optim.lr_decay_style} falls; give fewer, or {key}.lr_decay_steps"
            )


def _muon_problems(role: _Trained) -> Iterator[str]:
    key, optim, megatron = f"{role.prefix}optim", role.optim, role.megatron
    if optim.optimizer != "muon":
        if keys := given_keys(optim.muon):
            yield f"{key}.muon has {', '.join(keys)}, but {key}.optimizer={optim.optimizer}: give muon, or leave these out"
        return
    given = f"{key}.optimizer=muon"
    if find_spec("emerging_optimizers") is None:
        yield (
            f"{given} needs the package emerging-optimizers, which is not installed: pip install --no-deps --ignore-requires-python "
            "emerging-optimizers==0.3.0"
        )
    if megatron.dtype == "float16":
        yield (
            f"{given} goes without {role.prefix}megatron.dtype=float16, whose loss scale Megatron's Muon does not have; give bfloat16"
        )
    if optim.optimizer_cpu_offload:
        yield (
            f"{given} goes without {key}.optimizer_cpu_offload=true: buckets on their way through the device would cut matrices, which "
            f"it updates uncut; give {role.prefix}megatron.optimizer_offload=true, where engines share the devices"
        )
    if megatron.fsdp is not None:
        yield (
            f"{given} goes without {role.prefix}megatron.fsdp={megatron.fsdp}, which cuts matrices among data parallel ranks; leave fsdp "
            "out: use_distributed_optimizer gives each of these ranks some matrices"
        )
    if role.model.lora.rank:
        yield (
            f"{given} goes without {role.model_key}.lora.rank={role.model.lora.rank}: an orthogonal step of A and one of B are not one of "
            "their product; give adam, or no adapters"
        )


def _fsdp_problems(role: _Trained) -> Iterator[str]:
    if role.megatron.fsdp is None:
        return
    given = f"{role.prefix}megatron.fsdp={role.megatron.fsdp}"
    if role.model.lora.rank:
        yield (
            f"{given} goes without {role.model_key}.lora.rank={role.model.lora.rank}: adapters are small, and frozen weights next to "
            "them are read as they are; leave out one of them"
        )
    if role.optim.optimizer_cpu_offload:
        yield (
            f"{given} goes without {role.prefix}optim.optimizer_cpu_offload=true: states on the host pass through the device by "
            f"Megatron's own optimizer; leave out one of them, or give {role.prefix}megatron.optimizer_offload=true"
        )


def _prediction_problems(role: _Trained, model: TrainedModelConfig) -> Iterator[str]:
    """Problems of model.mtp=train, whatever the model's files."""
    key = f"{role.model_key}.mtp"
    if model.mtp != "train":
        for name in given_keys(model, ("mtp_loss_coef", "mtp_detached")):
            yield f"{role.model_key}.{name} is of {key}=train, which is {model.mtp}; leave it out"
        return
    if model.lora.rank:
        yield (
            f"{key}=train goes without {role.model_key}.lora.rank={model.lora.rank}: multi-token prediction layers have no adapters, and "
            "frozen ones stay as they are; give keep, or no adapters"
        )
    if role.megatron.fsdp is not None:
        yield (
            f"{key}=train goes without {role.prefix}megatron.fsdp={role.megatron.fsdp}: the units of Megatron-FSDP are the model's own "
            "layers; leave out one of them"
        )


def _indexer_problems(role: _Trained, model: TrainedModelConfig) -> Iterator[str]:
    """Problems of model.indexer=train, whatever the model's files."""
    key = f"{role.model_key}.indexer"
    if model.indexer != "train":
        for name in given_keys(model, ("indexer_loss_coef",)):
            yield f"{role.model_key}.{name} is of {key}=train, which is {model.indexer}; leave it out"
        return
    if model.lora.rank:
        yield (
            f"{key}=train goes without {role.model_key}.lora.rank={model.lora.rank}: indexers have no adapters, and adapters alone are trained, saved and "
            "served; leave out one of them"
        )
    if role.megatron.fsdp is not None:
        yield (
            f"{key}=train goes without {role.prefix}megatron.fsdp={role.megatron.fsdp}: indexers read their weights outside the layers that "
            "Megatron-FSDP gathers; leave out one of them"
        )
    if role.optim.optimizer == "muon":
        yield (
            f"{key}=train goes without {role.prefix}optim.optimizer=muon, which makes steps of matrices orthogonal: nobody has tried it with "
            "indexers; give adam, or leave it out"
        )


# Keys of megatron that a critic on the actor's base may have of its own.
_OWN = ("seed", "grad_offload", "optimizer_offload")


def _lora_problems(key: str, lora: LoraConfig) -> Iterator[str]:
    if lora.rank == 0:
        if given := given_keys(lora):
            yield f"{key} has {', '.join(given)}, but no adapters: give {key}.rank, or leave these out"
        return
    if not lora.target_modules:
        yield f"{key}.target_modules is empty; leave it out for all-linear, or {key}.rank for no adapters"
    if lora.base_dtype is None and given_keys(lora, ("base_block",)):
        yield f"{key}.base_block={lora.base_block}, but {key}.base_dtype is null: give float8, or leave it out"
    path = lora.adapter_path
    if path is not None and not (Path(path) / "adapter_config.json").is_file():
        yield (
            f"{key}.adapter_path={path!r} is no folder of an adapter in PEFT's format: it has no adapter_config.json "
            f"(working directory {Path.cwd()})"
        )


def _shared_base_problems(config: TrainConfig, critic: CriticConfig) -> Iterator[str]:
    """A critic on the actor's base has nothing of its own but adapters, value head and training."""
    policy, key = config.actor_rollout_ref, "critic.model.share_base=true"
    for section, lora in ((f"{POLICY}.model", policy.model.lora), ("critic.model", critic.model.lora)):
        if lora.rank == 0:
            yield f"{key} needs {section}.lora.rank: the base that two models share is frozen, and adapters are trained on it"
    own, base = critic.model.lora, policy.model.lora
    if own.base_dtype is not None and (own.base_dtype, own.base_block) != (base.base_dtype, base.base_block):
        yield f"{key}, but critic.model.lora.base_dtype is given: it is {POLICY}.model.lora's; leave it out"
    if critic.model.path != policy.model.path:
        yield (
            f"{key}, but critic.model.path={critic.model.path!r} is not {POLICY}.model.path={policy.model.path!r}; leave "
            "one of them out"
        )
    if critic.resource_pool != policy.actor.resource_pool:
        yield (
            f"{key}, but critic.resource_pool={critic.resource_pool!r} is not the actor's "
            f"({policy.actor.resource_pool!r}); leave one of them out"
        )
    actors, critics = policy.actor.megatron, critic.megatron
    assert critics is not None, "resolved"
    other = [
        f"{member.name}={getattr(critics, member.name)} (the actor's: {getattr(actors, member.name)})"
        for member in fields(MegatronConfig)
        if member.name not in _OWN and getattr(critics, member.name) != getattr(actors, member.name)
    ]
    if other:
        yield f"{key}, but critic.megatron has {', '.join(other)}: the model has one layout; leave critic.megatron out"
