"""Agents of a run: the gateway with its agents in an engine's process.

The gateway of an engine listens in the engine's process, on the engine's event loop, and its agents are processes on the same machine.
So all requests of a session go to the engine that has its prefix, and none passes the controller. The loop runs while the controller
waits for trajectories; between two phases of generation agents wait for their answers.

Guarantees, each asserted by a test:

- an agent that asks nothing, or fails before it asks, costs its own sample: one masked token, and its error;
- agents end with the process of their engine, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvicorn

from megarl.cluster.guard import KEEP_ENVIRON, MARK_PREFIX
from megarl.cluster.ranks import node_address
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.environment import Task
from megarl.gateway.agents import AgentRunner
from megarl.gateway.call import find_function
from megarl.gateway.copies import ForkServer
from megarl.gateway.reader import TurnReader
from megarl.gateway.sandboxes.find import find_sandbox
from megarl.gateway.sandboxes.interface import NoSandbox, Sandbox, SandboxSettings, kept_environment
from megarl.gateway.server import listen, listen_locally, make_app, url_of
from megarl.gateway.service import Gateway, Limits
from megarl.rollout.engine import EngineError, Generation, SamplingParams
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.trainer.workers.agents_spec import AgentsSpec
from megarl.trainer.workers.multi_turn import tasks_of
from megarl.util.plugins import load_plugins

# Seconds that a connection stays open without a request: longer than any pause. uvloop, which SGLang uses, looks at its clock before it reads. So after a
# pause that was longer, an agent's request that came meanwhile would meet a closed connection. Connections end with their agents.
_KEEP_ALIVE = 365 * 24 * 3600


class Agents:
    """Runs the agents of one engine's requests."""

    def __init__(
        self,
        spec: AgentsSpec,
        engine: SGLangEngine,
        stop_token_ids: tuple[int, ...],
        folder: Path | None = None,
    ) -> None:
        """Begin to listen.

        Args:
            stop_token_ids: the engine's stop tokens that are not the model's own end tokens.
            folder: as in `AgentRunner`.
        """
        load_plugins(spec.plugins)
        settings = spec.gateway
        self.concurrency = settings.concurrency  # sessions at a time
        assert spec.model.tokenizer_path is not None, "resolved"
        self._tokenizer = load_tokenizer(spec.model.tokenizer_path, spec.model.trust_remote_code)
        reader = TurnReader(self._tokenizer, settings.tool_parser, settings.reasoning_parser)
        # The runner ends sessions, and an answer may wait until the models have learnt.
        limits = Limits(
            requests=settings.max_requests,
            requests_per_minute=settings.requests_per_minute,
            request_seconds=math.inf,
            idle_seconds=math.inf,
            sessions=settings.concurrency,
        )
        gateway = Gateway(
            engine,
            self._tokenizer,
            reader,
            settings.models,
            SamplingParams(),
            limits,
            players=settings.players,
            fixed_sampling=True,
            stop_token_ids=stop_token_ids,
        )
        host = node_address() if settings.host == "cluster" else settings.host
        listeners = [listen(host, 0)]
        port = listeners[0].getsockname()[1]
        config = uvicorn.Config(
            make_app(gateway, secrets.token_urlsafe(24)),
            log_level="warning",
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
        )
        self._server = _Server(config)

        # An agent in a sandbox reaches nothing but the gateway, by a socket in the file system.
        sandbox: Sandbox = NoSandbox()
        if settings.sandbox != "none":
            local = Path(tempfile.mkdtemp(prefix="gateway-"), "socket")
            listeners.append(listen_locally(local))
            told = SandboxSettings(str(local), port, spec.readable, settings.memory_mb, settings.image)
            sandbox = find_sandbox(settings.sandbox, told)

        async def serve() -> asyncio.Task[None]:
            return asyncio.create_task(self._server.serve(listeners))

        self._serving = engine.run(serve())
        score = None if settings.score is None else find_function(settings.score, "rollout.gateway.score")
        # By these marks the cluster's guards find the processes that an agent leaves behind.
        passed = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(MARK_PREFIX) or name in settings.pass_env
        }
        given = {name: str(value) for name, value in (settings.environment or {}).items()}
        environment = {**passed, **KEEP_ENVIRON, **given}
        forks = None
        if settings.preload:
            assert spec.agent is not None, "checked"
            inherited = {**kept_environment(), **environment}
            forks = ForkServer(*spec.agent, settings.preload, inherited, settings.python)
        self._runner = AgentRunner(
            gateway,
            url_of(host, port),
            spec.command,
            Path(spec.logs),
            seconds=settings.timeout,
            concurrency=settings.concurrency,
            environment=environment,
            score=score,
            keep_logs=settings.keep_logs,
            sandbox=sandbox,
            forks=forks,
            template_kwargs=spec.template_kwargs,
            folder=folder,
        )

    def answers(
        self, requests: pa.Table, sampling: SamplingParams, version: int | None
    ) -> list[Coroutine[Any, Any, list[Generation]]]:
        """A coroutine for each of the requests, which runs its agent; `version`: of the engine's weights."""
        tasks, prompts = tasks_of(requests, self._tokenizer), requests["prompt_ids"].to_pylist()
        assert version is not None, "requests come when weights are there"
        return [self._play(task, ids, sampling, version) for task, ids in zip(tasks, prompts, strict=True)]

    async def _play(
        self, task: Task, ids: list[int], sampling: SamplingParams, version: int
    ) -> list[Generation]:
        if self._serving.done():
            raise EngineError(f"the gateway has ended: {self._serving.exception()}")
        made, error = await self._runner.play(task, sampling)
        return made or [_nothing(f"{task.uid}.0", ids, version, error or "it asked the policy nothing")]


class _Server(uvicorn.Server):
    """A server that leaves the signal handlers of its process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _nothing(uid: str, prompt_ids: list[int], version: int, error: str) -> Generation:
    """The trajectory of an agent that failed before the policy's first turn: a response has at least one token."""
    return Generation(
        uid,
        prompt_ids[-1:],
        [0.0],
        "stop",
        version,
        response_mask=[False],
        num_turns=0,
        environment_notes=json.dumps({"numbers": {"num_turns": 0.0}, "error": error}),
    )
