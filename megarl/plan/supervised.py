"""What a run of `megarl sft`, `rm` or `dpo` will hold on the fullest device, owner by owner, before it runs.

One model is on all devices, and all it has is there all the time: there are no engines to make room for.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import PoolConfig, SFTConfig, TrainConfig, TuningConfig
from megarl.config.resolve import GLOBAL_POOL, least_tokens
from megarl.costs.model import model_bytes
from megarl.costs.phases import trained_parts
from megarl.costs.reserve import reserved
from megarl.plan.inputs import PlanInputs
from megarl.plan.memory import MemoryPlan, Owned, plan_memory
from megarl.plan.model_uses import model_use, tuned_role

EVALUATE, UPDATE = "evaluate", "update"


def plan_of(
    config: TrainConfig | TuningConfig, inputs: PlanInputs, limit: int, reserve: int | None = None
) -> MemoryPlan:
    """The plan of a resolved configuration of any command that trains; the arguments are those of `plan_memory`."""
    plan = plan_memory if isinstance(config, TrainConfig) else plan_tuning
    return plan(config, inputs, limit, reserve)


def plan_tuning(
    config: TuningConfig, inputs: PlanInputs, limit: int, reserve: int | None = None
) -> MemoryPlan:
    """The plan of a resolved configuration; the arguments are those of `plan_memory`.

    Raises:
        ValueError: a layout that cannot be.
    """
    pool = PoolConfig(nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
    # Supervised fine-tuning evaluates held-out examples alone; rewards and the reference's log-probs are always computed.
    evaluates = config.data.val_files is not None or not isinstance(config, SFTConfig)
    phases = (EVALUATE, UPDATE) if evaluates else (UPDATE,)
    longest = least_tokens(config)
    owners = tuple(
        owner for owner in _owners(config, inputs) if owner.phases is None or owner.phases & {*phases}
    )
    use = model_use(config, inputs, tuned_role(config))
    rows = tuple(reserved([use.layout], None).items()) if reserve is None else ()
    rows = tuple((cause, size) for cause, size in rows if size)
    reserve = sum(size for _, size in rows) if reserve is None else reserve
    return MemoryPlan(owners, phases, {GLOBAL_POOL: pool}, longest, 0, longest, limit, reserve, rows)


def _owners(config: TuningConfig, inputs: PlanInputs) -> Iterator[Owned]:
    role = tuned_role(config)
    stages = model_bytes(model_use(config, inputs, role), inputs.tables)
    for part in trained_parts(config.megatron):
        sizes = tuple(getattr(stage.held, part) for stage in stages)
        if any(sizes):
            host = tuple(stage.held.host for stage in stages) if part == "optimizer" else ()
            yield Owned(f"{role}_{part}", role, GLOBAL_POOL, sizes, None, host)
    for part, name, phase in (
        ("kept", "activations", UPDATE),
        ("working", "working", UPDATE),
        ("evaluating", "evaluating", EVALUATE),
    ):
        sizes = tuple(getattr(stage, part) for stage in stages)
        yield Owned(f"{role}_{name}", role, GLOBAL_POOL, sizes, frozenset({phase}))
