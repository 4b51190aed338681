"""The batch arithmetic of a run, computed once: how many prompts, trajectories and sequences go where.

Everything here is for a configuration that `check_config` accepts; every division is then exact unless it says
"at most".
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import overload

from megarl.config.resolve import (
    GLOBAL_POOL,
    TEACHER,
    eval_rollout,
    pool_devices,
    reference_in_actor,
    references,
    served_references,
    validates_concurrently,
)
from megarl.config.schema.commands import (
    ActorConfig,
    CriticConfig,
    MegatronConfig,
    PoolConfig,
    RefConfig,
    RolloutConfig,
    TrainConfig,
)
from megarl.config.schema.rewards import RewardModelConfig
from megarl.config.schema.supervised import TuningConfig, learns_rankings
from megarl.util.files import write_text


@dataclass(frozen=True)
class RolePlan:
    """The devices of one Megatron model: world = tp * pp * cp * dp of `pool`.

    A stage's experts are shared by groups of ep * etp of its devices.
    """

    pool: str
    world: int
    tp: int
    pp: int
    vpp: int  # model chunks a stage; 1: no interleaved schedule
    cp: int
    dp: int
    ep: int = 1
    etp: int = 1


@dataclass(frozen=True)
class UpdatePlan:
    """How a trained role goes through a step's sequences (trajectories, or examples)."""

    mini_batches_per_epoch: int
    epochs: int
    updates_per_step: int  # optimizer steps
    sequences_per_mini_batch: int  # over all ranks
    sequences_per_dp_rank: int  # of a mini-batch
    micro_batch_tokens: int | None  # at most; exactly one of this and the next is not None
    micro_batch_sequences: int | None  # at most


@dataclass(frozen=True)
class RolloutPlan:
    """The engines."""

    pool: str
    engines: int
    tp: int
    devices: int
    trajectories_per_engine: int  # a step, at most, if they are spread evenly
    max_num_seqs: int
    ep: int = 1  # of tp: groups of devices that share the experts


@dataclass(frozen=True)
class EnginesPlan:
    """Engines that generate no trajectories to train on."""

    pool: str
    engines: int
    tp: int
    devices: int
    ep: int = 1


@dataclass(frozen=True)
class BatchPlan:
    """`megarl train`: a step generates, and trains on, `trajectories_per_step` trajectories."""

    devices: int  # of all pools
    prompts_per_step: int
    responses_per_prompt: int
    trajectories_per_step: int
    max_tokens_per_trajectory: int
    actor: RolePlan
    actor_update: UpdatePlan
    critic: RolePlan | None
    critic_update: UpdatePlan | None
    ref: RolePlan | None  # None: the run has no reference policy
    ref_in_actor: bool  # it lives in the actor's processes
    ref_micro_batch_tokens: int | None  # at most; with a reference one of this and the next is not None
    ref_micro_batch_sequences: int | None
    rollout: RolloutPlan
    teachers: dict[str, RolePlan] = field(default_factory=dict)  # several, in place of the reference, by name
    reward_model: RolePlan | None = None  # None: the run has none
    reward_model_micro_batch: str | None = None  # "2048 tokens" or "8 trajectories", at most
    eval_engines: EnginesPlan | None = None  # of concurrent validation; None: there are none
    judging_engines: dict[str, EnginesPlan] = field(default_factory=dict)  # by the role of the reference


@dataclass(frozen=True)
class TuningBatchPlan:
    """`megarl sft`, `megarl rm`: a step is one mini-batch of examples (rankings, each of several texts)."""

    devices: int
    max_tokens_per_example: int  # of one text
    model: RolePlan
    update: UpdatePlan
    noun: str = "examples"


@overload
def resolve_batches(config: TrainConfig) -> BatchPlan: ...
@overload
def resolve_batches(config: TuningConfig) -> TuningBatchPlan: ...
def resolve_batches(config: TrainConfig | TuningConfig) -> BatchPlan | TuningBatchPlan:
    """The batch plan of a resolved configuration."""
    return _train_plan(config) if isinstance(config, TrainConfig) else _tuning_plan(config)


def answered_prompts(config: TrainConfig) -> int:
    """The mean number of prompts a step that the engines answer, rounded up, at least 1: all but prompts with given responses."""
    data = config.data
    share = 1.0 if data.given_response_key is None else data.on_policy_share
    return max(1, math.ceil(data.train_batch_size * share))


def trajectories_per_step(config: TrainConfig) -> int:
    """Trajectories that a step trains on, over all ranks."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def trajectories_per_mini_batch(config: TrainConfig, section: ActorConfig | CriticConfig) -> int:
    """Trajectories of one optimizer step of the actor or the critic (`section`, resolved), over all ranks."""
    assert section.ppo_mini_batch_size is not None, "resolved"
    return section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n


def updates_per_step(config: TrainConfig, section: ActorConfig | CriticConfig) -> int:
    """Optimizer steps in which the actor or the critic (`section`, resolved) learns from a step's trajectories."""
    assert section.ppo_mini_batch_size is not None and section.ppo_epochs is not None, "resolved"
    return config.data.train_batch_size // section.ppo_mini_batch_size * section.ppo_epochs


