"""Copies of checkpoints at a URL: in fsspec's memory, and in another folder."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megarl.checkpoints import CheckpointStore, Keep, find_damage, read_checkpoint, steps_in
from tests.checkpoints.shared import DAMAGES, NAMES, assert_whole, save

URL = "memory://bucket/run"


class Remote:
    """fsspec's file system in memory; it records the names that are written, in order, and can fail to write some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = fsspec.filesystem("memory")
        self.files.store.clear()
        self.files.pseudo_dirs[:] = [""]
        self.sent: list[str] = []
        self.failing: str | None = None  # files with this text in their path cannot be written
        self.before_put: Any = lambda name: None
        put, pipe = MemoryFileSystem.put_file, MemoryFileSystem.pipe_file

        def put_file(files: Any, local: str, path: str, **kwargs: Any) -> None:
            self._note(path)
            self.before_put(path)
            put(files, local, path, **kwargs)

        def pipe_file(files: Any, path: str, value: bytes, **kwargs: Any) -> None:
            self._note(path)
            pipe(files, path, value, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)

    def _note(self, path: str) -> None:
        if self.failing is not None and self.failing in path:
            raise PermissionError("the bucket is closed")
        self.sent.append(path.removeprefix("/bucket/run/"))

    def names(self) -> list[str]:
        return sorted(name.removeprefix("/bucket/run/") for name in self.files.store)

    def steps(self) -> list[int]:
        """The steps that are there; each must have all its files, and no further files."""
        steps = sorted({int(name.split("/")[0][5:]) for name in self.names() if name.startswith("step-")})
        assert [name for name in self.names() if name.startswith("step-")] == sorted(
            f"step-{step}/{name}" for step in steps for name in (*NAMES, "manifest.json")
        )
        return steps


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    remote = Remote(monkeypatch)
    yield remote
    remote.files.store.clear()


def test_a_checkpoint_is_copied_its_manifest_last(tmp_path: Path, remote: Remote) -> None:
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        save(store, 1)
    assert sorted(remote.sent[:3]) == sorted(f"step-1/{name}" for name in NAMES)
    assert remote.sent[3:] == ["step-1/manifest.json"]
    for name in (*NAMES, "manifest.json"):
        assert (
            remote.files.cat_file(f"/bucket/run/step-1/{name}") == (tmp_path / "step-1" / name).read_bytes()
        )


def test_another_folder_as_the_remote(tmp_path: Path) -> None:
    with CheckpointStore(
        tmp_path / "here", Keep(last=1), f"file://{tmp_path}/far/away", say=pytest.fail
    ) as store:
        for step in (1, 2):
            save(store, step)
    copy = tmp_path / "far" / "away"
    assert steps_in(copy) == [2]
    assert find_damage(read_checkpoint(copy / "step-2")) == []
    shutil.rmtree(tmp_path / "here")
    lines: list[str] = []
    with CheckpointStore(tmp_path / "here", Keep(), f"file://{tmp_path}/far/away", lines.append) as store:
        assert_whole(store.newest_good(), 2)
    assert len(lines) == 1 and lines[0].startswith(f"fetching file://{tmp_path}/far/away/step-2: 3 files")


def test_what_fails_is_named_and_sent_again_with_the_next_checkpoint(tmp_path: Path, remote: Remote) -> None:
    lines: list[str] = []
    failed = threading.Event()
    with CheckpointStore(tmp_path, Keep(), URL, say=lambda line: (lines.append(line), failed.set())) as store:
        remote.failing = "step-1/trainer.json"
        save(store, 1)
        assert failed.wait(30)
        (line,) = lines
        assert "memory://bucket/run/step-1/trainer.json: PermissionError: the bucket is closed" in line
        assert "step-1/manifest.json" not in remote.names()
        remote.failing = None
        save(store, 2)
    assert remote.steps() == [1, 2]
    assert sorted(remote.sent) == remote.names()  # nothing was sent twice
    assert lines == [line]


def test_what_still_fails_at_the_end_is_said_and_ends(tmp_path: Path, remote: Remote) -> None:
    lines: list[str] = []
    remote.failing = "manifest.json"
    with CheckpointStore(tmp_path, Keep(), URL, say=lines.append) as store:
        save(store, 1)
    assert lines and all("step-1/manifest.json" in line for line in lines)
    assert_whole(_newest(tmp_path), 1)
    remote.failing = None
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        save(store, 2)
    assert remote.steps() == [1, 2]  # also the step that an earlier process could not copy


