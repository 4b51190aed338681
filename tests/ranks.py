"""Real ranks for tests: a pool of processes, started once a session, that talk over gloo.

Usage, in tests/<room>/test_something.py:

    def _sum(rank: int, world: int, start: int) -> int:      # a module-level function; runs on every rank
        import torch                                          # torch.distributed is initialised (gloo)
        total = torch.tensor(start + rank)
        torch.distributed.all_reduce(total)
        return total.item()                                   # anything that pickles; tensors are copied

    def test_sum(ranks):                                      # `ranks`: session fixture of tests/conftest.py
        assert ranks.run(_sum, 10, world=2) == [21, 21]       # one result per rank, in rank order

- Each run has a fresh default process group (its rendezvous is a file) and torch's seed 0; afterwards
  `megarl.megatron.parallel.destroy_parallel()` clears Megatron's state, so runs may use any layouts. Call
  `init_parallel(layout, rank, world, seed=...)` inside the function: it takes the group that is there.
- The first run starts 4 processes (a few seconds: torch and megatron-core are imported once and forked);
  a run with world=8 adds 4 more.
- An exception on a rank is raised in the test as `RankError` with that rank's traceback (its cause is the
  exception itself if it pickles). On an error or a timeout, ranks that do not come back are killed, with
  their stacks in the message; the next run starts new ones.
- Arguments and results travel by pickle: the function must be importable by its module name, so test
  folders have an `__init__.py`. What ranks print is shown with an error only.
"""

import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType
from typing import Any

BLOCK = 4  # ranks that are forked from one process
STARTUP_SECONDS = 120
GRACE_SECONDS = 5  # for the other ranks, after one rank has failed
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONWARNINGS": "ignore",
}


class RankError(Exception):
    """A rank raised, hung or died."""


@dataclass
class _Rank:
    connection: Connection
    pid: int


@dataclass(frozen=True)
class _Failure:
    when: float  # monotonic seconds: the first failure is the cause, others often follow from it
    rank: int
    message: str
    error: Exception | None = None


