"""A guard knows how its process ended, and removes shared memory with the scratch folder that names it."""

import secrets
import subprocess
import sys
from pathlib import Path

from megarl.cluster import guard
from megarl.cluster.guard import DISK, NAMES, remove_scratch
from tests.waiting import wait_for


def test_a_guard_that_has_started_knows_how_its_process_ended(tmp_path: Path) -> None:
    """Also if the process is killed and gone at once, before the guard has done anything else."""
    for number in range(20):
        log = tmp_path / f"{number}.log"
        with log.open("w") as out, subprocess.Popen(["sleep", "60"]) as process:
            mark = f"MEGARL_TEST={tmp_path}"
            guarded = [sys.executable, "-S", "-I", guard.__file__, str(process.pid), "0", mark]
            subprocess.run(guarded, start_new_session=True, stdout=out, check=True)
            process.kill()
        wait_for(lambda log=log: guard.ENDED in log.read_text())
        assert log.read_text().removeprefix(guard.ENDED).startswith("killed")


def test_a_guard_that_cannot_write_to_the_log_removes_what_is_left(tmp_path: Path) -> None:
    """Logs are on the run folder's disk, which may be full."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open("/dev/full", "w") as out, subprocess.Popen(["sleep", "60"]) as process:
        guarded = [
            sys.executable,
            "-S",
            "-I",
            guard.__file__,
            str(process.pid),
            "0",
            f"MEGARL_TEST={tmp_path}",
        ]
        subprocess.run([*guarded, str(scratch)], start_new_session=True, stdout=out, stderr=out, check=True)
        process.kill()
    wait_for(lambda: not scratch.exists())


def test_shared_memory_that_is_named_in_a_scratch_folder_goes_with_it(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    shared = [Path(f"/dev/shm/megarl-test-{token}-{number}") for number in range(3)]
    other, scratch = tmp_path / "kept", tmp_path / "scratch[1]"  # the folder's name is also a glob pattern
    scratch.mkdir()
    for path in (*shared, other):
        path.write_text("")
    try:
        (scratch / f"a{NAMES}").write_text(f"{shared[0]}\n/dev/shm/megarl-test-{token}-9\n")
        (scratch / f"b{NAMES}").write_text(f"/dev/shm/megarl-test-{token}-[1]\n{other}\n\n")
        remove_scratch(str(scratch))
        assert [path.exists() for path in shared] == [False, False, True]
        assert other.exists() and not scratch.exists()
        remove_scratch(str(scratch))  # a second time, as when two processes end the same one
    finally:
        shared[2].unlink()


def test_a_folder_on_the_disk_goes_with_the_scratch_folder_that_links_to_it(tmp_path: Path) -> None:
    disk, other, scratch = tmp_path / "disk", tmp_path / "other", tmp_path / "scratch"
    for folder in (disk, other, scratch):
        (folder / "within").mkdir(parents=True)
    (scratch / DISK).symlink_to(disk)
    (scratch / "link").symlink_to(other)
    for _ in range(2):
        remove_scratch(str(scratch))
        assert [folder.exists() for folder in (disk, other, scratch)] == [False, True, False]
