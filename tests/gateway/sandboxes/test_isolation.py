"""Real sandboxes, in which an agent tries what it must not do. Docker and podman are tested with --container-image IMAGE."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megarl.gateway.sandboxes.bubblewrap import Bubblewrap
from megarl.gateway.sandboxes.containers import LABEL, Container
from megarl.gateway.sandboxes.first import FAILED
from megarl.gateway.sandboxes.interface import Sandbox, SandboxSettings
from megarl.gateway.sandboxes.namespaces import Namespaces
from megarl.rewards.sandbox.sandbox import best_isolation

FACTS = """
import json, os, socket, subprocess, sys
def connects(host, port):
    try:
        with socket.create_connection((host, port), 2) as one:
            one.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            return one.makefile().read().endswith("hello")
    except OSError:
        return False
def writes(path):
    try:
        open(path, "w").close()
        return True
    except OSError:
        return False
def allocates():
    try:
        return bool(bytearray(1 << 28))
    except MemoryError:
        return False
facts = {
    "gateway": connects("127.0.0.1", PORT), "network": connects("1.1.1.1", 80), "secret": os.path.exists("SECRET/secret"),
    "readable": open("READABLE/text").read(), "readable is written": writes("READABLE/text"), "system": writes("/usr/x"),
    "work": writes("x"), "tmp": writes("/tmp/x"), "memory": allocates(), "key": os.environ["KEY"],
    "others": os.path.exists("/proc") and sum(one.isdigit() for one in os.listdir("/proc")) > 2,
    "shell": subprocess.run("exit 3", shell=True).returncode,
}
print(json.dumps(facts))
sys.exit(7)
"""


OWN = {"namespaces": Namespaces, "bubblewrap": Bubblewrap}


@dataclass(frozen=True)
class Kind:
    """A sandbox that this machine has. `image`: the image of its containers; None: it has no containers."""

    name: str
    image: str | None

    @property
    def python(self) -> str:
        return sys.executable if self.image is None else "python3"

    def __call__(self, settings: SandboxSettings) -> Sandbox:
        if self.image is None:
            return OWN[self.name](settings)
        return Container(self.name, replace(settings, image=self.image))


@pytest.fixture(params=[*OWN, "docker", "podman"])
def kind(request) -> Kind:
    name, image = request.param, None
    if name == "namespaces" and best_isolation() != "namespaces":
        pytest.skip("this system gives ordinary processes no namespaces")
    if name == "bubblewrap":
        tried = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
        if shutil.which("bwrap") is None or subprocess.run(tried, capture_output=True).returncode:
            pytest.skip(
                "bubblewrap is not installed (tests/gateway/debian_packages.txt), or has no namespaces here"
            )
    if name not in OWN:
        image = request.config.getoption("--container-image")
        if image is None:
            pytest.skip("--container-image names no image")
        found = shutil.which(name) and subprocess.run([name, "image", "inspect", image], capture_output=True)
        if not found or found.returncode:
            pytest.skip(f"{name} does not answer, or has no image {image}")
    return Kind(name, image)


def test_an_agent_reaches_the_gateway_alone_and_writes_into_its_folder(kind, settings, play, tmp_path):
    folders = {name: tmp_path / name for name in ("READABLE", "SECRET")}
    for name, text in (("READABLE", "text"), ("SECRET", "secret")):
        folders[name].mkdir()
        (folders[name] / text).write_text("told")
    code = FACTS.replace("PORT", str(settings.port))
    for name, folder in folders.items():
        code = code.replace(name, str(folder))
    limit = 200 if kind.image is None else None  # a container's limit is tested below
    sandbox = kind(replace(settings, readable=(str(folders["READABLE"]),), memory_mb=limit))
    exit_code, log = play(sandbox, code, python=kind.python, KEY="k")
    assert exit_code == 7, log
    facts = json.loads(log)
    expected = {
        "gateway": True, "network": False, "secret": False, "readable": "told", "readable is written": False, "system": False,
        "work": True, "tmp": True, "memory": False, "key": "k", "others": False, "shell": 3,
    }  # fmt: skip
    if kind.image is not None:
        expected |= {"memory": True, "system": facts["system"]}  # a container writes into its own file system
    assert facts == expected and not Path("/usr/x").exists()


def test_what_is_in_a_sandbox_ends_with_the_gateway(kind, settings, gateway, play):
    code, log = play(
        kind(settings),
        "import time; time.sleep(1000)",
        meanwhile=lambda: gateway.connections and gateway.end(),
        python=kind.python,
    )
    assert (code, log) == (FAILED, "no sandbox: the gateway has ended\n")


@pytest.mark.parametrize("kind", ["docker", "podman"], indirect=True)
def test_containers_are_removed_and_have_so_much_memory(kind, settings, gateway, play):
    def left() -> list[str]:
        command = [kind.name, "ps", "--all", "--quiet", "--filter", f"label={LABEL}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    before = left()
    limited = kind(replace(settings, memory_mb=64))
    code = "x = bytearray(MB << 20); x[::4096] = bytes(len(x[::4096])); print(len(x) >> 20)"
    assert play(limited, code.replace("MB", "16"), python="python3") == (0, "16\n")
    exit_code, log = play(limited, code.replace("MB", "256"), python="python3")
    assert exit_code not in (0, None) and "256" not in log
    asleep = "import time; print('begun', flush=True); time.sleep(1000)"
    connected = len(gateway.connections)
    exit_code, _ = play(
        limited, asleep, meanwhile=lambda: len(gateway.connections) > connected, python="python3"
    )
    assert exit_code is None and left() == before
