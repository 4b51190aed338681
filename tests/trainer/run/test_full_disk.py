"""What a run says when a disk is full: the file or folder, and the key that moves it."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.cluster import RayFailed, WorkerFailed
from megarl.cluster.ranks import RankError, RankProcess
from megarl.data.trajectories import write_parquet
from megarl.trainer.health.monitor import _write as write_finding
from megarl.trainer.run.full_disk import advice, naming_keys
from megarl.trainer.run.logger import RunLogger, read_metrics
from tests.disks import small_disk

LOCAL, ROLLOUTS = "trainer.default_local_dir", "trainer.rollout_data_dir"


@pytest.fixture
def disk(tmp_path: Path):
    """A folder on a disk of its own with 64 KiB, of which `fill` leaves nothing."""
    with small_disk(tmp_path / "disk", 64) as folder:
        yield folder


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def ended(folders: dict[str, Path], action) -> OSError:
    with pytest.raises(OSError, match="No space left on device") as caught, naming_keys(folders):
        action()
    assert caught.value.errno == errno.ENOSPC
    return caught.value


@pytest.mark.parametrize("sink", ["file", "tensorboard"])
def test_metrics_and_events(disk: Path, sink: str) -> None:
    folders = {LOCAL: disk / "run", ROLLOUTS: disk / "run" / "rollouts"}
    logger = RunLogger(disk / "run", [sink])
    fill(disk)
    if sink == "file":
        error = ended(folders, lambda: logger.log(1, {f"metric-{number}": 1.0 for number in range(3000)}))
        file = "run/metrics.jsonl"
    else:
        error = ended(folders, lambda: logger.log_samples(1, "a", [{"b": "x" * 100_000}]))
        file = "run/tensorboard/events.out.tfevents."
    assert error.filename.startswith(str(disk / file))
    assert f"set {LOCAL} to a folder on a disk with more room" in error.strerror
    # Nothing is half-written: what was there before is read as before.
    (disk / "filler").unlink()
    logger.log(2, {"a": 1.0})
    assert [row["step"] for row in read_metrics(disk / "run")] == [2]
    if sink == "tensorboard":
        events = EventAccumulator(str(disk / "run" / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Scalars("a")] == [2]


def test_trajectories_and_findings(disk: Path) -> None:
    folders = {LOCAL: disk / "run", ROLLOUTS: disk / "elsewhere"}
    (disk / "run").mkdir()
    fill(disk)
    table = pa.table({"response": [os.urandom(100).hex() for _ in range(1000)]})
    error = ended(folders, lambda: write_parquet(table, disk / "elsewhere" / "step-000001.parquet"))
    assert error.filename.startswith(str(disk / "elsewhere")) and f"set {ROLLOUTS} to" in error.strerror
    error = ended(folders, lambda: write_finding(disk / "run", 1, {"text": "x" * 10_000}))
    assert error.filename == str(disk / "run" / "health.jsonl") and f"set {LOCAL} to" in error.strerror


def test_an_error_without_a_name_is_of_the_disk_with_the_least_room(disk: Path) -> None:
    fill(disk)

    def bare() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    error = ended({LOCAL: disk}, bare)
    assert error.filename == str(disk) and f"set {LOCAL} to" in error.strerror


def test_a_ranks_file(disk: Path) -> None:
    process = RankProcess(SimpleNamespace(), "actor", 1, "host7", "node", "/logs/actor-rank1.log", pid=42)
    for message, words in (
        (
            f"[Errno 28] No space left on device: '{disk}/run/x.pt'",
            f"{disk}/run/x.pt: no space left; set {LOCAL} to",
        ),
        (
            "[Errno 122] Disk quota exceeded: '/dev/shm/megarl'",
            "/dev/shm/megarl: no space left; give the machine",
        ),
    ):
        failure = WorkerFailed(process, RankError("OSError", message, "", 0.0, ""))
        with pytest.raises(WorkerFailed) as caught, naming_keys({LOCAL: disk / "run"}):
            raise failure
        assert words in str(caught.value).splitlines()[-1]


def test_ray_that_cannot_start() -> None:
    told = "Ray did not start on this machine: [Errno 28] No space left on device: '/tmp/megarl-x/session'"
    with pytest.raises(RayFailed) as caught, naming_keys({LOCAL: "run"}):
        raise RayFailed(told)
    assert str(caught.value).splitlines() == [
        told,
        "/tmp/megarl-x/session: no space left; make room there, where Ray and others have temporary files",
    ]


def test_other_errors_stay_as_they_are() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "no", "f"), TimeoutError("late"), ValueError("x")):
        with pytest.raises(type(error)) as caught, naming_keys({LOCAL: "run"}):
            raise error
        assert caught.value is error


def test_each_key_that_moves_it_is_named() -> None:
    folders = {LOCAL: "run", ROLLOUTS: "run/rollouts"}
    assert advice("run/rollouts/step-1.parquet", folders).startswith(f"set {LOCAL} or {ROLLOUTS} to a folder")
    assert advice("run/metrics.jsonl", folders).startswith(f"set {LOCAL} to a folder")
    assert (
        advice("/tmp/megarl-x/session", folders)
        == "make room there, where Ray and others have temporary files"
    )
    assert advice("/data/x", folders) == "make room there"
