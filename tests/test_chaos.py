"""benchmarks/chaos.py: what it observes in a run, and that it would report a loss."""

import importlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A "run" of 4 steps that saves after each step, and leaves a process behind that nobody ends.
RUN = """
import pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
saved = folder / "saved"
step = int(saved.read_text()) if saved.exists() else 0
if step:
    print(f"going on from step {step}: {folder}")
print(f"run folder: {folder}")
if not step:
    subprocess.Popen(["sleep", "100"], start_new_session=True)
again = bool(step)
while step < 4:
    step += 1
    time.sleep(0.2)
    print(f"step {step}/4  loss 1.0", flush=True)
    if step == 3 and not again:
        time.sleep(1000)  # finished, and never saved
    saved.write_text(str(step))
"""
# The report on a run that finished unharmed.
FINISHED = {
    "finished": True,
    "ends": {"finished": 1},
    "errors": [],
    "differences": [],
    "orphans": [],
    "seconds_until_nothing_was_left": [1.0],
    "seconds": 60.0,
}


@pytest.fixture
def chaos(monkeypatch):
    """chaos(name): a module of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in [name for name in sys.modules if name.startswith("chaos")]:
        del sys.modules[name]


def test_a_killed_controller_is_started_again_and_what_it_lost_and_left_is_seen(chaos, tmp_path, monkeypatch):
    module = chaos("chaos_run")
    monkeypatch.setattr(module, "GONE_SECONDS", 1.0)
    run = module.AttackedRun([sys.executable, "-c", RUN, str(tmp_path)], tmp_path)
    run.begin()
    deadline = time.monotonic() + 60
    while run.last_step < 3:
        assert time.monotonic() < deadline
        run.poll()
    ((pid,),) = run.victims().values()
    assert run.phase == "step" and run.hit(pid, signal.SIGKILL)
    while not run.finished:
        assert time.monotonic() < deadline and run.failure is None
        run.poll()
    run.stop()
    assert (run.last_step, run.lost, run.resumed, len(run.starts)) == (4, 1, 2, 2)
    assert run.signs == ["exit code -9"] and run.errors == [] and run.ends == ["killed", "finished"]
    (orphan,) = run.starts[0].orphans
    assert orphan.endswith("sleep 100") and run.starts[1].orphans == ()


def test_a_command_that_fails_by_itself_is_a_failure(chaos, tmp_path):
    module = chaos("chaos_run")
    run = module.AttackedRun([sys.executable, "-c", "raise SystemExit('wrong')"], tmp_path)
    run.begin()
    deadline = time.monotonic() + 60
    while run.failure is None:
        assert time.monotonic() < deadline and not run.finished
        run.poll()
    run.stop()
    assert len(run.errors) == module.MAX_FAILURES and "exit code 1: wrong" in run.failure


def test_all_kinds_and_signals_are_dealt_those_that_are_there_first(chaos):
    module = chaos("chaos_blows")
    deck = module.Deck(random.Random(3))
    assert deck.deal({"controller": [7]})[::2] == ("controller", 7)
    present = {kind: [1, 2] for kind in module.KINDS}
    dealt = [deck.deal(present)[:2] for _ in range(len(module.DECK) - 1)]
    assert len(set(dealt)) == len(set(module.DECK)) == 2 * len(module.KINDS)


def test_every_difference_and_everything_left_behind_is_harm(chaos):
    task = chaos("chaos_task")
    one = {"steps": [1], "metrics of step 1": {"loss": "1.0", "kl": "0.1"}, "hf/model": "a"}
    other = {"steps": [1], "metrics of step 1": {"loss": "1.5", "kl": "0.1"}, "hf/more": "b"}
    assert task.differences(one, one) == []
    lines = task.differences(one, other)
    assert [line.partition(":")[0] for line in lines] == ["hf/model", "hf/more", "metrics of step 1, loss"]
    assert not task.is_compared("timing_s/update") and task.is_compared("critic/vf_loss")
    record = chaos("chaos_record")
    blow = chaos("chaos_blows").Blow(
        1, "actor rank", "SIGKILL", "save", 2, 5, seconds=3.0, recovered=True, lost=1
    )

    def unharmed(run):
        return record.is_unharmed(record.summary(record.Record(0, 4, [], [blow], [run], [], None)))

    assert unharmed(FINISHED)
    for harm in (
        {"finished": False},
        {"differences": ["x"]},
        {"orphans": ["process 1"]},
        {"ends": {"finished": 1, "unexpected": 1}},
    ):
        assert not unharmed(FINISHED | harm)
    blow.recovered = False
    assert not unharmed(FINISHED)


def test_ends_are_told_apart(chaos, tmp_path):
    """A controller that asks by itself to be started again was stuck: this end is expected, and counted, but not among those that were asked for."""
    module = chaos("chaos_run")
    code = "import pathlib, sys\npath = pathlib.Path(sys.argv[1], 'again')\nif not path.exists():\n  path.touch()\n  sys.exit(75)"
    run = module.AttackedRun([sys.executable, "-c", code, str(tmp_path)], tmp_path)
    run.begin()
    deadline = time.monotonic() + 60
    while not run.finished:
        assert time.monotonic() < deadline and run.failure is None
        run.poll()
    run.stop()
    assert run.ends == ["stuck", "finished"] and run.errors == []


def test_a_recording_is_continued(chaos, tmp_path):
    """All parts are counted together; a blow that was dealt, at its time, is not dealt again; other settings are refused."""
    record, blows = chaos("chaos_record"), chaos("chaos_blows")
    path = tmp_path / "folder" / "chaos.json"
    assert record.open_record(path, 3, 5).parts == []
    streams = []
    for part, kind in enumerate(("actor rank", "critic rank"), 1):
        found = record.open_record(path, 3, 5)
        found.begin()
        streams.append(found.stream)
        blow = blows.Blow(part, kind, "SIGKILL", "save", 2, 5, seconds=3.0, recovered=True, lost=1)
        found.struck(1)
        assert record.open_record(path, 3, 5).report()["summary"]["kills_not_counted"] == 1
        found.add([blow], {**FINISHED, "ends": {"finished": 1, "stuck": part}}, [("controller", "SIGTERM")])
    report = json.loads(path.read_text())
    assert len(set(streams)) == 2
    assert [part["kills"] for part in report["parts"]] == [1, 1]
    assert all(len(part["commit"]) == 40 and part["begun"].endswith(" UTC") for part in report["parts"])
    assert [run["part"] for run in report["runs"]] == [1, 2]
    figures = report["summary"]
    assert (figures["kills"], figures["recovered"], figures["kills_not_counted"]) == (2, 2, 0)
    assert figures["expected_ends"] == {"finished": 2, "stuck": 3} and figures["unexpected_ends"] == 0
    assert record.open_record(path, 3, 5).cards == [("controller", "SIGTERM")]
    with pytest.raises(ValueError, match=r"recorded with --steps 5, not 6"):
        record.open_record(path, 3, 6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_survives_some_blows(tmp_path):
    """The first call deals two blows; the second continues the recording with one more."""
    out = tmp_path / "chaos.json"
    for kills in ("--kills=2", "--kills=1"):
        command = [sys.executable, "benchmarks/chaos.py", kills, "--steps=4", "--seed=1", "--json", out]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
        assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert report["summary"]["recovered"] == 3 and [part["kills"] for part in report["parts"]] == [2, 1]
    assert "going on with" in result.stdout
