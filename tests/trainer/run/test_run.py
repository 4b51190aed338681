"""How a run handles calls of its processes; no process is started."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from megarl.cluster import WaitTimeout, WorkerDied
from megarl.data.routing import list_of_binary
from megarl.data.trajectories import REF_TOP_TOKENS, ragged, read_trajectories
from megarl.trainer.run import run as run_module
from megarl.trainer.run.run import Run
from tests.trainer.trajectories import scored


def test_engines_that_return_nothing_for_too_long_are_an_error(tmp_path, monkeypatch):
    reported = []
    monkeypatch.setattr(run_module, "stacks_of", reported.append)
    monkeypatch.setattr(
        run_module, "write_report", lambda folder, failure, groups, facts: reported.append(facts)
    )
    run = Run(tmp_path, Console(quiet=True), phase_timeout=5.0)
    engine = SimpleNamespace(name="rollout rank 0", pid=7, log_path="log")
    run.refuse_silence(time.monotonic() - 1.0, [engine])
    assert reported == []
    with pytest.raises(WaitTimeout, match="no answer within 5 s from 1 of 1 calls"):
        run.refuse_silence(time.monotonic() - 6.0, [engine])
    assert reported == [[engine], {"step": "none yet", "phase": "start"}]
    run.phase_timeout = None
    run.refuse_silence(time.monotonic() - 6.0, [engine])


def test_a_loss_that_no_call_showed_has_a_report(tmp_path, monkeypatch):
    reported = []
    monkeypatch.setattr(
        run_module, "write_report", lambda folder, failure, groups, facts: reported.append(failure)
    )
    monkeypatch.setattr(
        run_module, "loss_of", lambda process, others: WorkerDied(process, "killed", "", others)
    )
    engine = SimpleNamespace(role="rollout", rank=0, host="h", pid=7, log_path="log")
    with pytest.raises(WorkerDied, match="also: 3 engines were started anew already") as raised:
        Run(tmp_path, Console(quiet=True)).refuse_loss(engine, "3 engines were started anew already")
    assert reported == [raised.value]


def test_the_references_most_likely_tokens_are_not_written(tmp_path):
    """With 64 of them a step's file would be many times as large, and a replay computes them again."""
    table = scored({"a": [1.0, 0.0]}).table
    tokens, offsets = ragged(table, "response_ids")
    top = list_of_binary(np.zeros(len(tokens), "V512"), offsets)
    run = Run(tmp_path, Console(quiet=True), trajectory_folder=tmp_path)
    run.save_trajectories(table.append_column(REF_TOP_TOKENS, top), "step", 3)
    written = read_trajectories(tmp_path / "step-000003.parquet", finite=False)
    assert written.column_names == table.column_names and written.num_rows == 2
