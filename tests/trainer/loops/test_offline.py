"""The steps and the output of `megarl replay`; real replays are in test_debugging_runs.py."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from megarl.data.trajectories import GIVEN
from megarl.trainer.loops import offline
from megarl.trainer.loops.driver import LearningState, Metrics
from megarl.trainer.loops.offline import print_comparison
from megarl.trainer.run.run import Run
from megarl.trainer.stages.nonfinite import NotFinite
from tests.trainer.healthy import configuration, monitor
from tests.trainer.trajectories import scored


def printed(logged: dict[str, float] | None, found: dict[str, float]) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=100)
    equal = print_comparison(console, 7, logged, found)
    return equal, console.file.getvalue()


def test_numbers_are_compared_bit_for_bit() -> None:
    equal, text = printed({"a": 0.1 + 0.2, "b": 1.0}, {"a": 0.3, "b": 1.0})
    assert not equal and text.count("differs") == 1
    assert "step 7: 1 of 2 numbers are not those of the run" in text
    equal, text = printed({"a": 0.3, "b": float("nan"), "c": 2.0}, {"a": 0.3, "b": float("nan")})
    assert equal and "step 7: all 2 numbers are equal bit for bit" in text


def test_a_step_of_which_nothing_was_logged_differs_in_nothing() -> None:
    equal, text = printed(None, {"a": 0.25, "b": 1.0})
    assert not equal and "differs" not in text and "numbers are not those" not in text
    assert "step 7: nothing to compare: metrics.jsonl has no line of this step" in text
    assert "0.25" in text and "logged" not in text.splitlines()[0]


def replayed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, batch: pa.Table | None = None
) -> tuple[dict[int, Metrics], LearningState, str]:
    """Replay steps 2 and 3, where the loss of step 2 is not finite; return the replay's metrics, state and output.

    batch: the trajectories of each step; None: two of one prompt.
    """
    config, own = configuration(*overrides), monitor(*overrides)
    state = LearningState(own.controls, own, None, SimpleNamespace(resume=lambda: 1))
    monkeypatch.setattr(LearningState, "start", lambda *arguments: state)
    read = scored({"a": [1.0, 0.0]}).table if batch is None else batch
    monkeypatch.setattr(offline, "read_step", lambda *arguments: read)

    def learn(config: Any, run: Run, roles: Any, batch: pa.Table, controls: Any, step: int, ptx: Any) -> Any:
        if step == 2:
            controls.clip_low = 0.01
            raise NotFinite("the loss is nan", batch)
        return batch, {"actor/pg_loss": 0.25, "perf/tokens": 7.0}

    monkeypatch.setattr(offline, "learn", learn)
    console = Console(file=io.StringIO(), width=200)
    files = {step: folder / f"{step}.parquet" for step in (2, 3)}
    found = offline._replay_steps(config, Run(folder, console), SimpleNamespace(), files, 3, None)
    return found, state, console.file.getvalue()


def test_a_replay_skips_steps_as_the_run_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a skipped step the controls are as before it; no file is written, and times and speeds are not compared."""
    found, state, text = replayed(monkeypatch, tmp_path, "trainer.on_nonfinite=skip")
    assert found == {2: {"training/skipped": 1.0}, 3: {"actor/pg_loss": 0.25, "training/skipped": 0.0}}
    assert state.controls.clip_low == 0.2 and not list(tmp_path.iterdir())
    assert "left out (trainer.on_nonfinite=skip): step 2: the loss is nan" in text


def test_a_replay_looks_for_repetition_in_the_policys_responses_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a run does: given responses are repeated where there are fewer than rollout.n, and nothing is to be changed for that."""
    policys = scored({"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [0.0, 0.0]}, lengths=[1, 2, 4, 4, 4, 4]).table
    given = pa.array([False, False, True, True, True, True])
    acts = (
        "trainer.on_nonfinite=skip",
        "health.auto_action=true",
        "health.patience=1",
        "health.duplicate_responses=0.2",
        "health.clip_ratio=0.1",
    )
    for batch, low in ((policys, 0.1), (policys.append_column(GIVEN, given), 0.2)):
        _, state, _ = replayed(monkeypatch, tmp_path, *acts, batch=batch)
        assert state.controls.clip_low == low


def test_a_replay_stops_as_the_run_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="step 2: the loss is nan"):
        replayed(monkeypatch, tmp_path)
    assert not list(tmp_path.iterdir())
