"""How deaths, exceptions and silence are reported; nothing is left when the controller itself is killed."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster import WaitTimeout, WorkerDied, WorkerFailed, WorkerHung, ranks, wait, waiting, worker
from megarl.cluster.pool import ResourcePool
from megarl.cluster.ranks import RankProcess
from megarl.cluster.waiting import MissingReporter
from megarl.weight_sync import links
from tests.cluster.processes import alive, alive_after, carrying, guards_of, wait_until_it_hangs
from tests.cluster.test_report import stacks_in
from tests.waiting import wait_for


def test_a_killed_rank_ends_a_hung_call(start_group, tmp_path):
    group = start_group("actor", 2)
    refs = group.call("hang_if", 1)
    wait_until_it_hangs(group.processes[1])
    begin = time.monotonic()
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        wait(refs, [group])
    assert time.monotonic() - begin < 30
    error = caught.value
    assert (error.role, error.rank, error.host, error.pid) == ("actor", 1, "127.0.0.1", group.pids[1])
    assert error.cause.startswith(("killed by SIGKILL", "killed or crashed"))
    assert error.log_path == str(tmp_path / "actor-rank1.log")
    assert error.log_tail.endswith("I hang now")
    for part in ("actor rank 1", "127.0.0.1", error.cause, error.log_path, "| I hang now"):
        assert part in str(error)


def test_a_death_elsewhere_ends_a_hung_call(start_group):
    """The dead process is of another group, and idle; the one that was called hangs."""
    actor, critic = start_group("actor", 1), start_group("critic", 2)
    refs = actor.call("hang_if", 0)
    wait_until_it_hangs(actor.processes[0])
    begin = time.monotonic()
    os.kill(critic.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="critic rank 1"):
        wait(refs, [actor, critic])
    assert time.monotonic() - begin < 30
    # The next wait reports the death, too.
    with pytest.raises(WorkerDied, match="critic rank 1"):
        wait([], [actor, critic])


def test_a_death_ends_the_start_of_another_group(start_group):
    """The start would take for ever, because its process gets no device."""
    actor = start_group("actor", 1)
    killer = threading.Timer(1.0, os.kill, (actor.pids[0], signal.SIGKILL))
    begin = time.monotonic()
    killer.start()
    with pytest.raises(WorkerDied, match="actor rank 0"):
        start_group("critic", 1, gpu_fraction=1.0, watched_groups=[actor])
    assert 1 <= time.monotonic() - begin < 60


def test_children_of_a_killed_rank_are_killed(start_group, tmp_path):
    group = start_group("engine", 1)
    (children,) = wait(group.call("start_children"), [group])
    ((guard, (scratch,)),) = guards_of(group.pids).items()
    assert wait(group.call("get_info"), [group])[0].scratch == scratch and os.path.isdir(scratch)
    os.kill(group.pids[0], signal.SIGKILL)
    assert alive_after([*children, guard], 30) == []
    assert carrying(group.processes[0].mark.partition("=")[2]) == []
    assert not os.path.exists(scratch)
    assert "killed what it left behind" in (tmp_path / "engine-rank0.log").read_text()


def test_an_exception_ends_the_call_although_others_hang(start_group, tmp_path):
    """The exception's class need not exist where the controller is, nor be picklable."""
    group = start_group("actor", 3)
    begin = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        wait(group.call("fail_if", 1), [group])
    assert time.monotonic() - begin < 30
    error = caught.value
    assert (error.role, error.rank, error.host) == ("actor", 1, "127.0.0.1")
    assert (error.kind, error.message) == ("LocalError", "3 is not 4")
    assert "raise LocalError(3, 4)" in error.remote_traceback
    assert error.log_tail.endswith("I shall raise")
    assert "raise LocalError(3, 4)" in (tmp_path / "actor-rank1.log").read_text()
    for part in (
        "actor rank 1",
        "LocalError: 3 is not 4",
        "raise LocalError(3, 4)",
        "| I shall raise",
        error.log_path,
    ):
        assert part in str(error)


def test_a_group_works_on_after_an_exception(start_group):
    group = start_group("actor", 2)
    with pytest.raises(WorkerFailed):
        wait(group.call("no_such_method"), [group])
    assert wait(group.call("hang_if", 5), [group]) == [0, 1]


def test_the_death_is_reported_not_what_it_caused(start_group):
    """Rank 0 raises "Connection closed by peer" because rank 1 was killed."""
    group = start_group("actor", 2)
    wait(group.call("meet"), [group], timeout=60)
    refs = group.call("hang_on_peer")
    wait_until_it_hangs(group.processes[0])
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="actor rank 1") as caught:
        wait(refs, [group])
    assert caught.value.rank == 1


