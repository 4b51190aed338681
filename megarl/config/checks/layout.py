"""Checks of devices and batches: pools, parallel layouts, sizes that must divide each other.

Values that are out of range by themselves are reported elsewhere; here they only must not break the arithmetic,
so a check whose operands are no positive numbers is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megarl.config.checks.rollout import attention_problems
from megarl.config.engine_options import engine_option_problems
from megarl.config.megatron_options import megatron_option_problems
from megarl.config.pipeline_layout import pipeline_layout_problems
from megarl.config.problems import did_you_mean
from megarl.config.resolve import (
    ENGINE_ROOM,
    GLOBAL_POOL,
    eval_rollout,
    megatron_sections,
    micro_batch_size,
    pool_devices,
    reference_key,
    references,
    served_references,
    validates_concurrently,
)
from megarl.config.schema.commands import (
    POLICY,
    ActorConfig,
    CriticConfig,
    EvalConfig,
    MegatronConfig,
    TrainConfig,
    rollout_section,
)
from megarl.config.schema.rollout import RolloutConfig
from megarl.config.schema.run import PoolConfig
from megarl.config.schema.supervised import TuningConfig

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")


def pool_problems(config: TrainConfig, written: TrainConfig) -> Iterator[str]:
    """Of a resolved configuration: the pool of each role exists, each pool is used, all fit.

    Args:
        written: the configuration before it was resolved: a pool that a role takes from the actor is reported for the actor.
    """
    pools, trainer, policy = config.resource_pools or {}, config.trainer, written.actor_rollout_ref
    if not pools:
        yield "resource_pools is empty; name at least one pool, or leave it out for one of all devices"
        return
    given: dict[str, str | None] = {
        f"{POLICY}.actor": policy.actor.resource_pool,
        f"{POLICY}.ref": policy.ref.resource_pool,
        f"{POLICY}.rollout": policy.rollout.resource_pool,
    }
    given |= {f"{POLICY}.teachers.{one}": own.resource_pool for one, own in (policy.teachers or {}).items()}
    if written.critic is not None:
        given["critic"] = written.critic.resource_pool
    if written.reward_model.enable:
        given["reward_model"] = written.reward_model.resource_pool
    actor_pool, of_eval = config.actor_rollout_ref.actor.resource_pool, trainer.eval_resource_pool
    for role, name in given.items():
        if name is not None and name not in pools:
            hint = did_you_mean(name, pools)
            yield f"{role}.resource_pool={name!r} is unknown; resource_pools has {', '.join(pools)}{hint}"
    if actor_pool is None:
        yield (
            f"{POLICY}.actor.resource_pool is required where resource_pools has several and none is named "
            f"{GLOBAL_POOL}: one of {', '.join(pools)}"
        )
    for name in pools:
        if actor_pool is not None and name not in (actor_pool, of_eval, *given.values()):
            yield f"resource_pools.{name} is used by no role; name it as a resource_pool or leave it out"
    for name, pool in pools.items():
        for size in ("nnodes", "n_gpus_per_node"):
            if getattr(pool, size) > getattr(trainer, size):
                yield (
                    f"resource_pools.{name}.{size}={getattr(pool, size)} is more than "
                    f"trainer.{size}={getattr(trainer, size)}"
                )
    total = sum(pool.num_devices for pool in pools.values())
    there = trainer.nnodes * trainer.n_gpus_per_node
    if total > there:
        yield (
            f"resource_pools have {total} devices together, more than trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} = {there}"
        )


@dataclass(frozen=True)
class _Role:
    key: str  # "" for the only model of a command
    megatron: MegatronConfig
    pool: str | None
    devices: int | None  # None: there is no such pool

    @property
    def megatron_key(self) -> str:
        return f"{self.key}.megatron" if self.key else "megatron"

    @property
    def num_shards(self) -> int:
        """tp * pp * cp."""
        return prod(getattr(self.megatron, name) for name in _SIZES)

    @property
    def dp(self) -> int | None:
        """Data parallel size; None where the layout does not fit the devices."""
        if self.devices is None or min(getattr(self.megatron, name) for name in _SIZES) < 1:
            return None
        return None if self.devices % self.num_shards else self.devices // self.num_shards


def _roles(config: TrainConfig | TuningConfig) -> list[_Role]:
    """The Megatron models of a resolved configuration, the actor first; the reference if there is one."""
    if isinstance(config, TuningConfig):
        return [
            _Role("", config.megatron, GLOBAL_POOL, config.trainer.nnodes * config.trainer.n_gpus_per_node)
        ]
    roles = []
    for key, section in megatron_sections(config).items():
        assert section.megatron is not None, "resolved"
        devices = pool_devices(config.resource_pools, section.resource_pool)
        roles.append(_Role(key, section.megatron, section.resource_pool, devices))
    return roles


def split_sequences(config: TrainConfig | TuningConfig) -> list[str]:
    """The keys, with their values, by which models of a resolved configuration have context parallelism."""
    return list(
        dict.fromkeys(
            f"{role.megatron_key}.context_parallel_size={role.megatron.context_parallel_size}"
            for role in _roles(config)
            if role.megatron.context_parallel_size > 1
        )
    )


def layout_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Of a resolved configuration: every role's layout fits itself and the devices of its pool."""
    first, *others = _roles(config)
    for role in (first, *others):
        # A layout that is the actor's is the actor's problem.
        if role is first or role.megatron != first.megatron:
            yield from _megatron_problems(role.megatron_key, role.megatron)
        if role is first or (role.megatron, role.pool) != (first.megatron, first.pool):
            yield from _division_problems(role)


