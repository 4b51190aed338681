"""Containers, with a stand-in for `docker` that records its arguments and runs the container's command on this machine."""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.guard import process_state
from megarl.gateway.sandboxes.containers import Container
from megarl.gateway.sandboxes.interface import AgentProcess
from megarl.gateway.server import listen
from tests.waiting import wait_for

# A container is no child of `docker run` but a process group of its own, which `docker rm --force` ends.
DOCKER = """#!PYTHON
import json, os, signal, subprocess, sys
folder = "FOLDER"
arguments = sys.argv[1:]
with open(folder + "/calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments[0] == "rm":
    os.killpg(int(open(folder + "/" + arguments[-1]).read()), signal.SIGKILL)
    sys.exit()
entry, environment = arguments.index("--entrypoint"), {"PATH": "/image/bin"}
for place, argument in enumerate(arguments[:entry]):
    if argument == "--env":
        name, given, value = arguments[place + 1].partition("=")
        environment[name] = value if given else os.environ[name]
process = subprocess.Popen([sys.executable, *arguments[entry + 3:]], env=environment, start_new_session=True,
                           cwd=arguments[arguments.index("--workdir") + 1])
with open(folder + "/" + arguments[arguments.index("--name") + 1], "w") as file:
    file.write(str(process.pid))
sys.exit(process.wait() % 256)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docker() -> the arguments of all calls so far."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.replace("PYTHON", sys.executable).replace("FOLDER", str(program.parent)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", "/home/of-the-run")
    return lambda: [json.loads(line) for line in (program.parent / "calls").read_text().splitlines()]


def given(arguments: list[str], name: str) -> list[str]:
    return [after for one, after in itertools.pairwise(arguments) if one == name]


def ended(pid: int) -> bool:
    return process_state(pid) is None


def is_free(port: int) -> bool:
    try:
        listen("127.0.0.1", port).close()
    except OSError:
        return False
    return True


def test_an_agent_runs_in_a_container_of_its_tasks_image(settings, docker, play, tmp_path):
    sandbox = Container(
        "docker", replace(settings, image="repo/{name}:1", memory_mb=300, readable=("/data",))
    )
    code = (
        "import os, sys, urllib.request; "
        f"print(urllib.request.urlopen('http://127.0.0.1:{settings.port}/').read(), os.environ['HOME'], "
        "os.environ['KEY'], os.environ['PATH'], os.getcwd().endswith('work')); sys.exit(3)"
    )
    result = play(sandbox, code, extra={"name": "task-a"}, HOME="/w", KEY="secret")
    assert result == (3, "b'hello' /w secret /image/bin True\n")
    run, removal = docker()
    (name,) = given(run, "--name")
    assert removal == ["rm", "--force", name] and name.startswith("megarl-")
    assert given(run, "--network") == ["none"] and given(run, "--cap-drop") == ["ALL"] and "--rm" in run
    assert given(run, "--memory") == ["300m"] and given(run, "--pids-limit") == ["1024"]
    assert run[run.index("python3") + 1] == "repo/task-a:1"
    writable = [mount for mount in given(run, "--mount") if not mount.endswith(",readonly")]
    assert writable == [f"type=bind,source={tmp_path}/{name},target={tmp_path}/{name}"]
    assert "type=bind,source=/data,target=/data,readonly" in given(run, "--mount")
    assert "secret" not in " ".join(run) and given(run, "--env") == ["HOME=/w", "KEY"]
    with pytest.raises(ValueError, match=r"'repo/{name}:1': the row's extra_info has no 'name'"):
        play(sandbox, code)


def test_a_container_is_removed_by_the_runner_and_ends_with_the_gateway(
    settings, docker, play, gateway, tmp_path
):
    sandbox, code = Container("docker", replace(settings, image="image")), "import time; time.sleep(1000)"

    def noted() -> str:
        (name,) = given(docker()[-1], "--name") or docker()[-1][-1:]
        file = tmp_path / "bin" / name
        return file.read_text() if file.exists() else ""

    def pid() -> int:
        return int(noted())

    # The container may connect before the stand-in for `docker` has noted its process.
    exit_code, _ = play(sandbox, code, meanwhile=lambda: gateway.connections and noted())
    run, removal = docker()
    assert exit_code is None and removal == ["rm", "--force", *given(run, "--name")]
    wait_for(lambda: ended(pid()))
    # Its agent was killed with it, and has its listener as long as it has not executed its program.
    wait_for(lambda: is_free(settings.port))

    class Killed:
        """The sandbox of a runner that was killed: nothing removes the container."""

        start = sandbox.start

        def stop(self, agent: AgentProcess) -> None:
            return None

    exit_code, _ = play(Killed(), code, meanwhile=lambda: len(gateway.connections) == 2 and noted())
    left = pid()
    assert exit_code is None and not ended(left)
    gateway.end()
    wait_for(lambda: ended(left))
