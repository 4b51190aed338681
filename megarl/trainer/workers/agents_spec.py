"""The specification of a run's agents, from the configuration. The controller makes it, and an engine's process runs it (agents.py)."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import ModelPathConfig, RolloutConfig
from megarl.config.schema.rollout import GatewayConfig
from megarl.gateway.call import find_function
from megarl.gateway.sandboxes.find import KEY
from megarl.gateway.sandboxes.local import ROOT

LOGS = "agents"  # folder of a run for what its agents print
_CALL = "import sys; sys.path.insert(0, sys.argv.pop(1)); from megarl.gateway.call import main; main()"
_PYTHON = dict.fromkeys(("docker", "podman"), "python3")  # the image's own


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
        path, _, function = _absolute(gateway.agent).rpartition(":")
        command = (_PYTHON.get(gateway.sandbox, sys.executable), "-c", _CALL, ROOT, path, function)
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
    return AgentsSpec(gateway, model, command, seen, str(logs), files)


def _absolute(name: str) -> str:
    """FILE.py:NAME with the file's absolute path."""
    file, _, attribute = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{attribute}"