class RankPool:
    """Processes that run functions as the ranks of a process group. See the module's docstring."""

    def __init__(self, size: int = BLOCK) -> None:
        self._size = size
        self._folder = Path(tempfile.mkdtemp(prefix="megarl-ranks-"))
        self._ranks: list[_Rank] = []
        self._servers: list[Any] = []
        self._num_runs = 0

    def run(
        self, function: Callable[..., Any], *args: Any, world: int = BLOCK, timeout: float = 120
    ) -> list[Any]:
        """Call `function(rank, world, *args)` on ranks 0 to world-1.

        Returns: the results in rank order.

        Raises:
            RankError: a rank raised an exception, died, or did not answer within `timeout` seconds.
        """
        self._grow(max(world, self._size))
        self._num_runs += 1
        store = self._folder / f"store-{self._num_runs}"
        for rank in range(world):
            job = (rank, world, str(store), timeout, list(sys.path), pickle.dumps((function, args)))
            self._ranks[rank].connection.send_bytes(pickle.dumps(job))
        results, failures = self._collect(world, timeout)
        store.unlink(missing_ok=True)
        if failures:
            failures.sort(key=lambda failure: failure.when)
            text = "\n".join(f"--- rank {failure.rank} of {world}: {failure.message}" for failure in failures)
            raise RankError(f"{function.__qualname__} failed\n{text}") from failures[0].error
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        """End all processes and remove the pool's files."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, world: int, timeout: float) -> tuple[dict[int, Any], list[_Failure]]:
        waiting = {self._ranks[rank].connection: rank for rank in range(world)}
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        dead = False
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    kind, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    dead = True
                    kind, value = "raised", (0.0, f"the process died\n{self._log_tail(rank)}", None)
                if kind == "returned":
                    results[rank] = value
                else:
                    when, message, error = value
                    failures.append(_Failure(when, rank, message, error))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            failures.append(_Failure(math.inf, rank, f"no answer\n{self._stack_of(rank)}"))
        if waiting or dead:  # neither such a rank nor the other ranks of its group can be used again
            self._kill()
        return results, failures

    def _grow(self, size: int) -> None:
        while len(self._ranks) < size:
            first = len(self._ranks)
            context = multiprocessing.get_context("spawn")
            ends = [context.Pipe() for _ in range(BLOCK)]
            logs = [str(self._log(first + index)) for index in range(BLOCK)]
            saved = {name: os.environ.get(name) for name in ENVIRONMENT}
            os.environ.update(ENVIRONMENT)  # some of these are read as early as the import of torch
            try:
                server = context.Process(
                    target=_serve, args=([child for _, child in ends], logs), daemon=False
                )
                server.start()
            finally:
                for name, value in saved.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
            self._servers.append(server)
            for parent, child in ends:
                child.close()
                if not parent.poll(STARTUP_SECONDS):
                    raise RankError(f"no rank process within {STARTUP_SECONDS} s; see {self._folder}")
                self._ranks.append(_Rank(parent, pickle.loads(parent.recv_bytes())))

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
            try:
                os.kill(rank.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for server in self._servers:
            server.join(GRACE_SECONDS)
            if server.is_alive():
                server.kill()
        self._ranks, self._servers = [], []

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def _log_tail(self, rank: int, lines: int = 60) -> str:
        return "\n".join(self._log(rank).read_text(errors="replace").splitlines()[-lines:])

    def _stack_of(self, rank: int) -> str:
        os.kill(self._ranks[rank].pid, signal.SIGUSR1)  # faulthandler writes the stack to the rank's log
        time.sleep(0.5)
        return self._log_tail(rank)


def _serve(connections: list[Connection], logs: list[str]) -> None:
    """Import what every rank needs, or most of them, then fork the ranks: one import instead of one per rank."""
    import torch
    from transformers import Qwen2ForCausalLM  # noqa: F401

    import megarl.megatron.build
    import megarl.megatron.optimizer  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    processes = []
    for index in range(len(connections)):
        # Not daemonic: checkpoint writers start processes of their own.
        process = context.Process(target=_be_rank, args=(index, connections, logs[index]), daemon=False)
        process.start()
        processes.append(process)
    for connection in connections:
        connection.close()
    for process in processes:
        process.join()


def _be_rank(index: int, connections: list[Connection], log: str) -> None:
    # Only this rank may hold its end of the pipe: its death must close it.
    for other in connections:
        if other is not connections[index]:
            other.close()
    connection = connections[index]
    descriptor = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    connection.send_bytes(pickle.dumps(os.getpid()))
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, ConnectionResetError):  # the test session is over
            return
        connection.send_bytes(_answer(job))


def _answer(job: bytes) -> bytes:
    """Run one job. Returns: pickled ("returned", result) or ("raised", (when, traceback, exception))."""
    import torch

    from megarl.megatron.parallel import destroy_parallel

    rank, world, store, timeout, path, call = pickle.loads(job)
    sys.path[:] = path
    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * timeout),  # the pool's own timeout, which shows stacks, comes first
    )
    try:
        # A rank that raises at once and leaves would break the connections of ranks that are still connecting, and end them.
        torch.distributed.barrier()
        function, args = pickle.loads(call)
        result = function(rank, world, *args)
        torch.distributed.barrier()  # a rank that leaves early would break its neighbours' connections
        answer = pickle.dumps(("returned", result))
    except Exception as error:
        answer = _pickle_failure(time.monotonic(), traceback.format_exc(), error)
    destroy_parallel()
    _free_models()
    return answer


def _free_models() -> None:
    """Free the models of the run, and with them their process groups, each of which has threads that poll.

    megatron-core's DistributedDataParallel (0.19.2) is never freed by itself: gradient accumulators have hooks that hold
    it, a cycle through torch's own objects that the garbage collector does not see. Megatron-FSDP's model has more of such functions.

    The objects that remain belong to modules. They are frozen: otherwise the garbage collector would search some
    400,000 of them twice in each run, which takes a quarter of a second or more on every rank.
    """
    hook = "DistributedDataParallel._make_backward_post_hook.<locals>.hook"
    gc.collect()
    for function in [found for found in gc.get_objects() if type(found) is FunctionType]:
        sharded = (function.__module__ or "").startswith("megatron.core.distributed.fsdp")
        if function.__qualname__ == hook or (sharded and "<locals>" in function.__qualname__):
            for cell in function.__closure__ or ():
                cell.cell_contents = None
    gc.collect()
    gc.freeze()


def _pickle_failure(when: float, message: str, error: Exception) -> bytes:
    try:
        return pickle.dumps(("raised", (when, message, error)))
    except Exception:  # an exception may hold anything; its traceback is text in any case
        return pickle.dumps(("raised", (when, message, None)))
