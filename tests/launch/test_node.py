"""One node's part of a Slurm job, with stand-ins for Ray that fail when a test wants it; test_slurm.py has a real Ray."""

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for

NODE = Path(__file__).resolve().parents[2] / "launch/slurm/node.sh"
# Its servers answer; the first starts are given up later, during the wait for the head's devices, as on a machine that hangs.
RAY = """#!{python}
import os, pathlib, socket, sys, time
starts = pathlib.Path("{folder}/starts")
if sys.argv[1] == "start":
    with starts.open("a") as file:
        print(*sys.argv[1:], file=file)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    servers = [socket.create_server(("127.0.0.1", port + more)) for more in (0, 1)]
    given_up = len(starts.read_text().splitlines()) <= {bad}
    end = time.monotonic() + 1000
    while time.monotonic() < end and not (given_up and os.path.exists(f"{folder}/asked-{{port}}")):
        time.sleep(0.05)
    sys.exit(1)
"""
# Replaces the program that asks Ray for the job's devices. They are there, except those of a head that is given up, which never come.
PYTHON = """#!{python}
import os, pathlib, socket, sys, time
if not sys.argv[1].endswith("wait_for_devices.py"):
    os.execv("{python}", ["python3", *sys.argv[1:]])
host, port = sys.argv[2].split(":")
given_up = len(pathlib.Path("{folder}/starts").read_text().splitlines()) <= {bad}
pathlib.Path(f"{folder}/asked-{{port}}").touch()
time.sleep(1000 if given_up else 0)
socket.create_connection((host, int(port)))
"""
# Never joins, because the head whose address it has is gone.
WAITING_RAY = """#!{python}
import pathlib, sys, time
if sys.argv[1] == "start":
    with pathlib.Path("{folder}/starts").open("a") as file:
        print(*sys.argv[1:], file=file)
    time.sleep(1000)
"""
MEGARL = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "config":
    print(json.dumps({{"keys": {{f"trainer.{{key}}": {{"value": 1}} for key in ("nnodes", "n_gpus_per_node")}}}}))
else:
    pathlib.Path("{folder}/given").write_text(" ".join(sys.argv[1:]))
"""


def start_node(folder: Path, node: str, nodes: int, **programs: str) -> subprocess.Popen:
    """Run node.sh for one device on `node` of a job whose head is on localhost; its output is in the file `said`."""
    own = Path(sys.executable).parent
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    secured = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    job = {
        "SLURM_JOB_ID": str(os.getpid() % 140),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURMD_NODENAME": node,
    }
    with open(folder / "said", "w") as said:
        return subprocess.Popen(
            ["bash", str(NODE), str(folder), "localhost", "1", "yes", "lo", "60", "train", "recipe.yaml"],
            env={**os.environ, **secured, **job, "PATH": f"{folder}/bin:{own}:{os.environ['PATH']}"},
            stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip


def run_head(folder: Path, bad: int) -> tuple[int, str]:
    """Run the head of a job of one node, whose first `bad` starts of Ray are given up; returns its exit code and its output."""
    facts = {"python": sys.executable, "folder": folder, "bad": bad}
    stubs = {"ray": RAY, "python3": PYTHON, "megarl": MEGARL}
    process = start_node(
        folder, "localhost", 1, **{name: text.format(**facts) for name, text in stubs.items()}
    )
    try:
        return process.wait(100), (folder / "said").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_head_that_ray_gives_up_after_it_answered_is_started_again(tmp_path: Path) -> None:
    code, said = run_head(tmp_path, bad=1)
    assert code == 0, said
    starts = (tmp_path / "starts").read_text().splitlines()
    assert len(starts) == 2 and all(line.startswith("start ") for line in starts)
    head = (tmp_path / "head").read_text().strip()
    ports = [line.split()[line.split().index("--port") + 1] for line in starts]
    assert head == f"127.0.0.1:{ports[1]}" and ports[0] != ports[1]
    assert (tmp_path / "given").read_text() == f"train recipe.yaml trainer.ray_address={head}"
    assert (tmp_path / "done").read_text() == "0\n"


def test_a_head_that_never_stays_is_an_error(tmp_path: Path) -> None:
    code, said = run_head(tmp_path, bad=9)
    assert code == 2 and "Ray's head did not start in 3 tries" in said
    assert len((tmp_path / "starts").read_text().splitlines()) == 3
    assert not (tmp_path / "given").exists() and not (tmp_path / "done").exists()


def test_tasks_of_a_job_array_copy_checkpoints_to_places_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 1, "trainer.checkpoint_url": "s3://bucket/sweep"}
    config = json.dumps({"keys": {key: {"value": value} for key, value in keys.items()}})
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    process = start_node(tmp_path, "localhost", 1, megarl=f"#!{sys.executable}\nprint({config!r})\n")
    assert process.wait(100) == 2
    said = (tmp_path / "said").read_text()
    assert "trainer.checkpoint_url=s3://bucket/sweep is the same for all tasks of the job array" in said


def test_a_worker_follows_a_head_that_was_started_again(tmp_path: Path) -> None:
    ray = WAITING_RAY.format(python=sys.executable, folder=tmp_path)
    process = start_node(tmp_path, "another", 2, ray=ray)
    starts = tmp_path / "starts"
    try:
        for count, head in enumerate(("10.0.0.1:6400", "10.0.0.1:6408"), 1):
            (tmp_path / "head.new").write_text(f"{head}\n")
            (tmp_path / "head.new").rename(tmp_path / "head")
            wait_for(lambda count=count: starts.exists() and len(starts.read_text().splitlines()) == count)
            assert f" --address {head} " in starts.read_text().splitlines()[-1]
        (tmp_path / "done").write_text("0\n")
        assert process.wait(100) == 0, (tmp_path / "said").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