def _division_problems(role: _Role) -> Iterator[str]:
    yield from _expert_division_problems(role)
    if role.devices is None or role.num_shards < 1 or role.devices % role.num_shards == 0:
        return
    product = " x ".join(f"{name}={getattr(role.megatron, name)}" for name in _SIZES)
    possible = ",".join(str(number) for number in range(1, role.devices + 1) if role.devices % number == 0)
    yield (
        f"{role.megatron_key}: {product} needs {role.num_shards} devices, which does not divide the {role.devices} "
        f"devices of resource pool {role.pool!r}; possible products: {possible}"
    )


def _expert_division_problems(role: _Role) -> Iterator[str]:
    """Experts have groups of their own, which must divide the devices, but not the groups of other weights."""
    sizes = [getattr(role.megatron, name) for name in _EXPERT_SIZES]
    devices = role.devices
    if devices is None or prod(sizes[:2]) == 1 or min(sizes) < 1 or devices % prod(sizes) == 0:
        return
    product = " x ".join(f"{name}={size}" for name, size in zip(_EXPERT_SIZES, sizes, strict=True))
    yield (
        f"{role.megatron_key}: {product} needs {prod(sizes)} devices, which does not divide the {devices} devices "
        f"of resource pool {role.pool!r}"
    )


def _megatron_problems(key: str, megatron: MegatronConfig) -> Iterator[str]:
    yield from megatron_option_problems(key, megatron)
    yield from pipeline_layout_problems(key, megatron)
    yield from _overlap_problems(key, megatron)
    if megatron.recompute_modules is not None and megatron.recompute_granularity != "selective":
        yield (
            f"{key}.recompute_modules={list(megatron.recompute_modules)} are of {key}.recompute_granularity=selective, which is "
            f"{megatron.recompute_granularity or 'null'}; set that, or leave them out"
        )
    pp, vpp = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size
    if vpp is not None and pp == 1:
        yield (
            f"{key}.virtual_pipeline_model_parallel_size={vpp} needs {key}.pipeline_model_parallel_size of at least "
            "2; leave it out (null) without pipeline parallelism"
        )
    yield from _fsdp_problems(key, megatron)
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(megatron, name) is not None and pp == 1:
            yield f"{key}.{name}={getattr(megatron, name)} needs {key}.pipeline_model_parallel_size of at least 2"
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield (
            f"{key}.sequence_parallel=true needs {key}.tensor_model_parallel_size of at least 2; leave it out "
            "(null: true where that is over 1)"
        )


