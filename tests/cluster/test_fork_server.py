"""Ranks that are forked from a process which has their imports done."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.cluster import ProcessKind, WorkerDied, WorkerFailed, open_cluster_setup, wait
from megarl.cluster.fork_server import interpreter, start_fork_server
from megarl.cluster.guard import marked_processes, parent_of
from tests.cluster.processes import alive_after
from tests.waiting import wait_for

KIND = ProcessKind(("wave", "numpy"), (("OMP_NUM_THREADS", "1"),))
# A module whose import takes as long as a file exists.
SLOW = "import os, time\nwhile os.path.exists({path!r}): time.sleep(0.02)\n"


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """fork_server(kind): the socket of a fork server, which is killed at the end of the test."""
    started = []

    def start(kind: ProcessKind = KIND) -> str:
        path = str(tmp_path / f"fork-server-{len(started)}")
        started.append(start_fork_server(path, kind))
        return path

    yield start
    for process in started:
        process.kill()
        process.wait()


def serving(path: str) -> list[int]:
    """The fork server at `path` and its copies, except for copies that Ray has given a title."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and parent_of(int(folder.name)) is not None:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                arguments = (folder / "cmdline").read_bytes().decode().split("\0")
                if "--serve" in arguments and path in arguments:
                    found.append(int(folder.name))
    return sorted(found)


def is_connected(pid: int) -> bool:
    """Whether a process has a connected Unix socket, even if the other end has not accepted the connection yet."""
    files = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            files.append(os.readlink(file))
    connected = "03"  # include/uapi/linux/net.h of Linux: SS_CONNECTED
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return any(f"socket:[{fields[6]}]" in files for fields in sockets if fields[5] == connected)


def run_by(path: str, script: Path, *arguments: str, **options) -> subprocess.Popen:
    """Start a worker as Ray does: the interpreter, then the command's arguments."""
    command = f"exec {interpreter(path)} {script} {' '.join(arguments)}"
    return subprocess.Popen(["bash", "-c", command], **options)


def write(file: Path, text: str) -> Path:
    file.write_text(textwrap.dedent(text))
    return file


def text_of(file: Path, seconds: float = 60.0) -> str:
    """The text of a file that another process is writing."""
    return wait_for(
        lambda: file.exists() and (text := file.read_text()).endswith("\n") and text, seconds, lambda: file
    )


def test_ranks_have_the_imports_and_are_as_others_in_all_else(start_group, fork_server):
    path, env = fork_server(), {"MY_VARIABLE": "7"}
    copies = start_group("copies", 2, env=env, fork_server=path)
    others = start_group("others", 1, env=env)
    (first, second), (other,) = (wait(group.call("origin", "wave"), [group]) for group in (copies, others))
    assert {first["parent"], second["parent"]} == set(serving(path))
    assert other["parent"] not in serving(path)
    assert first["before_start"] and second["before_start"] and not other["before_start"]
    for name in ("folder", "oom_score", "main_module"):
        assert first[name] == second[name] == other[name], name
    for name in (
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "CapEff",
        "Cpus_allowed",
        "NoNewPrivs",
    ):
        assert first["status"][name] == other["status"][name], name
    changing = {"RAY_CLIENT_MODE", "MEGARL_RANK"}
    assert {k: v for k, v in first["environment"].items() if k not in changing} == {
        k: v for k, v in other["environment"].items() if k not in changing
    }
    assert first["random"] != second["random"], "numpy's random numbers"
    assert first["title"] == "ray::copies-rank0.origin"
    log = Path(copies.processes[0].log_path).read_text()
    assert log.startswith(f"--- copies-rank0: process {copies.pids[0]} on 127.0.0.1")


def test_the_death_of_a_copy_is_noticed_and_nothing_of_it_is_left(start_group, fork_server):
    group = start_group("copies", 2, fork_server=fork_server())
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="copies rank 1"):
        wait(group.call("sleep", 60), [group])
    gone = Path(f"/proc/{group.pids[1]}")
    wait_for(lambda: not gone.exists(), told=lambda: "nobody has waited for it")


def test_what_a_copy_raises_is_told_as_of_any_rank(start_group, fork_server):
    with pytest.raises(WorkerFailed, match="no weights for rank 0"):
        start_group("copies", 1, init_kwargs={"fail_rank": 0}, fork_server=fork_server())


