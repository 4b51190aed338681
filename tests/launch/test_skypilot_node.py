"""The script that a SkyPilot task runs on its nodes, on two addresses of this machine: with the environment that SkyPilot gives, a real Ray, and a
program that stands in for megarl. The tests do not cover what SkyPilot itself does when a node fails (it ends the other nodes).
"""

import contextlib
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from megarl.cli.main import main
from megarl.launch.skypilot import TOKEN
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PORT = 6400  # the first of eight ports of the script's head, and of eight of its worker
IPS = ("127.0.0.1", "127.0.0.2")


def taken() -> list[tuple[str, int]]:
    """The addresses and ports of the script's Ray at which a process listens."""
    found = []
    for place in itertools.product(IPS, range(PORT, PORT + 16)):
        with socket.socket() as asking:
            if asking.connect_ex(place) == 0:
                found.append(place)
    return found


pytestmark = [
    pytest.mark.skipif(bool(taken()), reason=f"port {PORT}, the task's own, is taken on this machine"),
    pytest.mark.timeout(300),
]


class Nodes:
    """Two nodes of one task; the task's run script is started on each, as SkyPilot does it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin = folder / "bin"
        bin.mkdir()
        # Writes down its arguments, waits for the file `go`, and exits with the code in that file.
        (bin / "megarl").write_text(f"""#!{sys.executable}
import json, os, pathlib, sys, time
import ray
address = sys.argv[-1].partition("=")[2]
ray.init(address=address, log_to_driver=False)
nodes = {{node["NodeManagerAddress"]: node["Resources"].get("CPU") for node in ray.nodes() if node["Alive"]}}
folder = pathlib.Path({str(folder)!r})
facts = {{"arguments": sys.argv[1:], "nodes": nodes, "cwd": os.getcwd(), "note": os.environ.get("NOTE")}}
(folder / "new").write_text(json.dumps(facts))
os.rename(folder / "new", folder / "facts.json")
while not (folder / "go").exists():
    time.sleep(0.1)
sys.exit(int((folder / "go").read_text()))
""")
        (bin / "megarl").chmod(0o755)
        self.processes: list[subprocess.Popen] = []
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert main(
                [
                    "launch", "skypilot", str(ROOT / "recipes/quickstart_ppo.yaml"), "--cpu", "--nodes", "2", "--setup", "true",
                    "--mount", f"shared:{folder}", "--work-dir", f"{folder}/work", "--start-seconds", "120", "--dry-run",
                    "trainer.n_gpus_per_node=2", "trainer.project_name=it's \"$HOME\" `x`",
                ]
            ) == 0  # fmt: skip
        self.task = yaml.safe_load(out.getvalue())

    def start(self, rank: int, **more: str) -> subprocess.Popen:
        environment = {
            **os.environ,
            # The two "machines" are one: PATH has the stand-in, then the venv's Python and Ray.
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(IPS),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "0",
            "SKYPILOT_INTERNAL_JOB_ID": "1",
            # Variables of SkyPilot's own Ray (sky/skylet/log_lib.py add_ray_env_vars).
            "RAY_JOB_ID": "01000000",
            "RAY_CLIENT_MODE": "0",
            TOKEN: "a" * 64,
            "NOTE": "kept",
            **more,
        }
        log = (self.folder / f"node{rank}.log").open("w")
        # SkyPilot adds lines behind the task's lines, which use the last exit code (sky/backends/task_codegen.py).
        script = self.task["run"] + "\n__skypilot_user_exit_code=$?\nexit $__skypilot_user_exit_code"
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=self.task["workdir"], env=environment, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip
        self.processes.append(process)
        return process

    def log(self, rank: int) -> str:
        return (self.folder / f"node{rank}.log").read_text()

    def up(self) -> dict:
        """Wait until megarl runs; returns the facts that it has written down."""
        facts = self.folder / "facts.json"

        def there() -> bool:
            assert all(process.poll() is None for process in self.processes), self.log(0) + self.log(1)
            return facts.exists()

        wait_for(there, 150, lambda: self.log(0) + self.log(1))
        return json.loads(facts.read_text())

    def own(self) -> list[psutil.Process]:
        """Every process of these nodes."""
        mark = str(self.folder / "bin")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mark in process.environ().get("PATH", "") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """End the nodes as SkyPilot does: signal all processes of the task's tree, and kill those that remain."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.own():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            psutil.wait_procs(self.own(), timeout=40)
        for process in self.processes:
            process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    two = Nodes(tmp_path)
    yield two
    two.end()


@pytest.mark.slow
def test_the_head_runs_megarl_over_all_nodes_and_all_end_with_it(nodes: Nodes) -> None:
    worker, head = nodes.start(1), nodes.start(0)
    facts = nodes.up()
    command, recipe, address = facts["arguments"]
    assert (command, address) == ("train", f"trainer.ray_address={IPS[0]}:{PORT}")
    written = yaml.safe_load(Path(recipe).read_text())["trainer"]
    assert (written["nnodes"], written["n_gpus_per_node"]) == (2, 2)
    assert written["project_name"] == 'it\'s "$HOME" `x`'  # no shell has interpreted it
    # Ray may give the head's node the machine's own address instead of the loopback's.
    assert facts["nodes"][IPS[1]] == 2.0 and list(facts["nodes"].values()) == [2.0, 2.0]
    assert (facts["cwd"], facts["note"]) == (str(nodes.folder / "work"), "kept")
    (nodes.folder / "go").write_text("75")
    assert head.wait(100) == 75  # the code with which SkyPilot starts the task again
    assert worker.wait(100) == 0  # whatever the run's result: the head's exit code counts
    assert "megarl ended with exit code 75" in nodes.log(0) and "the head has ended" in nodes.log(1)
    assert nodes.own() == [] and taken() == []


@pytest.mark.slow
def test_a_worker_that_is_lost_fails(nodes: Nodes) -> None:
    """SkyPilot would then end the other nodes; here the head lasts as long as megarl does."""
    head, worker = nodes.start(0), nodes.start(1)
    nodes.up()
    [raylet] = [
        process
        for process in psutil.Process(worker.pid).children(recursive=True)
        if process.name() == "raylet"
    ]
    raylet.kill()
    assert worker.wait(100) == 2
    assert "node.sh: node 1: Ray's worker has ended" in nodes.log(1)
    assert head.poll() is None
    nodes.end()
    assert nodes.own() == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"SKYPILOT_NODE_IPS": IPS[0]}, "the recipe is made for 2 nodes, and SkyPilot gave 1: 127.0.0.1"),
        ({"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS are not set"),
    ],
)
def test_what_cannot_run_says_why(nodes: Nodes, more: dict[str, str], said: str) -> None:
    assert nodes.start(0, **more).wait(100) == 2
    assert said in nodes.log(0)


def test_fewer_gpus_than_the_recipe_has_devices_are_refused(nodes: Nodes) -> None:
    nodes.task["run"] = nodes.task["run"].replace(" --cpu ", " ")
    assert nodes.start(0, SKYPILOT_NUM_GPUS_PER_NODE="1").wait(100) == 2
    assert "the recipe is made for 2 GPUs a node, and SkyPilot gave 1" in nodes.log(0)