def test_a_death_that_takes_its_time_is_reported_where_a_connection_was_lost(start_group):
    """Like an engine, which first has to notice the end of its SGLang scheduler."""
    group = start_group("actor", 2)
    with pytest.raises(WorkerDied, match="actor rank 1"):
        wait(group.call("lose_peer", 2.5), [group])


@pytest.mark.parametrize(
    "message",
    [
        "[1] is setting up NCCL communicator: Connection reset by peer",
        "NCCL error: remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "Connection closed by peer [127.0.0.1]:1",
    ],
)
def test_nccl_and_gloo_say_in_these_words_that_a_connection_was_lost(message):
    assert waiting._LOST_PEER.search(message)
    assert not waiting._LOST_PEER.search("NCCL error: unhandled cuda error")


def test_the_earliest_exception_is_reported(start_group, tmp_path):
    group = start_group("actor", 2)
    with pytest.raises(WorkerFailed, match=r"RuntimeError: failed first") as caught:
        wait(group.call("fail_in_turn", 1, str(tmp_path / "failed")), [group])
    assert caught.value.rank == 1
    assert "also: actor rank 0" in str(caught.value)


def test_the_cause_of_a_closed_connection_is_reported_though_it_came_later(start_group, monkeypatch):
    """A rank's exception is dated when it arrives, and its peers' exceptions may arrive before it. No rank dies, so that the time for
    noticing a death passes completely."""
    monkeypatch.setattr(waiting, "_LOST_PEER_SECONDS", 5.0)
    group = start_group("actor", 2)
    with pytest.raises(WorkerFailed, match="ValueError: why") as caught:
        wait(group.call("lose_at_once", 0, 0.5), [group])
    assert caught.value.rank == 1
    assert "also: actor rank 0" in str(caught.value) and "Connection closed by peer" in str(caught.value)


def test_a_result_that_cannot_be_sent_is_reported(start_group):
    group = start_group("actor", 1)
    with pytest.raises(WorkerFailed, match=r"cannot pickle '_thread.lock' object"):
        wait(group.call("return_lock"), [group])


def test_an_exit_is_reported_with_its_status(start_group):
    group = start_group("actor", 1)
    with pytest.raises(WorkerDied) as caught:
        wait(group.call("exit", 7), [group])
    assert caught.value.cause.startswith(("exited with status 7", "killed or crashed"))


def test_a_crash_leaves_its_stack_in_the_log(start_group):
    group = start_group("actor", 1)
    with pytest.raises(WorkerDied) as caught:
        wait(group.call("crash"), [group])
    assert 'workers.py", line' in caught.value.log_tail
    assert "Segmentation fault" in Path(caught.value.log_path).read_text()


def test_a_timeout_names_the_silent_ranks_and_shows_where_they_are(start_group, tmp_path):
    group = start_group("actor", 3)
    refs = group.call("hang_if", 2)
    wait(refs[:2], [group])  # the others have answered, however long it takes them
    begin = time.monotonic()
    with pytest.raises(WaitTimeout, match=r"no answer within 0.5 s from 1 of 3 calls") as caught:
        wait(refs, [group], timeout=0.5)
    assert time.monotonic() - begin < 30
    assert caught.value.silent == ["actor rank 2"]
    assert str(tmp_path / "actor-rank2.log") in str(caught.value)
    wait_for(lambda: "in hang_if" in (tmp_path / "actor-rank2.log").read_text())
    assert alive(group.pids) == group.pids


def test_results_of_other_groups_are_refused(start_group):
    actor, critic = start_group("actor", 1), start_group("critic", 1)
    with pytest.raises(AssertionError, match="not on a process of the groups"):
        wait(actor.call("get_info"), [critic])


def test_nothing_survives_a_killed_controller(controller, tmp_path):
    """kill -9: Ray's processes, ranks that are idle, hung in C or stopped, and all processes that these started."""
    process, report = controller("hang", tmp_path, "")
    assert len(alive(report["workers"])) == 3
    assert len(alive(report["children"])) == 12
    assert os.path.exists(report["temp_dir"])
    guards = guards_of([process.pid, *report["workers"]])
    folders = [folder for folders in guards.values() for folder in folders]
    assert len(folders) == 4 and report["temp_dir"] in folders
    process.kill()
    process.wait()
    assert alive_after(report["workers"] + report["children"] + report["started"] + list(guards), 30) == []
    token = report["mark"].partition("=")[2]
    assert alive_after(carrying(token), 30) == []
    assert carrying(token) == []
    assert [folder for folder in folders if os.path.exists(folder)] == []


