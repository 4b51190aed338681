"""Tests as `make test` and `make test-all` run them: `pytest -n 3`, then the files with failed tests once more, if they are `FEW` at most.

Most tests start real processes, kill some and wait for others within limits of time, on machines that do other work, too. So failures that
are in few files get a second try, with nothing beside them; files are counted, since one failed start fails all tests that share it. The
first one stays in the output, and the last lines name each test that needed two tries: such a test is to be mended. Where more fail, or a
test fails twice, the exit code says so.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROCESSES = "3"  # on two cores: a third one computes while others wait for what they have started
FEW = 3
SOME_FAILED = 1  # pytest's exit code
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: Sequence[str]) -> int:
    """Args: of pytest. Returns: its exit code."""
    code = _pytest(["--cache-clear", "-n", PROCESSES, *arguments])
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    files = sorted({test.partition("::")[0] for test in failed})
    if code != SOME_FAILED or not 0 < len(files) <= FEW:
        return code
    _say("failed, and run once more with the rest of their files, and nothing beside them:", failed)
    code = _pytest(files)
    _say(
        "failed at first and then " + ("passed; mend them:" if code == 0 else "their files failed again:"),
        failed,
    )
    return code


def _pytest(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _say(what: str, tests: Sequence[str]) -> None:
    print(f"=== {len(tests)} {what}", *tests, sep="\n    ", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
