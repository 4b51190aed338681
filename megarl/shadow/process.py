"""The process of shadow ranks: `python -m megarl.shadow.process`, with a list of requests as JSON on its standard input.

The device comes before torch, so this module imports nothing heavy before it has it. Its answer, a JSON object a line and rank, goes to
the file that the request names.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megarl.shadow import device

SHARED = "critic_"  # before the steps and parts of a critic in the actor's processes


@dataclass(frozen=True)
class Request:
    """Which ranks of a recipe to run, one after the other.

    Attributes:
        ranks: (role, rank).
        out: the file for the reports.
        together: whether the ranks of a role run at the same time, with uneven data, and receive what their peers send.
        command: whose recipe it is; None: what its keys say.
        transformer_engine: whether its layers are used, as on a machine where it is installed; else megarl's own in torch.
    """

    recipe: str
    overrides: list[str]
    ranks: list[tuple[str, int]]
    out: str
    micro_batches: int | None = None
    transformer_engine: bool = True
    together: bool = False
    card: dict[str, object] = field(default_factory=dict)
    command: str | None = None


def main() -> None:
    requests = [Request(**request) for request in json.load(sys.stdin)]
    first = requests[0]  # the process has one card, and Transformer Engine or not, for all
    device.load()

    from megarl.shadow import cuda, transformer_engine

    running: list[object] = []  # the runner, once it is there

    def current():
        return running[0].shadow if running else None

    cuda.install(cuda.Card(**first.card), current)
    if first.transformer_engine:
        transformer_engine.install(current)
    else:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its import fails, as where it is not installed

    from megarl.shadow import together
    from megarl.shadow.rank import Runner
    from megarl.trainer.memory_command import read_planned

    runner = Runner(*([transformer_engine.forget_workspaces] if first.transformer_engine else []))
    running.append(runner)
    for request in requests:
        config, inputs = read_planned(request.recipe, request.overrides, request.command, check=False)
        with Path(request.out).open("w", encoding="utf-8") as file:
            if request.together:
                reports = together.run(runner, config, inputs, request.ranks, request.micro_batches)
            else:
                reports = (
                    asdict(runner.run(config, inputs, role, rank, request.micro_batches))
                    for role, rank in request.ranks
                )
            for report in reports:
                file.write(json.dumps(report) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
