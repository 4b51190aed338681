"""A shadow rank's bytes compared with the plan's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.plan.memory import MemoryPlan
from megarl.shadow import engine
from megarl.shadow.requests import SHARED


@dataclass(frozen=True)
class Comparison:
    """Bytes of one owner on a rank: as planned, and as the rank had them.

    Attributes:
        phase: "always", or the phase whose peak it is.
    """

    rank: str
    owner: str
    phase: str
    planned: int
    found: int

    @property
    def difference(self) -> float:
        """The plan's error, relative to the measured bytes; negative where the plan is too small."""
        return (self.planned - self.found) / self.found if self.found else float(self.planned > 0)


def compare(plan: MemoryPlan, report: Mapping) -> Iterator[Comparison]:
    """A rank's bytes compared with the plan of its stage."""
    if report["role"] == engine.ROLE:
        planned = {owner.name: max(owner.stages) for owner in plan.owners}
        for row in engine.sizes(planned, report):
            yield Comparison(f"{report['role']} {report['rank']}", *row)
        return
    role, stage, parts, phases = report["role"], report["stage"], report["parts"], report["phases"]
    name = f"{role} {report['rank']} (stage {stage})"
    owners = {owner.name: owner.stages for owner in plan.owners}
    shared = SHARED if f"{SHARED}update" in phases else None  # a critic in the actor's processes
    for prefix, of in ((role, ""), *([("critic", shared)] if shared else [])):
        for part in ("weights", "adapters", "gradients", "optimizer"):
            if f"{prefix}_{part}" in owners:
                found = parts.get(f"{of}{part}", 0)
                yield Comparison(name, f"{prefix}_{part}", "always", owners[f"{prefix}_{part}"][stage], found)
    if "reference" in parts:
        yield Comparison(name, "ref_weights", "always", owners["ref_weights"][stage], parts["reference"])
    for prefix, of in ((role, ""), *([("critic", shared)] if shared else [])):
        if f"{of}evaluate" in phases:
            # The first pass leaves workspaces that libraries keep: they are a line of their own.
            took = phases[f"{of}evaluate"]["peak"] - phases[f"{of}evaluate"]["left"]
            evaluating = owners[f"{prefix}_evaluating"][stage]
            yield Comparison(name, f"{prefix}_evaluating", f"{of}evaluate", evaluating, took)
        if f"{of}update" in phases:
            update = owners[f"{prefix}_activations"][stage] + owners[f"{prefix}_working"][stage]
            # Memory that the first update leaves for later ones is there in all of them.
            took = phases[f"{of}update"]["peak"] + phases[f"{of}first_update"]["kept"]
            yield Comparison(name, f"{prefix}_activations + working", f"{of}update", update, took)
    if "sync" in phases:
        sending = [f"{role}_{part}" for part in ("sync_buffers", "merging", "gathered")]
        sending = [owner for owner in sending if owner in owners]
        planned = sum(owners[owner][stage] for owner in sending)
        together = " + ".join([sending[0], *(owner.removeprefix(f"{role}_") for owner in sending[1:])])
        yield Comparison(name, together, "sync", planned, phases["sync"]["peak"])
    for part, moved in report["moved"].items():
        owner = "ref_weights" if part == "reference" else part if part in owners else f"{role}_{part}"
        if owner in owners and owners[owner][stage]:
            # Tensors that an update keeps in place of gradients leave with them.
            kept = phases["first_update"]["kept"] if part == "gradients" else 0
            yield Comparison(name, owner, "release", owners[owner][stage], moved["freed"] - kept)
