"""Batches that are collected while the models learn: for which step, when, and after failures; no process is started."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from megarl.cluster import Watch
from megarl.config import FilterGroupsConfig, TrainConfig, load_config, resolve
from megarl.data.files import write_parquet
from megarl.trainer.run.run import Run
from megarl.trainer.schedule import collectors as module
from megarl.trainer.schedule.collectors import OneStepOff
from megarl.trainer.schedule.modes import make_batches
from megarl.trainer.stages.groups import Groups
from megarl.trainer.stages.nonfinite import NotFinite
from tests.trainer.trajectories import scored

ACTOR = "actor_rollout_ref.actor"


def configured(*overrides: str) -> TrainConfig:
    return resolve(load_config(TrainConfig, None, [
        "data.train_files=a.parquet", "data.train_batch_size=2", "data.max_prompt_length=8", "data.max_response_length=8",
        "actor_rollout_ref.model.path=m", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=16",
        f"{ACTOR}.optim.lr=1e-3", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2",
        "trainer.mode=one_step_off", *overrides,
    ]))  # fmt: skip


class Memory:
    @contextmanager
    def phase(self, name: str):
        yield

    def view(self, run: Any, groups: Any, recover: Any, serve: Any) -> "Memory":
        return self


@dataclass(frozen=True)
class FakeRoles:
    engines: str = "engines"
    reward_model: Any = None
    memory: Memory = field(default_factory=Memory)
    restarts: Any = field(default_factory=lambda: SimpleNamespace(version=None))


@dataclass(frozen=True)
class FakeRewards:
    run: Any = None


def of_version(step: int, version: int) -> Groups:
    """A step's groups: two prompts, named after the step, whose responses have this weight version."""
    groups = Groups(FilterGroupsConfig(), 2)
    names = groups.distinct(pa.table({"uid": [f"a{step}", f"b{step}"]}))["uid"].to_pylist()
    part = scored({names[0]: [1.0, 0.0], names[1]: [0.25, 0.1 * step]})
    column = part.table.schema.get_field_index("weight_version")
    versions = pa.array([version] * 4, pa.int64())
    groups.add(replace(part, table=part.table.set_column(column, "weight_version", versions)))
    return groups


@dataclass
class Play:
    """A run without ranks: `said` lists the main thread's syncs and updates in order; `synced` is the engines' weight version."""

    monkeypatch: pytest.MonkeyPatch
    folder: Path
    config: TrainConfig = field(default_factory=configured)
    said: list[str] = field(default_factory=list)
    answered: list[tuple[int, int]] = field(default_factory=list)  # (step, version)
    synced: int = 0
    spoilt: int = 0  # the step whose collection yields a number that is not finite
    release: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.release.set()
        self.monkeypatch.setattr(module, "sync_weights", self.sync)
        run = Run(self.folder, Console(), watch=Watch())
        run.groups = ["actor", "engines"]
        self.monkeypatch.setattr(Run, "wait", lambda run, refs: run.interrupt())
        self.batches = make_batches(
            self.config, run, FakeRoles(), FakeRewards(run), 4, iter(()), self.collect, self.answer
        )
        self.run = run

    def sync(self, run: Run, roles: Any, version: int) -> dict[str, float]:
        assert threading.current_thread() is threading.main_thread()
        self.said.append(f"sync {version}")
        self.synced = version
        return {"sync/bytes_total": float(version)}

    def collect(self, run: Run, roles: Any, rewards: Any, step: int) -> tuple[Groups, dict[str, float]]:
        synced = self.sync(run, roles, step)
        groups, metrics = self.answer(run, roles, rewards, step)
        return groups, synced | metrics

    def answer(self, run: Run, roles: Any, rewards: Any, step: int) -> tuple[Groups, dict[str, float]]:
        assert rewards.run is run
        self.answered.append((step, self.synced))
        while not self.release.wait(0.01):
            run.wait([])
        groups = of_version(step, self.synced)
        if step == self.spoilt:
            raise NotFinite("a score is nan", groups.batch())
        return groups, {"reward/of": 0.1 * step}

    def step(self, step: int) -> Any:
        batch = self.batches.of(step)
        with self.batches.during_learning(step):
            self.said.append(f"learn {step}")
        return batch


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    return Play(monkeypatch, tmp_path)


def test_which_weights_answer_which_step(play: Play) -> None:
    found = [play.step(step) for step in (1, 2, 3, 4)]
    assert play.said == ["sync 1", "sync 1", "learn 1", "sync 2", "learn 2", "sync 3", "learn 3", "learn 4"]
    assert play.answered == [(1, 1), (2, 1), (3, 2), (4, 3)]
    assert [one.prompt_uids[0] for one in found] == ["a1", "a2", "a3", "a4"]
    assert [one.metrics["staleness/max"] for one in found] == [0.0, 1.0, 1.0, 1.0]
    assert [one.metrics["sync/bytes_total"] for one in found] == [1.0, 1.0, 2.0, 3.0]
    assert play.batches.ahead is None


