"""Layouts for a recipe's model on its devices, by estimated seconds of a step among layouts that fit and are legal.

The search tries tensor, pipeline, context and expert parallel sizes (data parallel is the rest), recomputation (of layers or parts), offloading
of data that a phase does not use, and the engines' sizes. Roles without a layout of their own in the recipe
follow the actor; all else stays as the recipe has it. Layouts that `check_config` and `check_models` refuse are not proposed.

Layouts are ordered by their seconds without transfers to and from the host, which can only add to them: so the search
may end before all are seen, and its proposals are still the best of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from megarl.config import MegatronConfig, RolloutConfig, TrainConfig, check_config, resolve
from megarl.config.model_fit import check_model, check_models, check_rollout_model
from megarl.costs.model import model_bytes
from megarl.costs.muon import MOMENTUM
from megarl.costs.phases import phase_needs
from megarl.costs.speed import GRADIENT, STATES, Machine
from megarl.costs.tensors import FULL
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.plan.fit import ENGINE_KEYS, changed_keys, ends, powers, sized
from megarl.plan.inputs import PlanInputs, layout_of, model_use, precision
from megarl.plan.job import peer_seconds, sync_estimate
from megarl.plan.memory import MemoryPlan, engine_owners, plan_memory
from megarl.plan.seconds import PhaseTime, generate, model_parts, step_phases, step_seconds
from megarl.util.memory import collection_paused

OFFLOAD = (None, False)  # where engines share the devices: data leaves them, or stays on them
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
_ALWAYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "recompute_granularity",
)
_IF_CHANGED = (
    "recompute_modules",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "param_offload",
    "grad_offload",
    "optimizer_offload",
)
_GROUPS = ("attention_data_parallel_size", "data_parallel_lm_head")


@dataclass(frozen=True)
class Proposal:
    """A layout that fits.

    Attributes:
        config: resolved. keys: to be given with the recipe, as key=value.
    """

    config: TrainConfig
    keys: tuple[str, ...]
    memory: MemoryPlan
    phases: list[PhaseTime]

    @property
    def words(self) -> str:
        """The layout in words, such as "tp2 pp4 cp1 ep1 dp1, full recomputation, 4 engines of tp2"."""
        policy = self.config.actor_rollout_ref
        actor, rollout = policy.actor.megatron, policy.rollout
        layout = layout_of(actor, self.config.resource_pools[policy.actor.resource_pool])
        sizes = " ".join(f"{name}{getattr(layout, name)}" for name in ("tp", "pp", "cp", "ep", "dp"))
        again = f"{actor.recompute_granularity or 'no'} recomputation"
        parts = [
            sizes,
            again + (f" ({', '.join(actor.recompute_modules)})" if actor.recompute_modules else ""),
        ]
        parts += ["nothing leaves"] if actor.param_offload is False else []
        experts = f" ep{rollout.expert_parallel_size}" if rollout.expert_parallel_size > 1 else ""
        groups = rollout.attention_data_parallel_size
        experts += f" dp{groups}" if groups > 1 else ""
        noun = "engine" if rollout.num_engines == 1 else "engines"
        parts.append(f"{rollout.num_engines} {noun} of tp{rollout.tensor_model_parallel_size}{experts}")
        return ", ".join(parts)

    @property
    def seconds(self) -> float:
        return step_seconds(self.config, {phase.name: phase.seconds for phase in self.phases})


@dataclass(frozen=True)
class _Trainer:
    """A layout of the models, and the seconds of their passes, of gaps and of the sync's rounds by phase."""

    megatron: MegatronConfig
    phases: Mapping[str, float]


@dataclass(frozen=True)
class _Engine:
    """A layout of the engines, and the seconds in which they get their weights and generate."""

    rollout: RolloutConfig
    phases: Mapping[str, float]


