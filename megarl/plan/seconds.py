"""How long the phases of a step take by formulas, role by role; nothing is measured.

Roles that share devices work one after the other, others at once. Left out: rewards by rules, the controller, checkpoints,
validations, batches that dynamic sampling drops, turns of an environment, the auxiliary language-model loss (PPO-ptx), and the reference's
part of an exact KL in the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from megarl.config import (
    RolloutConfig,
    TrainConfig,
    all_references,
    leaves_tokens_out,
    needs_old_log_probs,
    needs_ref_log_probs,
    references,
)
from megarl.config.batches import UpdatePlan, answered_prompts, resolve_batches
from megarl.config.resolve import TEACHER
from megarl.costs.engine import Draft, EngineLoad, Generation, ServedModel, generation, token_bytes
from megarl.costs.floors import generation_floor, pass_floor
from megarl.costs.flops import LayerFlops, prediction_flops
from megarl.costs.model import orthogonalising
from megarl.costs.pipeline import PassTime, pass_time
from megarl.costs.speed import Machine, Passes
from megarl.costs.tensors import CORE_ATTENTION
from megarl.models import ModelConfig
from megarl.plan.drafts import draft_folder
from megarl.plan.inputs import (
    PlanInputs,
    cache_dtype,
    engine_layout,
    layout_of,
    model_use,
    precision,
    role_facts,
)
from megarl.plan.judges import judge_seconds
from megarl.plan.memory import MOVED, MemoryPlan, served_bytes

GAPS, MOVED_PARTS = "controller and workers", "moved to and from the host"
NAMES = {"ref": "reference", "reward_model": "reward model"}  # of roles, where they differ
TIMED = ("sync", "generate", "score_model", "evaluate_models", "update")


@dataclass(frozen=True)
class Part:
    """The work of a phase on the devices of a pool.

    Attributes:
        passes: its passes, if it is a Megatron model's.
        floor: the least seconds by the GPUs' peaks (`megarl.costs.floors`).
    """

    name: str
    pool: str
    seconds: float
    passes: PassTime | None = None
    floor: float = 0.0


@dataclass(frozen=True)
class PhaseTime:
    """A phase of a step; `tokens`: tokens that it processes or, in generation, makes."""

    name: str
    parts: tuple[Part, ...]
    tokens: float

    @property
    def seconds(self) -> float:
        """Seconds of the pool that takes longest."""
        return self._longest(lambda part: part.seconds)

    @property
    def floor(self) -> float:
        """Seconds of the pool that takes longest, at the GPUs' peaks."""
        return self._longest(lambda part: part.floor)

    def _longest(self, of: Callable[[Part], float]) -> float:
        pools: dict[str, float] = {}
        for part in self.parts:
            pools[part.pool] = pools.get(part.pool, 0.0) + of(part)
        return max(pools.values(), default=0.0)