@pytest.mark.parametrize(
    "signal_number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_nothing_survives_a_terminated_controller(controller, tmp_path, signal_number):
    """By the signals with which Slurm and Ctrl-C end a controller."""
    process, report = controller("hang", tmp_path, "")
    process.send_signal(signal_number)
    process.wait(60)
    assert alive_after(report["workers"] + report["children"] + report["started"], 30) == []
    assert alive_after(carrying(report["mark"].partition("=")[2]), 30) == []


@pytest.mark.slow
def test_a_killed_controller_leaves_a_joined_cluster_clean(controller, tmp_path):
    """The cluster lives on, the killed controller's ranks and their children do not; the next controller gets the devices."""
    _, cluster = controller("serve")
    first, report = controller("hang", tmp_path, cluster["address"])
    assert report["mark"] is None
    first.kill()
    first.wait()
    assert alive_after(report["workers"] + report["children"], 15) == []
    _, second = controller("hang", tmp_path, cluster["address"])
    assert alive(second["workers"]) == second["workers"]


def process(rank: int) -> RankProcess:
    return RankProcess(None, "rollout", rank, f"10.0.0.{rank}", "node", "log")


def test_who_is_missing_is_said_with_their_machines():
    said: list[str] = []
    missing = MissingReporter(said.append, 16, every=0.0)
    missing([])
    assert said == []
    missing([process(3), process(5)])
    assert said[0].endswith(
        "2 of 16 processes have yet to come up: rollout rank 3 (10.0.0.3), rollout rank 5 (10.0.0.5)"
    )
    missing([process(rank) for rank in range(10)])
    assert said[1].endswith(", rollout rank 7 (10.0.0.7) and 2 more")
    assert len(said) == 2


def test_nothing_is_said_of_what_is_quick():
    said: list[str] = []
    MissingReporter(said.append, 16, every=1e6)([process(1)])
    assert said == []


def test_many_nodes_have_longer_to_come_up():
    pool = ResourcePool.__new__(ResourcePool)
    pool.nnodes = 1
    assert pool.setup_seconds == 120
    pool.nnodes = 16
    assert pool.setup_seconds == 420


def test_a_rank_whose_answer_is_late_was_in_the_collective(monkeypatch):
    """Ranks of a relay, whose answers come together: one still waits, one has raised, one computes, one is on a machine that is lost."""
    waits, computes = stacks_in(links.__file__, "wait"), stacks_in(worker.__file__, "invoke")
    raised = stacks_in("ray/_private/worker.py", "main_loop")
    found = [waits, raised, computes, None]
    processes = [RankProcess(None, "actor", rank, "host", "node", "log") for rank in range(4)]
    monkeypatch.setattr(waiting, "stacks_of", lambda asked: [found[process.rank] for process in asked])
    (line,) = waiting._missing(processes, "actor")
    assert [f"actor rank {rank} " in line for rank in range(4)] == [False, False, True, True]
    # Where no other rank can be the reason, the rank that has raised is named, too: it may not have got the call.
    (line,) = waiting._missing(processes[:2], "actor")
    assert [f"actor rank {rank} " in line for rank in range(2)] == [False, True]
    assert waiting._missing(processes[:1], "actor") == []


def test_messages_stay_short_where_all_of_a_thousand_ranks_fail():
    processes = [RankProcess(None, "actor", rank, "h", "n", "log", pid=1) for rank in range(1000)]
    lost = ranks.WorkerDied(processes[0], "killed", "", [f"{process} died, too" for process in processes[1:]])
    assert "also: actor rank 1 (process 1 on h) died, too; " in str(lost) and str(lost).endswith(
        "; actor rank 8 (process 1 on h) died, too and 991 more"
    )
    late = ranks.WaitTimeout(5, processes, 1000)
    assert len(late.silent) == 1000 and len(str(late).splitlines()) == 10
    assert str(late).startswith("no answer within 5 s from 1000 of 1000") and str(late).endswith(
        "and 992 more"
    )


@pytest.mark.parametrize(
    ("is_dead", "kind", "told"),
    [(True, WorkerDied, "died: killed"), (False, WorkerHung, "hangs: it was found to")],
)
def test_the_loss_of_a_process_that_no_call_waits_for(monkeypatch, is_dead, kind, told):
    monkeypatch.setattr(waiting, "stacks_of", lambda processes: [None for _ in processes])
    monkeypatch.setattr(waiting, "on_node", lambda node, seconds, call, path: ("its last line", "killed"))
    actor = SimpleNamespace(_get_local_state=lambda: ranks._DEAD if is_dead else None)
    loss = waiting.loss_of(RankProcess(actor, "rollout", 1, "h", "n", "log"), ["3 were started anew"])
    assert isinstance(loss, kind) and f"rollout rank 1 (process ? on h) {told}" in str(loss)
    assert "its last line" in str(loss) and str(loss).endswith("also: 3 were started anew")
