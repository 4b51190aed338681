"""What a run is, written to its folder before it starts: its configuration, its batch arithmetic, and `run.json`, which has the
command, when and where it started, versions, and how it ended.

`run.json` is written again when the run ends; a run that was killed has no outcome.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from megarl import __version__
from megarl.config import BatchPlan, TrainConfig, TuningBatchPlan, TuningConfig, save_batch_plan, save_config
from megarl.util.files import whole_file

RUN_FILE = "run.json"
FINISHED = "finished"
_PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "ray")
_CLOCKS_APART = 2.0  # seconds between this file's and the kernel's start of a process


@dataclass(frozen=True)
class RunFacts:
    """What `run.json` holds.

    Attributes:
        command: what was typed. started, ended: seconds since the epoch; None: it has not ended, or was killed.
        host, process: where the controller runs.
        versions: by package, Python's among them.
        outcome: FINISHED, or why the run ended before its last step; None: it has not ended, or was killed.
    """

    command: str
    started: float
    host: str
    process: int
    versions: dict[str, str]
    ended: float | None = None
    outcome: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether the controller is alive, which can be told on its own machine alone."""
        if (
            self.outcome is not None
            or self.host != socket.gethostname()
            or not psutil.pid_exists(self.process)
        ):
            return False
        return psutil.Process(self.process).create_time() <= self.started + _CLOCKS_APART


@contextmanager
def recorded(
    config: TrainConfig | TuningConfig, plan: BatchPlan | TuningBatchPlan, folder: Path
) -> Iterator[None]:
    """Write down what is run, and at the end of the block, however it ends, the outcome."""
    save_config(config, folder / "config.yaml")
    save_batch_plan(plan, folder)
    facts = RunFacts(_command(), time.time(), socket.gethostname(), os.getpid(), _versions())
    _write(folder, facts)
    try:
        yield
    except BaseException as error:
        first_line = (str(error).splitlines() or [""])[0]
        outcome = f"{type(error).__name__}: {first_line}" if isinstance(error, Exception) else "told to end"
        _write(folder, replace(facts, ended=time.time(), outcome=outcome))
        raise
    _write(folder, replace(facts, ended=time.time(), outcome=FINISHED))


def read_facts(folder: Path) -> RunFacts | None:
    """The facts of a run folder; None: it has none."""
    path = folder / RUN_FILE
    return RunFacts(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _write(folder: Path, facts: RunFacts) -> None:
    with whole_file(folder / RUN_FILE) as temporary:
        temporary.write_text(json.dumps(asdict(facts), indent=2) + "\n", encoding="utf-8")


def _command() -> str:
    """What was typed, however megarl was started (`megarl`, `python -m megarl`)."""
    program = Path(sys.argv[0])
    own = program.name == "megarl" or program.resolve().is_relative_to(Path(__file__).resolve().parents[2])
    return shlex.join(["megarl", *sys.argv[1:]] if own else sys.argv)


def _versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {"megarl": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # such as SGLang where nothing is generated
            continue
    return found