def updates_of_run(config: TrainConfig, section: ActorConfig | CriticConfig, num_steps: int) -> int:
    """Optimizer steps of the actor or the critic (`section`, resolved) in a run of `num_steps` steps, at least 1; the actor has none in the
    critic's warm-up."""
    if isinstance(section, ActorConfig) and config.critic is not None:
        num_steps -= config.critic.warmup_steps
    return max(1, num_steps) * updates_per_step(config, section)


def batch_table(plan: BatchPlan | TuningBatchPlan) -> list[tuple[str, ...]]:
    """Roles, their devices, layouts, optimizer steps of a step and sizes, as rows of equal length to print; the first is the
    header."""
    rows: list[tuple[str, ...]]
    if isinstance(plan, TuningBatchPlan):
        noun, rows = plan.noun, [("model", *_role_cells(plan.model), *_update_cells(plan.update, plan.noun))]
    else:
        noun, rows = "trajectories", _train_rows(plan)
    rows.insert(0, ("", "pool", "devices", "layout", f"updates x {noun}", "micro-batch"))
    one_pool = len({row[1] for row in rows[1:]}) == 1
    return [(row[0], *row[2:]) for row in rows] if one_pool else rows


def batch_summary(plan: BatchPlan | TuningBatchPlan) -> str:
    """The contents of a step, such as "128 prompts x 4 responses = 512 trajectories of at most 1024 tokens"."""
    if isinstance(plan, TuningBatchPlan):
        text = "" if plan.noun == "examples" else ", each text"
        return f"{plan.update.sequences_per_mini_batch} {plan.noun}{text} of at most {plan.max_tokens_per_example} tokens"
    responses = "1 response" if plan.responses_per_prompt == 1 else f"{plan.responses_per_prompt} responses"
    return (
        f"{plan.prompts_per_step} prompts x {responses} = {plan.trajectories_per_step} trajectories of at most "
        f"{plan.max_tokens_per_trajectory} tokens"
    )


def _train_rows(plan: BatchPlan) -> list[tuple[str, ...]]:
    noun, engines = "trajectories", plan.rollout
    rows: list[tuple[str, ...]] = [
        ("actor", *_role_cells(plan.actor), *_update_cells(plan.actor_update, noun))
    ]
    if plan.critic is not None and plan.critic_update is not None:
        rows.append(("critic", *_role_cells(plan.critic), *_update_cells(plan.critic_update, noun)))
    if plan.ref is not None:
        size = _micro_batch_size(plan.ref_micro_batch_tokens, plan.ref_micro_batch_sequences, noun)
        rows.append(("reference", *_role_cells(plan.ref), "", f"max {size}"))
    rows += [(f"teacher {name}", *_role_cells(role), "", "") for name, role in plan.teachers.items()]
    for role, served in plan.judging_engines.items():
        name = "reference" if role == "ref" else f"teacher {role.removeprefix(TEACHER)}"
        rows.append((name, served.pool, str(served.devices), _layout_cell(served), "", ""))
    if plan.reward_model is not None:
        size = f"max {plan.reward_model_micro_batch}"
        rows.append(("reward model", *_role_cells(plan.reward_model), "", size))
    most = f"max {engines.trajectories_per_engine} an engine"
    rows.append(("rollout", engines.pool, str(engines.devices), _layout_cell(engines), most, ""))
    if (own := plan.eval_engines) is not None:
        rows.append(("validation", own.pool, str(own.devices), _layout_cell(own), "", ""))
    return rows


def _layout_cell(engines: RolloutPlan | EnginesPlan) -> str:
    experts = f" (ep{engines.ep})" if engines.ep > 1 else ""
    return f"{engines.engines} {'engine' if engines.engines == 1 else 'engines'} x tp{engines.tp}{experts}"


def save_batch_plan(plan: BatchPlan | TuningBatchPlan, folder: str | Path) -> Path:
    """Write `batch_plan.json` into a run folder; the file is complete or absent."""
    path = Path(folder) / "batch_plan.json"
    write_text(path, json.dumps(asdict(plan), indent=2) + "\n")
    return path


