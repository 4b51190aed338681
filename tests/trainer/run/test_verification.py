"""Verification on all machines: a cluster that is imitated, and one of two raylets."""

import errno
import io
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

import megarl.trainer.run.verification as verification
from megarl.checkpoints import FileFacts, changed_files, seal_files
from megarl.checkpoints.manifest import read_all_facts
from megarl.trainer.run.verification import verify_in_cluster
from tests.cluster.processes import start_controller

SIZES = {"a": 5, "b/c": 40, "d": 0, "e": 100, "f": 7}


def written(folder: Path) -> dict[str, FileFacts]:
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    return seal_files(folder, SIZES)


def without_folder(folder, sizes):
    return read_all_facts(folder / "elsewhere", sizes)


def failing(folder, sizes):
    raise OSError(errno.ESTALE, "")


@pytest.fixture
def imitate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """imitate(host=reader, ...): a cluster of these machines, each of which reads by a function of its own. Returns a list of what is done
    with it."""

    def make(**machines: Callable) -> list[str]:
        done: list[str] = []

        def spread(nodes, function, calls):
            assert nodes == list(machines)
            waiting = deque(nodes)  # one that has failed is given no other call
            for index, call in enumerate(calls):
                node = waiting.popleft() if waiting else None
                result = None
                if node is not None:
                    done.append(node)
                    monkeypatch.setattr(verification, "read_all_facts", machines[node])
                    try:
                        result = function(*call)
                        waiting.append(node)
                    except OSError:
                        node = None
                yield index, node, result

        nodes = [{"NodeID": host, "NodeManagerAddress": host} for host in machines]
        monkeypatch.setattr(verification, "living_nodes", lambda: nodes)
        monkeypatch.setattr(verification, "spread", spread)
        monkeypatch.setattr(verification, "start_cluster", lambda address, *_: done.append(f"join {address}"))
        monkeypatch.setattr(verification, "stop_cluster", lambda cluster: done.append("leave"))
        return done

    return make


def test_machines_read_parts_of_the_files(imitate, tmp_path):
    files = written(tmp_path)
    done = imitate(one=read_all_facts, two=read_all_facts)
    verify = verify_in_cluster("head:1", tmp_path, 0)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    assert verify(tmp_path, files, console) == {}
    assert done == ["join head:1", "one", "two", "one", "leave"]  # parts of two files
    assert f"verifying {tmp_path.name} on 2 machines" in console.file.getvalue()
    (tmp_path / "a").write_bytes(b"other")
    shutil.rmtree(tmp_path / "b")
    changed = verify(tmp_path, files, None)
    assert changed == changed_files(tmp_path, files)
    assert changed["a"] == "has another SHA-256 than when it was written"
    assert changed["b/c"].startswith("cannot be read")


def test_little_is_read_here(imitate, tmp_path):
    files = written(tmp_path)
    done = imitate(one=failing)
    total = sum(SIZES.values())
    assert verify_in_cluster("head:1", tmp_path, total + 1)(tmp_path, files, None) == {} and done == []
    assert verify_in_cluster("head:1", tmp_path, total)(tmp_path, files, None) == {}
    assert done[0] == "join head:1" and done[-1] == "leave"


def test_what_a_machine_cannot_read_is_read_here(imitate, tmp_path):
    files = written(tmp_path)

    def without_largest(folder, sizes):
        return read_all_facts(folder, sizes) | {"e": OSError(errno.EIO, "")}

    for reader in (failing, without_folder, without_largest):
        imitate(one=reader, two=read_all_facts)
        assert verify_in_cluster("head:1", tmp_path, 0)(tmp_path, files, None) == {}
    (tmp_path / "e").write_bytes(bytes(99) + b"1")
    changed = verify_in_cluster("head:1", tmp_path, 0)(tmp_path, files, None)
    assert changed == {"e": "has another SHA-256 than when it was written"}


def test_a_machine_without_the_folder_is_given_one_part(imitate, tmp_path):
    """It is done with each at once: it would be given nearly all of them, which this process would read."""
    files = written(tmp_path)
    done = imitate(one=without_folder, two=read_all_facts)
    assert verify_in_cluster("head:1", tmp_path, 0)(tmp_path, files, None) == {}
    assert done == ["join head:1", "one", "two", "two", "leave"]


def test_a_machine_that_reads_something_else_is_named(imitate, tmp_path):
    """Its ranks would go on with that."""
    files = written(tmp_path)
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)
    (other / "f").write_bytes(b"another")
    done = imitate(one=read_all_facts, two=lambda folder, sizes: read_all_facts(other, sizes))
    with pytest.raises(ValueError, match=r"/f: two reads other bytes than this machine"):
        verify_in_cluster("head:1", tmp_path, 0)(tmp_path, files, None)
    assert done[-1] == "leave"


@contextmanager
def two_machines():
    process, report = start_controller("serve", "127.0.0.3")
    try:
        yield report["address"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_two_machines_verify_a_checkpoint(tmp_path):
    files = written(tmp_path)
    with two_machines() as address:
        verify = verify_in_cluster(address, tmp_path, 0)
        assert verify(tmp_path, files, None) == {}
        (tmp_path / "e").write_bytes(b"1" + bytes(99))
        assert verify(tmp_path, files, None) == {"e": "has another SHA-256 than when it was written"}
