"""Checkpoints in a folder: each is complete or absent, they are found again, and the last good one is never lost."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from megarl.checkpoints import CheckpointStore, Keep, read_checkpoint, steps_in
from megarl.util.files import naming
from tests.checkpoints.shared import DAMAGES, NAMES, assert_whole, content, flip_bit, save, write_files
from tests.disks import small_disk

ALL = Keep()


def names(root: Path) -> list[str]:
    """The names in a store's folder, except the mark of its writer."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith(".writer."))


def hidden(root: Path) -> list[str]:
    return [name for name in names(root) if name.startswith(".")]


def test_a_checkpoint_has_the_facts_of_all_its_files(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "new" / "root", ALL) as store:
        checkpoint = save(store, 12, epoch=3, best=[0.5, None])
        assert (checkpoint.step, checkpoint.folder) == (12, tmp_path / "new" / "root" / "step-12")
        assert_whole(store.newest_good(), 12)
    document = json.loads((checkpoint.folder / "manifest.json").read_text())
    assert (document["format"], document["step"], document["facts"]) == (
        1,
        12,
        {"epoch": 3, "best": [0.5, None]},
    )
    assert document["files"] == {
        name: {"bytes": len(content(12, name)), "sha256": hashlib.sha256(content(12, name)).hexdigest()}
        for name in NAMES
    }
    assert read_checkpoint(checkpoint.folder) == checkpoint
    assert names(store.root) == ["step-12"]


def test_everything_is_flushed_before_the_rename_and_the_rename_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut must not break: files, then their folders, then the rename, then the root."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flushes(handle: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def renames(path: Path, target: Path) -> Path:
        done.append(f"{path} to {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushes)
    monkeypatch.setattr(Path, "rename", renames)
    with CheckpointStore(tmp_path, Keep(last=1)) as store:
        save(store, 1)
        done.clear()
        with store.building(2) as partial:
            store.commit(2, partial, write_files(partial, 2), {})
        (pruned,) = (line for line in done if line.endswith(".pruned"))
    renamed = done.index(f"{partial} to {tmp_path / 'step-2'}")
    folders = [done.index(str(folder)) for folder in (partial / "actor", partial)]
    files = [done.index(str(partial / name)) for name in (*NAMES, "manifest.json")]
    assert max(files[:3]) < files[3] < folders[0] < folders[1] < renamed
    assert done[renamed + 1 :] == [str(tmp_path), pruned, str(tmp_path)]


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, ALL) as store:
        assert store.newest_good() is None
        for step in (9, 100, 20):
            save(store, step)
        assert_whole(store.newest_good(), 100)
        assert steps_in(tmp_path) == [9, 20, 100]


def test_what_was_not_announced_is_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, ALL) as store:
        save(store, 1)
        changes = {
            "actor/extra is there and was not announced": lambda folder, files: (
                folder / "actor/extra"
            ).touch(),
            "actor/gone was announced and is not there": lambda folder, files: files.update(
                {"actor/gone": None}
            ),
            "actor/shard_0 has 1 bytes instead of": lambda folder, files: (
                folder / "actor/shard_0"
            ).write_bytes(b"x"),
            "manifest.json is for the store": lambda folder, files: (
                (folder / "manifest.json").touch(),
                files.update({"manifest.json": None}),
            ),
            "link is no file": lambda folder, files: (
                (folder / "link").symlink_to(folder / "actor"),
                files.update({"link": None}),
            ),
        }
        for message, change in changes.items():
            with pytest.raises(ValueError, match=message), store.building(2) as partial:
                files = write_files(partial, 2)
                change(partial, files)
                store.commit(2, partial, files, {})
            assert names(tmp_path) == ["step-1"]


def test_an_error_while_building_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, ALL) as store:
        save(store, 1)
        with pytest.raises(KeyboardInterrupt), store.building(2) as partial:
            write_files(partial, 2)
            raise KeyboardInterrupt
        assert names(tmp_path) == ["step-1"]


