"""What an error of a rank says, and in which order."""

from pathlib import Path
from types import SimpleNamespace

from megarl.cluster import WorkerDied, WorkerFailed, WorkerHung
from megarl.cluster.hosts import log_tail
from megarl.cluster.ranks import RankError, RankProcess

PROCESS = RankProcess(SimpleNamespace(), "actor", 1, "host7", "node", "/run/logs/actor-rank1.log", pid=42)


def test_the_last_line_names_the_rank_and_the_cause() -> None:
    told = RankError("ValueError", "wrong\nin detail", "Traceback ...", 0.0, "tail")
    for failure, words in (
        (WorkerDied(PROCESS, "killed by SIGKILL", "a\nb", ["x died, too"]), "died: killed by SIGKILL"),
        (WorkerHung(PROCESS, "stopped", "a\nb"), "hangs: stopped"),
        (WorkerFailed(PROCESS, told), "raised ValueError: wrong"),
    ):
        failure.name_report(Path("/run/failures/1.txt"))
        *_, log, report, last = (
            line for line in str(failure).splitlines() if not line.startswith(("  |", "also"))
        )
        assert str(failure).startswith(f"actor rank 1 (process 42 on host7) {words}")
        assert log.startswith("log: /run/logs/actor-rank1.log on host7")
        assert report == "stacks and logs of all processes: /run/failures/1.txt"
        assert last == f"the run ended: actor rank 1 (process 42 on host7) {words}"


def test_warnings_of_libraries_are_left_out_of_a_logs_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "started\n/lib/a.py:12: UserWarning: use b\n  warnings.warn(\n/lib/c.py:3: FutureWarning: gone soon\nmine\n  indented\n"
        "a.py:1: not a warning\n"
    )
    assert log_tail(str(log)) == ("started\nmine\n  indented\na.py:1: not a warning", "")
