"""Sandboxes of containers: an image's files, no network but the gateway, limits of memory and processes.

A container is not a child of the program that has started it, and outlives it. So the agent runner removes it by its name, and where the
runner was killed first, the container's first process ends with the gateway, and the container with that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from megarl.gateway.sandboxes import first
from megarl.gateway.sandboxes.interface import AgentProcess, Program, SandboxSettings
from megarl.gateway.sandboxes.local import ROOT

LABEL = "megarl.agent"
_MAX_PROCESSES = 1024
# Beginnings of the variables by which `docker` and `podman` find their daemon, images and settings.
_CLIENT = ("PATH", "HOME", "XDG_", "DOCKER_", "CONTAINER_", "CONTAINERS_")


@dataclass(frozen=True)
class Container:
    """An agent in a container of `docker` or `podman`. The image needs python3 (3.8 or newer), which runs the first process."""

    program: str
    settings: SandboxSettings

    def start(self, agent: AgentProcess) -> Program:
        settings = self.settings
        assert settings.image is not None, "checked"
        image = image_of(settings.image, agent)
        arguments = [self.program, "run", "--rm", "--name", agent.name, "--label", LABEL, "--network", "none"]
        arguments += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        # Else SELinux keeps containers from the gateway's socket.
        arguments += ["--security-opt", "label=disable", "--pids-limit", str(_MAX_PROCESSES)]
        # The user who writes files that this process removes: a podman without root maps its containers' root to this user.
        user = "0:0" if self.program == "podman" else f"{os.getuid()}:{os.getgid()}"
        arguments += ["--user", user]
        if settings.memory_mb is not None:
            arguments += ["--memory", f"{settings.memory_mb}m"]
        folder = str(agent.folder)
        for path in dict.fromkeys([f"{ROOT}/megarl", os.path.dirname(settings.socket), *settings.readable]):
            arguments += ["--mount", f"type=bind,source={path},target={path},readonly"]
        arguments += ["--mount", f"type=bind,source={folder},target={folder}", "--workdir", str(agent.work)]
        for name, value in agent.variables.items():
            # Values, some of which are keys, are passed in the client's environment, not in its arguments, which every user may read.
            arguments += ["--env", f"{name}={value}" if name.startswith(_CLIENT) else name]
        arguments += ["--entrypoint", "python3", image, "-I", "-S", "-B", first.__file__]
        arguments += [settings.socket, str(settings.port), "0", *agent.command]
        own = {name: value for name, value in agent.variables.items() if not name.startswith(_CLIENT)}
        return Program(tuple(arguments), own | self._client())

    def stop(self, agent: AgentProcess) -> Program:
        return Program((self.program, "rm", "--force", agent.name), self._client())

    def _client(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith(_CLIENT)}


def image_of(image: str, agent: AgentProcess) -> str:
    """The image of an agent's task.

    Raises:
        ValueError: the task's row has no such value.
    """
    try:
        return image.format_map(dict(agent.task.extra_info))
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"image {image!r}: the row's extra_info has no {error}") from error
