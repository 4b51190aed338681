"""Steps in processes of their own: a failing step ends no other, and its findings are kept; the record of a test and its page."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.gpu_test.runner import (
    FAILED,
    IMPOSSIBLE,
    PASSED,
    Check,
    Record,
    Result,
    facts_of,
    failure,
    file_of,
    merged,
    read_checks,
    run_step,
    write,
)
from megarl.gpu_test.steps import Step
from tests.cluster.processes import alive_after
from tests.gpu_test.test_steps import TWO


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
    result = run_step(made_up("hangs"), tmp_path, 10.0)
    assert result.outcome == FAILED
    assert (
        result.reason == "it was still running after 10 s and was killed; the last that it did was: a child"
    )
    (check,) = result.checks
    assert not alive_after(
        [check.figures["pid"]], 30
    )  # it was killed, which takes a moment on a busy machine


def test_a_line_that_was_not_finished_is_no_check(tmp_path: Path) -> None:
    file = tmp_path / "checks.jsonl"
    file.write_text('{"name": "whole", "ok": true, "found": "", "figures": {}}\n{"name": "cut')
    assert [check.name for check in read_checks(file)] == ["whole"]
    assert list(read_checks(tmp_path / "none")) == []


def test_what_a_step_that_ended_early_did_not_check_is_no_success() -> None:
    assert failure(0, [Check("figure", None)], 1.0) is None
    assert failure(0, [], 1.0) == "it checked nothing"
    assert failure(3, [Check("one", True)], 1.0) == "its process ended with exit code 3"


ONE = Result("sync", "a sync", PASSED, "", 3.0, [Check("same bytes", True, "1 | 2", {"gb_per_s": 200.0})])
TWO_RESULTS = (
    Result(
        "engine",
        "an engine",
        FAILED,
        "wrong: memory",
        61.4,
        [Check("memory", False, "3 GiB stay")],
        "bad\n```",
    ),
    Result("nccl", "pairs", IMPOSSIBLE, "needs 2 GPUs, here is 1", 0.0),
)


def test_a_step_that_is_run_alone_joins_the_record_of_the_day(tmp_path: Path) -> None:
    facts = facts_of(TWO)
    file = file_of(tmp_path / "results", "2026-11-25", facts)
    assert file.name == "2026-11-25_2x_NVIDIA_H100_80GB_HBM3.json"
    write(file, merged(file, Record("2026-11-25", facts, (ONE,))), ["engine", "sync", "nccl"])
    again = Result("sync", "a sync", FAILED, "wrong: same bytes", 4.0)
    record = merged(file, Record("2026-11-25", facts, (*TWO_RESULTS, again)))
    assert {result.name: result.outcome for result in record.results} == {
        "engine": FAILED, "nccl": IMPOSSIBLE, "sync": FAILED,
    }  # fmt: skip
    kept = merged(file, Record("2026-11-25", facts, TWO_RESULTS))
    assert kept.results[0] == ONE
    write(file, kept, ["engine", "sync", "nccl"])
    assert [told["name"] for told in json.loads(file.read_text())["results"]] == ["engine", "sync", "nccl"]
    other = merged(file, Record("2026-11-25", {**facts, "cuda": "12.8"}, TWO_RESULTS))
    assert other.results == TWO_RESULTS  # other versions: another record


def test_the_record_names_the_commit_and_each_changed_file(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    files = ["megarl/one.py", "recipes/two.yaml"]
    for file in files:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    for file in files:
        (tmp_path / file).write_text("after")
    told = facts_of(replace(TWO, checkout=tmp_path))["megarl"]
    assert told["commit"] == git("rev-parse", "HEAD").strip() and told["changed_files"] == files


def test_without_git_the_record_is_written_and_says_that_its_commit_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = facts_of(replace(TWO, checkout=tmp_path))
    _, page = write(tmp_path / "r.json", Record("2026-11-25", facts, (ONE,)), ["sync"])
    assert "(commit not known)" in page.read_text()


def test_the_page_says_what_a_reader_must_know(tmp_path: Path) -> None:
    facts = facts_of(TWO)
    file, page = write(
        tmp_path / "r.json", Record("2026-11-25", facts, (*TWO_RESULTS, ONE)), ["engine", "sync"]
    )
    text = page.read_text()
    for part in (
        "NVIDIA H100 80GB HBM3 (80 GiB, driver 580.95.05)", "CUDA 13.0", "sglang 0.5.21",
        "| engine | **failed** | 61 | an engine |", "| nccl | could not run |  | pairs |",
        "| memory | **wrong** | 3 GiB stay |", r"| same bytes | ok | 1 \| 2 |", "needs 2 GPUs, here is 1",
    ):  # fmt: skip
        assert part in text
    assert text.count("```") == 2  # what a step printed cannot end its own block
    figures = json.loads(file.read_text())["results"][1]["checks"][0]["figures"]
    assert figures == {"gb_per_s": 200.0}
