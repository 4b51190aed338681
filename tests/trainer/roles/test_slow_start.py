"""What is said of a start that takes long."""

import threading
from pathlib import Path

from megarl.trainer.roles.slow_start import last_line, telling


def test_the_last_line_of_a_log_is_said_until_the_start_is_over(tmp_path: Path) -> None:
    log, said, enough = tmp_path / "rollout-rank0.log", [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        enough.set()

    with telling(say, log, seconds=0.01):
        assert not said  # there is no log yet
        log.write_text("imported\nDeepGEMM warmup:  10%\rDeepGEMM warmup:  20%\r\n\n")
        assert enough.wait(60)
    assert said[0].endswith("s; rollout-rank0.log: DeepGEMM warmup:  20%")
    assert "slow-start" not in {thread.name for thread in threading.enumerate()}


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * 100_000 + b"\n" + b"y" * 1000)
    assert last_line(log) == "y" * 300
