"""All ranks of a job's roles, run at the same time on uneven data: whether their collectives fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config import TrainConfig, TuningConfig
from megarl.plan.inputs import PlanInputs, model_use
from megarl.shadow.agree import Agreement, agree
from megarl.shadow.collectives import Collective

LARGEST_WORLD = 64  # ranks of a role, each a process of some hundred megabytes


def all_ranks(
    config: TrainConfig | TuningConfig, inputs: PlanInputs, roles: Sequence[str]
) -> list[tuple[str, int]]:
    """(role, rank) of all ranks.

    Raises:
        ValueError: a role has too many.
    """
    found = []
    for role in roles:
        layout = model_use(config, inputs, role).layout
        if layout.world > LARGEST_WORLD:
            least = layout.world // layout.dp
            raise ValueError(
                f"--agree runs all ranks of a role at the same time, at most {LARGEST_WORLD}, and the {role} has {layout.world}: "
                f"give it fewer data parallel ranks or stages, by trainer.nnodes and its megatron section "
                f"(one model replica has {least} ranks)"
            )
        found += [(role, rank) for rank in range(layout.world)]
    return found


def agreements(reports: Sequence[Mapping]) -> dict[str, Agreement]:
    """By role: whether the logs of its ranks fit together; roles with one rank are left out.

    Raises:
        RuntimeError: a rank failed, and not because of its peers.
    """
    found = {}
    for role in dict.fromkeys(report["role"] for report in reports):
        own = [report for report in reports if report["role"] == role]
        if len(own) < 2:
            continue
        logs = {report["rank"]: [Collective.from_json(call) for call in report["log"]] for report in own}
        errors = {report["rank"]: report["error"] for report in own if "error" in report}
        found[role] = agree(logs, {rank: error.strip().splitlines()[-1] for rank, error in errors.items()})
        failed = [report for report in own if "error" in report and not report["stopped"]]
        if failed and not found[role].unequal:
            text = failed[0]["error"].strip().replace("\n", "\n  ")
            raise RuntimeError(f"the shadow of {role} rank {failed[0]['rank']} failed:\n  {text}")
    return found


def lines(found: Mapping[str, Agreement]) -> list[str]:
    """The printed lines."""
    told = []
    for role, agreement in found.items():
        told.append(f"{role}: {agreement.summary}")
        told += [f"  {problem}" for problem in agreement.problems]
    return told
