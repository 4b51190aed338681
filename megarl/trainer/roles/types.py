"""The roles of a PPO run as its stages see them, and the planned sizes of their weight syncs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.cluster import WorkerGroup
from megarl.trainer.roles.device_memory import DeviceMemory
from megarl.trainer.roles.judges import JudgeEngines
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.roles.restarts import EngineRestarts


@dataclass(frozen=True)
class VersionFacts:
    """Planned sizes of a version before it is sent.

    Attributes:
        account: bytes by link, in total, and the most for a rank (`SyncPlan.account`).
        received: bytes that each engine rank receives.
    """

    account: dict[str, int]
    received: tuple[int, ...]
    num_buckets: int


@dataclass(frozen=True)
class SyncFacts:
    """Facts that all syncs of a run share.

    Attributes:
        complete: a version with all weights, and the adapters if engines serve any.
        adapters: a version of adapters alone; None: engines serve none.
        engine_ranks: the number of ranks of an engine.
        skip_unchanged: whether slices that equal those of the version in an engine are not sent.
    """

    complete: VersionFacts
    adapters: VersionFacts | None
    engine_ranks: int
    skip_unchanged: bool


@dataclass(frozen=True)
class EvalEngines:
    """The engines of concurrent validation, which nothing else uses."""

    group: WorkerGroup
    sync: SyncFacts
    restarts: EngineRestarts


@dataclass(frozen=True)
class Roles:
    """The parts of a run; `ref.group` is the actor's where the reference lives in the actor's processes, and
    `critic.group` where the critic shares the actor's model. `teachers`: several in place of the reference, by name. `judges`: the reference,
    or teachers, that engines serve, by role; neither `ref` nor `teachers` has them.

    A run that generates nothing has no engines, and so neither `sync` nor `restarts`. `eval`: None where validation has no engines of its own.
    """

    actor: Role
    engines: WorkerGroup | None
    sync: SyncFacts | None
    critic: Role | None
    ref: Role | None
    reward_model: Role | None
    memory: DeviceMemory
    restarts: EngineRestarts | None
    teachers: Mapping[str, Role] = field(default_factory=dict)
    eval: EvalEngines | None = None
    judges: Mapping[str, JudgeEngines] = field(default_factory=dict)
