"""Memory of the devices, by owner and phase, as the run's own account has it."""

from __future__ import annotations

from typing import Any

from megarl.report.data import RunRecord
from megarl.report.figures import MIB
from megarl.report.seconds import PHASES

PREFIX, TOTAL = "memory/", "total"


def memory_by_phase(run: RunRecord) -> dict[str, Any] | None:
    """Bars by phase, a piece for each owner, in MiB, of the last step with an account; None: the run has none."""
    step = next((step for step in reversed(run.steps) if any(name.startswith(PREFIX) for name in step)), None)
    if step is None:
        return None
    account: dict[str, dict[str, float]] = {}
    for name, value in step.items():
        if name.startswith(PREFIX):
            _, phase, owner = name.split("/", 2)
            account.setdefault(phase, {})[owner] = value / MIB
    owners = sorted({owner for held in account.values() for owner in held if held[owner]} - {TOTAL})
    order = [phase for phase in PHASES if phase in account]
    phases = [*order, *(phase for phase in account if phase not in order)]
    return {
        "kind": "rows",
        "title": f"Device memory in step {int(step['step'])}",
        "about": "each owner on the device where it has most; the number is all of the fullest device, and may be less than their sum",
        "unit": "MiB",
        "rows": [PHASES.get(phase, phase) for phase in phases],
        "parts": [
            {"colour": f"c{number % 10}", "label": owner.replace("_", " "), "values": [account[phase].get(owner, 0.0) for phase in phases]}
            for number, owner in enumerate(owners)
        ],
        "totals": [account[phase].get(TOTAL, 0.0) for phase in phases],
    }  # fmt: skip
