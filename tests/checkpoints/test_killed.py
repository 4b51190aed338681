"""A process that is killed at any moment of a save loses no checkpoint, and the next process removes the remains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.checkpoints import CheckpointStore, Keep, find_damage, read_checkpoint, steps_in
from tests.checkpoints.shared import assert_whole, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", ["next", "again"])
def test_killed_at_every_moment_of_a_save(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # as in the other process
    command = [sys.executable, "-m", "tests.checkpoints.killed", str(tmp_path), what]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    moments = [json.loads(line) for line in result.stdout.splitlines()]
    assert [moment["number"] for moment in moments] == list(range(len(moments)))
    old = ("step 2", 1) if what == "next" else ("step 3", 1)
    found = []
    for moment in moments:
        root = tmp_path / str(moment["number"])
        _nothing_that_looks_whole_is_damaged(root)
        with CheckpointStore(root, Keep(last=1), say=lambda line: None) as store:
            checkpoint = store.newest_good()
            assert checkpoint is not None, moment
            assert_whole(checkpoint, checkpoint.step)
            found.append((f"step {checkpoint.step}", checkpoint.facts["attempt"]))
            rubbish = [
                path.name
                for path in root.iterdir()
                if path.name.startswith(".") and path.name != f".writer.{store._lock.token}"
            ]
            assert rubbish == [], moment
            assert store.best in (None, 3)
            save(store, 4)
            assert_whole(store.newest_good(), 4)
        with CheckpointStore(root, Keep(last=1), say=pytest.fail) as store:
            assert steps_in(root) in ([4], [3, 4])  # step 3, too, where it was marked as the best
    # Up to the rename the newest checkpoint is the old one, afterwards the new one; both cases occurred.
    turn = found.index(("step 3", 2))
    assert found == [old] * turn + [("step 3", 2)] * (len(found) - turn)
    assert 5 < turn < len(found) - 3
    before = moments[turn - 1]
    assert (before["operation"], before["of"].endswith(".partial")) == ("rename", True)
    seen = {moment["operation"] for moment in moments}
    assert {"rename", "fsync", "unlink", "rmdir", "mkdir", "open", "replace"} <= seen


def _nothing_that_looks_whole_is_damaged(root: Path) -> None:
    """Before any cleaning up, each folder that a reader without the lock would take for a checkpoint is one."""
    for step in steps_in(root):
        assert find_damage(read_checkpoint(root / f"step-{step}")) == []
