"""When a run saves a checkpoint, and from which one it resumes; the state of a rank is a file here."""

import errno
import json
import shutil
import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.checkpoints import CheckpointStore, seal_file, steps_in
from megarl.cluster import WaitTimeout, WorkerFailed
from megarl.cluster.ranks import RankError
from megarl.config import SFTConfig, load_config, resolve, save_config
from megarl.config.schema.run import SavingConfig
from megarl.trainer.run.checkpoints import (
    REQUEUE,
    Best,
    Checkpoints,
    find_resumed,
    open_store,
)
from megarl.trainer.run.preemption import noting_signals
from megarl.trainer.run.run import Run

RECIPE = [
    "data.train_files=a.parquet", "data.max_length=8", "data.train_batch_size=2", "model.path=m", "optim.lr=1",
    "max_token_len_per_gpu=8",
]  # fmt: skip


class Counter:
    """A part of the controller whose state belongs to the checkpoint."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Ranks:
    """A worker group of two ranks, each of which writes a file, or raises `fails` if it is set."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.loaded: list[tuple[str, ...]] = []
        self.saving: tuple[str, ...] | None = None
        self.slow = False  # whether one rank is still writing

    def call(self, method: str, *arguments: Any, background: bool = False) -> list[Any]:
        if method == "load_checkpoint":
            self.loaded.append(arguments)
            return [None, None]
        if method == "begin_save":
            self.saving, self.slow = arguments, background
            return [None, None]
        if method == "is_saved":
            return [True, not self.slow]
        assert method == "finish_save" and self.saving is not None
        (folder, role), self.saving = self.saving, None
        if self.fails is not None:
            raise self.fails
        results = []
        for rank in (0, 1):
            path = Path(folder, f"rank-{rank}")
            path.write_text(f"{role} {rank}")
            results.append({path.name: seal_file(path)})
        return results


class QuietRun(Run):
    def __init__(self, folder: Path, store: CheckpointStore) -> None:
        super().__init__(folder, console=None, store=store)
        self.said: list[str] = []
        self.seconds["step"] = 1.0

    def say(self, text: str) -> None:
        self.said.append(text)

    def wait(self, refs: list[Any]) -> list[Any]:
        return refs

    @contextmanager
    def status(self, what: str):
        self.say(what)
        yield


def start(folder: Path, resumed: bool = False, begun: float | None = None, **keys: Any) -> Checkpoints:
    trainer = SavingConfig(**keys)
    folder.mkdir(exist_ok=True)
    config = resolve(load_config(SFTConfig, None, [*RECIPE, f"trainer.default_local_dir={folder}"]))
    store = open_store(trainer, folder / "checkpoints", print)
    run = QuietRun(folder, store)
    run.started = run.started if begun is None else begun
    if resumed:
        saving = {key.name: getattr(trainer, key.name) for key in fields(SavingConfig)}
        changed = replace(config, trainer=replace(config.trainer, **saving))
        run.resumed = find_resumed(changed, store, run.say)
    save_config(config, folder / "config.yaml")

    def export(target: Path) -> None:
        target.mkdir()
        (target / "model").write_text("exported")

    return Checkpoints(
        run, trainer, {"actor": Ranks()}, {"counter": Counter()}, lambda phase: nullcontext(), export
    )


def play(
    checkpoints: Checkpoints, first: int, last: int, metrics: dict[int, dict[str, float]] | None = None
) -> None:
    for step in range(first, last + 1):
        checkpoints.parts["counter"].value = step
        checkpoints.after(step, (metrics or {}).get(step, {}), last=step == last)
    checkpoints.run.store.close()


def test_every_so_many_steps_and_goes_on_from_the_newest(tmp_path: Path) -> None:
    play(start(tmp_path, save_freq=2, save_hf=True), 1, 5)
    root = tmp_path / "checkpoints"
    assert steps_in(root) == [2, 4]
    assert (root / "step-4" / "actor" / "rank-1").read_text() == "actor 1"
    assert (root / "step-4" / "hf" / "model").is_file() and (root / "step-4" / "config.yaml").is_file()
    again = start(tmp_path, resumed=True, save_freq=2)
    assert again.resume() == 4 and again.parts["counter"].value == 4
    assert again.groups["actor"].loaded == [(str(root / "step-4" / "actor"), "actor")]
    again.run.store.close()


