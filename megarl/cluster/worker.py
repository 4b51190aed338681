"""The process of one rank: its environment, its cores, its log, and how methods of the user's class are called in it.

Ray 2.60 runs the methods of a plain actor in the main thread of its process. As soon as an actor has concurrency groups or
max_concurrency > 1 they move to other threads, where signal handlers, such as SGLang's, cannot be installed. So this process has no
watching thread or method: the controller learns of a death from Ray's own records (waiting.py).

A rank with GPUs runs on the cores near its GPUs. Copies between a GPU and memory of the other socket cross the link between
sockets, at half the speed or less, and memory is allocated on the socket of the core that touches it first. Ray (2.60,
`set_omp_num_threads_if_unset`) would leave each rank one thread, since ranks book a fraction of a core. No driver is asked: the
numbers and NUMA nodes of GPUs are read from the files of the NVIDIA driver and of Linux. Where these files are missing, such as in some
containers, ranks are not bound to cores.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import io
import os
import re
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from megarl.cluster.guard import KEEP_ENVIRON, MARK_PREFIX
from megarl.cluster.hosts import log_tail, reserve_port, start_guard
from megarl.cluster.ranks import ProcessFacts, RankError, RankInfo, RelayedErrors
from megarl.util import nccl
from megarl.util.memory import without_collection
from megarl.util.signals import outlive_job_signals
from megarl.util.spans import Span, Spans, facts_of_call

_MARK_NAME = f"{MARK_PREFIX}RANK"
_SHARED_MEMORY = "/dev/shm"
PROCESSES_OF_A_GPU = 3  # that compute at the same time, at most: a rank, an engine's owner and its scheduler
FILE_SYSTEM = Path("/")


class Worker:
    """The Ray actor of one rank: `setup`, then `start`, then `invoke` any number of times."""

    def __init__(self) -> None:
        self._user: Any = None
        self._log_path = ""
        self._port_holder: socket.socket | None = None
        self._spans = Spans()
        self._signatures: dict[str, inspect.Signature] = {}  # of the user's methods
        self._around: Callable[[str], AbstractContextManager[object]] = nullcontext

    def setup(self, name: str, log_path: str, env: dict[str, str], needs_port: bool) -> ProcessFacts:
        """Prepare the process. From here on all output, also of C code, goes to the log.

        `env` becomes part of the environment, also of child processes, before anything heavy is imported. Settings of NCCL that are
        still missing are added.
        """
        self._log_path = log_path
        type(self).__name__ = name  # Ray derives the process title from it, anew after every call
        _redirect_output(log_path)
        print(f"--- {name}: process {os.getpid()} on {ray.util.get_node_ip_address()}, {time.ctime()}")
        faulthandler.enable()
        outlive_job_signals()
        if os.getpgrp() != os.getpid():  # it leads its group, unless the cluster has that disabled
            os.setpgid(0, 0)
        os.environ.update(KEEP_ENVIRON | env)
        nccl.complete(os.environ)
        if env.get("CUDA_VISIBLE_DEVICES"):
            num_gpus = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
            os.environ.update(use_cores(env, num_gpus))
        # The guard starts before the scratch folder exists, so that the folder is removed however this process ends.
        token = secrets.token_hex(8)
        os.environ[_MARK_NAME] = token
        mark = f"{_MARK_NAME}={token}"
        parent = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else tempfile.gettempdir()
        scratch = f"{parent}/megarl-{token}"
        start_guard(mark, parent=os.getppid(), directories=[scratch], output=1)
        os.mkdir(scratch, mode=0o700)
        if needs_port:
            self._port_holder = reserve_port()
        return ProcessFacts(
            pid=os.getpid(),
            mark=mark,
            scratch=scratch,
            host=ray.util.get_node_ip_address(),
            node_id=ray.get_runtime_context().get_node_id(),
            port=self._port_holder.getsockname()[1] if needs_port else None,
        )

    def start(
        self, info: RankInfo, worker_class: str, init_kwargs: dict[str, Any], around: str | None = None
    ) -> None:
        """Imports "module:Class" and makes the user's object.

        Args:
            around: "module:function"; called with a method's name it returns the context manager in which the method runs.

        Raises:
            RankError: the import or the constructor raised.
        """
        with self._reporting(), self._spans.span("start"):
            with without_collection():
                constructor = _imported(worker_class)
                if around is not None:
                    self._around = _imported(around)
            if self._port_holder is not None:
                self._port_holder.close()
                self._port_holder = None
            self._user = constructor(info, **init_kwargs)

    def invoke(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the user's object.

        Raises:
            RankError: the method raised, or the object was never made.
        """
        self._require_start()
        with self._reporting(), self._noted(method, args, kwargs):
            return getattr(self._user, method)(*args, **kwargs)

    def take_spans(self) -> list[Span]:
        """Spans since the last call, on this process's own clock."""
        return self._spans.take()

    @contextmanager
    def _noted(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[None]:
        if method not in self._signatures:
            self._signatures[method] = inspect.signature(getattr(self._user, method))
        facts = facts_of_call(self._signatures[method], args, kwargs)
        with self._spans.span(method, facts), self._around(method):
            yield

    def _require_start(self) -> None:
        if self._user is None:
            raise RankError("RuntimeError", "the worker never started", "", time.time(), "")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except RelayedErrors:
            raise
        except Exception as error:
            when, tail = time.time(), log_tail(self._log_path)[0]
            text = traceback.format_exc()
            print(text, file=sys.stderr)
            raise RankError(type(error).__name__, str(error), text, when, tail) from None


def _imported(path: str) -> Any:
    """Import the object that "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _redirect_output(log_path: str) -> None:
    """File descriptors 1 and 2, and Python's streams on them, go to the log, unbuffered."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # New streams, as of `python -u`: the streams that Ray made write to Ray's files.
    sys.stdout = _unbuffered(1)
    sys.stderr = _unbuffered(2)


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def rank_environment(gpu_ids: tuple[str, ...], single_machine: bool) -> dict[str, str]:
    """The variables that every rank needs in its environment before torch is imported."""
    # An empty list hides the GPUs of a machine from ranks that were asked to do without.
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    # Megatron's overlap of communication and computation relies on one hardware queue.
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if gpu_ids:
        # Transformer Engine 2.18 would choose flash-attn-4 where it is installed. SGLang brings another version of it than the one that
        # Transformer Engine was made for (attention/dot_product_attention/utils.py reads this).
        env["NVTE_FLASH_ATTN_V4"] = "0"
    else:
        # One thread a rank: there are more ranks than cores already.
        env["OMP_NUM_THREADS"] = "1"
    if single_machine:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env | nccl.asked_for(os.environ)


@dataclass(frozen=True)
class Cores:
    """The cores of a process: `cpus` that it may use, and `threads` of torch's operations on them."""

    cpus: frozenset[int]
    threads: int


def use_cores(env: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """Bind this process, if it has GPUs, to the cores near them.

    Args:
        env: the process's environment: CUDA_VISIBLE_DEVICES, and OMP_NUM_THREADS where it is set already.
        num_gpus: number of the machine's GPUs.

    Returns: variables to add to its environment.
    """
    if not env.get("CUDA_VISIBLE_DEVICES"):
        return {}
    found = cores_near(
        env["CUDA_VISIBLE_DEVICES"].split(","), num_gpus, frozenset(os.sched_getaffinity(0)), FILE_SYSTEM
    )
    os.sched_setaffinity(0, found.cpus)  # of this thread and the threads that it starts
    return {} if "OMP_NUM_THREADS" in env else {"OMP_NUM_THREADS": str(found.threads)}


def cores_near(gpu_ids: Sequence[str], num_gpus: int, allowed: frozenset[int], root: Path) -> Cores:
    """The `allowed` cores of the NUMA node that has all GPUs of `gpu_ids`; all allowed cores where there is no such node.

    Args:
        gpu_ids: numbers, in the order of bus addresses as nvidia-smi has them, or UUIDs.
        root: of the file system.
    """
    gpus = _gpus(root)
    nodes = {name: node for number, (uuid, node) in enumerate(gpus) for name in (str(number), uuid)}
    own = {nodes.get(gpu) for gpu in gpu_ids}
    (node,) = own if len(own) == 1 else (None,)
    near = allowed & _cpus_of(root, node) if node is not None else frozenset()
    if not near:
        return Cores(allowed, _share(allowed, num_gpus))
    return Cores(near, _share(near, sum(other == node for _, other in gpus)))


def _share(cpus: frozenset[int], num_gpus: int) -> int:
    return max(1, len(cpus) // (PROCESSES_OF_A_GPU * max(1, num_gpus)))


def _gpus(root: Path) -> list[tuple[str, int | None]]:
    """(UUID, NUMA node) of each GPU in the order of bus addresses, as GPUs are numbered; None: a node unknown to Linux."""
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        uuid = re.search(r"^GPU UUID:\s*(\S+)", (folder / "information").read_text(), re.MULTILINE)
        place = root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node"
        node = int(place.read_text()) if place.exists() else -1
        found.append((uuid[1] if uuid is not None else "", node if node >= 0 else None))
    return found


def _cpus_of(root: Path, node: int) -> frozenset[int]:
    """The cores of a NUMA node, from a list such as "0-3,8-11"."""
    cpus: set[int] = set()
    for part in (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1)) if first else set()
    return frozenset(cpus)
