"""Step `engine` on a CPU, and how it compares answers and bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.trajectories import Generation
from megarl.gpu_test.engine import GIB, _freed, _same
from megarl.rollout.sglang.before_import import sglang_environment


@pytest.mark.slow
def test_an_engine_goes_through_the_step_on_a_cpu(tmp_path: Path) -> None:
    environment = {**os.environ, **sglang_environment("cpu", 1)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_test.cpu_engine", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    checks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0, done.stderr[-3000:]
    assert [check["name"] for check in checks] == [
        "it starts", "first answers", "answers", "memory that it held", "memory that it reports after release",
        "weights are sent", "answers with weights that were sent", "the same answers",
    ]  # fmt: skip
    assert all(check["ok"] for check in checks), checks
    assert checks[-1]["figures"] == {"different": 0, "largest": pytest.approx(0.0, abs=1e-4)}


def answer(ids: list[int], log_probs: list[float]) -> Generation:
    return Generation("one", ids, log_probs, "length", 1)


def test_answers_are_compared_up_to_where_they_part() -> None:
    first = [answer([1, 2, 3], [-1.0, -2.0, -3.0])]
    assert _same(first, [answer([1, 2, 4], [-1.0, -2.01, -9.0])]).ok
    check = _same(first, [answer([1, 2, 3], [-1.0, -2.5, -3.0])])
    assert check.ok is False and check.figures == {"different": 0, "largest": 0.5}
    assert not _same(first, [answer([7, 2, 3], [-1.0, -2.0, -3.0])]).ok  # nothing could be compared


def test_memory_that_did_not_come_free_is_told() -> None:
    freed, stays = _freed(40 * GIB, before=78 * GIB, started=34 * GIB, released=74 * GIB)
    assert freed.ok and stays.found == "4.00 GiB: context, graphs, workspaces"
    # A memory saver that was not loaded: the engine reports that it released its memory, and none is free.
    freed, _ = _freed(40 * GIB, before=78 * GIB, started=34 * GIB, released=34 * GIB)
    assert freed.ok is False and "0.00 GiB more than before; the engine released 40.00 GiB" in freed.found