def test_a_new_run_begins_at_step_0(tmp_path: Path) -> None:
    checkpoints = start(tmp_path, resumed=True)
    assert checkpoints.resume() == 0 and checkpoints.run.resumed_step == -1
    checkpoints.run.store.close()


def test_files_are_written_while_steps_go_on(tmp_path: Path) -> None:
    """A checkpoint has the state after the step at which its save began, although it is committed later."""
    checkpoints = start(tmp_path, save_freq=2, async_save=True)
    ranks, root = checkpoints.groups["actor"], tmp_path / "checkpoints"
    checkpoints.parts["counter"].value = 2
    checkpoints.after(2, {}, last=False)
    checkpoints.parts["counter"].value = 3
    checkpoints.after(3, {}, last=False)
    assert steps_in(root) == [] and ranks.saving is not None
    ranks.slow = False
    checkpoints.after(3, {}, last=False)
    assert steps_in(root) == [2]
    assert json.loads((root / "step-2" / "run.json").read_text())["counter"] == {"value": 2}
    checkpoints.after(4, {}, last=False)
    checkpoints.after(6, {}, last=False)  # waits for the save of step 4
    assert steps_in(root) == [2, 4]
    checkpoints.after(7, {}, last=True)
    assert steps_in(root) == [2, 4, 6]
    checkpoints.run.store.close()


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path, capsys) -> None:
    play(start(tmp_path, save_freq=2), 1, 4)
    damaged = tmp_path / "checkpoints" / "step-4" / "actor" / "rank-0"
    damaged.write_text("actor 9")
    again = start(tmp_path, resumed=True, save_freq=2)
    assert again.resume() == 2
    assert "actor/rank-0" in capsys.readouterr().out
    # The damaged checkpoint is moved aside for inspection, so that this run can save its own step 4.
    assert (tmp_path / "checkpoints-1" / "step-4" / "actor" / "rank-0").read_text() == "actor 9"
    play(again, 3, 4)
    assert steps_in(tmp_path / "checkpoints") == [2, 4]


def test_a_new_course_leaves_the_old_ones_checkpoints_aside(tmp_path: Path) -> None:
    play(start(tmp_path, save_freq=1), 1, 3)
    anew = start(tmp_path, resumed=True, save_freq=1, resume_mode="disable")
    assert anew.resume() == 0
    play(anew, 1, 1)
    earlier = tmp_path / "earlier_runs" / "1" / "checkpoints"
    assert steps_in(tmp_path / "checkpoints") == [1] and steps_in(earlier) == [1, 2, 3]
    path = str(earlier / "step-2")
    other = start(tmp_path / "other", resumed=True, resume_mode="path", resume_from_path=path)
    assert other.resume() == 2
    other.run.store.close()


def test_a_course_from_elsewhere_leaves_earlier_steps_aside_too(tmp_path: Path) -> None:
    """A restart must not resume from checkpoints that an earlier run left in the run folder."""
    play(start(tmp_path / "one", save_freq=3), 1, 3)
    play(start(tmp_path / "other", save_freq=1), 1, 2)
    path = str(tmp_path / "one" / "checkpoints" / "step-3")
    run = start(tmp_path / "other", resumed=True, resume_mode="path", resume_from_path=path)
    assert run.resume() == 3 and steps_in(tmp_path / "other" / "checkpoints") == []
    assert steps_in(tmp_path / "other" / "earlier_runs" / "1" / "checkpoints") == [1, 2]
    run.run.store.close()


def test_a_named_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    play(start(tmp_path, save_freq=1), 1, 1)
    folder = tmp_path / "checkpoints" / "step-1"
    (folder / "run.json").unlink()
    with pytest.raises(ValueError, match=r"resume_from_path=.*run\.json is missing"):
        start(tmp_path / "other", resumed=True, resume_mode="path", resume_from_path=str(folder))


def test_a_changed_configuration_is_said_or_refused(tmp_path: Path) -> None:
    play(start(tmp_path, save_freq=1), 1, 1)
    saved = tmp_path / "checkpoints" / "step-1" / "config.yaml"
    store = open_store(SavingConfig(), tmp_path / "checkpoints", print)
    said: list[str] = []
    changed = resolve(load_config(SFTConfig, None, [*RECIPE, "optim.lr=2", "max_token_len_per_gpu=16"]))
    assert find_resumed(changed, store, said.append).step == 1
    assert "  changed since: optim.lr: 1.0 -> 2.0" in said
    refused = resolve(load_config(SFTConfig, None, [*RECIPE, "data.seed=5"]))
    with pytest.raises(ValueError, match=r"cannot go on from .*step-1:\n  data\.seed was 1, is 5 now"):
        find_resumed(refused, store, said.append)
    assert saved.is_file()
    store.close()


