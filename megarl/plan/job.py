"""The plan of a job before it runs: memory by device, bytes of the weight sync, seconds by formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megarl.config import (
    RolloutConfig,
    TrainConfig,
    eval_rollout,
    served_references,
    validates_concurrently,
)
from megarl.config.schema.models import LoraConfig
from megarl.costs.engine import engine_adapter_bytes
from megarl.costs.floors import at_peaks
from megarl.costs.hardware import likely
from megarl.costs.phases import frees_engines
from megarl.costs.speed import Machine
from megarl.layout.grid import ParallelLayout, RankCoords, coords_of
from megarl.plan.inputs import PlanInputs, engine_layout, layout_of, precision
from megarl.plan.memory import EVAL, MemoryPlan, memory_json, served_bytes
from megarl.plan.seconds import PhaseTime, bubbles, lengths, step_phases, step_seconds
from megarl.plan.sync import LINK_WORDS, PlanReport, configured_sync, report, size_text
from megarl.trainer.roles.adapters import served_adapters

NOTE = "seconds are estimates by formulas, nothing was measured; assumed (--assume name=value)"


def range_words(seconds: float) -> str:
    """The range in which an estimate likely lies, as text."""
    low, high = likely(seconds)
    return f"from {low:,.0f} to {high:,.0f} s" if low >= 10 else f"from {low:.1f} to {high:.1f} s"


@dataclass(frozen=True)
class Device:
    """A GPU of a pool: number, counted from 0 over its nodes, and the actor's rank on it, if there is one."""

    pool: str
    number: int
    per_node: int
    actor: RankCoords | None
    engine: int | None

    def __str__(self) -> str:
        node, gpu = divmod(self.number, self.per_node)
        words = f"node {node}, GPU {gpu} of pool {self.pool}"
        if self.actor is not None:
            at = self.actor
            words += (
                f" (actor rank {self.number}: tp {at.tp}, cp {at.cp}, dp {at.dp}, pp {at.pp}, ep {at.ep})"
            )
        return words