def test_a_checkpoint_can_be_committed_after_the_block(tmp_path: Path) -> None:
    """Files may be written in the background while the run goes on."""
    with CheckpointStore(tmp_path, ALL) as store:
        with store.building(2) as partial:
            pass
        files = write_files(partial, 2)
        assert store.newest_good() is None
        store.commit(2, partial, files, {})
        assert_whole(store.newest_good(), 2)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", ["actor/shard_1", "trainer.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_taken(
    tmp_path: Path, kind: str, name: str
) -> None:
    damage, message = DAMAGES[kind]
    lines: list[str] = []
    with CheckpointStore(tmp_path, ALL, say=lines.append) as store:
        for step in (1, 2, 3):
            save(store, step)
        damage(tmp_path / "step-3" / name)
        assert_whole(store.newest_good(), 2)
        (line,) = lines
        assert "step-3" in line and f"{name} " in line and message in line
        assert line.count(";") == 0  # the other files are unchanged


def test_sizes_are_compared_whatever_reads_the_files(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, ALL, say=lambda line: None) as store:
        for step in (1, 2):
            save(store, step)
        flip_bit(tmp_path / "step-2" / "trainer.json")
        assert store.newest_good(verify=lambda folder, files, console: {}).step == 2
        told = {"trainer.json": "is told to be damaged"}
        assert store.newest_good(verify=lambda folder, *_: told if folder.name == "step-2" else {}).step == 1
        (tmp_path / "step-1" / "trainer.json").write_text("")
        assert (
            store.newest_good(verify=lambda folder, files, console: {"step-2": told}.get(folder.name, {}))
            is None
        )


def test_a_folder_without_a_good_manifest_is_none(tmp_path: Path) -> None:
    lines: list[str] = []
    with CheckpointStore(tmp_path, Keep(last=1), say=lines.append) as store:
        save(store, 1)
        for step in (5, 6, 7):
            (tmp_path / f"step-{step}").mkdir()
        manifest = tmp_path / "step-1" / "manifest.json"
        (tmp_path / "step-6" / "manifest.json").write_bytes(manifest.read_bytes()[:-20])
        (tmp_path / "step-7" / "manifest.json").write_bytes(manifest.read_bytes())  # of step 1
        assert_whole(store.newest_good(), 1)
        assert len(lines) == 3 and all(
            f"step-{step}" in line for step, line in zip((7, 6, 5), lines, strict=True)
        )
        save(store, 2)  # this save prunes
        assert names(tmp_path) == ["step-2", "step-5", "step-6", "step-7"]


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, ALL) as store:
        path = save(store, 1, loss=0.5).folder / "manifest.json"
    good = path.read_bytes()
    seen = 0
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        if json.loads(good) == _json(path):
            continue  # one white space became another
        with pytest.raises(ValueError, match=r"manifest\.json"):
            read_checkpoint(path.parent)
        seen += 1
    assert seen > 0.9 * len(good)


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_pruning_keeps_the_last_the_best_and_every_so_many(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, Keep(last=2, every=50)) as store:
        for step in range(10, 101, 10):
            save(store, step)
            if step in (20, 40):
                store.mark_best(step)
        assert steps_in(tmp_path) == [40, 50, 90, 100]
        with pytest.raises(ValueError, match=r"no good checkpoint of step 30"):
            store.mark_best(30)
    with CheckpointStore(tmp_path, Keep(last=1)) as store:  # the store remembers the best step
        assert store.best == 40
        save(store, 110)
        assert steps_in(tmp_path) == [40, 110]
    with CheckpointStore(tmp_path, Keep(last=1, best=False)) as store:
        save(store, 120)
        assert names(tmp_path) == ["state.json", "step-120"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, Keep(last=2), say=lambda line: None) as store:
        for step in (1, 2, 3):
            save(store, step)
        flip_bit(tmp_path / "step-3" / "trainer.json")
        assert_whole(store.newest_good(), 2)
        save(store, 4)
        assert steps_in(tmp_path) == [2, 3, 4]  # 2 and 4 are the last two good ones; 3 stays for inspection
        save(store, 3)
        assert_whole(store.newest_good(), 4)
        assert steps_in(tmp_path) == [3, 4]


def test_a_step_that_is_there_is_replaced(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, Keep(last=1)) as store:
        save(store, 1, attempt=1)
        save(store, 1, attempt=2)
        assert store.newest_good().facts == {"attempt": 2}
        assert names(tmp_path) == ["step-1"]


