"""benchmarks/chaos.py: what it sees of a run, and that it would say so if something was lost."""

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
# A "run" of 4 steps that saves after each, and leaves a process behind that nobody ends.
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
while step < 4:
    step += 1
    time.sleep(0.2)
    print(f"step {step}/4  loss 1.0")
    if step == 3:
        time.sleep(0.5)  # finished, and not yet saved
    saved.write_text(str(step))
"""


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
    assert run.signs == ["exit code -9"] and run.errors == []
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
    task, main = chaos("chaos_task"), chaos("chaos")
    one = {"steps": [1], "metrics of step 1": {"loss": "1.0", "kl": "0.1"}, "hf/model": "a"}
    other = {"steps": [1], "metrics of step 1": {"loss": "1.5", "kl": "0.1"}, "hf/more": "b"}
    assert task.differences(one, one) == []
    lines = task.differences(one, other)
    assert [line.partition(":")[0] for line in lines] == ["hf/model", "hf/more", "metrics of step 1, loss"]
    assert not task.is_compared("timing_s/update") and task.is_compared("critic/vf_loss")
    blow = chaos("chaos_blows").Blow(
        1, "actor rank", "SIGKILL", "save", 2, 5, seconds=3.0, recovered=True, lost=1
    )
    run = {
        "finished": True,
        "errors": [],
        "differences": [],
        "orphans": [],
        "seconds_until_nothing_was_left": [1.0],
    }
    figures = main.summary([blow], [run])
    assert main.is_unharmed(figures) and figures["steps_lost_most"] == 1
    for harm in ({"finished": False}, {"differences": ["x"]}, {"orphans": ["process 1"]}, {"errors": ["x"]}):
        assert not main.is_unharmed(main.summary([blow], [run | harm]))
    blow.recovered = False
    assert not main.is_unharmed(main.summary([blow], [run]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_survives_some_blows(tmp_path):
    out = tmp_path / "chaos.json"
    command = [sys.executable, "benchmarks/chaos.py", "--kills=3", "--steps=4", "--seed=1", "--json", out]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(out.read_text())["summary"]["recovered"] == 3
