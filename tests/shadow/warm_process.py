"""A process that has done the imports of shadow ranks and forks for each start: `python -m tests.shadow.warm_process SOCKET MODULE`, with
the number of its socket and the module of `megarl.shadow` whose work it does.

A message is a list of requests as JSON, the file for what is printed and the working directory; with it comes a pipe, into which the fork
writes its number and, at its end, its exit code. Imports no torch before the module has prepared itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from megarl.shadow.requests import Request

LONGEST = 1 << 20  # bytes of a message
NUMBER = 16  # bytes of a number in a pipe
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# What ranks import in their runs.
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


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    name, process, prepared = sys.argv[2], importlib.import_module(sys.argv[2]), None
    while True:
        told, pipes, _, _ = socket.recv_fds(connection, LONGEST, 1)
        if not told:
            return
        requests, log, folder = json.loads(told)
        requests = [Request(**request) for request in requests]
        if prepared is None:
            prepared = process.prepare(requests[0])
            for module in LATER[name]:
                importlib.import_module(module)
            # Forks leave nothing behind. Not earlier: the compiler of the device waits for its own processes.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        child = os.fork()
        if child == 0:
            connection.close()
            _answer(process, prepared, requests, log, folder, pipes[0])
        os.close(pipes[0])


def _answer(
    process: Any, prepared: Any, requests: Sequence[Request], log: str, folder: str, writes: int
) -> None:
    """As the fork, which ends here."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.set_inheritable(writes, False)
    os.write(writes, str(os.getpid()).rjust(NUMBER).encode())
    os.chdir(folder)
    code = 1
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            for request in requests:
                process.answer(prepared, request)
            code = 0
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writes, str(code).rjust(NUMBER).encode())
        os._exit(code)


if __name__ == "__main__":
    main()
