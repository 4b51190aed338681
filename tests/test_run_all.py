"""Who gets a second try."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_all import FEW

ROOT = Path(__file__).resolve().parents[1]
AT_THE_SECOND_TRY = """
from pathlib import Path
def test_unlucky():
    tries = Path(__file__).with_name("tries")
    before = tries.exists()
    tries.touch()
    assert before
"""
ALWAYS = "def test_broken():\n    assert False\n"
GOOD = "def test_good():\n    pass\n"


@pytest.fixture
def run(tmp_path: Path):
    """run(text of each file of tests): (exit code, what was printed)."""

    def run(*texts: str) -> tuple[int, str]:
        files = [f"test_{number}.py" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            (tmp_path / file).write_text(text)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, "-m", "tests.run_all", "--rootdir", str(tmp_path), "-n0", *files],
            cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def test_one_that_passes_the_second_time_is_named(run) -> None:
    code, text = run(GOOD + AT_THE_SECOND_TRY)
    assert code == 0
    assert text.endswith("=== 1 failed at first and then passed; mend them:\n    test_0.py::test_unlucky\n")
    assert "assert before" in text and "1 failed, 1 passed" in text and "2 passed" in text


def test_one_that_fails_twice_is_a_failure(run) -> None:
    code, text = run(GOOD + ALWAYS)
    assert code == 1 and text.count("1 failed, 1 passed") == 2


def test_many_files_are_not_tried_again(run) -> None:
    code, text = run(*[ALWAYS] * (FEW + 1))
    assert code == 1 and text.count(f"{FEW + 1} failed") == 1 and "once more" not in text


def test_many_tests_of_a_file_are(run) -> None:
    """They share a fixture that fails at first."""
    shared = AT_THE_SECOND_TRY.replace(
        "def test_unlucky", "import pytest\n@pytest.fixture(scope='module')\ndef shared"
    )
    text = shared + "".join(f"def test_{number}(shared):\n    pass\n" for number in range(FEW + 1))
    code, said = run(GOOD, text)
    assert code == 0 and f"=== {FEW + 1} failed at first and then passed" in said


def test_a_file_that_cannot_be_read_is_no_test_that_failed(run) -> None:
    assert run("import nothing_of_this_name")[0] == 2
