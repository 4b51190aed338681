"""Sandboxes of this machine's own programs: real ones, in which an agent tries what it must not do."""

import json
import shutil
import subprocess
from dataclasses import replace

import pytest

from megarl.gateway.sandboxes.bubblewrap import Bubblewrap
from megarl.gateway.sandboxes.first import FAILED
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


@pytest.fixture(params=[Namespaces, Bubblewrap])
def kind(request):
    if request.param is Namespaces and best_isolation() != "namespaces":
        pytest.skip("this system gives ordinary processes no namespaces")
    if request.param is Bubblewrap:
        tried = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
        if shutil.which("bwrap") is None or subprocess.run(tried, capture_output=True).returncode:
            pytest.skip(
                "bubblewrap is not installed (tests/gateway/debian_packages.txt), or has no namespaces here"
            )
    return request.param


def test_an_agent_reaches_the_gateway_alone_and_writes_into_its_folder(kind, settings, play, tmp_path):
    folders = {name: tmp_path / name for name in ("READABLE", "SECRET")}
    for name, text in (("READABLE", "text"), ("SECRET", "secret")):
        folders[name].mkdir()
        (folders[name] / text).write_text("told")
    code = FACTS.replace("PORT", str(settings.port))
    for name, folder in folders.items():
        code = code.replace(name, str(folder))
    sandbox = kind(replace(settings, readable=(str(folders["READABLE"]),), memory_mb=200))
    exit_code, log = play(sandbox, code, KEY="k")
    assert exit_code == 7, log
    assert json.loads(log) == {
        "gateway": True, "network": False, "secret": False, "readable": "told", "readable is written": False, "system": False,
        "work": True, "tmp": True, "memory": False, "key": "k", "others": False, "shell": 3,
    }  # fmt: skip


def test_what_is_in_a_sandbox_ends_with_the_gateway(kind, settings, gateway, play):
    code, log = play(
        kind(settings),
        "import time; time.sleep(1000)",
        meanwhile=lambda: gateway.connections and gateway.end(),
    )
    assert (code, log) == (FAILED, "no sandbox: the gateway has ended\n")