def test_a_copy_is_restarted_as_a_copy(start_group, fork_server):
    path = fork_server()
    group = start_group("copies", 2, fork_server=path)
    before = group.pids
    wait(group.restart(0), [group])
    origin, _ = wait(group.call("origin", "wave"), [group])
    assert group.pids[0] != before[0] and group.pids[1] == before[1]
    assert origin["parent"] in serving(path) and origin["before_start"]


def test_without_a_fork_server_ranks_make_their_imports_themselves(start_group, fork_server):
    path = fork_server(ProcessKind(("no_such_module_of_anybody",), ()))
    log = Path(f"{path}.log")  # of which the error is written line by line
    wait_for(lambda: log.exists() and "no_such_module_of_anybody" in log.read_text(), told=lambda: log)
    for gone in (path, f"{path}-never-there"):
        group = start_group("others", 1, fork_server=gone)
        (origin,) = wait(group.call("origin", "wave"), [group])
        assert origin["parent"] not in serving(path) and not origin["before_start"]
        group.shutdown()


def test_a_copy_has_the_streams_arguments_and_folder_of_who_asked(fork_server, tmp_path):
    script = write(
        tmp_path / "script.py", "import os, sys; print(sys.argv[1:], os.getcwd(), sys.stdin.read())"
    )
    with run_by(
        fork_server(),
        script,
        "a",
        "--b=c",
        cwd="/proc",
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as asker:
        out, _ = asker.communicate("what is asked", timeout=100)
    assert out == "['a', '--b=c'] /proc what is asked\n" and asker.returncode == 0


def test_who_does_not_wait_gets_no_copy(fork_server, tmp_path, monkeypatch):
    """A worker that Ray no longer waits for must not start later: it would be one too many."""
    hold, ran = write(tmp_path / "hold", ""), tmp_path / "ran"
    write(tmp_path / "slow_module.py", SLOW.format(path=str(hold)))
    monkeypatch.syspath_prepend(tmp_path)
    script = write(tmp_path / "script.py", f"import sys; print(sys.argv[1], file=open({str(ran)!r}, 'a'))")
    path = fork_server(ProcessKind(("slow_module",), ()))
    gone = run_by(path, script, "gone")
    wait_for(lambda: is_connected(gone.pid))
    gone.kill()
    gone.wait()
    hold.unlink()
    run_by(path, script, "waits").wait(100)
    assert text_of(ran) == "waits\n"


def test_it_ends_with_the_parent_of_who_asked_first(fork_server, tmp_path):
    """The fork server ends with Ray's raylet: otherwise its copies would live on without a raylet (see guard.py)."""
    done = tmp_path / "done"
    script = write(tmp_path / "script.py", f"print('done', file=open({str(done)!r}, 'w'))")
    path = fork_server()
    command = f"{interpreter(path)} {script}; sleep 60"  # a parent that lives on
    raylet = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    assert text_of(done) == "done\n"
    assert serving(path) and raylet.poll() is None
    os.killpg(raylet.pid, signal.SIGKILL)
    raylet.wait()
    wait_for(lambda: not serving(path))


def test_a_cluster_setup_has_a_fork_server_for_each_kind_and_leaves_nothing():
    with open_cluster_setup({"one": KIND, "two": KIND, "three": ProcessKind(("wave",), ())}) as cluster_setup:
        one, two, three = (cluster_setup.fork_servers[name] for name in ("one", "two", "three"))
        assert one == two != three
        pids = serving(one) + serving(three)
        assert len(pids) == 2 and set(pids) <= set(marked_processes(cluster_setup.mark))
    assert alive_after(pids, 30) == []
    assert not Path(cluster_setup.temp_dir).exists()


def test_a_cluster_setup_ends_with_a_controller_that_is_killed():
    code = """
        import time
        from megarl.cluster import ProcessKind, open_cluster_setup
        with open_cluster_setup({"kind": ProcessKind(("wave",), ())}) as cluster_setup:
            print(cluster_setup.fork_servers["kind"], flush=True)
            time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        path = controller.stdout.readline().strip()
        pids = serving(path)
        assert len(pids) == 1
        controller.kill()
    assert alive_after(pids, 30) == []