def _train_plan(config: TrainConfig) -> BatchPlan:
    policy, critic = config.actor_rollout_ref, config.critic
    actor, ref, rollout = policy.actor, policy.ref, policy.rollout
    trajectories = trajectories_per_step(config)
    actor_role = _role(actor, config.resource_pools)
    critic_role = None if critic is None else _role(critic, config.resource_pools)
    judges, reward = references(config), config.reward_model
    with_ref = "ref" in judges
    assert rollout.resource_pool is not None and rollout.num_engines is not None, "resolved"
    return BatchPlan(
        devices=sum(pool.num_devices for pool in (config.resource_pools or {}).values()),
        prompts_per_step=config.data.train_batch_size,
        responses_per_prompt=rollout.n,
        trajectories_per_step=trajectories,
        max_tokens_per_trajectory=config.data.max_prompt_length + config.data.max_response_length,
        actor=actor_role,
        actor_update=_update(actor, actor_role, config),
        critic=critic_role,
        critic_update=None if critic is None or critic_role is None else _update(critic, critic_role, config),
        ref=_role(ref, config.resource_pools) if with_ref else None,
        ref_in_actor=with_ref and reference_in_actor(config),
        ref_micro_batch_tokens=ref.log_prob_max_token_len_per_gpu if with_ref else None,
        ref_micro_batch_sequences=ref.log_prob_micro_batch_size_per_gpu if with_ref else None,
        rollout=RolloutPlan(
            pool=rollout.resource_pool,
            engines=rollout.num_engines,
            tp=rollout.tensor_model_parallel_size,
            devices=rollout.num_engines * rollout.tensor_model_parallel_size,
            trajectories_per_engine=-(-trajectories // rollout.num_engines),
            max_num_seqs=rollout.max_num_seqs,
            ep=rollout.expert_parallel_size,
        ),
        teachers={
            role.removeprefix(TEACHER): _role(section, config.resource_pools)
            for role, section in judges.items()
            if role != "ref"
        },
        reward_model=_role(reward, config.resource_pools) if reward.enable else None,
        reward_model_micro_batch=_micro_batch_size(
            reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu, "trajectories"
        )
        if reward.enable
        else None,
        eval_engines=_engines(eval_rollout(config)) if validates_concurrently(config) else None,
        judging_engines={role: _engines(engines) for role, engines in served_references(config).items()},
    )


def _engines(rollout: RolloutConfig) -> EnginesPlan:
    assert rollout.resource_pool is not None and rollout.num_engines is not None, "resolved"
    tp = rollout.tensor_model_parallel_size
    return EnginesPlan(
        rollout.resource_pool, rollout.num_engines, tp, rollout.num_engines * tp, rollout.expert_parallel_size
    )


def _tuning_plan(config: TuningConfig) -> TuningBatchPlan:
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    role = _role_on(config.megatron, GLOBAL_POOL, devices)
    examples = config.data.train_batch_size
    return TuningBatchPlan(
        devices=devices,
        max_tokens_per_example=config.data.max_length,
        model=role,
        update=UpdatePlan(1, 1, 1, examples, examples // role.dp, config.max_token_len_per_gpu, None),
        noun="rankings" if learns_rankings(config) else "examples",
    )


def _role(
    section: ActorConfig | CriticConfig | RefConfig | RewardModelConfig, pools: dict[str, PoolConfig] | None
) -> RolePlan:
    devices = pool_devices(pools, section.resource_pool)
    assert devices is not None and section.resource_pool is not None and section.megatron is not None, (
        "resolved"
    )
    return _role_on(section.megatron, section.resource_pool, devices)


def _role_on(megatron: MegatronConfig, pool: str, world: int) -> RolePlan:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp, vpp = megatron.context_parallel_size, megatron.virtual_pipeline_model_parallel_size
    return RolePlan(
        pool=pool,
        world=world,
        tp=tp,
        pp=pp,
        vpp=vpp or 1,
        cp=cp,
        dp=world // (tp * pp * cp),
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size,
    )


def _update(section: ActorConfig | CriticConfig, role: RolePlan, config: TrainConfig) -> UpdatePlan:
    epochs, sequences = section.ppo_epochs, trajectories_per_mini_batch(config, section)
    assert epochs is not None, "resolved"
    return UpdatePlan(
        mini_batches_per_epoch=updates_per_step(config, section) // epochs,
        epochs=epochs,
        updates_per_step=updates_per_step(config, section),
        sequences_per_mini_batch=sequences,
        sequences_per_dp_rank=sequences // role.dp,
        micro_batch_tokens=section.ppo_max_token_len_per_gpu,
        micro_batch_sequences=section.ppo_micro_batch_size_per_gpu,
    )


def _role_cells(role: RolePlan) -> tuple[str, str, str]:
    chunks = f" (vpp{role.vpp})" if role.vpp > 1 else ""
    experts = [f"{name}{size}" for name, size in (("ep", role.ep), ("etp", role.etp)) if size > 1]
    shared = f" ({' '.join(experts)})" if experts else ""
    layout = f"tp{role.tp} x pp{role.pp}{chunks} x cp{role.cp} x dp{role.dp}{shared}"
    return role.pool, str(role.world), layout


def _update_cells(update: UpdatePlan, noun: str) -> tuple[str, str]:
    epochs = "" if update.epochs == 1 else f"{update.epochs} epochs x "
    steps = f"{epochs}{update.mini_batches_per_epoch} x {update.sequences_per_mini_batch}"
    size = _micro_batch_size(update.micro_batch_tokens, update.micro_batch_sequences, noun)
    return f"{steps} ({update.sequences_per_dp_rank} a dp rank)", f"max {size}"


def _micro_batch_size(tokens: int | None, sequences: int | None, noun: str) -> str:
    return f"{tokens} tokens" if tokens is not None else f"{sequences} {noun}"
