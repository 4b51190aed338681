"""A node's part of a Slurm job by itself, where what goes wrong cannot be had of a whole cluster."""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NODE = Path(__file__).resolve().parents[2] / "launch/slurm/node.sh"
# As a start on a machine that stands still for seconds: its servers answer, and then it is given up. From the second one on Ray's own.
RAY = """#!{python}
import os, pathlib, socket, sys, time
starts = pathlib.Path("{folder}/starts")
if sys.argv[1] == "start":
    with starts.open("a") as file:
        print(*sys.argv[1:], file=file)
if sys.argv[1] != "start" or len(starts.read_text().splitlines()) > {bad}:
    os.execv("{ray}", ["ray", *sys.argv[1:]])
port = int(sys.argv[sys.argv.index("--port") + 1])
servers = [socket.create_server(("127.0.0.1", port + more)) for more in (0, 1)]
time.sleep(4)
sys.exit(1)
"""
MEGARL = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "config":
    print(json.dumps({{"keys": {{f"trainer.{{key}}": {{"value": 1}} for key in ("nnodes", "n_gpus_per_node")}}}}))
else:
    pathlib.Path("{folder}/given").write_text(" ".join(sys.argv[1:]))
"""


def run_node(folder: Path, bad: int) -> tuple[int, str]:
    """The head of a job of one node, whose first `bad` starts of Ray are given up: its exit code, and what it has said."""
    programs = Path(sys.executable).parent
    for name, text in (("ray", RAY), ("megarl", MEGARL)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(python=sys.executable, folder=folder, bad=bad, ray=programs / "ray"))
        path.chmod(0o755)
    secured = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    job = {"SLURM_JOB_ID": str(os.getpid() % 140), "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "localhost"}
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(
            ["bash", str(NODE), str(folder), "localhost", "1", "yes", "none", "60", "train", "recipe.yaml"],
            env={**os.environ, **secured, **job, "PATH": f"{folder}/bin:{programs}:{os.environ['PATH']}"},
            stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(250), (folder / "said").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_head_that_ray_gives_up_after_it_answered_is_started_again(tmp_path: Path) -> None:
    code, said = run_node(tmp_path, bad=1)
    assert code == 0, said
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == 2 and all(line.startswith("start ") for line in starts)
    head = (tmp_path / "head").read_text().strip()
    ports = [line.split()[line.split().index("--port") + 1] for line in starts]
    assert head == f"127.0.0.1:{ports[1]}" and ports[0] != ports[1]
    assert (tmp_path / "given").read_text() == f"train recipe.yaml trainer.ray_address={head}"
    assert (tmp_path / "done").read_text() == "0\n"


@pytest.mark.slow
def test_a_head_that_never_stays_is_an_error(tmp_path: Path) -> None:
    code, said = run_node(tmp_path, bad=9)
    assert code == 2 and "Ray's head did not start in 3 tries" in said
    assert len((tmp_path / "starts").read_text().splitlines()) == 3
    assert not (tmp_path / "given").exists() and not (tmp_path / "done").exists()
