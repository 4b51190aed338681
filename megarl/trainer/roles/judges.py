"""References that engines serve: their worker groups, and what happens when an engine is lost.

Engines load the folder of their model when they start, and have no other state: a new engine equals the lost one. They have devices of their
own, so that no phase of a step moves their memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.cluster import WorkerGroup
from megarl.config import TrainConfig, all_references, reference_key, served_references
from megarl.rollout.engine import EngineConfig
from megarl.trainer.roles.device_memory import DeviceMemory
from megarl.trainer.roles.engines import engine_config
from megarl.trainer.roles.restarts import EngineRestarts
from megarl.trainer.run.run import Run

WORKER = "megarl.trainer.workers.judge:JudgeWorker"


@dataclass(frozen=True)
class JudgeEngines:
    """The engines of a reference. `restarts`: replaces lost ones."""

    group: WorkerGroup
    restarts: EngineRestarts


def judge_engine(config: TrainConfig, role: str, *, use_gpu: bool) -> EngineConfig:
    """An engine of a reference (one of `served_references`), whose log-probs are at the temperature of the rollouts, as Megatron's are."""
    data, path = config.data, all_references(config)[role].model.path
    assert path is not None, "resolved"
    context = data.max_prompt_length + data.max_response_length
    engine = engine_config(served_references(config)[role], path, context, use_gpu=use_gpu, synced=False)
    return replace(engine, judging_temperature=config.actor_rollout_ref.rollout.temperature)


def judge_engines(config: TrainConfig, run: Run, role: str, group: WorkerGroup) -> JudgeEngines:
    """The engines of a reference, whose group has started."""
    most, memory = served_references(config)[role].max_restarts, DeviceMemory(run, [], {})
    if most:
        run.spares.append(group)
    key = f"{reference_key(role)}.engine.max_restarts"
    return JudgeEngines(group, EngineRestarts(run, group, most, memory, _nothing, _nothing, key=key))


def _nothing(*_: object) -> None:
    """In place of connecting a judging engine to the actor, and of a sync: it gets no weights."""
