"""Processes are really killed while one view of a run generates and the other one learns, in a real run of two engines."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.cluster import WorkerDied
from megarl.config import TrainConfig
from megarl.trainer.loops.driver import epochs
from megarl.trainer.loops.ppo import answer, collect, learn
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.export import export_hf
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.collectors import Collected, OneStepOff
from megarl.trainer.stages.advantages import make_controls
from megarl.trainer.stages.scoring import Rewards
from tests.faults.live import STEPS, scheduler, start


@dataclass(frozen=True)
class Disturbed(Rewards):
    """Calls `at_first` when the first trajectories come that were collected in the background."""

    at_first: list = field(default_factory=list)

    def submit(self, table: pa.Table) -> None:
        if threading.current_thread() is not threading.main_thread() and self.at_first:
            self.at_first.pop()()
        super().submit(table)


@dataclass
class Live:
    """A run, and what it needs to take steps."""

    config: TrainConfig
    run: Run
    roles: Roles
    batches: OneStepOff

    def learn(self, half: tuple[Run, Roles], batch: Collected) -> None:
        learn(
            self.config,
            *half,
            batch.table,
            make_controls(self.config.algorithm, self.config.actor_rollout_ref.actor, STEPS),
            batch.step,
        )

    def disturb(self, call) -> None:
        self.batches.rewards.at_first.append(call)

    def reports(self) -> list[Path]:
        folder = self.run.folder / "failures"
        return sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("ahead")
    with start(folder, "one_step_off_cpu.yaml", 16) as (config, run, roles, inputs, scorer):
        prompts = epochs(inputs.loader)
        halves = partial(collect, config, prompts), partial(answer, config, prompts)
        rewards = Disturbed(run, scorer, inputs.tokenizer)
        yield Live(config, run, roles, OneStepOff(config, run, roles, rewards, STEPS, *halves))


def log_probs(model: Path, table: pa.Table) -> list[np.ndarray]:
    """Log-probs of the responses, by transformers."""
    policy, found = AutoModelForCausalLM.from_pretrained(model), []
    for prompt, response in zip(
        table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist(), strict=True
    ):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy())
    return found


def test_the_prompts_of_a_lost_engine_go_to_the_other_one(live: Live, tmp_path: Path) -> None:
    """The other engine has the same weights: no response is lost, and none comes twice. A new engine comes when the actor has learnt."""
    batches, pids = live.batches, live.roles.engines.pids
    first = batches.of(1)
    live.disturb(lambda: os.kill(scheduler(live.roles, 1), signal.SIGKILL))
    with live.run.timed("step", {"step": 1}), batches.during_learning(1) as half:
        live.learn(half, first)
        assert live.roles.restarts.version == 1  # the engines' weights have not been touched
    assert live.roles.engines.pids[0] == pids[0] and live.roles.engines.pids[1] != pids[1]
    assert live.roles.restarts.count == 1 and live.roles.restarts.version == 1
    assert live.roles.restarts.lacks_weights
    table = batches.ahead.table
    assert len(set(table["uid"].to_pylist())) == table.num_rows == 32
    versions = table["weight_version"].to_numpy()
    assert set(versions) == {1}
    model = live.config.actor_rollout_ref.model
    with live.roles.memory.held("export"):
        export_hf(live.run, live.roles.actor.group, model, tmp_path / "learnt")
    sampled = [np.array(row) for row in table["rollout_log_probs"].to_pylist()]
    before, learnt = (
        [np.abs(a - b).max() for a, b in zip(log_probs(folder, table), sampled, strict=True)]
        for folder in (Path(model.path), tmp_path / "learnt")
    )
    assert max(before) < 1e-4 < min(learnt)
    (report,) = live.reports()
    text = report.read_text()
    assert "role: rollout\nrank: 1\n" in text and "\nphase: step / ahead / generate\nmeanwhile: step" in text
    found = batches.of(2)
    assert found.metrics["staleness/max"] == found.metrics["staleness/mean"] == 1.0
    assert live.run.seconds["ahead_wait"] > 0.1  # the time of an engine's start


def test_a_failure_of_the_half_that_collects_ends_the_other(live: Live) -> None:
    before = live.reports()

    def fail() -> None:
        raise RuntimeError("no reward works")

    live.disturb(fail)
    with pytest.raises(RuntimeError, match="no reward works"), live.batches.during_learning(2) as (run, _):
        while True:  # an update that takes long
            run.wait([])
    assert live.reports() == before
    assert not any(thread.name == "collect-ahead" for thread in threading.enumerate())
    live.batches.rewards.scorer.collect()


def test_a_dead_actor_ends_both_with_one_report(live: Live) -> None:
    """The last test, because it ends the run."""
    before, batches = live.reports(), live.batches
    batch = replace(batches.of(3), step=3)
    with (
        pytest.raises(WorkerDied, match=r"actor rank 0 .* died") as caught,
        batches.during_learning(3) as half,
    ):
        os.kill(live.roles.actor.group.pids[0], signal.SIGKILL)
        live.learn(half, batch)
    assert not any(thread.name == "collect-ahead" for thread in threading.enumerate())
    (report,) = sorted(set(live.reports()) - set(before))
    assert caught.value.report == report
    assert "\nmeanwhile: ahead" in report.read_text()