def _overlap_problems(key: str, megatron: MegatronConfig) -> Iterator[str]:
    if not megatron.overlap_param_gather:
        return
    if not megatron.use_distributed_optimizer:
        yield f"{key}.overlap_param_gather=true needs {key}.use_distributed_optimizer=true: else no rank has weights to gather"
    if megatron.overlap_grad_reduce is False:
        yield f"{key}.overlap_param_gather=true needs {key}.overlap_grad_reduce=true"


def _fsdp_problems(key: str, megatron: MegatronConfig) -> Iterator[str]:
    if megatron.fsdp is None:
        return
    given = f"{key}.fsdp={megatron.fsdp}"
    for name, why in (
        (
            "pipeline_model_parallel_size",
            "Megatron-FSDP (megatron-core 0.19.2) makes its mesh of all ranks without pipeline stages",
        ),
        ("expert_model_parallel_size", "experts over several ranks have not been tried with it"),
        ("expert_tensor_parallel_size", "experts over several ranks have not been tried with it"),
    ):
        if getattr(megatron, name) > 1:
            yield f"{given} goes without {key}.{name}={getattr(megatron, name)}: {why}; set that to 1, or leave fsdp out"
    if not megatron.use_distributed_optimizer:
        yield f"{given} shares out optimizer states, {key}.use_distributed_optimizer=false does not; leave out one of them"
    if megatron.dtype == "float16":
        yield (
            f"{given} goes without {key}.dtype=float16: Megatron-FSDP has no gradient where a rank has no part of a weight, "
            "which scaled losses need; use bfloat16"
        )