def test_what_an_earlier_process_could_not_copy_is_copied_without_a_new_checkpoint(
    tmp_path: Path, remote: Remote
) -> None:
    """A run whose last checkpoint was not copied is started again, and has nothing left to train."""
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=lambda line: None) as store:
        save(store, 1)
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=lambda line: None) as store:
        remote.failing = "step-2/"
        save(store, 2)
    assert remote.steps() == [1]
    remote.failing = None
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=pytest.fail) as store:
        assert_whole(store.newest_good(), 2)
        store.abandon_later(2)
    assert remote.steps() == [1, 2]  # older ones are removed with the next one
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=pytest.fail) as store:
        save(store, 3)
    assert remote.steps() == [3]


def test_a_run_that_goes_on_from_an_earlier_step_removes_nothing_before_it_saves(
    tmp_path: Path, remote: Remote
) -> None:
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        for step in (1, 2, 3):
            save(store, step)
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"step-{step}")
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        store.abandon_later(1)
    assert remote.steps() == [1, 2, 3]


def _newest(root: Path) -> Any:
    with CheckpointStore(root, Keep(), say=pytest.fail) as store:
        return store.newest_good()


def test_the_remote_is_pruned_by_the_same_rules(tmp_path: Path, remote: Remote) -> None:
    keep = Keep(last=2, every=4)
    for first in (1, 5):  # two processes, the second one with a new disk
        root = tmp_path / str(first)
        with CheckpointStore(root, keep, URL, say=lambda line: None) as store:
            found = store.newest_good()
            assert (None if found is None else found.step) == (None if first == 1 else 4)
            assert store.best == (None if first == 1 else 2)
            for step in range(first, first + 4):
                save(store, step)
                if step == 2:
                    store.mark_best(2)
        assert steps_in(root) == ([2, 3, 4] if first == 1 else [4, 7, 8])
    assert remote.steps() == [2, 4, 7, 8]


def test_nothing_is_fetched_where_the_local_one_is_as_new(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        save(store, 1)
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda *args, **kwargs: pytest.fail("fetched"))
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        assert_whole(store.newest_good(), 1)


def test_a_damaged_local_one_is_healed_from_the_remote(tmp_path: Path, remote: Remote) -> None:
    lines: list[str] = []
    with CheckpointStore(tmp_path, Keep(), URL, say=lines.append) as store:
        for step in (1, 2):
            save(store, step)
    (tmp_path / "step-2" / "trainer.json").unlink()
    with CheckpointStore(tmp_path, Keep(), URL, say=lines.append) as store:
        assert_whole(store.newest_good(), 2)
    assert [line.split(" ")[0] for line in lines] == ["Warning:", "fetching"]
    assert_whole(_newest(tmp_path), 2)


def test_a_damaged_local_one_is_not_copied(tmp_path: Path, remote: Remote) -> None:
    with CheckpointStore(tmp_path, Keep(), say=pytest.fail) as store:
        for step in (1, 3):
            save(store, step)
    (tmp_path / "step-3" / "trainer.json").unlink()
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=lambda line: None) as store:
        assert_whole(store.newest_good(), 1)
        save(store, 2)
    assert remote.steps() == [2]


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_remote_one_is_named_and_the_one_before_taken(
    tmp_path: Path, remote: Remote, kind: str
) -> None:
    with CheckpointStore(tmp_path / "first", Keep(), URL, say=pytest.fail) as store:
        for step in (1, 2):
            save(store, step)
    damage, message = DAMAGES[kind]
    broken = tmp_path / "broken"
    broken.write_bytes(remote.files.cat_file("/bucket/run/step-2/trainer.json"))
    damage(broken)
    remote.files.rm_file("/bucket/run/step-2/trainer.json")
    if broken.exists():
        remote.files.put_file(str(broken), "/bucket/run/step-2/trainer.json")
    lines: list[str] = []
    root = tmp_path / "second"
    with CheckpointStore(root, Keep(), URL, say=lines.append) as store:
        assert_whole(store.newest_good(), 1)
        (warning,) = [line for line in lines if line.startswith("Warning")]
        assert "step-2" in warning and "trainer.json " in warning and message in warning
        assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".w")) == ["step-1"]
        save(store, 2)  # step 2 again: the remote has its manifest, but not its files
    assert remote.steps() == [1, 2]
    shutil.rmtree(root)
    with CheckpointStore(root, Keep(), URL, say=lambda line: None) as store:
        assert_whole(store.newest_good(), 2)