def test_the_best_checkpoint_is_saved_and_kept(tmp_path: Path) -> None:
    scores = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}
    metrics = {step: {"val/score/mean": score} for step, score in scores.items()}
    play(start(tmp_path, max_ckpt_to_keep=1, best_metric="val/score/mean"), 1, 4, metrics)
    assert steps_in(tmp_path / "checkpoints") == [1, 2]  # the next save deletes the previous best
    play(start(tmp_path, resumed=True, save_freq=1, max_ckpt_to_keep=1, best_metric="val/score/mean"), 3, 6)
    assert steps_in(tmp_path / "checkpoints") == [2, 6]


def test_the_best_checkpoint_is_kept_also_by_a_run_that_was_killed_before_it_marked_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`commit` removes older checkpoints, which may take minutes, before the best one is marked."""
    keys = {"save_freq": 1, "max_ckpt_to_keep": 1, "best_metric": "val/score"}
    checkpoints = start(tmp_path, **keys)
    checkpoints.after(1, {"val/score": 0.1}, last=False)

    def killed(step: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.run.store, "mark_best", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.after(2, {"val/score": 0.9}, last=False)
    checkpoints.run.store.close()
    again = start(tmp_path, resumed=True, **keys)
    assert again.resume() == 2 and again.run.store.best == 2
    play(again, 3, 4, {3: {"val/score": 0.5}})
    assert steps_in(tmp_path / "checkpoints") == [2, 4]


def test_a_validation_after_its_checkpoint_can_be_the_best(tmp_path: Path) -> None:
    keys = {"save_freq": 1, "max_ckpt_to_keep": 1, "best_metric": "val/score"}
    checkpoints = start(tmp_path, **keys)
    checkpoints.after(1, {}, last=False)
    checkpoints.validated(1, {"val/score": 0.9})
    checkpoints.validated(2, {"val/score": 1.0})  # its checkpoint was not written
    checkpoints.after(2, {"val/score": 0.5}, last=True)
    assert checkpoints.best.value == 0.9 and checkpoints.run.store.best == 1
    assert steps_in(tmp_path / "checkpoints") == [1, 2]
    checkpoints.run.store.close()


def test_best() -> None:
    best = Best("val/loss", "min")
    assert best.is_beaten_by(3.0) and not best.is_beaten_by(None)
    best.value = 2.0
    assert [best.is_beaten_by(value) for value in (3.0, 2.0, float("nan"), 1.0)] == [
        False,
        False,
        False,
        True,
    ]
    assert not Best("val/loss", "max", 2.0).is_beaten_by(1.0)
    assert best.found({"val/loss": 3.0}) == 3.0 and best.found({"train/loss": 0.0}) is None
    with pytest.raises(ValueError, match=r"trainer\.best_metric='val/loss': validations have val/score"):
        best.found({"val/score": 1.0})
    other = Best("val/loss", "max", value=7.0)
    other.load_state_dict(best.state_dict())
    assert other.value == 7.0


@pytest.mark.parametrize("background", [False, True])
def test_the_best_checkpoint_is_one_that_was_written(tmp_path: Path, background: bool) -> None:
    """The disk is full at the step with the best value; the next step that is better than the last saved best is saved."""
    keys = {"best_metric": "val/score", "on_save_error": "continue", "async_save": background}
    checkpoints = start(tmp_path, **keys)
    ranks, root = checkpoints.groups["actor"], tmp_path / "checkpoints"
    checkpoints.after(1, {"val/score": 0.1}, last=False)
    checkpoints.finish()
    ranks.fails = OSError(28, "No space left on device", "x")
    checkpoints.after(2, {"val/score": 0.9}, last=False)
    if not background:
        assert checkpoints.best.value == 0.1
        ranks.fails = None
    checkpoints.after(3, {"val/score": 0.05}, last=False)
    assert "step 2: no checkpoint" in checkpoints.run.said[-1] and steps_in(root) == [1]
    ranks.fails = None
    checkpoints.after(4, {"val/score": 0.5}, last=True)
    assert steps_in(root) == [1, 4] and checkpoints.run.store.best == 4
    assert json.loads((root / "step-4" / "run.json").read_text())["best"]["value"] == 0.5
    checkpoints.run.store.close()


def test_who_fails_in_it_is_said_to_fail_in_the_phase_save(tmp_path: Path) -> None:
    checkpoints = start(tmp_path, save_freq=1)
    ranks, phases = checkpoints.groups["actor"], set()
    call = ranks.call

    def noting(method: str, *arguments: Any, **options: Any) -> list[Any]:
        phases.add((method, *checkpoints.run.phases))
        return call(method, *arguments, **options)

    ranks.call = noting
    play(checkpoints, 1, 1)
    assert phases == {("begin_save", "save"), ("finish_save", "save")}


def test_saved_when_asked(tmp_path: Path) -> None:
    checkpoints = start(tmp_path, save_freq=2, async_save=True, on_save_error="continue")
    checkpoints.after(2, {}, last=False)
    assert checkpoints.save(3) == tmp_path / "checkpoints" / "step-3"
    assert steps_in(tmp_path / "checkpoints") == [2, 3]
    checkpoints.groups["actor"].fails = OSError(28, "No space left on device", "x")
    assert checkpoints.save(4) is None and steps_in(tmp_path / "checkpoints") == [2, 3]
    checkpoints.run.store.close()


def test_a_run_that_is_told_to_end_saves_first_and_asks_to_be_started_again(tmp_path: Path) -> None:
    checkpoints = start(tmp_path)
    with noting_signals() as checkpoints.run.preemption:
        checkpoints.after(1, {}, last=False)
        assert steps_in(tmp_path / "checkpoints") == []
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(SystemExit) as ended:
            checkpoints.after(2, {}, last=False)
    assert ended.value.code == REQUEUE == 75
    assert steps_in(tmp_path / "checkpoints") == [2]
    assert checkpoints.run.said[-1].endswith("the run was told to end (SIGUSR1)")
    checkpoints.run.store.close()


def test_after_the_last_step_nothing_is_to_be_started_again(tmp_path: Path) -> None:
    checkpoints = start(tmp_path)
    with noting_signals() as checkpoints.run.preemption:
        signal.raise_signal(signal.SIGTERM)
        checkpoints.after(2, {}, last=True)
    checkpoints.run.store.close()


def test_the_second_sigterm_ends_at_once() -> None:
    with noting_signals() as preemption:
        signal.raise_signal(signal.SIGTERM)
        assert preemption.requested == "SIGTERM"
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)


def test_a_deadline_ends_the_run_in_time(tmp_path: Path) -> None:
    """40 s of a minute are over: another step of 1 s fits into the rest, one of 30 s does not."""
    checkpoints = start(tmp_path, begun=time.monotonic() - 40, max_run_minutes=1.0)
    checkpoints.after(1, {}, last=False)
    assert steps_in(tmp_path / "checkpoints") == []
    checkpoints.run.seconds["step"] = 30.0
    with pytest.raises(SystemExit):
        checkpoints.after(2, {}, last=False)
    assert steps_in(tmp_path / "checkpoints") == [2]
    checkpoints.run.store.close()


def test_the_last_steps_checkpoint_is_written_also_shortly_before_the_deadline(tmp_path: Path) -> None:
    checkpoints = start(tmp_path, begun=time.monotonic() - 3600, max_run_minutes=1.0, save_freq=2)
    checkpoints.after(4, {}, last=True)
    assert steps_in(tmp_path / "checkpoints") == [4]
    checkpoints.run.store.close()
    unasked = start(tmp_path / "other", begun=time.monotonic() - 3600, max_run_minutes=1.0)
    unasked.after(4, {}, last=True)
    assert steps_in(tmp_path / "other" / "checkpoints") == []
    unasked.run.store.close()


@pytest.mark.parametrize(("seconds", "ends"), [(40.0, False), (60.0, True)])
def test_a_deadline_leaves_time_for_files_that_are_written_in_the_background(
    tmp_path: Path, seconds: float, ends: bool
) -> None:
    """40 s of two minutes are over: 1.5 times the duration of a step of 1 s and a save must fit into the rest."""
    checkpoints = start(
        tmp_path, begun=time.monotonic() - 40, max_run_minutes=2.0, save_freq=2, async_save=True
    )
    checkpoints.after(2, {}, last=False)
    assert checkpoints._unfinished is not None
    checkpoints._unfinished = replace(checkpoints._unfinished, begun=checkpoints._unfinished.begun - seconds)
    checkpoints.groups["actor"].slow = False
    checkpoints.after(3, {}, last=False)  # commits the checkpoint of step 2
    with pytest.raises(SystemExit) if ends else nullcontext():
        checkpoints.after(5, {}, last=False)
    checkpoints.run.store.close()


@pytest.mark.parametrize("error", ["here", "in a rank"])
def test_a_full_disk(tmp_path: Path, error: str) -> None:
    """The older checkpoint stays; the run reports the failed save, then ends or continues."""
    full = OSError(28, "No space left on device", "x")
    failure = full if error == "here" else failed("OSError", "[Errno 28] No space left on device: 'x'")
    for mode in ("stop", "continue"):
        checkpoints = start(tmp_path / mode, save_freq=1, on_save_error=mode)
        checkpoints.after(1, {}, last=False)
        checkpoints.groups["actor"].fails = failure
        if mode == "stop":
            with pytest.raises(type(failure), match="No space left"):
                checkpoints.after(2, {}, last=False)
            assert "step 2: no checkpoint, and the run ends" in checkpoints.run.said[-1]
        else:
            checkpoints.after(2, {}, last=False)
            assert "step 2: no checkpoint, the run goes on" in checkpoints.run.said[-1]
            checkpoints.groups["actor"].fails = None
            checkpoints.after(3, {}, last=False)
            shutil.rmtree(tmp_path / mode / "checkpoints" / "step-3")
        assert steps_in(tmp_path / mode / "checkpoints") == [1]
        checkpoints.run.store.close()


PROCESS = SimpleNamespace(role="actor", rank=1, host="h", pid=3, log_path="l", name="actor rank 1")


def failed(kind: str, message: str) -> WorkerFailed:
    return WorkerFailed(PROCESS, RankError(kind, message, "", 0.0, ""))


@pytest.mark.parametrize(
    "failure",
    [failed("KeyError", "x"), failed("TimeoutError", "rank 0 does not come"), WaitTimeout(5.0, [PROCESS], 1)],
    ids=["another error", "a rank that waits", "no answer"],
)
def test_other_errors_of_ranks_are_not_taken_for_a_full_disk(tmp_path: Path, failure: Exception) -> None:
    checkpoints = start(tmp_path, save_freq=1, on_save_error="continue")
    checkpoints.groups["actor"].fails = failure
    with pytest.raises(type(failure)):
        checkpoints.after(1, {}, last=False)
    checkpoints.run.store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ETIMEDOUT, errno.EEXIST, errno.ENOTDIR])
def test_a_file_system_has_many_errors(tmp_path: Path, number: int) -> None:
    """Python has a class for some of the error numbers; a network file system that does not answer is a TimeoutError."""
    checkpoints = start(tmp_path, save_freq=1, on_save_error="continue")
    error = OSError(number, "it cannot be written", "x")
    checkpoints.groups["actor"].fails = failed(type(error).__name__, str(error))
    checkpoints.after(1, {}, last=False)
    assert "step 1: no checkpoint, the run goes on" in checkpoints.run.said[-1]
    checkpoints.run.store.close()


def test_a_fault_of_one_role_is_not_hidden_by_a_full_disk_of_another(tmp_path: Path) -> None:
    checkpoints = start(tmp_path, save_freq=1, on_save_error="continue")
    checkpoints.groups |= {"critic": Ranks()}
    checkpoints.groups["actor"].fails = failed("OSError", "[Errno 28] No space left on device: 'x'")
    checkpoints.groups["critic"].fails = failed("KeyError", "x")
    with pytest.raises(WorkerFailed, match="KeyError"):
        checkpoints.after(1, {}, last=False)
    checkpoints.run.store.close()


def test_a_checkpoint_after_the_last_step_is_refused(tmp_path: Path) -> None:
    """If the run had fewer steps than the checkpoint, it would train nothing and export the checkpoint's model as its own."""
    play(start(tmp_path, save_freq=1), 1, 3)
    config = resolve(load_config(SFTConfig, None, [*RECIPE, f"trainer.default_local_dir={tmp_path}"]))
    said: list[str] = []
    with open_store(SavingConfig(), tmp_path / "checkpoints", print) as store:
        with pytest.raises(ValueError, match=r"is of step 3, and the run ends with step 2 \(trainer\.total"):
            find_resumed(config, store, said.append, 2)
        assert steps_in(tmp_path / "checkpoints") == [1, 2, 3] and said == []
        assert find_resumed(config, store, said.append, 3).step == 3
    assert said[0] == "all 3 steps are made: nothing is left to train, and the model is exported again"
