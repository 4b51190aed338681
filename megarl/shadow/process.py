"""The process of shadow ranks: `python -m megarl.shadow.process`, with requests as JSON on its standard input, one a line; those after the
first have its card and its layers.
"""The process of shadow ranks: `python -m megarl.shadow.process`, with a list of requests as JSON on its standard input.

The device comes before torch, so this module imports nothing heavy before it has it. Its answers, a JSON object a line and rank, go to
the files that the requests name.
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
    for request in requests:
        config, inputs = read_planned(request.recipe, request.overrides, request.command, check=False)
        with Path(request.out).open("w", encoding="utf-8") as file:
            if request.together:
                for report in together.run(runner, config, inputs, request.ranks, request.micro_batches):
                    file.write(json.dumps(report) + "\n")
                continue
            for role, rank in request.ranks:
                report = runner.run(config, inputs, role, rank, request.micro_batches)
                file.write(json.dumps(asdict(report)) + "\n")
                file.flush()
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

    for request in requests:
        config, inputs = read_planned(request.recipe, request.overrides, request.command, check=False)
        with Path(request.out).open("w", encoding="utf-8") as file:
            if request.together:
                for report in together.run(runner, config, inputs, request.ranks, request.micro_batches):
                    file.write(json.dumps(report) + "\n")
                continue
            for role, rank in request.ranks:
                report = runner.run(config, inputs, role, rank, request.micro_batches)
                file.write(json.dumps(asdict(report)) + "\n")
                file.flush()
    running.append(runner)
    for request in requests:
        config, inputs = read_planned(request.recipe, request.overrides, request.command, check=False)
        with Path(request.out).open("w", encoding="utf-8") as file:
    for request in requests:
        config, inputs = read_planned(request.recipe, request.overrides, request.command, check=False)
        with Path(request.out).open("w", encoding="utf-8") as file:
            if request.together:
                for report in together.run(runner, config, inputs, request.ranks, request.micro_batches):
                    file.write(json.dumps(report) + "\n")
                continue
            for role, rank in request.ranks:
                report = runner.run(config, inputs, role, rank, request.micro_batches)
                file.write(json.dumps(asdict(report)) + "\n")
                file.flush()
                file.flush()


if __name__ == "__main__":
    main()
