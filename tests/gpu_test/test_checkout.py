"""Figures compared with published ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.gpu_test import checkout
from megarl.gpu_test.checkout import ARTICLE, ENGINE, RL_16K, comparison_text, figures, marked
from megarl.gpu_test.runner import LOG
from megarl.gpu_test.steps import CHECKOUT
from tests.gpu_test.test_steps import TWO, VERSIONS

REPORT = {
    "what": "PPO with a critic",
    "device": "NVIDIA H100 80GB HBM3",
    "phases": {
        "sync": {"seconds": 0.5, "tokens_per_s": None, "mfu": None},
        "generate": {"seconds": 4.0, "tokens_per_s": 8192.0, "mfu": 0.01},
        "step": {"seconds": 6.65, "tokens_per_s": 3404.0, "mfu": None},
    },
    "peak_mib": 61234.0,
    "peak_of": "of the GPU",
}


def test_a_step_is_compared_with_the_articles() -> None:
    checks = list(figures("gpu_single.py", REPORT, ARTICLE, "step"))
    assert all(check.ok in (True, None) for check in checks)
    by_name = {check.name: check for check in checks}
    assert by_name["generate"].found == "4.000 s, 8,192 tokens/s, MFU 1.0%"
    assert by_name["peak memory"].figures == {"mib": 61234.0}
    text = by_name["compared with PPO of Qwen2.5-0.5B, H800"].found
    assert "3,404 tokens/s, 2.00x of 1,702; 6.65 s a step, 0.50x of 13.3" in text
    assert "354 a trajectory" in text and "nothing was generated" not in text


def test_a_step_without_an_engine_says_that_it_is_none() -> None:
    phases = {name: found for name, found in REPORT["phases"].items() if name != "generate"}
    *_, last = figures("gpu_single.py", {**REPORT, "phases": phases}, ARTICLE, "step")
    assert "nothing was generated here" in last.found


def test_mfu_is_compared_with_mfu() -> None:
    text = comparison_text(RL_16K, 23_800.0, 2.75, 0.222)
    assert "2.00x of 11,900; 2.75 s a step; MFU 22.2% (published: 11.1%)" in text
    # The caveat's arithmetic: 13.3 s at 1,702 tokens/s are few tokens.
    tokens = ARTICLE.tokens_per_s * ARTICLE.seconds
    assert (round(tokens), round(tokens / 64)) == (22637, 354)


def test_a_machine_that_only_trains_starts_no_engine_in_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = replace(TWO, versions=VERSIONS | {"torch": "2.11.0"})
    monkeypatch.setattr(checkout, "_pytest", lambda folder, what: iter(what))
    monkeypatch.setattr(checkout, "machine_here", lambda: TWO)
    everything = set(checkout.run_tests(tmp_path))
    monkeypatch.setattr(checkout, "machine_here", lambda: older)
    assert everything - set(checkout.run_tests(tmp_path)) == {ENGINE}
    assert everything == set(marked(CHECKOUT)) - {checkout.PLAN}


def test_a_benchmark_that_fails_comes_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOG).write_text("error: the card is on fire\n")
    monkeypatch.setattr(checkout.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1}))
    (check,) = checkout.measure(tmp_path / "single.json", [], ARTICLE, "step")
    assert check.ok is False and check.found == "exit code 1\nerror: the card is on fire"
