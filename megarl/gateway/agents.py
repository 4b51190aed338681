"""Agents as processes: a command is run for each task, calls the policy through the gateway, and its session becomes trajectories.

The command is any program that reads its API's address and key from the environment. It finds there

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, MEGARL_GATEWAY (the address without "/v1"),
    MEGARL_TASK (a JSON file: uid, prompt, messages, data_source, extra_info; not the ground truth)

and works in an empty folder of its own, which is also its HOME and is removed afterwards.

Guarantees, each asserted by a test:

- a process ends at its time limit, or when its task is cancelled, with all that it started (without a sandbox, its process group); time in
  which the event loop stands still, as while the models learn, does not count;
- an agent that fails or takes too long costs its own trajectories alone: they are masked, and the error is recorded with the log's end;
- whatever an agent leaves in its folder, the folder is removed or, where that cannot be, left: neither fails the agent or the run;
- no agent gets the environment of this process, but for PATH and the language;
- when an agent has ended its key is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from megarl.data.trajectories import Generation
from megarl.environments.environment import Task
from megarl.gateway.copies import ForkServer, run_copy
from megarl.gateway.players import SessionScore, checked_scores, is_finite_number, refuse_missing, score_of
from megarl.gateway.sandboxes.interface import (
    AgentProcess,
    NoSandbox,
    Sandbox,
    kept_environment,
    new_name,
)
from megarl.gateway.sandboxes.processes import run_agent
from megarl.gateway.service import Gateway, Session
from megarl.rollout.engine import SamplingParams

Score = Callable[[Task, Session], SessionScore]
"""The reward of a finished session, or each player's; `Session.tree` has its turns, `Session.score` what the agent has posted."""

LOG = logging.getLogger(__name__)
NO_SANDBOX = NoSandbox()
# Also of folders that are read-only, as Go's are.
_REMOVE = 'rm -rf -- "$0" || { chmod -R u+rwX -- "$0"; rm -rf -- "$0"; }'
_LOG_END = 400  # characters of an agent's log that its error shows
_LOG_BYTES = 4096  # that are read for them: a log may be large, and other agents wait meanwhile


class AgentFailed(Exception):
    """An agent ended with an error, or did not end in time."""


