"""`run.json`: what a run is, and how it ended."""

import json
import os
import platform
import socket
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from megarl import __version__
from megarl.config import SFTConfig, load_config, resolve, resolve_batches
from megarl.report.data import read_run
from megarl.report.summary import status_of
from megarl.trainer.run.facts import read_facts, recorded

KEYS = ("data.train_files=x.jsonl", "data.max_length=8", "data.train_batch_size=2", "model.path=x", "optim.lr=1e-3", "max_token_len_per_gpu=16")  # fmt: skip


@pytest.fixture(scope="module")
def planned():
    config = resolve(load_config(SFTConfig, None, KEYS))
    return config, resolve_batches(config)


def test_a_run_that_ends_says_so(tmp_path, planned):
    with recorded(*planned, tmp_path):
        facts = read_facts(tmp_path)
        assert facts.outcome is None and facts.is_running
        assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "batch_plan.json", "run.json"}
    facts = read_facts(tmp_path)
    assert facts.outcome == "finished" and facts.ended >= facts.started and not facts.is_running
    assert facts.process == os.getpid() and facts.host == socket.gethostname()
    assert facts.versions["megarl"] == __version__ and facts.versions["Python"] == platform.python_version()
    assert {"torch", "megatron-core", "ray", "transformers"} <= facts.versions.keys()


@pytest.mark.parametrize(
    ("error", "outcome", "word"),
    [
        (RuntimeError("actor rank 1 died\nwith a log"), "RuntimeError: actor rank 1 died", "failed"),
        (SystemExit(75), "told to end", "stopped"),
        (KeyboardInterrupt(), "told to end", "stopped"),
    ],
)
def test_a_run_that_raises_says_why(tmp_path, planned, error, outcome, word):
    with pytest.raises(type(error)), recorded(*planned, tmp_path):
        raise error
    assert read_facts(tmp_path).outcome == outcome
    (tmp_path / "metrics.jsonl").touch()
    status = status_of(read_run(tmp_path))
    assert status.word == word and outcome in status.text


def test_the_status_of_a_run_without_an_outcome(tmp_path, planned):
    """Running where its process lives; killed, or on another machine, there is no end known."""
    with recorded(*planned, tmp_path):
        (tmp_path / "metrics.jsonl").touch()
        assert status_of(read_run(tmp_path)).word == "running"
        facts = read_facts(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    younger = psutil.Process().create_time() - 60  # another process has the number since
    for changed in (
        replace(facts, process=gone.pid),
        replace(facts, host="elsewhere"),
        replace(facts, started=younger),
    ):
        (tmp_path / "run.json").write_text(json.dumps(vars(changed)))
        assert status_of(read_run(tmp_path)).word == "no end known", changed