def update_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Of a resolved configuration: batches divide into mini-batches and over ranks, budgets hold a sequence."""
    roles = {role.key: role for role in _roles(config)}
    if isinstance(config, TuningConfig):
        size, tokens, longest = (
            config.data.train_batch_size,
            config.max_token_len_per_gpu,
            config.data.max_length,
        )
        yield from _share_problems(f"data.train_batch_size={size}", size, roles[""])
        assert tokens is not None, "resolved"
        if tokens < longest:
            yield f"max_token_len_per_gpu={tokens} is less than data.max_length={longest}: a long example would not fit"
        return
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    actor = config.actor_rollout_ref.actor
    yield from _mini_batch_problems(actor.ppo_mini_batch_size, config, roles[f"{POLICY}.actor"])
    yield from _micro_batch_problems(f"{POLICY}.actor", actor, config)
    for role in roles.values() if actor.share_prompts else ():
        if role.key != "reward_model" and role.megatron.context_parallel_size > 1:
            yield (
                f"{POLICY}.actor.share_prompts=true: prompts cannot be shared with {role.megatron_key}.context_parallel_size="
                f"{role.megatron.context_parallel_size}; set it to false"
            )
    if config.data.ptx is not None:
        texts, tokens = config.data.ptx, actor.ppo_max_token_len_per_gpu
        yield from _share_problems(
            f"data.ptx.batch_size={texts.batch_size}", texts.batch_size, roles[f"{POLICY}.actor"]
        )
        if tokens is not None and tokens < texts.max_length:
            yield (
                f"{POLICY}.actor.ppo_max_token_len_per_gpu={tokens} is less than data.ptx.max_length={texts.max_length}: "
                "a long text would not fit"
            )
    if config.critic is not None:
        critic = config.critic
        yield from _mini_batch_problems(critic.ppo_mini_batch_size, config, roles["critic"])
        if micro_batch_size(critic) != micro_batch_size(actor):  # else it is the actor's problem
            yield from _micro_batch_problems("critic", critic, config)
    for name, ref in references(config).items():
        key = reference_key(name)
        if name == "ref":  # one of several teachers has any number of trajectories
            what = f"data.train_batch_size={prompts} x {POLICY}.rollout.n={n} = {prompts * n} trajectories"
            yield from _share_problems(what, prompts * n, roles[key])
        tokens = ref.log_prob_max_token_len_per_gpu
        if tokens is not None and ref.log_prob_micro_batch_size_per_gpu is not None:
            names = "log_prob_max_token_len_per_gpu and log_prob_micro_batch_size_per_gpu"
            yield f"{key}: {names} are both set; give one of them, or log_prob_use_dynamic_bsz"
        if tokens is not None and tokens != actor.ppo_max_token_len_per_gpu:
            yield from _budget_problems(f"{key}.log_prob_max_token_len_per_gpu", tokens, config)


def _mini_batch_problems(mini: int | None, config: TrainConfig, role: _Role) -> Iterator[str]:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    assert mini is not None, "resolved"
    if mini < 1 or n < 1:
        return
    key = f"{role.key}.ppo_mini_batch_size={mini}"
    inherited = role.key == "critic" and mini == config.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts % mini and not inherited:
        yield f"{key} does not divide data.train_batch_size={prompts}"
    yield from _share_problems(f"{key} x {POLICY}.rollout.n={n} = {mini * n} trajectories", mini * n, role)


def _share_problems(what: str, sequences: int, role: _Role) -> Iterator[str]:
    """A batch is shared out evenly over data parallel ranks, with an interleaved schedule over its groups too."""
    if role.dp is None or sequences < 1:
        return
    pp, vpp = role.megatron.pipeline_model_parallel_size, role.megatron.virtual_pipeline_model_parallel_size
    # The interleaved schedule takes micro-batches in groups of its stages: each rank needs a multiple of them.
    groups = pp if vpp is not None and pp > 1 else 1
    if sequences % (role.dp * groups):
        stages = f" and {pp} stages of the interleaved pipeline" if groups > 1 else ""
        yield (
            f"{what} cannot be shared out evenly over the {role.dp} data parallel ranks{stages} of "
            f"{role.megatron_key}; a multiple of {role.dp * groups} is needed"
        )


def _micro_batch_problems(key: str, role: ActorConfig | CriticConfig, config: TrainConfig) -> Iterator[str]:
    tokens, trajectories = micro_batch_size(role)
    keys = f"{key}.ppo_max_token_len_per_gpu and {key}.ppo_micro_batch_size_per_gpu"
    if tokens is not None and trajectories is not None:
        yield (
            f"{keys} are both set ({tokens} tokens, {trajectories} trajectories); give one of them, or say by "
            f"{key}.use_dynamic_bsz which counts (true: tokens)"
        )
    elif tokens is not None:
        yield from _budget_problems(f"{key}.ppo_max_token_len_per_gpu", tokens, config)


def _budget_problems(key: str, tokens: int, config: TrainConfig | EvalConfig) -> Iterator[str]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if tokens < prompt + response:
        yield (
            f"{key}={tokens} is less than data.max_prompt_length={prompt} + data.max_response_length={response} = "
            f"{prompt + response}: a long trajectory would not fit"
        )


def engine_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Of a resolved configuration: the engines fit the devices of their pool, and a trajectory an engine."""
    if isinstance(config, TrainConfig) and validates_concurrently(config):
        name = config.trainer.eval_resource_pool
        if (own := (config.resource_pools or {}).get(name or "")) is not None and own.n_gpus_per_node > 0:
            per_node = f"resource_pools.{name}.n_gpus_per_node={own.n_gpus_per_node}"
            yield from _node_problems(f"{POLICY}.rollout", eval_rollout(config), own, per_node)
    key, rollout = rollout_section(config)
    if isinstance(config, TrainConfig):
        yield from _teacher_engine_problems(config)
        pool = (config.resource_pools or {}).get(rollout.resource_pool or "")
    else:
        pool = PoolConfig(nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
    if pool is not None and min(rollout.tensor_model_parallel_size, pool.n_gpus_per_node) > 0:
        per_node = f"resource_pools.{rollout.resource_pool}.n_gpus_per_node"
        if rollout.resource_pool == GLOBAL_POOL and pool.n_gpus_per_node == config.trainer.n_gpus_per_node:
            per_node = "trainer.n_gpus_per_node"
        yield from _node_problems(key, rollout, pool, f"{per_node}={pool.n_gpus_per_node}")
    yield from attention_problems(key, rollout)
    if rollout.max_total_tokens is not None:
        groups, name = max(1, rollout.attention_data_parallel_size), f"{key}.max_total_tokens"
        name += " / attention_data_parallel_size" if groups > 1 else ""
        yield from _budget_problems(name, rollout.max_total_tokens // groups, config)
    yield from _expert_kernel_problems(key, rollout)
    yield from engine_option_problems(f"{key}.engine_kwargs", rollout.engine_kwargs)


def _teacher_engine_problems(config: TrainConfig) -> Iterator[str]:
    """The engines of references fit the devices of their pools, and a trajectory an engine's cache."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    for role, engines in served_references(config).items():
        key, name = f"{reference_key(role)}.engine", engines.resource_pool
        pool = (config.resource_pools or {}).get(name or "")
        if pool is not None and min(engines.tensor_model_parallel_size, pool.n_gpus_per_node) > 0:
            per_node = f"resource_pools.{name}.n_gpus_per_node={pool.n_gpus_per_node}"
            yield from _node_problems(key, engines, pool, per_node)
        if engines.max_total_tokens is not None and engines.max_total_tokens < longest + ENGINE_ROOM:
            yield (
                f"{key}.max_total_tokens={engines.max_total_tokens} is less than data.max_prompt_length + data.max_response_length = {longest} and "
                f"{ENGINE_ROOM} tokens that SGLang keeps free: a long trajectory would not fit"
            )
        yield from engine_option_problems(f"{key}.engine_kwargs", engines.engine_kwargs)


def _expert_kernel_problems(key: str, rollout: RolloutConfig) -> Iterator[str]:
    runner, tp, ep = (
        rollout.moe_runner_backend,
        rollout.tensor_model_parallel_size,
        rollout.expert_parallel_size,
    )
    if rollout.moe_a2a_backend is not None:
        backend = f"{key}.moe_a2a_backend={rollout.moe_a2a_backend}"
        if ep != tp or tp == 1:
            yield (
                f"{backend} has each rank's experts as a whole: {key}.expert_parallel_size={ep} must be {key}.tensor_model_parallel_size={tp}, "
                "and more than 1"
            )
        if runner == "triton":
            yield f"{backend} hands tokens to DeepGEMM's kernels: leave {key}.moe_runner_backend=triton out"
    elif runner == "deep_gemm" and rollout.quantization is None:
        yield (
            f"{key}.moe_runner_backend=deep_gemm needs {key}.quantization=fp8 (or moe_a2a_backend=deepep): without either experts are Triton's; "
            "leave it out"
        )


def _node_problems(key: str, rollout: RolloutConfig, pool: PoolConfig, per_node: str) -> Iterator[str]:
    """Engines have neighbouring devices of the pool; an engine's devices are on one node, or equally many on each of several.

    Args:
        per_node: the key of the pool's devices on each node, with its value.
    """
    tp, engines, nodes = (
        rollout.tensor_model_parallel_size,
        rollout.num_engines or 1,
        rollout.nodes_per_engine or 1,
    )
    devices = pool.num_devices
    size, spread = f"{key}.tensor_model_parallel_size={tp}", f"{key}.nodes_per_engine={nodes}"
    part = tp // nodes
    if tp > devices:
        yield f"{size} is more than the {devices} devices of resource pool {rollout.resource_pool!r}"
    elif tp % nodes:
        yield f"{size} does not divide by {spread}: an engine has equally many devices on each of its nodes"
    elif part > pool.n_gpus_per_node:
        needed = -(-tp // pool.n_gpus_per_node)
        yield f"{size} is {part} devices on each of {spread}, more than {per_node}; it needs {needed} nodes or more"
    elif engines * tp > devices:
        yield (
            f"{key}.num_engines={engines} x {size} is more than the {devices} devices of resource pool "
            f"{rollout.resource_pool!r}; at most {devices // tp} engines fit"
        )
    elif pool.n_gpus_per_node % part and engines * tp > pool.n_gpus_per_node:
        what = "" if nodes == 1 else f" over {spread}"
        yield (
            f"{size}{what}, {part} devices of an engine on a node, does not divide {per_node}, and one of "
            f"{key}.num_engines={engines} engines would have some of them on another node"
        )
