"""Shared memory is removed with the scratch folder that names it."""

import secrets
from pathlib import Path

from megarl.cluster.guard import NAMES, remove_scratch


def test_shared_memory_that_is_named_in_a_scratch_folder_goes_with_it(tmp_path: Path) -> None:
    token = secrets.token_hex(8)
    shared = [Path(f"/dev/shm/megarl-test-{token}-{number}") for number in range(3)]
    other, scratch = tmp_path / "kept", tmp_path / "scratch[1]"  # a name that is a pattern, too
    scratch.mkdir()
    for path in (*shared, other):
        path.write_text("")
    try:
        (scratch / f"a{NAMES}").write_text(f"{shared[0]}\n/dev/shm/megarl-test-{token}-9\n")
        (scratch / f"b{NAMES}").write_text(f"/dev/shm/megarl-test-{token}-[1]\n{other}\n\n")
        remove_scratch(str(scratch))
        assert [path.exists() for path in shared] == [False, False, True]
        assert other.exists() and not scratch.exists()
        remove_scratch(str(scratch))  # as two do that end the same process
    finally:
        shared[2].unlink()