def test_a_remote_that_cannot_be_read(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("the bucket is closed")

    monkeypatch.setattr(MemoryFileSystem, "ls", closed)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", closed)
    lines: list[str] = []
    with CheckpointStore(tmp_path, Keep(), URL, say=lines.append) as store:
        with pytest.raises(ValueError, match=r"there is no good checkpoint in .*memory://bucket/run.*closed"):
            store.newest_good()
    with CheckpointStore(tmp_path, Keep(), say=pytest.fail) as store:
        save(store, 1)
    with CheckpointStore(tmp_path, Keep(), URL, say=lines.append) as store:
        assert_whole(store.newest_good(), 1)
    assert len(lines) == 1 and "newer checkpoints than" in lines[0] and "closed" in lines[0]


def test_newer_ones_of_a_remote_that_could_not_be_read_stay(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with CheckpointStore(old, Keep(last=2), URL, say=pytest.fail) as store:
        save(store, 1)
    with CheckpointStore(new, Keep(last=2), URL, say=lambda line: None) as store:
        assert_whole(store.newest_good(), 1)
        for step in (2, 3):
            save(store, step)

    def closed(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError("no answer")

    # The run comes back to its first machine, and the remote does not answer as it starts.
    with CheckpointStore(old, Keep(last=2), URL, say=lambda line: None) as store:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "ls", closed)
            assert_whole(store.newest_good(), 1)
        store.abandon_later(1)
        save(store, 2, again=True)
    assert remote.steps() == [2, 3]
    with CheckpointStore(old, Keep(last=2), URL, say=lambda line: None) as store:
        assert_whole(store.newest_good(), 3)


def test_what_is_being_copied_is_not_pruned(tmp_path: Path, remote: Remote) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        if "step-1/" in path:
            begun.set()
            assert go.wait(30)

    remote.before_put = wait
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=pytest.fail) as store:
        save(store, 1)
        assert begun.wait(30)
        save(store, 2)
        save(store, 3)
        assert steps_in(tmp_path) == [1, 3]
        go.set()
    assert "step-1/manifest.json" in remote.sent and not any("step-2" in name for name in remote.sent)
    assert remote.steps() == [3]
    with CheckpointStore(tmp_path, Keep(last=1), URL, say=pytest.fail) as store:
        save(store, 4)
    assert steps_in(tmp_path) == [4]


def test_a_step_that_is_replaced_while_it_is_copied_is_copied_whole(tmp_path: Path, remote: Remote) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        if path.endswith("shard_1") and not begun.is_set():
            begun.set()
            assert go.wait(30)

    remote.before_put = wait
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        save(store, 1, attempt=1)
        assert begun.wait(30)
        save(store, 1, attempt=2)
        go.set()
    assert remote.steps() == [1]
    manifest = remote.files.cat_file("/bucket/run/step-1/manifest.json")
    assert manifest == (tmp_path / "step-1" / "manifest.json").read_bytes()
    assert remote.sent.count("step-1/manifest.json") == 1


def test_an_unfinished_copy_is_no_checkpoint_and_is_removed(tmp_path: Path, remote: Remote) -> None:
    remote.files.pipe_file("/bucket/run/step-7/actor/shard_0", b"half")
    with CheckpointStore(tmp_path, Keep(), URL, say=pytest.fail) as store:
        assert store.newest_good() is None
        save(store, 1)
    assert remote.steps() == [1]


def test_another_history_is_removed_at_the_remote(tmp_path: Path, remote: Remote) -> None:
    with CheckpointStore(tmp_path, Keep(last=2), URL, say=pytest.fail) as store:
        for step in (1, 2, 3, 4):
            save(store, step)
        store.mark_best(4)
    (tmp_path / "state.json").unlink()
    shutil.rmtree(tmp_path / "step-4")  # only the remote has it
    with CheckpointStore(tmp_path, Keep(last=2), URL, say=pytest.fail) as store:
        store.abandon_later(2)
        assert store.newest_good() is None  # step 2 was pruned; steps 3 and 4 do not count
        assert store.best is None and remote.steps() == [3, 4]
        save(store, 3, again=True)
    assert remote.steps() == [3] == steps_in(tmp_path)
    assert b'"again": true' in remote.files.cat_file("/bucket/run/step-3/manifest.json")


@pytest.mark.parametrize(
    ("url", "message"),
    [("/mnt/run", "a URL, such as"), ("nosuch://bucket", "protocol nosuch:// is unknown")],
)
def test_urls_that_cannot_be_used(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointStore(tmp_path / "root", Keep(), url)
    assert not (tmp_path / "root").exists()