class AgentRunner:
    """Runs a command for each task."""

    def __init__(
        self,
        gateway: Gateway,
        url: str,
        command: Sequence[str],
        logs: Path,
        *,
        seconds: float = 600.0,
        concurrency: int = 64,
        environment: Mapping[str, str] | None = None,
        score: Score | None = None,
        keep_logs: bool = True,
        sandbox: Sandbox = NO_SANDBOX,
        forks: ForkServer | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            url: where the gateway listens, such as "http://127.0.0.1:8000".
            logs: folder; gets "<uid>.log" of each task, with the command's output.
            seconds: that a command may take.
            concurrency: commands at a time.
            environment: further variables of the command's.
            score: the rewards; None: the scores that the agents post.
            keep_logs: false: logs of agents that did not fail are removed.
            sandbox: in which agents run.
            forks: the fork server whose copies the agents are, in place of `command`.
            template_kwargs: of the chat template, for tasks that have none of their own. Tools are those of an agent's requests.
            folder: in which each agent has its own folder; None: that of temporary files.
        """
        self._gateway, self._url, self._command, self._logs = gateway, url, [*command], logs
        self._keep_logs, self._sandbox, self._forks = keep_logs, sandbox, forks
        self._seconds, self._environment, self._score = seconds, dict(environment or {}), score
        self._template_kwargs, self._folder = template_kwargs or {}, folder
        self._places = asyncio.Semaphore(concurrency)

    async def play(
        self, task: Task, sampling: SamplingParams | None = None
    ) -> tuple[list[Generation], str | None]:
        """The trajectories of a task's session, none if the agent has asked nothing, and its error, which is also in their notes.

        Args:
            sampling: of the session's requests; None: the gateway's.

        Raises:
            EngineError: the engine or the agents' fork server has failed: the task is to be played again by another engine.
        """
        async with self._places, _scratch(self._folder) as folder:
            given = self._template_kwargs if task.template_kwargs is None else task.template_kwargs
            keywords = {name: value for name, value in given.items() if name != "tools"}
            session = self._gateway.begin(task.uid, sampling, keywords)
            error: str | None = None
            try:
                await self._run(task, session, folder)
                score = self._posted(session) if self._score is None else await self._scored(task, session)
            except AgentFailed as failure:
                error, score = str(failure), None
            finally:
                self._gateway.end(session)
        return [self._noted(one, session, score, error) for one in session.trajectories()], error

    def _posted(self, session: Session) -> SessionScore | None:
        if isinstance(session.score, Mapping):
            try:  # a player may have asked after the score was posted
                refuse_missing(session.score, session.tree.players)
            except ValueError as error:
                raise AgentFailed(f"score: {error}") from None
        return session.score

    async def _scored(self, task: Task, session: Session) -> SessionScore:
        assert self._score is not None
        try:
            score = await asyncio.to_thread(self._score, task, session)
        except Exception as error:  # whatever a user's code raises
            raise AgentFailed(f"score: {type(error).__name__}: {error}") from error
        if isinstance(score, Mapping):
            try:
                return checked_scores(score, self._gateway.players, session.tree.players)
            except ValueError as error:
                raise AgentFailed(f"score: {error}") from None
        if not is_finite_number(score):
            raise AgentFailed(f"score: {score!r} is no finite number")
        return float(score)

    def _noted(
        self, one: Generation, session: Session, score: SessionScore | None, error: str | None
    ) -> Generation:
        turns = session.tree.turns
        numbers = {"num_turns": float(len(turns)), **session.numbers}
        masked = [False] * len(one.response_ids) if error is not None else one.response_mask
        notes = json.dumps({"numbers": numbers, "error": error})
        own = score_of(score, one.player)
        return replace(one, response_mask=masked, environment_score=own, environment_notes=notes)

    async def _run(self, task: Task, session: Session, folder: Path) -> None:
        """Run the command to its end, with its files in `folder`.

        Raises:
            AgentFailed: it could not be started, ended with another exit code than 0, or did not end in time.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{task.uid.replace('/', '-')}.log"
        place, file = folder / "work", folder / "task.json"
        place.mkdir()
        file.write_text(json.dumps(_told(task)), encoding="utf-8")
        variables = self._variables(session, place, file)
        with log.open("wb") as output:
            if self._forks is not None:
                copy = await self._forks.start(kept_environment() | variables, place, log)
                code = await run_copy(copy, self._seconds)
            else:
                code = await self._run_program(task, variables, folder, place, output)
        if session.failure is not None:  # whatever the agent made of it
            raise session.failure
        if code is None:
            raise AgentFailed(f"it did not end within {self._seconds:g} s; {_end_of(log)}")
        if code != 0:
            raise AgentFailed(f"exit code {code}; {_end_of(log)}")
        if not self._keep_logs:
            log.unlink()

    async def _run_program(
        self, task: Task, variables: Mapping[str, str], folder: Path, place: Path, output: IO[bytes]
    ) -> int | None:
        """As `run_agent`."""
        agent = AgentProcess(new_name(), task, tuple(self._command), folder, place, variables)
        try:
            return await run_agent(self._sandbox, agent, output, self._seconds)
        except OSError as error:
            raise AgentFailed(f"{self._command[0]}: {error.strerror}") from error
        except Exception as error:  # whatever a user's sandbox raises
            raise AgentFailed(f"sandbox: {type(error).__name__}: {error}") from error

    def _variables(self, session: Session, place: Path, file: Path) -> dict[str, str]:
        return {
            "HOME": str(place),
            "OPENAI_BASE_URL": f"{self._url}/v1",
            "OPENAI_API_KEY": session.token,
            "ANTHROPIC_BASE_URL": self._url,
            "ANTHROPIC_API_KEY": session.token,
            "MEGARL_GATEWAY": self._url,
            "MEGARL_TASK": str(file),
            **self._environment,
        }


@asynccontextmanager
async def _scratch(within: Path | None) -> AsyncIterator[Path]:
    """A folder for an agent, which a program removes afterwards: Python fails at folders a thousand levels deep, and other agents would
    wait while it removes thousands of files."""
    folder = tempfile.mkdtemp(prefix="agent-", dir=within)
    try:
        yield Path(folder)
    finally:
        nothing = asyncio.subprocess.DEVNULL
        remover = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", _REMOVE, folder, stdin=nothing, stdout=nothing, stderr=nothing
        )
        if await remover.wait():
            # It has files of another user, such as a container's, or a process still writes into it.
            LOG.warning("an agent's folder could not be removed: %s", folder)


def _told(task: Task) -> dict[str, Any]:
    return {
        "uid": task.uid,
        "prompt": task.prompt,
        "messages": [dict(message) for message in task.messages or ()],
        "data_source": task.data_source,
        "extra_info": dict(task.extra_info),
    }


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read(_LOG_BYTES).decode(errors="replace").strip()
    return f"its log {log} ends with {text[-_LOG_END:]!r}"