def test_another_history_is_removed_once_there_is_a_checkpoint(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, Keep(last=2)) as store:
        for step in (1, 2, 3, 4):
            save(store, step)
        store.mark_best(4)
        store.abandon_later(3)
        assert steps_in(tmp_path) == [3, 4]
        assert_whole(store.newest_good(), 3)
        assert store.best is None
        save(store, 5)
        assert steps_in(tmp_path) == [3, 5]
        store.abandon_later(-1)
        assert store.newest_good() is None and steps_in(tmp_path) == [3, 5]
        save(store, 1)
        assert steps_in(tmp_path) == [1]
    with CheckpointStore(tmp_path, ALL) as store:
        assert store.best is None


def test_a_full_disk_leaves_older_checkpoints_as_they_were(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 512) as disk:
        with CheckpointStore(disk / "checkpoints", Keep(last=1)) as store:
            save(store, 1)
            for size in (2_000_000, None):  # full during a write; full when only the manifest is missing
                filler = disk / "filler"
                with pytest.raises(OSError) as caught, store.building(2) as partial:
                    files = write_files(partial, 2)
                    with naming(filler), open(filler, "wb", buffering=0) as file:
                        if size is not None:
                            file.write(b"x" * size)
                            file.write(b"x" * size)
                        _fill(file)
                    store.commit(2, partial, files, {})
                assert caught.value.errno == errno.ENOSPC
                assert str(disk) in caught.value.filename
                assert hidden(store.root) == []
                assert_whole(store.newest_good(), 1)
                filler.unlink()
            save(store, 2)
            assert_whole(store.newest_good(), 2)


def _fill(file: object) -> None:
    try:
        while True:
            file.write(b"x" * 512)
    except OSError:
        pass


def test_a_commit_whose_rename_fails_leaves_the_step_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore(tmp_path, ALL) as store:
        save(store, 1, attempt=1)
        rename = Path.rename

        def fails(path: Path, target: Path) -> Path:
            if path.name.endswith(".partial"):
                raise OSError(errno.EIO, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match="step-1"):
            save(store, 1, attempt=2)
        assert store.newest_good().facts == {"attempt": 1}
        assert names(tmp_path) == ["step-1"]


def test_rubbish_of_the_dead_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    lines: list[str] = []
    with CheckpointStore(tmp_path, ALL) as store:
        for step in (1, 2):
            save(store, step)
    (tmp_path / "step-2").rename(tmp_path / ".step-2.0a1b-1.replaced")
    for name in (".step-3.0a1b-2.partial", ".step-0.0a1b-3.pruned", ".step-1.0a1b-4.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "mine.partial").mkdir()
    with CheckpointStore(tmp_path, ALL, say=lines.append) as store:
        assert names(tmp_path) == ["mine.partial", "step-1", "step-2"]
        assert_whole(store.newest_good(), 2)
    assert len(lines) == 4 and sum("put back" in line for line in lines) == 1


def test_what_a_living_writer_builds_is_left_alone(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, ALL) as store:
        with store.building(1) as partial:
            files = write_files(partial, 1)
            with pytest.raises(ValueError, match="another run writes to"):
                CheckpointStore(tmp_path, ALL)
            store.commit(1, partial, files, {})
        assert_whole(store.newest_good(), 1)


def test_a_writer_that_was_taken_for_dead_changes_nothing(tmp_path: Path) -> None:
    sleeper = CheckpointStore(tmp_path, Keep(last=1))
    save(sleeper, 1, writer="sleeper")
    (tmp_path / f".writer.{sleeper._lock.token}").unlink()  # as the next writer does
    with CheckpointStore(tmp_path, Keep(last=1)) as store:
        save(store, 1, writer="next")
        for step in (1, 2):
            with pytest.raises(RuntimeError, match="may not write"):
                save(sleeper, step, writer="sleeper")
        assert names(tmp_path) == ["step-1"]
        assert store.newest_good().facts == {"writer": "next"}
    sleeper.close()


def test_what_was_just_committed_stays_also_before_later_steps(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, Keep(last=1)) as store:
        for step in (5, 3):
            save(store, step)
        assert steps_in(tmp_path) == [3, 5]
        save(store, 6)
        assert steps_in(tmp_path) == [6]
