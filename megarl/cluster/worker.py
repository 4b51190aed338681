"""The process of one rank: what happens in it before the user's class is imported, and how it is called.

Ray 2.60 runs the methods of a plain actor in the main thread of its process; as soon as an actor has concurrency
groups or max_concurrency > 1 they move to other threads, where signal handlers cannot be installed (SGLang
does). So there is no watching thread or method in here: the controller learns of a death from Ray's own books,
see failure.py.
"""

import faulthandler
import importlib
import inspect
import io
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray._private.accelerators import NvidiaGPUAcceleratorManager

from megarl.cluster.affinity import use_cores
from megarl.cluster.guard import KEEP_ENVIRON, MARK_PREFIX
from megarl.cluster.hosts import log_tail, reserve_port, start_guard
from megarl.cluster.ranks import ProcessFacts, RankError, RankInfo, RelayedErrors
from megarl.cluster.tables import received, sent
from megarl.util import nccl
from megarl.util.imports import without_collection
from megarl.util.signals import outlive_job_signals
from megarl.util.spans import Facts, Span, Spans, facts_of_call

_MARK_NAME = f"{MARK_PREFIX}RANK"
_SHARED_MEMORY = "/dev/shm"


class Worker:
    """The Ray actor of one rank: `setup`, then `start`, then `invoke` and `stream` any number of times."""

    def __init__(self) -> None:
        self._user: Any = None
        self._log_path = ""
        self._port_holder = None
        self._spans = Spans()
        self._signatures: dict[str, inspect.Signature] = {}  # of the user's methods
        self._around: Callable[[str], AbstractContextManager[object]] = nullcontext

    def setup(self, name: str, log_path: str, env: dict[str, str], needs_port: bool) -> ProcessFacts:
        """Prepares the process; after it nothing that is printed, also by C code, misses the log.

        `env` is put into the environment here, before anything heavy is imported; it is also what children get. Over it
        comes what NCCL needs and nobody has set.
        """
        self._log_path = log_path
        type(self).__name__ = name  # Ray derives the process title from it, anew after every call
        _redirect_output(log_path)
        print(f"--- {name}: process {os.getpid()} on {ray.util.get_node_ip_address()}, {time.ctime()}")
        faulthandler.enable()
        outlive_job_signals()
        if os.getpgrp() != os.getpid():  # so unless the cluster was started with it disabled
            os.setpgid(0, 0)
        os.environ.update(KEEP_ENVIRON | env)
        nccl.complete(os.environ)
        if env.get("CUDA_VISIBLE_DEVICES"):
            num_gpus = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
            os.environ.update(use_cores(env, num_gpus))
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
            around: "module:function", whose value for the name of a method is a context manager that it runs in.

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

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """What a generator method of the user's object yields, as it comes. Raises as `invoke` does."""
        self._require_start()
        args = [received(arg) for arg in args]
        with self._reporting(), self._noted(method, args, kwargs) as facts:
            facts["yielded_rows"] = 0
            for value in getattr(self._user, method)(*args, **kwargs):
                facts["yielded_rows"] += getattr(value, "num_rows", 1)
                yield sent(value)

    def take_spans(self) -> list[Span]:
        """What this process has done since it was asked last, on its own clock."""
        return self._spans.take()

    @contextmanager
    def _noted(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Facts]:
        if method not in self._signatures:
            self._signatures[method] = inspect.signature(getattr(self._user, method))
        facts = facts_of_call(self._signatures[method], args, kwargs)
        with self._spans.span(method, facts), self._around(method):
            yield facts

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
    """What "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _redirect_output(log_path: str) -> None:
    """File descriptors 1 and 2, and Python's streams on them, go to the log, unbuffered."""
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    # New streams, as of `python -u`: those that Ray put in place write to files of its own.
    sys.stdout = _unbuffered(1)
    sys.stderr = _unbuffered(2)


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