@dataclass(frozen=True)
class JobPlan:
    """The results of `plan_job`.

    Attributes:
        sync: None where it was estimated.
    """

    config: TrainConfig
    machine: Machine
    memory: MemoryPlan
    sync: PlanReport | None
    phases: list[PhaseTime]

    @property
    def devices(self) -> int:
        return sum(pool.nnodes * pool.n_gpus_per_node for pool in self.config.resource_pools.values())

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return step_seconds(self.config, {phase.name: phase.seconds for phase in self.phases})

    @property
    def floor(self) -> float:
        """The least seconds of a step by the GPUs' peaks."""
        return step_seconds(self.config, {phase.name: phase.floor for phase in self.phases})

    @property
    def tokens(self) -> float:
        """Tokens of prompts and responses in a step."""
        return self.phases[-1].tokens

    def held(self, phase: str) -> dict[tuple[str, int], dict[str, int]]:
        """(pool, number of a device) -> bytes of each owner there."""
        found = {}
        served = {
            role: engines.num_engines * engines.tensor_model_parallel_size
            for role, engines in self._engines()
        }
        for name, pool in self.memory.pools.items():
            count = pool.nnodes * pool.n_gpus_per_node
            for number in range(count):
                found[name, number] = {
                    owner.name: owner.at(phase)[number * len(owner.stages) // count]
                    for owner in self.memory.owners
                    if owner.pool == name and number < served.get(owner.role, count)
                }
        return found

    def fullest(self, phase: str) -> tuple[Device, int]:
        """The device that holds most in a phase, the first of several, and how many bytes."""
        totals = {place: sum(owners.values()) for place, owners in self.held(phase).items()}
        place = max(totals, key=totals.__getitem__)
        return self.device(*place), totals[place]

    def device(self, pool: str, number: int) -> Device:
        per_node = self.memory.pools[pool].n_gpus_per_node
        policy = self.config.actor_rollout_ref
        place = coords_of(self.actor_layout, number) if pool == policy.actor.resource_pool else None
        on = next((rollout for _, rollout in self._engines() if rollout.resource_pool == pool), None)
        engines = None if on is None else engine_layout(on)
        serves = engines is not None and number < engines.num_ranks
        return Device(pool, number, per_node, place, number // engines.tp if serves else None)

    def _engines(self) -> Iterator[tuple[str, RolloutConfig]]:
        """The sections of all engines, by role."""
        yield "rollout", self.config.actor_rollout_ref.rollout
        if validates_concurrently(self.config):
            yield EVAL, eval_rollout(self.config)
        yield from served_references(self.config).items()

    @property
    def actor_layout(self) -> ParallelLayout:
        actor = self.config.actor_rollout_ref.actor
        return layout_of(actor.megatron, self.config.resource_pools[actor.resource_pool])


def plan_job(
    config: TrainConfig,
    inputs: PlanInputs,
    machine: Machine,
    memory: MemoryPlan,
    sync: bool = True,
    fused: bool = True,
) -> JobPlan:
    """The plan of a resolved and checked configuration.

    Args:
        sync: whether the weight sync is planned, copy by copy; else, and where only adapters are sent, it is estimated.
        fused: as in `Passes`.
    """
    figures, seconds = None, sync_estimate(config, inputs, machine)
    peaks = at_peaks(machine)
    floor = _sync_floor(config, inputs, peaks)
    if sync and _adapters(config, inputs) is None:
        plan = configured_sync(config, inputs.model, config.actor_rollout_ref.rollout)
        figures = report(plan, machine.links)
        seconds = figures.reshard.seconds + peer_seconds(config, inputs, machine)
        links = figures.reshard.links.items()
        floor = max(max(cost.max_received, cost.max_sent) / peaks.links[link] for link, cost in links)
    phases = step_phases(config, inputs, machine, memory, seconds, fused, floor)
    return JobPlan(config, machine, memory, figures, phases)


def sync_estimate(config: TrainConfig, inputs: PlanInputs, machine: Machine, peers: bool = True) -> float:
    """The most seconds of a sync: an engine rank gets all its bytes from other GPUs, of its own node where that is the only one.

    Engines that serve adapters separately get these alone.

    Args:
        peers: whether to add the rounds in which ranks meet, which follow from the trainer's layout.
    """
    policy, pools = config.actor_rollout_ref, config.resource_pools
    rollout, size = policy.rollout, _sent_bytes(config, inputs)
    shared = policy.actor.resource_pool == rollout.resource_pool
    near = shared and pools[rollout.resource_pool].nnodes == 1
    rate = machine.links["intra_node" if near else "inter_node"]
    return size / rate + (peer_seconds(config, inputs, machine) if peers else 0.0)


def _sync_floor(config: TrainConfig, inputs: PlanInputs, peaks: Machine) -> float:
    """Seconds in which a rank of the engines gets its bytes, from its own device where the trainer shares it, else over the network."""
    policy = config.actor_rollout_ref
    shared = policy.actor.resource_pool == policy.rollout.resource_pool
    return _sent_bytes(config, inputs) / peaks.links["local" if shared else "inter_node"]


def _sent_bytes(config: TrainConfig, inputs: PlanInputs) -> int:
    """Bytes that a sync brings to a rank of the engines."""
    rollout, adapters = config.actor_rollout_ref.rollout, _adapters(config, inputs)
    if adapters is None:
        return served_bytes(rollout, inputs)
    return engine_adapter_bytes(inputs.model, engine_layout(rollout), adapters, precision(rollout.dtype))


def peer_seconds(config: TrainConfig, inputs: PlanInputs, machine: Machine) -> float:
    """Seconds of the rounds in which an engine's rank meets the trainer's ranks that hold different parts; none for adapters alone."""
    if _adapters(config, inputs) is not None:
        return 0.0
    policy = config.actor_rollout_ref
    layout = layout_of(policy.actor.megatron, config.resource_pools[policy.actor.resource_pool])
    holders = layout.pp * max(layout.tp, layout.ep * layout.etp)
    own = policy.actor.resource_pool == policy.rollout.resource_pool
    return (holders - own) * machine.assumed.peer


def _adapters(config: TrainConfig, inputs: PlanInputs) -> LoraConfig | None:
    """The adapters that engines serve in addition to weights that are sent once; None: there are none."""
    policy, freed = config.actor_rollout_ref, frees_engines(config, config.resource_pools)
    adapters, _ = served_adapters(policy.rollout, inputs.model, policy.model.lora, freed)
    return adapters


def as_json(job: JobPlan, advice: list[dict[str, object]]) -> dict[str, object]:
    """The plan as JSON: bytes and seconds."""
    return {
        "note": NOTE,
        "hardware": asdict(job.machine.gpu),
        "assumed": asdict(job.machine.assumed) | asdict(lengths(job.config, job.machine)),
        "devices": job.devices,
        "memory": memory_json(job.memory, []),
        "fullest": {
            phase: {"device": str(device), "number": device.number, "pool": device.pool, "bytes": size}
            for phase, (device, size) in ((phase, job.fullest(phase)) for phase in job.memory.phases)
        },
        "sync": None if job.sync is None else asdict(job.sync.reshard),
        "passes": {
            name: {
                "micro_batches": passes.micro_batches,
                "updates": passes.updates,
                "bubble": passes.bubble,
                "pipeline_seconds": passes.seconds,
                "reduce_seconds": passes.reduce,
                "optimizer_seconds": passes.adam,
            }
            for name, passes in bubbles(job.phases).items()
        },
        "phases": {phase.name: _phase_json(phase) for phase in job.phases},
        "step": {
            **seconds_json(job.seconds),
            "floor": job.floor,
            "tokens": job.tokens,
            "tokens_per_s": job.tokens / job.seconds,
            "tokens_per_s_per_device": job.tokens / job.seconds / job.devices,
        },
        "advice": advice,
    }


def seconds_json(seconds: float) -> dict[str, float]:
    """The seconds of a step, and the range in which they likely are."""
    low, high = likely(seconds)
    return {"seconds": seconds, "seconds_low": low, "seconds_high": high}


def _phase_json(phase: PhaseTime) -> dict[str, object]:
    return {
        "seconds": phase.seconds,
        "tokens": phase.tokens,
        "tokens_per_s": phase.tokens / phase.seconds if phase.seconds else 0.0,
        "parts": {part.name: part.seconds for part in phase.parts},
        "floor": phase.floor,
        "floors": {part.name: part.floor for part in phase.parts},
    }


def assumed_text(machine: Machine) -> str:
    """The assumptions as name value, ..."""
    return ", ".join(f"{name} {value:g}" for name, value in asdict(machine.assumed).items())


def assumed_words(job: JobPlan) -> str:
    """The assumptions behind the seconds, as text."""
    texts = lengths(job.config, job.machine)
    return (
        f"{assumed_text(job.machine)}; so prompts of {texts.prompt:,.0f} tokens, responses of {texts.response:,.0f}, the longest "
        f"of {texts.longest:,}"
    )


# Tables of a job, as rows of text: for the terminal and for the page.


def sync_rows(job: JobPlan) -> list[list[str]]:
    """By link: the bytes of all ranks and of the rank that gets most, and the seconds; empty: no sync was planned."""
    if job.sync is None:
        return []
    return [
        [words, size_text(cost.total), size_text(cost.max_received), f"{cost.seconds:.2f}"]
        for words, cost in zip(LINK_WORDS, job.sync.reshard.links.values(), strict=True)
    ]


def time_rows(job: JobPlan) -> Iterator[tuple[bool, list[str]]]:
    """Seconds, floor, part of the step and tokens/s of each phase (True), and seconds and floors of its parts (False)."""
    for phase in job.phases:
        rate = f"{phase.tokens / phase.seconds:,.0f}" if phase.tokens and phase.seconds else "-"
        share = f"{phase.seconds / job.seconds:.0%}"
        yield True, [phase.name, f"{phase.seconds:.2f}", _floor_cell(phase.floor), share, rate]
        yield from (
            (False, [part.name, f"{part.seconds:.2f}", _floor_cell(part.floor), "", ""])
            for part in phase.parts
        )


def _floor_cell(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds else "-"


def pipeline_rows(job: JobPlan) -> list[list[str]]:
    """For each model's passes: the part of the time in which stages wait, the micro-batches, the optimizer steps (or passes)."""
    return [
        [name, f"{passes.bubble:.1%}", str(passes.micro_batches), str(passes.updates)]
        for name, passes in bubbles(job.phases).items()
    ]
