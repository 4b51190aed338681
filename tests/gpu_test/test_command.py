"""`megarl doctor --gpu`: its output without a GPU, and that a failing step leaves the others running."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.gpu_test import command
from megarl.gpu_test.runner import FAILED, IMPOSSIBLE, PASSED, Result
from megarl.gpu_test.steps import STEPS, Step
from tests.gpu_test.test_steps import CARD, TWO


def test_without_a_gpu_it_says_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "machine_here", lambda: replace(TWO, gpus=()))
    assert main(["doctor", "--gpu", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "nothing can run here: no GPU: nvidia-smi lists none" in printed
    for step in STEPS:
        assert step.what in printed
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_the_options_is_said(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--gpu", "--steps", "kernel"]) == 2
    assert "did you mean kernels" in capsys.readouterr().err
    assert main(["doctor", "recipe:quickstart_ppo", "--gpu"]) == 2
    assert "takes no recipe" in capsys.readouterr().err


def test_a_folder_that_no_record_can_be_written_into_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "out").touch()
    monkeypatch.setattr(
        command, "chosen", lambda names: [Step("passes", "made up", "tests.gpu_test.made_up:passes")]
    )
    monkeypatch.setattr(command, "machine_here", lambda: TWO)
    assert main(["doctor", "--gpu", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert f"error: {tmp_path}/out: File exists" in printed.err and "passes: passed" not in printed.out


def test_a_step_that_fails_leaves_the_others_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    steps = [
        *(Step(name, "made up", f"tests.gpu_test.made_up:{name}") for name in ("raises", "passes")),
        Step("far", "made up", "tests.gpu_test.made_up:passes", gpus=2),
    ]
    monkeypatch.setattr(command, "chosen", lambda names: steps)
    monkeypatch.setattr(command, "machine_here", lambda: replace(TWO, gpus=(CARD,)))
    assert main(["doctor", "--gpu", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "raises: failed" in printed and "| RuntimeError: the card is on fire" in printed
    assert "passes: passed" in printed and "far: cannot run: needs 2 GPUs" in printed
    (file,) = (tmp_path / "out").glob("*.json")
    found = {told["name"]: told["outcome"] for told in json.loads(file.read_text())["results"]}
    assert found == {"raises": FAILED, "passes": PASSED, "far": IMPOSSIBLE}
    assert file.with_suffix(".md").exists()


def test_a_step_that_was_asked_for_and_cannot_run_is_no_success() -> None:
    results = [Result("one", "", PASSED, "", 0.0), Result("two", "", IMPOSSIBLE, "no room", 0.0)]
    assert command.exit_code(results, by_name=False) == 0
    assert command.exit_code(results, by_name=True) == 1
    assert command.exit_code([Result("one", "", FAILED, "", 0.0)], by_name=False) == 1
