"""Sandboxes by name: a user's own, and sandboxes that the machine lacks."""

from pathlib import Path

import pytest

from megarl.gateway.sandboxes.find import find_sandbox, try_sandbox

OWN = """
from megarl.gateway.sandboxes.interface import Program

class Elsewhere:
    def __init__(self, settings):
        self.port = settings.port

    def start(self, agent):
        variables = [f"{name}={value}" for name, value in agent.variables.items()]
        return Program(("env", "-i", *variables, f"MACHINE={self.port}", *agent.command), {"PATH": "/usr/bin:/bin"})

    def stop(self, agent):
        return None
"""


def test_a_sandbox_of_ones_own_starts_agents(settings, play, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    try_sandbox(f"{file}:Elsewhere", (), None, None)
    sandbox = find_sandbox(f"{file}:Elsewhere", settings)
    code, log = play(
        sandbox, "import os; print(os.environ['KEY'], os.environ['MACHINE'], 'HOME' in os.environ)", KEY="k"
    )
    assert (code, log) == (0, f"k {settings.port} False\n")


def test_a_sandbox_that_this_machine_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, program in (("docker", "docker"), ("podman", "podman"), ("bubblewrap", "bwrap")):
        with pytest.raises(ValueError, match=f"gateway.sandbox={name} .*no program {program} in PATH"):
            try_sandbox(name, (), None, "image")
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho no daemon\nexit 125\n")
    docker.chmod(0o755)
    with pytest.raises(
        ValueError, match="sandbox=docker does not work on this machine: exit code 125, 'no daemon'"
    ):
        try_sandbox("docker", (), None, "image")
    try_sandbox("docker", (), None, "{image}")  # tasks name their images, and fetch them themselves
    try_sandbox("none", (), None, None)