def step_seconds(config: TrainConfig, phases: Mapping[str, float]) -> float:
    """Seconds of a step with these seconds by phase: their sum, or where models learn while others generate (`trainer.mode`) the sync and
    the longer of the two."""
    if config.trainer.mode in ("sync", "partial_rollouts"):
        return sum(phases.values())
    ahead = phases["generate"] + phases.get("score_model", 0.0)
    return phases["sync"] + max(ahead, phases.get("evaluate_models", 0.0) + phases["update"])


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of prompts and responses; the most of a response."""

    prompt: float
    response: float
    longest: int

    @property
    def total(self) -> float:
        return self.prompt + self.response


def lengths(config: TrainConfig, machine: Machine) -> Lengths:
    """Lengths of prompts and responses by the assumptions."""
    data, assumed = config.data, machine.assumed
    prompt = max(1.0, data.max_prompt_length * assumed.prompt)
    response = max(1.0, data.max_response_length * assumed.response)
    return Lengths(prompt, response, data.max_response_length)


def step_phases(
    config: TrainConfig,
    inputs: PlanInputs,
    machine: Machine,
    plan: MemoryPlan,
    sync: float,
    fused: bool = True,
    sync_floor: float = 0.0,
) -> list[PhaseTime]:
    """The phases of a step of a resolved configuration.

    Args:
        plan: its memory, from which the tokens of the engines' cache and the transfers between phases follow.
        sync: seconds that the weights travel; sync_floor: the least. fused: as in `Passes`.
    """
    texts, moves = lengths(config, machine), moved_seconds(plan, machine)
    count = resolve_batches(config).trajectories_per_step
    generated = answered_prompts(config) * config.actor_rollout_ref.rollout.n
    rollout = config.actor_rollout_ref.rollout.resource_pool
    made = generate(config, inputs, machine, plan.kv_tokens)
    least = generate(config, inputs, machine, plan.kv_tokens, generation_floor)
    parts: dict[str, list[Part]] = {
        "sync": [Part("weights", rollout, sync, floor=sync_floor)],
        "generate": [
            Part("prompts", rollout, made.prefill, floor=least.prefill),
            Part("tokens", rollout, made.decode, floor=least.decode),
        ],
    }
    for phase, part in model_parts(config, inputs, machine, fused):
        parts.setdefault(phase, []).append(part)
    for judge in judge_seconds(config, inputs, machine, texts.prompt, texts.response):
        part = Part(judge.name, judge.pool, judge.seconds, floor=judge.floor)
        parts.setdefault("evaluate_models", []).append(part)
    for phase, pool, seconds in moves:
        parts.setdefault(phase, []).append(
            Part(MOVED_PARTS, pool, seconds, floor=seconds * machine.assumed.host)
        )
    for found in parts.values():  # each role's workers are called, meet and free memory
        roles = Counter(part.pool for part in found if part.passes is not None)
        for pool in dict.fromkeys(part.pool for part in found):
            gap = machine.assumed.phase * max(1, roles[pool])
            found.append(Part(GAPS, pool, gap))
    whole = count * texts.total
    return [
        PhaseTime(
            name,
            tuple(parts[name]),
            {"sync": 0.0, "generate": generated * texts.response}.get(name, whole),
        )
        for name in TIMED
        if name in parts
    ]


def generate(
    config: TrainConfig,
    inputs: PlanInputs,
    machine: Machine,
    kv_tokens: int,
    work: Callable[[ServedModel, EngineLoad], Generation] = generation,
) -> Generation:
    """An engine's work in a step. `work`: `generation`, or `generation_floor`."""
    rollout, texts = config.actor_rollout_ref.rollout, lengths(config, machine)
    layout, dtype = engine_layout(rollout), precision(rollout.dtype)
    served = ServedModel(
        inputs.model,
        inputs.flops_of(inputs.model, "lm"),
        layout,
        machine,
        served_bytes(rollout, inputs, draft=False),
        token_bytes(inputs.model, layout, cache_dtype(rollout)),
        dtype.itemsize,
        rollout.quantization == "fp8",
        drafting(rollout, inputs),
        leaves_tokens_out(rollout),
    )
    prompts = -(-answered_prompts(config) // rollout.num_engines)
    running = min(rollout.max_num_seqs, kv_tokens // texts.total)
    shape = (texts.prompt, texts.response, texts.longest)
    return work(served, EngineLoad(prompts * rollout.n, prompts, *shape, running))


def drafting(rollout: RolloutConfig, inputs: PlanInputs) -> Draft:
    """How tokens are drafted; as if none were where `accept_length` is not given."""
    speculative, model = rollout.speculative, inputs.model
    if speculative.algorithm is None or speculative.accept_length is None:
        return Draft()
    read = 0.0
    if speculative.algorithm == "mtp":  # the layer, and the model's head
        read = served_bytes(rollout, inputs) - served_bytes(rollout, inputs, draft=False)
        head = model.vocab_size * model.hidden_size * precision(rollout.dtype).itemsize
        read += head / rollout.tensor_model_parallel_size
    elif speculative.draft_path is not None:
        read = draft_folder(rollout).weights
    return Draft(speculative.num_draft_tokens, read, speculative.accept_length)


def _predicted(
    config: TrainConfig, model: ModelConfig, role: str, updates: bool
) -> tuple[tuple[LayerFlops, ...], bool]:
    """The layers of multi-token prediction that a role's updates train, and whether they do so detached."""
    how = config.actor_rollout_ref.model
    trains = updates and role == "actor" and how.mtp == "train"
    return (prediction_flops(model) if trains else ()), how.mtp_detached


def _muon(config: TrainConfig, inputs: PlanInputs, role: str) -> tuple[float, float]:
    """The operations of Muon's products in an optimizer step of a role, and the bytes gathered for them: of the stage with the most."""
    return max(orthogonalising(model_use(config, inputs, role), inputs.once))


def model_parts(
    config: TrainConfig, inputs: PlanInputs, machine: Machine, fused: bool = True
) -> Iterator[tuple[str, Part]]:
    """The work of Megatron's models, by phase. Several teachers are assumed to judge equal parts of the trajectories."""
    batches, critic, judges = resolve_batches(config), config.critic, references(config)

    def part(role: str, update: UpdatePlan | None = None) -> Part:
        """All texts of the step once, forward; or all optimizer steps of a step."""
        facts = role_facts(config, inputs, role)
        section, name = facts.section, NAMES.get(role, role.replace(TEACHER, "teacher ", 1))
        megatron, pool = section.megatron, config.resource_pools[section.resource_pool]
        trained = None if update is None else "adapters" if facts.lora.rank > 0 else "weights"
        passes = Passes(
            facts.model,
            inputs.flops_of(facts.model, facts.head),
            layout_of(megatron, pool),
            replace(machine, per_node=pool.n_gpus_per_node),
            trained,
            megatron.recompute_granularity,
            megatron.recompute_modules or CORE_ATTENTION,
            precision(megatron.dtype).itemsize,
            update is not None and section.optim.optimizer_cpu_offload,
            fused,
            megatron.fp8 is not None,
            (megatron.num_layers_at_start_in_bf16, megatron.num_layers_at_end_in_bf16),
            megatron.fsdp,
            _muon(config, inputs, role) if update is not None and section.optim.optimizer == "muon" else None,
            *_predicted(config, facts.model, role, update is not None),
            update is not None and role == "actor" and config.actor_rollout_ref.model.indexer == "train",
        )
        # The floor counts a prompt once for all responses that share it.
        texts = lengths(config, machine)
        length, actor = texts.total, config.actor_rollout_ref
        shared = actor.rollout.n if actor.actor.share_prompts else 1
        least = (texts.prompt / shared, texts.response)
        if update is None:
            several = len(all_references(config)) if role in judges else 1
            texts_in_all = max(1, batches.trajectories_per_step // several)
            time = pass_time(passes, texts_in_all, length, *facts.most)
            floor = pass_floor(passes, texts_in_all, *least)
            return Part(f"{name} forward", section.resource_pool, time.total, time, floor)
        most = (update.micro_batch_tokens, update.micro_batch_sequences)
        time = pass_time(passes, update.sequences_per_mini_batch, length, *most, update.updates_per_step)
        floor = pass_floor(passes, update.sequences_per_mini_batch, *least, update.updates_per_step)
        return Part(f"{name} updates", section.resource_pool, time.total, time, floor)

    if config.reward_model.enable:
        yield "score_model", part("reward_model")
    if needs_old_log_probs(config):
        yield "evaluate_models", part("actor")
    for judge in judges if needs_ref_log_probs(config) else ():
        yield "evaluate_models", part(judge)
    if critic is not None:
        yield "evaluate_models", part("critic")
        yield "update", part("critic", batches.critic_update)
    yield "update", part("actor", batches.actor_update)


def moved_seconds(plan: MemoryPlan, machine: Machine) -> list[tuple[str, str, float]]:
    """(phase, pool, seconds) of transfers from the host's memory when the phase begins, or back to it."""
    found: dict[tuple[str, str], float] = {}
    for owner in plan.owners:
        if owner.role == "rollout" or owner.name.rpartition("_")[2] not in MOVED or any(owner.host):
            continue  # the engines' weights come with the sync; states that are always on the host, with the update
        for before, phase in zip((plan.phases[-1], *plan.phases), plan.phases, strict=False):
            if (max(owner.at(before)) > 0) != (max(owner.at(phase)) > 0):
                key = ("update" if phase.startswith("update") else phase, owner.pool)
                found[key] = found.get(key, 0.0) + max(owner.stages) / machine.host
    return [(phase, pool, seconds) for (phase, pool), seconds in found.items()]


def bubbles(phases: list[PhaseTime]) -> Mapping[str, PassTime]:
    """The passes of Megatron's models, by part."""
    return {part.name: part.passes for phase in phases for part in phase.parts if part.passes is not None}