@dataclass
class Search:
    """The search and its intermediate results.

    Attributes:
        recipe: as it was read, not resolved. full: resolved. limit: bytes of a device. reserve: memory left out of plans (as in `plan_memory`).
        trainers, engines: layouts of the models and of the engines that may fit. seen: pairs of these, whose time was estimated.
        planned: layouts whose memory was planned.
    """

    recipe: TrainConfig
    inputs: PlanInputs
    machine: Machine
    limit: int
    reserve: int | None
    trainers: int = 0
    engines: int = 0
    seen: int = 0
    planned: int = 0
    full: TrainConfig = field(init=False)
    _too_large: dict[MegatronConfig, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.full = resolve(self.recipe)

    @collection_paused()
    def run(self, count: int) -> list[Proposal]:
        """The `count` fastest proposals that fit, of equally fast ones the first; fewer where no more fit."""
        trainers, engines = self._trainers(), self._engines()
        pairs = [
            (step_seconds(self.recipe, _together(trainer.phases, engine.phases)), number, at)
            for number, trainer in enumerate(trainers)
            for at, engine in enumerate(engines)
        ]
        self.trainers, self.engines, self.seen = len(trainers), len(engines), len(pairs)
        found: list[Proposal] = []
        for least, number, at in sorted(pairs):
            if len(found) >= count and least >= found[count - 1].seconds:
                break
            proposal = self._proposal(trainers[number].megatron, engines[at].rollout)
            if proposal is not None and proposal.seconds not in {each.seconds for each in found}:
                found = sorted([*found, proposal], key=lambda each: each.seconds)[:count]
        return found

    def _configured(self, megatron: MegatronConfig, rollout: RolloutConfig) -> TrainConfig:
        """The recipe with these sections, not resolved."""
        policy = self.recipe.actor_rollout_ref
        model = replace(policy.model, enable_gradient_checkpointing=None)
        actor = replace(policy.actor, megatron=megatron)
        return replace(
            self.recipe, actor_rollout_ref=replace(policy, model=model, actor=actor, rollout=rollout)
        )

    def _trainers(self) -> list[_Trainer]:
        """All layouts of the models that may fit, with their seconds."""
        policy, model = self.full.actor_rollout_ref, self.inputs.model
        pool = self.full.resource_pools[policy.actor.resource_pool]
        world, per_node = pool.nnodes * pool.n_gpus_per_node, pool.n_gpus_per_node
        found = []
        for megatron in _megatrons(self.recipe.actor_rollout_ref.actor.megatron, model, world, per_node):
            try:
                check_model(megatron, model)
                if self._least_bytes(megatron, world) > self.limit - (self.reserve or 0):
                    continue
                config = resolve(self._configured(megatron, self.recipe.actor_rollout_ref.rollout))
                check_models(config, model, self.inputs.critic, self.inputs.reward, self.inputs.teachers)
                parts = list(model_parts(config, self.inputs, self.machine))
            except ValueError:  # sizes that are no divisors
                continue
            gap = self.machine.assumed.phase
            pool_of_engines = config.actor_rollout_ref.rollout.resource_pool
            phases = {("sync", pool_of_engines): peer_seconds(config, self.inputs, self.machine)}
            for phase, part in parts:
                phases[phase, part.pool] = phases.get((phase, part.pool), 0.0) + part.seconds + gap
            longest: dict[str, float] = {}
            for (phase, _), seconds in phases.items():
                longest[phase] = max(longest.get(phase, 0.0), seconds)
            found += [_Trainer(each, longest) for each in self._offloads(megatron)]
        return found

    def _offloads(self, megatron: MegatronConfig) -> list[MegatronConfig]:
        """The layout with default offloading and with none, on the engines' devices; on other devices as the recipe has it."""
        policy = self.full.actor_rollout_ref
        if policy.actor.resource_pool != policy.rollout.resource_pool:
            return [megatron]
        slots = policy.actor.optim.optimizer_cpu_offload  # slots are all states on devices: let them leave
        return [
            replace(megatron, param_offload=off, grad_offload=off, optimizer_offload=None if slots else off)
            for off in OFFLOAD
        ]

    def _least_bytes(self, megatron: MegatronConfig, world: int) -> float:
        """A lower bound of the bytes that the actor's fullest rank holds while it is trained: the average of all stages, without padding."""
        layout, policy = ParallelLayout.from_config(megatron, world), self.recipe.actor_rollout_ref
        flops = self.inputs.flops_of(self.inputs.model, "lm")
        dense = sum(layer.dense for layer in flops.layers) / (layout.tp * layout.pp)
        experts = sum(layer.experts for layer in flops.layers) / (layout.ep * layout.etp * layout.pp)
        if policy.model.lora.rank:
            return (dense + experts) * (1 if policy.model.lora.blocks is not None else 2)
        item = precision(megatron.dtype).itemsize
        states = STATES if item < 4 else STATES - 4
        if policy.actor.optim.optimizer == "muon":
            states -= MOMENTUM  # one state less for nearly all weights
        if policy.actor.optim.optimizer_cpu_offload:
            states = 0
        shared = (layout.dp * layout.cp, layout.expert_dp) if megatron.use_distributed_optimizer else (1, 1)
        total = 0.0
        for weights, ranks in zip((dense, experts), shared, strict=True):
            held = item / (ranks if megatron.fsdp == FULL else 1)
            total += weights * (held + (GRADIENT / ranks if megatron.fsdp else GRADIENT) + states / ranks)
        return total

    def _engines(self) -> list[_Engine]:
        """All sizes of engines whose cache holds the longest trajectory, with their seconds: sizes within a node, and where
        there are none, sizes over several.
        """
        pools, policy = self.full.resource_pools, self.full.actor_rollout_ref
        pool = pools[policy.rollout.resource_pool]
        per_node, devices = pool.n_gpus_per_node, pool.nnodes * pool.n_gpus_per_node
        within = powers(per_node)
        over = [
            size for size in powers(devices) if size > per_node and devices % size == size % per_node == 0
        ]
        return self._engines_of(within, devices) or self._engines_of(over, devices)

    def _engines_of(self, sizes: list[int], devices: int) -> list[_Engine]:
        recipe, found = self.recipe, []
        longest = recipe.data.max_prompt_length + recipe.data.max_response_length
        for tp in sizes:
            for ep, groups in self._engine_parts(tp):
                rollout = replace(
                    recipe.actor_rollout_ref.rollout,
                    tensor_model_parallel_size=tp,
                    expert_parallel_size=ep,
                    attention_data_parallel_size=groups,
                    data_parallel_lm_head=groups > 1
                    and recipe.actor_rollout_ref.rollout.data_parallel_lm_head,
                    nodes_per_engine=None,
                    num_engines=devices // tp,
                )
                config = resolve(self._configured(recipe.actor_rollout_ref.actor.megatron, rollout))
                try:
                    check_rollout_model(rollout, self.inputs.model)
                    _, tokens, _ = engine_owners(config, self.inputs, phase_needs(config), self.limit)
                except ValueError:  # a size that does not divide the model, or its blocks
                    continue
                if tokens // groups < longest:
                    continue
                sync = sync_estimate(config, self.inputs, self.machine, peers=False)
                made = generate(config, self.inputs, self.machine, tokens)
                gap = self.machine.assumed.phase
                found.append(_Engine(rollout, {"sync": sync + gap, "generate": made.seconds + gap}))
        return found

    def _engine_parts(self, tp: int) -> list[tuple[int, int]]:
        """(expert parallel size, data parallel groups of attention): one, or as many as devices. Groups, also of a node each, are tried for
        latent attention, whose cache all devices of a group have as a whole."""
        model, rollout = self.inputs.model, self.recipe.actor_rollout_ref.rollout
        pool = self.full.resource_pools[self.full.actor_rollout_ref.rollout.resource_pool]
        experts = {1, tp} if model.moe is not None else {1}
        grouped = model.mla is not None and tp <= rollout.max_num_seqs and rollout.lora_sync != "adapters"
        groups = {1, max(1, tp // pool.n_gpus_per_node), tp} if grouped else {1}
        return sorted((ep, dp) for ep in experts for dp in groups)

    def _proposal(self, megatron: MegatronConfig, rollout: RolloutConfig) -> Proposal | None:
        recipe = self._configured(megatron, rollout)
        config = resolve(recipe)
        if self._first_stage_is_too_large(megatron, config):
            return None
        try:
            check_config(recipe, data_files=False)
            check_models(
                config, self.inputs.model, self.inputs.critic, self.inputs.reward, self.inputs.teachers
            )
            self.planned += 1
            memory = plan_memory(config, self.inputs, self.limit, self.reserve)
        except ValueError:  # an impossible layout or batch
            return None
        if not memory.fits:
            return None
        phases = step_phases(
            config, self.inputs, self.machine, memory, sync_estimate(config, self.inputs, self.machine)
        )
        return Proposal(config, tuple(_keys(self.recipe, recipe)), memory, phases)

    def _first_stage_is_too_large(self, megatron: MegatronConfig, config: TrainConfig) -> bool:
        """Whether the actor's update alone exceeds the limit; worked out once for all sizes of engines, with or without offloading."""
        key = replace(megatron, param_offload=None, grad_offload=None, optimizer_offload=None)
        if key not in self._too_large:
            try:
                use = model_use(config, self.inputs, "actor")
                (stage,) = model_bytes(use, self.inputs.once, stages=[0])
            except ValueError:
                self._too_large[key] = True
                return True
            held = stage.held
            needed = (
                held.weights + held.adapters + held.gradients + held.optimizer + stage.kept + stage.working
            )
            self._too_large[key] = needed > self.limit - (self.reserve or 0)
        return self._too_large[key]


def _together(trainer: Mapping[str, float], engine: Mapping[str, float]) -> dict[str, float]:
    """Seconds of both by phase."""
    names = (*engine, *trainer)
    return {name: trainer.get(name, 0.0) + engine.get(name, 0.0) for name in names}


def _megatrons(
    megatron: MegatronConfig, model: ModelConfig, world: int, per_node: int
) -> Iterator[MegatronConfig]:
    """Sizes that divide the devices, tensor parallel ones within a node, expert parallel ones that divide the experts.

    With Megatron-FSDP there are neither stages nor parts of the experts.
    """
    most = min(world, model.num_layers) if megatron.fsdp is None else 1
    for pp in (size for size in range(1, most + 1) if world % size == 0):
        for tp in powers(per_node):
            for cp in powers(per_node):
                if world % (tp * pp * cp):
                    continue
                for ep in _expert_sizes(model, world // pp) if megatron.fsdp is None else (1,):
                    for first, last in ends(model.num_layers, pp):
                        for granularity, modules in recomputations(model):
                            found = sized(megatron, tp, pp, cp, ep, first, last)
                            yield replace(
                                found,
                                sequence_parallel=None,
                                recompute_granularity=granularity,
                                recompute_modules=modules,
                            )


def recomputations(model: ModelConfig) -> Iterator[tuple[str | None, tuple[str, ...] | None]]:
    """The choices of recomputation, as (recompute_granularity, recompute_modules): nothing; parts that the model has, from the ones that take
    least time to the ones that save most; whole layers.

    Attention is not among the parts: flash kernels keep no scores, so that it saves nothing. Nor are whole blocks of experts: Megatron-core
    0.19.2 leaves their inputs, and gradients of these, on the device between updates, 1.9 GiB of a rank of Qwen3-30B-A3B (found in a shadow).
    """
    latent = ("mla_up_proj",) if model.mla is not None else ()
    norms = ("layernorm",) if latent or model.moe is not None else ()  # others are one kernel with a matrix
    yield None, None
    if model.moe is not None:
        yield "selective", (*norms, *latent, "moe_act")
    else:
        yield "selective", (*norms, *latent, "mlp")
    yield "full", None


def _expert_sizes(model: ModelConfig, ranks: int) -> list[int]:
    """Sizes of the groups that share the experts, among the ranks of a stage."""
    if model.moe is None:
        return [1]
    return [size for size in powers(ranks) if ranks % size == 0 and model.moe.num_experts % size == 0]


def _keys(recipe: TrainConfig, found: TrainConfig) -> Iterator[str]:
    """Keys that turn the recipe into the found layout, as key=value."""
    before, after = recipe.actor_rollout_ref, found.actor_rollout_ref
    yield from changed_keys(_ACTOR, before.actor.megatron, after.actor.megatron, _ALWAYS, _IF_CHANGED)
    if before.model.enable_gradient_checkpointing is not None:
        yield "actor_rollout_ref.model.enable_gradient_checkpointing=null"
    yield from changed_keys(_ROLLOUT, before.rollout, after.rollout, ENGINE_KEYS, _GROUPS)
    if before.rollout.nodes_per_engine is not None:
        yield f"{_ROLLOUT}.nodes_per_engine=null"
