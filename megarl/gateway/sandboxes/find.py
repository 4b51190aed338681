"""Sandboxes by their names, and whether this machine has one."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from megarl.environments.environment import Task
from megarl.gateway.call import find_function
from megarl.gateway.sandboxes.bubblewrap import Bubblewrap
from megarl.gateway.sandboxes.containers import Container
from megarl.gateway.sandboxes.interface import (
    AgentProcess,
    NoSandbox,
    Program,
    Sandbox,
    SandboxSettings,
    new_name,
)
from megarl.gateway.sandboxes.namespaces import Namespaces

_SECONDS = 600.0  # an image may have to be fetched
_END = 400  # characters of a failed sandbox's output
KEY = "rollout.gateway.sandbox"


def find_sandbox(name: str, settings: SandboxSettings) -> Sandbox:
    """The sandbox that a configuration names.

    Raises:
        ValueError: there is no such one.
    """
    if name == "none":
        return NoSandbox()
    if name in ("docker", "podman"):
        return Container(name, settings)
    if name == "namespaces":
        return Namespaces(settings)
    if name == "bubblewrap":
        return Bubblewrap(settings)
    return find_function(name, KEY)(settings)


def try_sandbox(name: str, readable: tuple[str, ...], memory_mb: int | None, image: str | None) -> None:
    """Try a sandbox with a command that does nothing, and a gateway that answers nothing. Images that tasks name are not tried.

    Raises:
        ValueError: it has failed.
    """
    if name == "none" or "{" in (image or ""):
        return
    from megarl.gateway.server import listen, listen_locally  # whose packages a controller may lack

    with tempfile.TemporaryDirectory(prefix="try-") as scratch:
        folder, path = Path(scratch, "agent"), Path(scratch, "g/socket")
        work = folder / "work"
        for made in (work, path.parent):
            made.mkdir(parents=True)
        with listen_locally(path), listen("127.0.0.1", 0) as free:
            settings = SandboxSettings(str(path), free.getsockname()[1], readable, memory_mb, image)
            sandbox = find_sandbox(name, settings)
            agent = AgentProcess(
                new_name(), Task("try", "", None, "", "", {}), ("true",), folder, work, {"HOME": str(work)}
            )
            if problem := _problem(sandbox, agent):
                raise ValueError(f"{KEY}={name} does not work on this machine: {problem}")


def _problem(sandbox: Sandbox, agent: AgentProcess) -> str | None:
    program = sandbox.start(agent)
    name = program.arguments[0]
    problem = f"{name} did not end within {_SECONDS:g} s"
    try:
        done = _run(program, agent)
    except subprocess.TimeoutExpired:
        pass
    except FileNotFoundError:
        return f"there is no program {name} in PATH"
    else:
        if done.returncode == 0:
            return None
        problem = f"exit code {done.returncode}, {done.stdout.decode(errors='replace').strip()[-_END:]!r}"
    if (stopping := sandbox.stop(agent)) is not None:
        _run(stopping, agent)
    return problem


def _run(program: Program, agent: AgentProcess) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        program.arguments,
        cwd=agent.work,
        env=dict(program.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_SECONDS,
    )
