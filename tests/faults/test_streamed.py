"""Responses that go on from step to step in a real run of two engines: interruptions, and processes that are really killed."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config import TrainConfig
from megarl.rewards.processes.scorer import make_scorer
from megarl.trainer.loops.driver import epochs
from megarl.trainer.loops.ppo import answer, collect, learn
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.export import export_hf
from megarl.trainer.run.run import Run
from megarl.trainer.schedule.collectors import Collected
from megarl.trainer.schedule.in_flight import save_in_flight
from megarl.trainer.schedule.modes import make_batches
from megarl.trainer.schedule.streaming import Streamed
from megarl.trainer.stages.advantages import make_controls
from megarl.trainer.stages.request_queue import RequestQueue
from megarl.trainer.stages.scoring import Rewards
from tests.faults.live import STEPS, scheduler, start

# Of the STEPS of the run: the one in which an engine is killed, unless earlier ones had to be repeated, and the one after which it is saved.
FIRST_LOSS, LAST_SAVED = 5, STEPS - 2


@dataclass
class Live:
    """A run, what it needs to take steps, and the policy before each of them."""

    config: TrainConfig
    run: Run
    roles: Roles
    batches: Streamed
    folder: Path
    policies: dict[int, Path] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)  # uids

    def step(self, step: int, during=nullcontext) -> Collected:
        self.policies[step] = self.folder / f"policy-{step}"
        with self.roles.memory.held("export"):
            model = self.config.actor_rollout_ref.model
            export_hf(self.run, self.roles.actor.group, model, self.policies[step])
        with self.run.timed("step", {"step": step}):
            batch = self.batches.of(step)
            with self.batches.during_learning(step) as half, during():
                learn(
                    self.config,
                    *half,
                    batch.table,
                    make_controls(self.config.algorithm, self.config.actor_rollout_ref.actor, STEPS),
                    step,
                )
        self.trained += batch.table["uid"].to_pylist()
        return batch

    def is_sampled_from(self, table: pa.Table) -> int:
        """Check that each token is from one of the versions that its trajectory names, the first tokens from the first version; returns how many
        trajectories have several versions."""
        policies = {
            version: AutoModelForCausalLM.from_pretrained(path) for version, path in self.policies.items()
        }
        several = 0
        for row in table.to_pylist():
            first, last = row["weight_version"], row["last_weight_version"]
            response, sampled = row["response_ids"], np.array(row["rollout_log_probs"])
            fits = {}
            for version in range(first, last + 1):
                with torch.no_grad():
                    logits = policies[version](torch.tensor([row["prompt_ids"] + response])).logits[0]
                found = logits[len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
                found = found.gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
                fits[version] = np.abs(found - sampled) < 1e-4
            at = 0
            for version in range(first, last + 1):
                while at < len(response) and fits[version][at]:
                    at += 1
            assert at == len(response), (row["uid"], first, last, at, len(response))
            assert fits[first][0] and fits[last][-1], row["uid"]
            several += first != last
        return several


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("streamed")
    # Long responses: some are still in flight when they are interrupted, even on a machine that stands still for a second.
    overrides = ["trainer.max_staleness=2", "data.max_response_length=160"]
    with start(folder, "fully_async_cpu.yaml", 128, overrides) as (
        config,
        run,
        roles,
        inputs,
        scorer,
    ):
        prompts = epochs(inputs.loader)
        halves = partial(collect, config, prompts), partial(answer, config, prompts)
        rewards = Rewards(run, scorer, inputs.tokenizer)
        batches = make_batches(config, run, roles, rewards, STEPS, prompts, *halves)
        yield Live(config, run, roles, batches, folder)


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_partial_rollouts_go_on_with_the_next_weights(live: Live) -> None:
    live.batches.overlapped = False
    first, several = live.step(1), 0
    for step in (2, 3, 4):
        second = live.step(step)
        several = live.is_sampled_from(second.table)
        if several:
            break  # else the machine stood still: all in-flight responses had ended before the interruption
    assert first.metrics["staleness/of_several_versions"] == 0.0
    held = [uids for _, uids in live.run.wait(live.roles.engines.call("begin_generation"))]
    # How many requests are held depends on the machine; which engine holds which does not.
    assert {uid: rank for rank, uids in enumerate(held) for uid in uids} == live.batches.queue.engine_of
    unanswered = {
        uid
        for prompt in live.batches.in_flight.prompts.values()
        for requests in prompt.requests(2, greedy=False)
        for uid in requests["uid"].to_pylist()
        if uid not in prompt.answers
    }
    assert all(len(uids) == len(set(uids)) for uids in held) and {*live.batches.queue.engine_of} <= unanswered
    # Responses that had ended when the engines were interrupted; they come again.
    live.run.wait(live.roles.engines.call("land", 1.0))
    time.sleep(1.0)
    landed = live.run.wait(live.roles.engines.call("land", 1.0))
    assert [one.table for one in landed] == [None, None]  # the engines rest
    assert live.is_sampled_from(first.table) == 0
    assert several > 0
    assert second.metrics["staleness/of_several_versions"] > 0.0
    assert second.metrics["staleness/max"] == 1.0


def test_engines_go_on_while_the_models_learn(live: Live) -> None:
    live.batches.overlapped = True
    number = len(live.policies) + 1
    batches = [live.step(number)]
    in_flight = live.batches.in_flight
    came = sum(len(one.answers) for one in in_flight.prompts.values()) + 2 * len(in_flight.ready)
    assert came > 0 and live.run.seconds["meanwhile/generate"] > 0.0
    batches += [live.step(step) for step in range(number + 1, FIRST_LOSS)]
    for step, batch in enumerate(batches, number):
        live.is_sampled_from(batch.table)
        assert batch.metrics["staleness/max"] <= 2.0 and batch.step == step


def test_a_lost_engine_costs_no_trajectory(live: Live) -> None:
    batches, pids = live.batches, live.roles.engines.pids
    expected = {one.uid for one in batches.in_flight.prompts.values()}
    number = len(live.policies) + 1
    live.step(number, lambda: killed_at_once(scheduler(live.roles, 1)))
    assert live.roles.engines.pids[0] == pids[0] and live.roles.engines.pids[1] != pids[1]
    assert live.roles.restarts.count == 1
    after = [live.step(step) for step in range(number + 1, LAST_SAVED + 1)]
    known = {one.uid for one in batches.in_flight.prompts.values()} | {
        one.uid for one in batches.in_flight.ready
    }
    assert expected <= known | {uid.rpartition("/")[0] for uid in live.trained}
    for batch in after:
        live.is_sampled_from(batch.table)
        assert batch.metrics["staleness/max"] <= 2.0 and batch.metrics["staleness/too_late"] == 0.0
    assert len(live.trained) == len(set(live.trained)) == LAST_SAVED * 32


@contextmanager
def killed_at_once(pid: int) -> Iterator[None]:
    """A process is killed at the start of the block."""
    os.kill(pid, signal.SIGKILL)
    yield


def test_what_was_saved_goes_on(live: Live, tmp_path: Path, started: ExitStack) -> None:
    """Prompts and groups are the ones that were saved; engines that have none of the requests get all of them."""
    batches, saved, again = live.batches, tmp_path / "saved", tmp_path / "again"
    saved.mkdir()
    again.mkdir()
    batches.save(saved)
    before = {one.uid for one in batches.in_flight.prompts.values()}
    whole = [one.uid for one in batches.in_flight.ready]
    assert before
    empty = replace(batches.in_flight, prompts={}, ready=[], dropped=[], drawn=0, too_late=0)
    scorer = started.enter_context(make_scorer(live.config))
    rewards = replace(batches.rewards, scorer=scorer)
    other = replace(
        batches, in_flight=empty, drawn=None, queue=RequestQueue(live.roles.engines), rewards=rewards
    )
    other.load(saved)
    save_in_flight(other.in_flight, other.drawn, again)
    assert sorted(file.name for file in saved.iterdir()) == sorted(file.name for file in again.iterdir())
    for file in saved.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    for rank in (0, 1):  # a run that goes on has engines that were just started
        live.run.wait(live.roles.engines.restart(rank))
    live.roles.restarts.connect()
    live.batches = other
    eighth, ninth = (live.step(LAST_SAVED + more) for more in (1, 2))
    assert not other.in_flight.prompts and not other.in_flight.ready  # the run ends with nothing left over
    uids = set(eighth.table["prompt_uid"].to_pylist()) | set(ninth.table["prompt_uid"].to_pylist())
    assert before | set(whole) <= uids and len(uids) == 32
    live.is_sampled_from(eighth.table)
    live.is_sampled_from(ninth.table)
    assert len(live.trained) == len(set(live.trained)) == 9 * 32
