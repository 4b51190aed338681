"""The specification of a run's agents, from the configuration. The controller makes it, and an engine's process runs it (agents.py)."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megarl.config import ModelPathConfig, RolloutConfig
from megarl.config.schema.rollout import CONTAINERS, GatewayConfig
from megarl.gateway.call import find_function
from megarl.gateway.copies import python_command
from megarl.gateway.sandboxes.find import KEY

LOGS = "agents"  # folder of a run for what its agents print


@dataclass(frozen=True)
class AgentsSpec:
    """The settings with which an engine's process runs agents.

    Attributes:
        command: of an agent.
        agent: file and function of an agent that is a Python function.
        readable: folders that an agent in a sandbox may read.
        logs: folder, as an absolute path.
        template_kwargs: of the chat template, for rows that have none of their own.
    """

    gateway: GatewayConfig
    model: ModelPathConfig
    command: tuple[str, ...]
    readable: tuple[str, ...]
    logs: str
    agent: tuple[str, str] | None = None
    plugins: tuple[str, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def agents_spec(
    rollout: RolloutConfig,
    model: ModelPathConfig,
    template_kwargs: Mapping[str, Any] | None,
    folder: str,
    plugins: tuple[str, ...],
) -> AgentsSpec | None:
    """The settings of section `rollout.gateway` (resolved and checked); None where it is not enabled.

    Args:
        folder: of the run.

    Raises:
        ValueError: there is no such function.
    """
    gateway = rollout.gateway
    if not gateway.enable:
        return None
    command, readable = gateway.command, gateway.readable
    agent = None
    if gateway.agent is not None:
        path, _, function = _absolute(gateway.agent).rpartition(":")
        agent = path, function
        if gateway.python is None:
            find_function(gateway.agent, "rollout.gateway.agent")
            _find_modules(gateway.preload, Path(path).parent)
        else:  # not resolved: the link tells Python its virtual environment
            found = shutil.which(Path(gateway.python).expanduser())
            assert found is not None, "checked"
            gateway = replace(gateway, python=os.path.abspath(found))
        # A container runs the image's own Python.
        python = "python3" if gateway.sandbox in CONTAINERS else gateway.python
        command = (*python_command(python, "call", *agent),)
        readable = (*readable, str(Path(path).parent))
    if ":" in gateway.sandbox:
        find_function(gateway.sandbox, KEY)
        gateway = replace(gateway, sandbox=_absolute(gateway.sandbox))
    if gateway.score is not None:
        find_function(gateway.score, "rollout.gateway.score")
        gateway = replace(gateway, score=_absolute(gateway.score))
    files = tuple(str(Path(file).expanduser().resolve()) for file in plugins)
    logs = Path(folder).expanduser().resolve() / LOGS
    seen = tuple(str(Path(folder).expanduser().resolve()) for folder in readable)
    return AgentsSpec(gateway, model, command, seen, str(logs), agent, files, template_kwargs or {})


def _find_modules(names: Sequence[str], folder: Path) -> None:
    """ValueError: one of them is neither installed nor in the folder of the agent's file."""
    for name in names:
        if PathFinder.find_spec(name.partition(".")[0], [str(folder), *sys.path]) is None:
            raise ValueError(f"rollout.gateway.preload: there is no module {name}")


def _absolute(name: str) -> str:
    """FILE.py:NAME with the file's absolute path."""
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{attribute}"
