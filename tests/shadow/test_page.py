"""The HTML page of a dry run: what it shows of each rank, and which commands make it."""

import json
import re
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.shadow.comparison import Comparison
from megarl.shadow.page import page
from tests.shadow.conftest import RECIPE

MIB = 1 << 20


ENGINE = {
    "role": "rollout", "rank": 0, "world_size": 2, "model": "LlamaForCausalLM", "num_operations": 7, "kv_tokens": 900,
    "seconds": 3.0, "num_parameters": 12, "problems": ["weight_scale_inv has no value"],
}  # fmt: skip


def report(role: str = "actor", phase: str = "update") -> dict:
    largest = [[["build", "aten.empty", "megarl.megatron.build:7 make"], 900 * MIB],
               [[phase, "aten.mm", "megarl.megatron.step:9 <lambda>"], 300 * MIB]]  # fmt: skip
    return {
        "role": role,
        "phases": {phase: {"peak": 300 * MIB, "left": 0, "largest": largest}},
        "released": 32 * MIB,
        "kept_by": [[["evaluate", "aten.empty", "te.gemm:62 workspace"], 32 * MIB]],
        "assumed": {"a float32 is 1, at megarl.step:3": 4},
    }


def test_it_shows_each_ranks_peak_by_owner_and_by_line() -> None:
    rows = [
        Comparison(f"actor {rank} (stage 0)", owner, phase, planned * MIB, 300 * MIB)
        for rank in (0, 4)
        for owner, phase, planned in (("actor_weights", "always", 300), ("actor_working", "update", 270))
    ]
    text = page("recipe:one", rows, [report(), report()], tolerance=5)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert len(data["charts"]) == 4
    owners, lines = data["charts"][2:]
    assert owners["title"].startswith("actor 4") and owners["rows"] == ["plan", "dry run"]
    assert [(part["label"], part["values"]) for part in owners["parts"]] == [
        ("actor_weights", [0.293, 0.293]), ("actor_working", [0.2637, 0.293]),
    ]  # fmt: skip
    assert lines["rows"] == ["megarl.megatron.build:7 make", "megarl.megatron.step:9 <lambda>"]
    assert [part["label"] for part in lines["parts"]] == ["build", "update"]
    assert lines["totals"] == [0.8789, 0.293]
    assert "the plan is too small" in text and "actor 4 (stage 0): actor_working in update, -10.0%" in text
    assert "step:9 &lt;lambda&gt;" in text and "<lambda>" not in text
    assert "assumed 4 times: a float32 is 1" in text and "te.gemm:62 workspace" in text
    held = page("recipe:one", rows, [report(), report()], tolerance=15)
    assert "the plan holds" in held and "the plan is too small" not in held


def test_a_page_of_no_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "memory", str(RECIPE), "--html", str(tmp_path / "page.html")]) == 2
    assert "is of shadow ranks: give --dry-run, too" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_reference_has_an_evaluation_and_an_engine_its_own_facts() -> None:
    rows = [
        Comparison("ref 0 (stage 0)", "ref_weights", "always", 300 * MIB, 300 * MIB),
        Comparison("ref 0 (stage 0)", "ref_evaluating", "evaluate", 290 * MIB, 300 * MIB),
        Comparison("rollout 0", "rollout_weights", "always", 200 * MIB, 200 * MIB),
    ]
    text = page("recipe:one", rows, [report("ref", "evaluate"), ENGINE], tolerance=5)
    charts = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])["charts"]
    assert [chart["title"] for chart in charts] == [
        "ref 0 (stage 0): the peak by owner", "ref 0 (stage 0): the peak by line, in phase evaluate",
        "rollout 0: the peak by owner",
    ]  # fmt: skip
    assert [part["label"] for part in charts[0]["parts"]] == ["ref_weights", "ref_evaluating"]
    assert (
        "weights do not fit the engines" in text
        and "LlamaForCausalLM" in text
        and "weight_scale_inv has no value" in text
    )