def test_in_sync_mode_each_step_has_the_newest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play = Play(monkeypatch, tmp_path, configured("trainer.mode=sync"))
    found = [play.step(step) for step in (1, 2)]
    assert play.said == ["sync 1", "learn 1", "sync 2", "learn 2"] and play.batches.folders == {}
    assert play.answered == [(1, 1), (2, 2)]
    assert not any(name.startswith("staleness") for one in found for name in one.metrics)


def test_collecting_and_learning_run_at_once_and_the_wait_is_measured(play: Play) -> None:
    play.batches.of(1)
    play.release.clear()
    with play.batches.during_learning(1):
        time.sleep(0.6)  # the models learn
        threading.Timer(1.0, play.release.set).start()
    seconds = play.run.seconds
    assert 0.4 < seconds["ahead_wait"] < seconds["ahead"] - 0.2
    assert seconds["ahead_overlap"] == pytest.approx(seconds["ahead"] - seconds["ahead_wait"])
    assert seconds["ahead_overlap"] > 0.2


def same(one: Any, other: Any) -> bool:
    names = [name for name in one.table.column_names if name != "environment_score"]  # which is NaN
    return (
        one.table.select(names).equals(other.table.select(names))
        and one.prompt_uids == other.prompt_uids
        and one.scores.dtype == other.scores.dtype
        and np.array_equal(one.scores, other.scores)
        and (one.step, one.metrics, one.problem) == (other.step, other.metrics, other.problem)
    )


def test_a_saved_batch_is_the_one_that_is_continued_with(play: Play, tmp_path: Path) -> None:
    play.step(1)
    (tmp_path / "saved").mkdir()
    play.batches.save(tmp_path / "saved")
    other = replace(play.batches, ahead=None)
    other.load(tmp_path / "saved")
    assert same(other.ahead, play.batches.ahead)
    assert play.batches.ahead.metrics == {"sync/bytes_total": 1.0, "reward/of": 0.2}
    files = []
    for number, one in enumerate((other, play.batches)):
        files.append(write_parquet(one.ahead.table, tmp_path / f"{number}.parquet").read_bytes())
    assert files[0] == files[1]  # in the format of a step's trajectories
    assert same(other.of(2), play.batches.of(2))


def test_after_the_last_step_there_is_nothing(play: Play, tmp_path: Path) -> None:
    """If the run is resumed with more steps, it collects the next batch when the next step begins."""
    play.step(4)
    play.batches.save(tmp_path)
    other = OneStepOff(**{**vars(play.batches), "ahead": "nothing was loaded", "last_step": 6})
    other.load(tmp_path)
    assert other.ahead is None
    assert other.of(5).metrics["staleness/max"] == 0.0


def test_a_batch_of_other_sizes_is_refused(play: Play, tmp_path: Path) -> None:
    play.step(1)
    play.batches.save(tmp_path)
    other = replace(play.batches, config=configured("actor_rollout_ref.rollout.n=4"))
    with pytest.raises(ValueError, match=r"batch\.arrow has 4 trajectories; .* is 2 x 4"):
        other.load(tmp_path)


def test_a_number_that_is_not_finite_belongs_to_the_step_of_its_batch(play: Play, tmp_path: Path) -> None:
    """A NaN in batch 2, found while step 1 learns, is kept in the checkpoint; step 2 is skipped or stops the run."""
    play.spoilt = 2
    play.step(1)
    play.batches.save(tmp_path)
    other = replace(play.batches, ahead=None)
    other.load(tmp_path)
    for one in (play.batches, other):
        with pytest.raises(NotFinite, match="a score is nan") as caught:
            one.of(2)
        assert caught.value.batch.num_rows == 4
    assert (
        play.batches.of(3).metrics["staleness/max"] == 0.0
    )  # no batch was collected while step 2 was skipped


@pytest.mark.parametrize("skips", [False, True])
def test_a_step_that_is_skipped_leaves_the_next_its_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, skips: bool
) -> None:
    play = Play(monkeypatch, tmp_path, configured(f"trainer.on_nonfinite={'skip' if skips else 'stop'}"))
    batch = play.batches.of(1)
    play.release.clear()
    if skips:
        threading.Timer(0.2, play.release.set).start()
    with pytest.raises(NotFinite, match="a loss"), play.batches.during_learning(1):
        raise NotFinite("a loss", batch.table)
    assert (play.batches.ahead is not None) == skips
    assert not any(thread.name == "collect-ahead" for thread in threading.enumerate())


def test_a_failure_of_one_view_ends_the_other(play: Play) -> None:
    play.batches.of(1)
    play.release.clear()
    begun = time.monotonic()
    with pytest.raises(SystemExit), play.batches.during_learning(1):
        raise SystemExit(75)  # as after a second SIGTERM
    assert not any(thread.name == "collect-ahead" for thread in threading.enumerate())
    play.batches.answer = None  # not callable, so that collecting raises an error
    with pytest.raises(TypeError, match="not callable"), play.batches.during_learning(2) as (run, _):
        while True:
            run.wait([])
    assert time.monotonic() - begun < 30
