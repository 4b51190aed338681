"""The process of shadow ranks: `python -m megarl.shadow.process`, with a list of requests as JSON on its standard input.

The device comes before torch, so this module imports nothing heavy before it has loaded the device. Its answer, a line of JSON for each rank,
goes to the file that the request names.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.shadow import device
from megarl.shadow.requests import Request


def main() -> None:
    requests = [Request(**request) for request in json.load(sys.stdin)]
    runner = prepare(requests[0])  # the process has one card, and Transformer Engine or not, for all
    for request in requests:
        answer(runner, request)


def prepare(first: Request) -> Any:
    """The runner (`rank.Runner`) of this process, on the card and with the layers that its first request names. Imports torch."""
    device.load()

    from megarl.shadow import cuda, fla, transformer_engine

    running: list[Any] = []  # the runner, once it is there

    def current():
        return running[0].shadow if running else None

    card = cuda.Card(**first.card)
    cuda.install(card, current)
    fla.install(card, current)
    if first.transformer_engine:
        transformer_engine.install(current)
    else:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # its import fails, as where it is not installed

    from megarl.shadow.rank import Runner

    runner = Runner(*([transformer_engine.forget_workspaces] if first.transformer_engine else []))
    running.append(runner)
    return runner


def answer(runner: Any, request: Request) -> None:
    """Run the ranks of a request and write their reports."""
    from megarl.plan.inputs import read_planned
    from megarl.shadow import together

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
