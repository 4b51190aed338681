"""The specification of a run's agents, from the configuration. The controller makes it, and an engine's process runs it (agents.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import ModelPathConfig, RolloutConfig
from megarl.config.schema.rollout import GatewayConfig
from megarl.gateway.call import find_function

LOGS = "agents"  # folder of a run for what its agents print


@dataclass(frozen=True)
class AgentsSpec:
    """The settings with which an engine's process runs agents.

    Attributes:
        command: of an agent.
        readable: folders that an agent in a sandbox may read.
        logs: folder, as an absolute path.
    """

    gateway: GatewayConfig
    model: ModelPathConfig
    command: tuple[str, ...]
    readable: tuple[str, ...]
    logs: str
    plugins: tuple[str, ...] = ()


def agents_spec(
    rollout: RolloutConfig, model: ModelPathConfig, folder: str, plugins: tuple[str, ...]
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
    if gateway.agent is not None:
        find_function(gateway.agent, "rollout.gateway.agent")
        file, _, function = gateway.agent.rpartition(":")
        path = str(Path(file).expanduser().resolve())
        command = (sys.executable, "-m", "megarl.gateway.call", path, function)
        readable = (*readable, str(Path(path).parent))
    if gateway.score is not None:
        find_function(gateway.score, "rollout.gateway.score")
        file, _, function = gateway.score.rpartition(":")
        gateway = replace(gateway, score=f"{Path(file).expanduser().resolve()}:{function}")
    files = tuple(str(Path(file).expanduser().resolve()) for file in plugins)
    logs = Path(folder).expanduser().resolve() / LOGS
    seen = tuple(str(Path(folder).expanduser().resolve()) for folder in readable)
    return AgentsSpec(gateway, model, command, seen, str(logs), files)
