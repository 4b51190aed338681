"""A process that has done the imports of shadow ranks and forks for each start (tests/fixtures/forks.py): `python -m
tests.shadow.warm_process SOCKET MODULE`, where MODULE is the module of `megarl.shadow` whose work the forks do.

A request is JSON: a list of requests, the file for output, and the working directory. Torch is not imported before the module has
prepared itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import NoReturn

from megarl.shadow.requests import Request
from tests.fixtures.forks import serve

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Modules that ranks import in their runs.
LATER = {
    "megarl.shadow.process": (
        *("megarl.shadow.together", "megarl.plan.inputs", "megarl.weight_sync.triton_kernels"),
        *("megatron.core.models.mimo", "torch.distributed._tools"),
    ),
    "megarl.shadow.engine_process": (
        *("megarl.shadow.sglang", "sglang.srt.managers.scheduler", "sglang.srt.model_executor.model_runner"),
        *("sglang.srt.models.registry", "sglang.srt.speculative.spec_utils"),
    ),
}


def main() -> NoReturn:
    name, process, prepared = sys.argv[2], importlib.import_module(sys.argv[2]), []

    def prepare(text: str) -> None:
        if not prepared:
            prepared.append(process.prepare(Request(**json.loads(text)[0][0])))
            for module in LATER[name]:
                importlib.import_module(module)

    text, _ = serve(int(sys.argv[1]), prepare)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, log, folder = json.loads(text)
    os.chdir(folder)
    code = 1
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            for request in requests:
                process.answer(prepared[0], Request(**request))
            code = 0
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
