"""The record of a test: what is kept of an earlier one, and its page."""

import json
from pathlib import Path

from megarl.gpu_test.record import Record, facts_of, file_of, merged, write
from megarl.gpu_test.runner import FAILED, IMPOSSIBLE, PASSED, Check, Result
from tests.gpu_test.test_steps import TWO

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
