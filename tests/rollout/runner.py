"""An engine in a process of its own, as in production: a crash of SGLang takes its owner with it."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megarl.rollout.engine import EngineConfig

STARTUP_SECONDS = 240


class OwnerDied(Exception):
    """The process that owns the engine ended."""


class EngineProcess:
    """Starts the process that owns an engine; `call` runs a method of the engine there."""

    def __init__(self, config: EngineConfig, log: Path) -> None:
        from megarl.rollout.sglang.before_import import sglang_environment

        # All owners are forked from one process that has imported SGLang, because the import takes a core for 6 s.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["sglang.srt.entrypoints.engine"])
        self.log = log
        self.connection, child = context.Pipe()
        added = sglang_environment(config.device, config.tensor_parallel_size, nodes=config.nodes)
        added |= {"GLOO_SOCKET_IFNAME": "lo"}
        saved = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            self.process = context.Process(target=_own, args=(config, child, str(log), added))
            self.process.start()
        finally:
            for name, value in saved.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        child.close()

    def call(self, method: str | Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
        """Run `engine.method(*args)` or `method(engine, *args)`, or read the attribute; raises what it raises.

        The values of an iterator are returned as a list.
        """
        try:
            self.connection.send((method, args))
        except ConnectionError as error:
            raise OwnerDied(self.tail()) from error
        return self._answer(timeout, method)

    def _answer(self, timeout: float, what: Any) -> Any:
        try:
            if not self.connection.poll(timeout):
                raise TimeoutError(f"{what} took longer than {timeout} s\n{self.tail()}")
            returned, value = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise OwnerDied(self.tail()) from error
        if returned:
            return value
        raise value

    def start(self) -> "EngineProcess":
        self.call("start", timeout=STARTUP_SECONDS)
        return self

    def begin(self, method: str) -> None:
        """As `call`, but returns at once; `end` waits for the result."""
        self.connection.send((method, ()))

    def end(self, timeout: float = STARTUP_SECONDS) -> Any:
        return self._answer(timeout, "what was begun")

    def tail(self, lines: int = 40) -> str:
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""
        )

    def close(self) -> None:
        if self.process.is_alive():
            try:
                self.call("shutdown")
            finally:
                self.connection.close()
                self.process.join(20)
                self.process.kill()


def _own(config: EngineConfig, connection, log: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a fork inherits the environment of the first owner
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    from megarl.rollout.sglang.engine import SGLangEngine, SGLangPart

    engine = SGLangEngine(config) if config.node == 0 else SGLangPart(config)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            value = partial(method, engine) if callable(method) else getattr(engine, method)
            value = value(*args) if callable(value) else value
            answer = (True, list(value) if isinstance(value, Iterator) else value)
        except Exception as error:
            answer = (False, error)
        connection.send(answer)
