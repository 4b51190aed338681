import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from ray._raylet import raise_sys_exit_with_custom_error_message

from examples.tiny_model import make_tiny_model
from megarl import Trainer, make_trainer_config
from megarl.trainer.run.preemption import REQUEUE, ending_at_once, noting_signals


def test_the_first_signal_is_noted_and_a_second_sigterm_ends_the_run(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with noting_signals() as preemption:
        assert preemption.requested is None
        signal.raise_signal(signal.SIGUSR1)  # the early warning
        assert preemption.requested == "SIGUSR1"
        signal.raise_signal(signal.SIGTERM)  # the job's time is nearly over: a save in progress must finish
        signal.raise_signal(signal.SIGUSR1)
        assert preemption.requested == "SIGUSR1"
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == REQUEUE == 75
    assert signal.getsignal(signal.SIGTERM) is before
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("SIGUSR1: the run ends after this step") and lines[1].startswith(
        "SIGTERM again"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_the_first_step_the_first_signal_ends_the_run_and_asks_for_another(capfd, number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ending_at_once():
        signal.raise_signal(number)
    assert ended.value.code == REQUEUE
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.startswith(f"{signal.Signals(number).name}: ending before the first step")


def _told_in_a_call_of_ray() -> None:
    """A signal comes while C++ waits: Ray catches the handler's SystemExit, and raises its own after the call."""
    with suppress(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    raise_sys_exit_with_custom_error_message("SystemExit is raised (sys.exit is called).", exit_code=1)


def test_a_call_of_ray_that_is_interrupted_does_not_change_the_exit_code():
    with pytest.raises(SystemExit) as ended, ending_at_once():
        _told_in_a_call_of_ray()
    assert ended.value.code == REQUEUE
    with pytest.raises(SystemExit) as ended, noting_signals() as preemption:
        signal.raise_signal(signal.SIGTERM)
        _told_in_a_call_of_ray()
    assert (preemption.num_terms, ended.value.code) == (2, REQUEUE)
    with pytest.raises(SystemExit) as ended, ending_at_once():  # nobody was told to end
        raise_sys_exit_with_custom_error_message("of a program's own handler", exit_code=1)
    assert ended.value.code == 1


def test_a_program_of_the_users_own_ends_with_one_line_unless_it_has_handlers(capfd):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    noted = []
    others = signal.signal(signal.SIGUSR1, lambda number, frame: noted.append(number))
    try:
        with pytest.raises(SystemExit) as ended, ending_at_once("ending", keep_handlers=True):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
        assert (ended.value.code, noted) == (REQUEUE, [signal.SIGUSR1])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert capfd.readouterr().err == "SIGTERM: ending\n"
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR1, others)


@pytest.fixture
def no_handler() -> Iterator[None]:
    """SIGTERM without a handler: a cluster of an earlier test has left Ray's in this process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_jobs_signal_ends_the_program_with_one_line(no_handler, monkeypatch, capfd, tmp_path):
    """A Trainer handles signals from the start of its first process until it is closed; no process is started here."""

    def told(*arguments):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the program went on")

    monkeypatch.setattr("megarl.api.trainer.make_scorer", told)
    make_tiny_model(tmp_path, ["1 + 1 = 2"], hidden_size=64, ffn_hidden_size=128, num_layers=2)
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        Trainer(make_trainer_config(), actor_model=tmp_path, reward_fn=lambda *texts: 0.0)
    assert ended.value.code == 75 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert capfd.readouterr().err == (
        "SIGTERM: ending; started again, the program goes on from its last checkpoint, if there is one\n"
    )
