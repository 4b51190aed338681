"""The fewest nodes on which a job's memory fits, with the layout for it; and changes that would make a job fit, or come nearer to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from megarl.config import MegatronConfig, RolloutConfig, TrainConfig, check_config
from megarl.config.model_fit import check_models, check_rollout_model
from megarl.models import ModelConfig, logical_tensors
from megarl.plan.inputs import PlanInputs, read_inputs
from megarl.plan.memory import GIB, MemoryPlan, plan_memory, served_bytes

_MEGATRON, _ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
# Keys of a layout that is found: those that are always given, and those that are given where the recipe has another value.
_ALWAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_IF_CHANGED = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_tensor_parallel_size",
)
ENGINE_KEYS = ("tensor_model_parallel_size", "expert_parallel_size", "num_engines")


def fit(
    config: TrainConfig,
    inputs: PlanInputs,
    limit: int,
    reserve: int | None,
    max_nodes: int,
    engines: bool = True,
) -> tuple[TrainConfig, MemoryPlan] | None:
    """The configuration with the fewest nodes, up to `max_nodes`, whose memory fits; None: there is none.

    Tensor parallel sizes within a node are tried, with pipeline stages, and experts on as many ranks as a stage has; engines lie
    within a node, or over several nodes where no engine fits on one. Fewer stages are tried first, then smaller sizes, and the first
    layout that fits is taken. All roles share the devices and have the actor's layout.

    Args:
        engines: whether they share the devices, too; else they are left out.

    Raises:
        ValueError: engines do not fit on any number of nodes up to `max_nodes`.
    """
    itemsize = 1 if config.actor_rollout_ref.model.lora.blocks is not None else 2
    sizes = _engine_sizes(config, inputs, limit - (reserve or 0), max_nodes) if engines else []
    # Bytes of the weights, on all devices.
    least = itemsize * sum(map(prod, logical_tensors(inputs.model).values()))
    for nodes in range(1, max_nodes + 1):
        if least > nodes * config.trainer.n_gpus_per_node * limit:
            continue
        for candidate, plan in _plans(config, inputs, limit, reserve, nodes, sizes):
            if plan.fits and _is_legal(candidate):
                return candidate, plan
    return None


def _engine_sizes(config: TrainConfig, inputs: PlanInputs, room: int, max_nodes: int) -> list[int]:
    """Tensor parallel sizes with which an engine's weights fit on each device: sizes within a node, else over several nodes.

    Raises:
        ValueError: there are none.
    """
    per_node, held = config.trainer.n_gpus_per_node, {}
    for tp in powers(per_node * max_nodes):
        if tp > per_node and (tp % per_node or any(size < room for size in held.values())):
            continue
        rollout = _engine(config.actor_rollout_ref.rollout, inputs.model, tp, per_node)
        try:
            check_rollout_model(rollout, inputs.model)
            held[tp] = served_bytes(rollout, inputs)
        except ValueError:  # a size that does not divide the model, or its blocks
            continue
    sizes = [tp for tp, size in held.items() if size < room]
    if not sizes:
        least = ", ".join(f"{size / GIB:.1f} GiB with {tp}" for tp, size in held.items())
        raise ValueError(
            f"engines on up to {max_nodes} nodes of {per_node} devices hold more weights than there is room for, which is "
            f"{room / GIB:.1f} GiB a device: {least}; rollout.quantization=fp8 holds half, larger devices may be a resource "
            "pool of their own (--without-engines)"
        )
    return sizes


def _engine(rollout: RolloutConfig, model: ModelConfig, tp: int, per_node: int) -> RolloutConfig:
    return replace(
        rollout,
        tensor_model_parallel_size=tp,
        expert_parallel_size=1 if model.moe is None else tp,
        nodes_per_engine=-(-tp // per_node),
        num_engines=1,
    )


def layout_keys(recipe: TrainConfig, found: TrainConfig) -> list[str]:
    """Keys that turn the recipe into the layout that `fit` found, as key=value.

    Args:
        recipe: as it was read, not resolved.
    """
    before, after = recipe.actor_rollout_ref, found.actor_rollout_ref
    keys = [
        f"trainer.nnodes={found.trainer.nnodes}",
        *changed_keys(_MEGATRON, before.actor.megatron, after.actor.megatron, _ALWAYS, _IF_CHANGED),
        *changed_keys(_ROLLOUT, before.rollout, after.rollout, ENGINE_KEYS),
    ]
    # These follow from the sizes where they are null.
    keys += [] if before.actor.megatron.sequence_parallel is None else [f"{_MEGATRON}.sequence_parallel=null"]
    keys += [] if before.rollout.nodes_per_engine is None else [f"{_ROLLOUT}.nodes_per_engine=null"]
    # A layout of their own would keep roles from following the actor's.
    roles = {
        "actor_rollout_ref.ref": before.ref,
        "critic": recipe.critic,
        "reward_model": recipe.reward_model,
    }
    roles |= {f"actor_rollout_ref.teachers.{name}": role for name, role in (before.teachers or {}).items()}
    own = [name for name, role in roles.items() if role is not None and role.megatron is not None]
    return [*keys, *(f"{name}.megatron=null" for name in own)]


def changed_keys(
    section: str,
    before: MegatronConfig | RolloutConfig,
    after: MegatronConfig | RolloutConfig,
    always: Sequence[str],
    if_changed: Sequence[str] = (),
) -> Iterator[str]:
    """Keys of a section with the values of `after`, as key=value: some always, others where `before` has another value."""
    for name in (*always, *if_changed):
        value = getattr(after, name)
        if name in always or value != getattr(before, name):
            yield f"{section}.{name}={_as_yaml(value)}"


def _as_yaml(value: str | int | bool | tuple[str, ...] | None) -> str:
    """The value as YAML writes it."""
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def _plans(
    config: TrainConfig, inputs: PlanInputs, limit: int, reserve: int | None, nodes: int, engines: list[int]
) -> Iterator[tuple[TrainConfig, MemoryPlan]]:
    """Plans of the candidates on `nodes` nodes, without layouts that the model cannot have."""
    for candidate in _candidates(config, inputs.model, nodes, engines):
        try:
            check_models(candidate, inputs.model, inputs.critic, inputs.reward, inputs.teachers)
            plan = plan_memory(candidate, inputs, limit, reserve)
        except ValueError:  # an impossible layout: others are tried
            continue
        yield candidate, plan if engines else plan.without_engines()


def _is_legal(config: TrainConfig) -> bool:
    """Whether `check_config` accepts the layout, with its batches and all other keys."""
    try:
        check_config(config, data_files=False)
    except ValueError:
        return False
    return True


def _candidates(config: TrainConfig, model: ModelConfig, nodes: int, engines: bool) -> Iterator[TrainConfig]:
    policy, per_node = config.actor_rollout_ref, config.trainer.n_gpus_per_node
    world = nodes * per_node
    pools = {name: replace(pool, nnodes=nodes) for name, pool in config.resource_pools.items()}
    base = replace(config, resource_pools=pools, trainer=replace(config.trainer, nnodes=nodes))
    for megatron in _megatrons(policy.actor.megatron, model, world, per_node):
        for tp in (size for size in engines or [per_node] if world % size == 0):
            rollout = replace(_engine(policy.rollout, model, tp, per_node), num_engines=world // tp)
            yield replace(
                base,
                actor_rollout_ref=replace(
                    policy,
                    actor=replace(policy.actor, megatron=megatron),
                    ref=replace(policy.ref, megatron=megatron),
                    teachers=policy.teachers
                    and {name: replace(each, megatron=megatron) for name, each in policy.teachers.items()},
                    rollout=rollout,
                ),
                critic=None if config.critic is None else replace(config.critic, megatron=megatron),
                reward_model=replace(config.reward_model, megatron=megatron),
            )


def _megatrons(
    megatron: MegatronConfig, model: ModelConfig, world: int, per_node: int
) -> Iterator[MegatronConfig]:
    for pp in range(1, min(world, model.num_layers) + 1):
        for tp in powers(per_node):
            if world % (tp * pp):
                continue
            ep = 1
            while (
                model.moe is not None and model.moe.num_experts % (2 * ep) == 0 and world % (2 * ep * pp) == 0
            ):
                ep *= 2
            for first, last in ends(model.num_layers, pp):
                yield replace(sized(megatron, tp, pp, 1, ep, first, last), sequence_parallel=tp > 1)


def sized(
    megatron: MegatronConfig, tp: int, pp: int, cp: int, ep: int, first: int | None, last: int | None
) -> MegatronConfig:
    """`megatron` with these sizes, and these numbers of layers in its first and last stage; experts are not cut."""
    return replace(
        megatron,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )


def ends(layers: int, stages: int) -> Iterator[tuple[int | None, int | None]]:
    """Layers of the first and last stage, where the stages cannot all have equally many."""
    if layers % stages == 0:
        yield None, None
        return
    if stages == 2:
        yield -(-layers // 2), None
        return
    for others in (layers // stages, -(-layers // stages)):
        rest = layers - others * (stages - 2)
        if rest >= 2:
            yield -(-rest // 2), rest // 2


def powers(most: int) -> list[int]:
    """Powers of two, up to `most`."""
    return [1 << number for number in range(most.bit_length()) if 1 << number <= most]


# Advice: changes of one or two keys that are legal, each with the memory that it leads to.

_POLICY = "actor_rollout_ref"


@dataclass(frozen=True)
class Change:
    """Keys to set, why they help, and the bytes that the fullest device then holds."""

    keys: tuple[str, ...]
    why: str
    peak: int
    fits: bool


def changes(
    recipe: str, overrides: Sequence[str], config: TrainConfig, plan: MemoryPlan, reserve: int | None
) -> list[Change]:
    """Changes that lower the peak or make the job fit, best first: fitting ones, then by the remaining memory.

    Args:
        config: the recipe with `overrides`, resolved; plan: its memory.
        reserve: as in `plan_memory`.
    """
    found = []
    for keys, why in _possible_changes(config):
        try:
            changed, inputs = read_inputs(recipe, [*overrides, *keys])
            check_models(changed, inputs.model, inputs.critic, inputs.reward, inputs.teachers)
            after = plan_memory(changed, inputs, plan.limit, reserve)
        except ValueError:  # not for this model, or these devices
            continue
        if after.fits or after.peak < plan.peak:
            found.append(Change(keys, why, after.peak, after.fits))
    return sorted(found, key=lambda change: (not change.fits, change.peak))


def as_words(change: Change) -> str:
    """The change as one line of text."""
    fits = "fits" if change.fits else "does not fit yet"
    return f"{' '.join(change.keys)}: {change.peak / GIB:.1f} GiB, {fits} ({change.why})"


def _possible_changes(config: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    # From changes that cost a step some time to one that costs devices.
    policy = config.actor_rollout_ref
    actor, rollout, megatron = policy.actor, policy.rollout, policy.actor.megatron
    if megatron.recompute_granularity != "full":
        keys = (f"{_MEGATRON}.recompute_granularity=full",)
        keys += (f"{_MEGATRON}.recompute_modules=null",) if megatron.recompute_modules is not None else ()
        yield keys, "activations are computed again instead of being kept"
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = actor.ppo_max_token_len_per_gpu
    if tokens is not None and tokens > longest:
        key = f"{_POLICY}.actor.ppo_max_token_len_per_gpu={max(longest, tokens // 2)}"
        yield (key,), "smaller micro-batches keep fewer activations"
    for name, why in (
        ("tensor_model_parallel_size", "each layer is cut further"),
        ("pipeline_model_parallel_size", "each device has fewer layers"),
        ("context_parallel_size", "texts are cut further"),
        ("expert_model_parallel_size", "each device has fewer experts"),
    ):
        yield (f"{_MEGATRON}.{name}={2 * getattr(megatron, name)}",), why
    if not megatron.use_distributed_optimizer:
        yield (f"{_MEGATRON}.use_distributed_optimizer=true",), "optimizer states are shared out"
    parts = ("param", "grad", "optimizer")
    if any(getattr(megatron, f"{part}_offload") is False for part in parts):
        keys = tuple(f"{_MEGATRON}.{part}_offload=true" for part in parts)
        yield keys, "data that a phase does not use leaves the devices"
    if not actor.optim.optimizer_cpu_offload and actor.optim.optimizer == "adam":
        key = f"{_POLICY}.actor.optim.optimizer_cpu_offload=true"
        yield (key,), "optimizer states stay on the host, also while they are updated"
    if rollout.quantization is None:
        yield (f"{_POLICY}.rollout.quantization=fp8",), "engines hold a byte for each weight"
    size = rollout.tensor_model_parallel_size
    keys = (f"{_POLICY}.rollout.tensor_model_parallel_size={2 * size}", f"{_POLICY}.rollout.num_engines=null")
    yield keys, "each device serves a smaller part"
    for part in (0.1, -0.1):
        share = round(rollout.gpu_memory_utilization + part, 3)
        if 0 < share <= 0.95:
            key = f"{_POLICY}.rollout.gpu_memory_utilization={share}"
            yield (key,), "a larger cache" if part > 0 else "a smaller cache"
    if config.resource_pools is not None and len(config.resource_pools) == 1:
        nodes = config.trainer.nnodes
        yield (f"trainer.nnodes={2 * nodes}",), "more devices share optimizer states"
