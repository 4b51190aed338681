"""The script as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.data.shared import shared_data

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "tools/preprocess_gsm8k.py", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_real_gsm8k(tmp_path):
    done = run("--source", str(shared_data("gsm8k")), "--out", str(tmp_path / "gsm8k"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"train: 7473 rows in {tmp_path}/gsm8k/train.parquet",
        f"test: 1319 rows in {tmp_path}/gsm8k/test.parquet",
    ]
    assert pq.read_metadata(tmp_path / "gsm8k" / "test.parquet").num_rows == 1319


def test_errors_are_one_line(tmp_path):
    done = run("--source", str(tmp_path / "gone"), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {tmp_path}/gone is neither a file, a folder nor a Hub id such as openai/gsm8k\n"
    )
