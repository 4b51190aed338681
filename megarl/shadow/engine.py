"""The engines' part of `megarl plan memory --dry-run`: which rank is run, and its comparison with the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config import TrainConfig
from megarl.rollout.sglang.before_import import sglang_environment

ROLE = "rollout"
MODULE = "megarl.shadow.engine_process"
FIRST = (ROLE, 0)  # which has as much as any


def environment(config: TrainConfig) -> dict[str, str]:
    """The environment of the process of an engine's rank."""
    rollout = config.actor_rollout_ref.rollout
    return sglang_environment("cuda", rollout.tensor_model_parallel_size, nodes=rollout.nodes_per_engine)


def sizes(planned: Mapping[str, int], report: Mapping[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """(owner, phase, planned, found) of an engine's rank. `planned`: bytes of the plan's owners."""
    for owner in ("weights", "kv_cache"):
        yield f"{ROLE}_{owner}", "always", planned[f"{ROLE}_{owner}"], report[owner]


def details(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{report['role']} rank {report['rank']} of {report['world_size']}: SGLang's {report['model']}; {report['num_operations']:,} "
        f"operations; a cache of {report['kv_tokens']:,} tokens; {report['seconds']:.0f} s of a processor"
    )
    if report["problems"]:
        yield f"  a sync does not fit its {report['num_parameters']} parameters:"
        yield from (f"    {problem}" for problem in report["problems"])
    else:
        yield f"  a sync fills its {report['num_parameters']} parameters, in name, place, shape and type"
