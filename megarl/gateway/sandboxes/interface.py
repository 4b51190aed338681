"""What the agent runner needs of a sandbox, and what a sandbox is told."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megarl.environments.environment import Task

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True)
class SandboxSettings:
    """The settings that all agents of an engine share.

    Attributes:
        socket: the gateway's Unix socket.
        port: at which the gateway listens on the loopback interface; agents are given an address with it.
        readable: folders that agents may read.
        memory_mb: MiB that an agent may have; None: any.
        image: of a container; "{NAME}" in it is `extra_info.NAME` of the task.
    """

    socket: str
    port: int
    readable: tuple[str, ...] = ()
    memory_mb: int | None = None
    image: str | None = None


@dataclass(frozen=True)
class AgentProcess:
    """An agent that is to be started.

    Attributes:
        name: a name that no other agent on this machine has; letters, digits and "-".
        folder: the folder that it may write into, removed when it has ended.
        work: its working directory, within the folder.
        variables: of its environment, keys among them; PATH and the language may be added.
    """

    name: str
    task: Task
    command: tuple[str, ...]
    folder: Path
    work: Path
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Program:
    """A program to start on this machine: its arguments, and all of its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class Sandbox(Protocol):
    """How agents are started and ended. A user's own is a function or class that is called with `SandboxSettings`."""

    def start(self, agent: AgentProcess) -> Program:
        """A program that runs until the agent ends, with the agent's output and exit code.

        Raises:
            ValueError: this task's agent cannot be started.
        """

    def stop(self, agent: AgentProcess) -> Program | None:
        """A program that ends an agent after `start`'s program and process group were killed; None: nothing is left of the agent."""


class NoSandbox:
    """The agent's own command, with the rights of this process."""

    def start(self, agent: AgentProcess) -> Program:
        return Program(agent.command, variables_here(agent))

    def stop(self, agent: AgentProcess) -> None:
        return None


def variables_here(agent: AgentProcess) -> dict[str, str]:
    """The environment of an agent that uses this machine's programs."""
    return kept_environment() | dict(agent.variables)


def kept_environment() -> dict[str, str]:
    """The variables of this process that agents have."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def new_name() -> str:
    """A name for an agent that no other one has."""
    return f"megarl-{secrets.token_hex(8)}"
