"""The batch arithmetic of a run, computed once: how many prompts, trajectories and sequences go where.

Everything here is for a configuration that `check_config` accepts; every division is then exact unless it says
"at most".
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import overload

from megarl.config.dpo_sections import DPOConfig
from megarl.config.resolve import GLOBAL_POOL, needs_reference, pool_devices, reference_in_actor, resolve
from megarl.config.reward_sections import RewardModelConfig
from megarl.config.rm_sections import RMConfig
from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    MegatronConfig,
    PoolConfig,
    RefConfig,
    TrainConfig,
)
from megarl.config.tuning_sections import TuningConfig
from megarl.files import whole_file


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
    reward_model: RolePlan | None = None  # None: the run has none
    reward_model_micro_batch: str | None = None  # "2048 tokens" or "8 trajectories", at most


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
    """The arithmetic of a configuration, resolved or not; see the module."""
    config = resolve(config)
    return _train_plan(config) if isinstance(config, TrainConfig) else _tuning_plan(config)


def batch_table(plan: BatchPlan | TuningBatchPlan) -> list[tuple[str, ...]]:
    """The plan as rows of equal length to print: first the header, then a quantity and its value for each role."""
    if isinstance(plan, TuningBatchPlan):
        columns = {"model": (plan.model, plan.update)}
        rows = [*_role_rows(columns), *_update_rows(columns, plan.noun)]
        return [("", "model"), ("longest example, tokens", str(plan.max_tokens_per_example)), *rows]
    columns = {"actor": (plan.actor, plan.actor_update)}
    if plan.critic is not None:
        columns["critic"] = (plan.critic, plan.critic_update)
    if plan.ref is not None:
        columns["reference"] = (plan.ref, None)
    engines = plan.rollout
    step = (
        ("prompts a step", plan.prompts_per_step),
        ("responses a prompt", plan.responses_per_prompt),
        ("trajectories a step", plan.trajectories_per_step),
        ("longest trajectory, tokens", plan.max_tokens_per_trajectory),
    )
    evaluated = {}
    if plan.ref is not None:
        tokens, sequences = plan.ref_micro_batch_tokens, plan.ref_micro_batch_sequences
        evaluated["reference"] = f"{sequences} trajectories" if tokens is None else f"{tokens} tokens"
    if plan.reward_model is not None:
        columns["reward model"] = (plan.reward_model, None)
        evaluated["reward model"] = plan.reward_model_micro_batch
    trained = [(*row, "") for row in _update_rows(columns, "trajectories")]
    micro_batch = zip(("", *columns, ""), trained[-1], strict=True)
    trained[-1] = tuple(evaluated.get(column, cell) for column, cell in micro_batch)
    return [
        ("", *columns, "rollout"),
        *((name, *("" for _ in columns), str(value)) for name, value in step),
        *((*row, cell) for row, cell in zip(_role_rows(columns), _rollout_cells(engines), strict=True)),
        *trained,
        ("trajectories an engine, at most", *("" for _ in columns), str(engines.trajectories_per_engine)),
    ]


def save_batch_plan(plan: BatchPlan | TuningBatchPlan, folder: str | Path) -> Path:
    """Write `batch_plan.json` into a run folder; the file is there whole or not at all."""
    path = Path(folder) / "batch_plan.json"
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")
    return path


def _train_plan(config: TrainConfig) -> BatchPlan:
    policy, critic = config.actor_rollout_ref, config.critic
    actor, ref, rollout = policy.actor, policy.ref, policy.rollout
    trajectories = config.data.train_batch_size * rollout.n
    actor_role = _role(actor, config.resource_pools)
    critic_role = None if critic is None else _role(critic, config.resource_pools)
    with_ref, reward = needs_reference(config), config.reward_model
    assert rollout.resource_pool is not None and rollout.num_engines is not None, "resolved"
    return BatchPlan(
        devices=sum(pool.nnodes * pool.n_gpus_per_node for pool in (config.resource_pools or {}).values()),
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
        reward_model=_role(reward, config.resource_pools) if reward.enable else None,
        reward_model_micro_batch=_micro_batch_size(
            reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu, "trajectories"
        )
        if reward.enable
        else None,
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
        noun="rankings" if isinstance(config, RMConfig | DPOConfig) else "examples",
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
    mini, epochs = section.ppo_mini_batch_size, section.ppo_epochs
    assert mini is not None and epochs is not None, "resolved"
    mini_batches, sequences = config.data.train_batch_size // mini, mini * config.actor_rollout_ref.rollout.n
    return UpdatePlan(
        mini_batches_per_epoch=mini_batches,
        epochs=epochs,
        updates_per_step=mini_batches * epochs,
        sequences_per_mini_batch=sequences,
        sequences_per_dp_rank=sequences // role.dp,
        micro_batch_tokens=section.ppo_max_token_len_per_gpu,
        micro_batch_sequences=section.ppo_micro_batch_size_per_gpu,
    )


_Columns = dict[str, tuple[RolePlan, UpdatePlan | None]]


def _role_rows(columns: _Columns) -> list[tuple[str, ...]]:
    roles = [role for role, _ in columns.values()]
    return [
        ("resource pool", *(role.pool for role in roles)),
        ("devices", *(str(role.world) for role in roles)),
        ("layout", *(_layout(role) for role in roles)),
    ]


def _rollout_cells(rollout: RolloutPlan) -> tuple[str, str, str]:
    experts = f" (ep{rollout.ep})" if rollout.ep > 1 else ""
    return rollout.pool, str(rollout.devices), f"{rollout.engines} engines x tp{rollout.tp}{experts}"


def _layout(role: RolePlan) -> str:
    chunks = f" (vpp{role.vpp})" if role.vpp > 1 else ""
    experts = [f"{name}{size}" for name, size in (("ep", role.ep), ("etp", role.etp)) if size > 1]
    shared = f" ({' '.join(experts)})" if experts else ""
    return f"tp{role.tp} x pp{role.pp}{chunks} x cp{role.cp} x dp{role.dp}{shared}"


def _update_rows(columns: _Columns, noun: str) -> list[tuple[str, ...]]:
    updates = [update for _, update in columns.values()]

    def row(name: str, value: Callable[[UpdatePlan], object]) -> tuple[str, ...]:
        return (name, *("" if update is None else str(value(update)) for update in updates))

    return [
        row("mini-batches an epoch", lambda update: update.mini_batches_per_epoch),
        row("epochs a step", lambda update: update.epochs),
        row("optimizer steps a step", lambda update: update.updates_per_step),
        row(f"{noun} a mini-batch", lambda update: update.sequences_per_mini_batch),
        row(f"{noun} a mini-batch and dp rank", lambda update: update.sequences_per_dp_rank),
        row("micro-batch, at most", lambda update: _micro_batch(update, noun)),
    ]


def _micro_batch(update: UpdatePlan, noun: str) -> str:
    return _micro_batch_size(update.micro_batch_tokens, update.micro_batch_sequences, noun)


def _micro_batch_size(tokens: int | None, sequences: int | None, noun: str) -> str:
    return f"{tokens} tokens" if tokens is not None else f"{sequences} {noun}"
