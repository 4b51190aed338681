"""A process that runs all ranks of tiny jobs together, case by case: `python -m tests.shadow.together_cases`, with cases as JSON on its
standard input; writes their reports to the file that is its argument.

A case may have a rank that deviates from the others (`Faulty`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.shadow import device


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        fault: the name in `FAULTS` of the fault of rank `faulty`; None: no rank has one.
    """

    recipe: str
    overrides: list[str]
    ranks: list[tuple[str, int]]
    micro_batches: int
    fault: str | None = None
    faulty: int = 0


def leave_out_a_send() -> None:
    """Have a stage not send its third output."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original, made = P2PCommunicator.send_forward, [0]

    def send_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return None if made[0] == 3 else original(self, *args, **kwargs)

    P2PCommunicator.send_forward = send_forward


FAULTS: dict[str, Callable[[], None]] = {"send": leave_out_a_send}


def main() -> None:
    cases = [Case(**fields) for fields in json.load(sys.stdin)]
    device.load()

    from megarl.shadow import cuda, transformer_engine

    running: list[Any] = []

    def current() -> Any:
        return running[0].shadow if running else None

    cuda.install(cuda.Card(), current)
    transformer_engine.install(current)

    from megarl.plan.inputs import read_inputs
    from megarl.shadow import together
    from megarl.shadow.rank import Runner

    class Faulty(Runner):
        """Runs one rank with a fault, in that rank's process."""

        case: Case

        def run(
            self, config: Any, inputs: Any, role: str, rank: int, micro_batches: int | None = None
        ) -> Any:
            if self.case.fault is not None and rank == self.case.faulty:
                FAULTS[self.case.fault]()
            return super().run(config, inputs, role, rank, micro_batches)

    runner = Faulty(transformer_engine.forget_workspaces)
    running.append(runner)
    reports = []
    for case in cases:
        runner.case = case
        config, inputs = read_inputs(case.recipe, case.overrides, check=False)
        ranks = [(role, rank) for role, rank in case.ranks]
        reports.append(list(together.run(runner, config, inputs, ranks, case.micro_batches)))
    Path(sys.argv[1]).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
