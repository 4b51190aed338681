"""The folder of checkpoints is a file system of its own, as where a volume is mounted for them."""

import subprocess
import sys

import pytest

# This runs in a mount namespace of its own, which ends with the process.
MOUNTED = """
import subprocess, sys
from pathlib import Path
from megarl.trainer.run.earlier_runs import move_checkpoints
root = Path(sys.argv[1])
subprocess.run(["mount", *sys.argv[2:], str(root)], check=True)
for again in range(2):
    for step in (1, 2, 3):
        (root / f"step-{step}").mkdir(exist_ok=True)
        (root / f"step-{step}" / "file").write_text(str(again))
    move_checkpoints(root, 2, None, print)
    print(sorted(str(path.relative_to(root.parent)) for path in root.parent.rglob("file")))
"""


@pytest.mark.parametrize("mount", [["-t", "tmpfs", "none"], ["--bind", "disk"]])
def test_checkpoints_of_another_course_where_their_folder_is_a_mount_point(tmp_path, mount):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this user cannot mount anything")
    root, disk = tmp_path / "run" / "checkpoints", tmp_path / "disk"
    root.mkdir(parents=True)
    disk.mkdir()
    mount = [str(disk) if word == "disk" else word for word in mount]
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(root), *mount]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"checkpoints of steps 2, 3 are not of this run's history: moved to {root}/aside-1"
    files = ["step-1", "aside-1/step-2", "aside-1/step-3", "aside-2/step-2", "aside-2/step-3"]
    assert lines[3] == str(sorted(f"checkpoints/{name}/file" for name in files))
    assert list((tmp_path / "run").iterdir()) == [root]
