"""The process of a shadow rank of an engine: `python -m megarl.shadow.engine_process`, with a list of one request on its input.

As `process`, but of one rank: SGLang keeps one configuration a process. It is started with the environment of an engine.
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
    (request,) = (Request(**request) for request in json.load(sys.stdin))
    answer(prepare(request), request)


def prepare(request: Request) -> list[Any]:
    """The device and the kernels' names in this process, on the request's card. Imports torch, and nothing of SGLang.

    Returns: an empty list, for the shadow once it is there.
    """
    device.load()

    from megarl.shadow import cuda, engine_kernels

    running: list[Any] = []
    cuda.install(cuda.Card(**request.card), lambda: running[0] if running else None)  # type: ignore[arg-type]
    engine_kernels.install()
    sys.modules["megatron.core"] = None  # type: ignore[assignment]  # SGLang would import it for its own debugging
    return running


def answer(running: list[Any], request: Request) -> None:
    """Run the rank and write its report."""
    from megarl.plan.inputs import read_inputs
    from megarl.shadow import sglang

    ((_, rank),) = request.ranks
    config, inputs = read_inputs(request.recipe, request.overrides, check=False)
    report = sglang.run(config, inputs.model, rank, running.append)
    Path(request.out).write_text(json.dumps(asdict(report)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
