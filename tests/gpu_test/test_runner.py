"""Steps in processes of their own: what ends one ends no other, and what it had found is kept."""

from pathlib import Path

import psutil
import pytest

from megarl.gpu_test.runner import FAILED, PASSED, Check, failure, read_checks, run_step
from megarl.gpu_test.steps import Step


def made_up(name: str) -> Step:
    return Step(name, "made up", f"tests.gpu_test.made_up:{name}")


def test_a_step_that_passes_tells_what_it_found(tmp_path: Path) -> None:
    result = run_step(made_up("passes"), tmp_path / "step", 60.0)
    assert (result.outcome, result.reason, result.log) == (PASSED, "", "")
    assert result.checks == [
        Check("its folder", True, figures={"tokens_per_s": 12.5}),
        Check("a note", None, "seen"),
    ]


@pytest.mark.parametrize(
    ("name", "reason", "logged"),
    [
        ("is_wrong", "wrong: two", ""),
        ("raises", "its process ended with exit code 1", "the card is on fire"),
        ("dies", "its process was killed by SIGSEGV", ""),
        ("says_nothing", "it checked nothing", ""),
    ],
)
def test_a_step_that_fails_says_why_and_keeps_what_it_had(
    tmp_path: Path, name: str, reason: str, logged: str
) -> None:
    result = run_step(made_up(name), tmp_path, 60.0)
    assert (result.outcome, result.reason) == (FAILED, reason)
    assert logged in result.log
    assert [check.name for check in result.checks] == {
        "is_wrong": ["one", "two"], "raises": ["before"], "dies": ["before"], "says_nothing": [],
    }[name]  # fmt: skip


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    result = run_step(made_up("hangs"), tmp_path, 5.0)
    assert result.outcome == FAILED
    assert result.reason == "it was still running after 5 s and was killed; the last that it did was: a child"
    (check,) = result.checks
    pid = check.figures["pid"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_line_that_was_not_finished_is_no_check(tmp_path: Path) -> None:
    file = tmp_path / "checks.jsonl"
    file.write_text('{"name": "whole", "ok": true, "found": "", "figures": {}}\n{"name": "cut')
    assert [check.name for check in read_checks(file)] == ["whole"]
    assert list(read_checks(tmp_path / "none")) == []


def test_what_a_step_that_ended_early_did_not_check_is_no_success() -> None:
    assert failure(0, [Check("figure", None)], 1.0) is None
    assert failure(0, [], 1.0) == "it checked nothing"
    assert failure(3, [Check("one", True)], 1.0) == "its process ended with exit code 3"
