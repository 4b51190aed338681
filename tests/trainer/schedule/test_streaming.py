"""Responses that continue from step to step; no process is started."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow as pa
import pytest

from megarl.trainer.schedule.streaming import Streamed
from megarl.trainer.stages.nonfinite import NotFinite


@dataclass
class FakeRewards:
    run: object = None
    log: list = field(default_factory=list)

    def ask_model(self, roles, table, phase):
        self.log.append("score")
        raise NotFinite("a score is nan", table)


@dataclass(frozen=True)
class Slot:
    name: str
    gpu_id: str | None


def devices(gpu_id, *names):
    return [(Slot(name, gpu_id),) for name in names]


@pytest.mark.parametrize(
    ("gpu_id", "judge_on", "rests"), [("0", "b", True), ("0", "c", False), (None, "b", False)]
)
def test_engines_rest_while_a_reward_model_computes_on_their_gpus(gpu_id, judge_on, rests):
    rewards = FakeRewards()
    engines = SimpleNamespace(
        devices=devices(gpu_id, "a", "b"), call=lambda method: rewards.log.append(method)
    )
    judge = SimpleNamespace(group=SimpleNamespace(devices=devices(gpu_id, judge_on)))
    roles = SimpleNamespace(engines=engines, reward_model=judge, memory=SimpleNamespace(phase=None))
    given_up, group = [], SimpleNamespace(table=lambda: pa.table({"uid": ["a/0"]}))
    in_flight = SimpleNamespace(finished=lambda: [group], give_up=given_up.extend)
    run = SimpleNamespace(wait=lambda refs: refs)
    batches = Streamed(None, run, roles, rewards, iter(()), in_flight, overlapped=True, queue=None)
    batches._score(run, roles, 3)
    assert rewards.log == (["interrupt", "score", "go_on"] if rests else ["score"])
    assert given_up == [group] and str(batches.problem) == "a score is nan"


def test_scores_of_trajectories_that_are_dropped_are_given_up():
    """Otherwise the scorer would keep the scores to the end of the run."""
    given_up = []
    rewards = SimpleNamespace(scorer=SimpleNamespace(give_up=given_up.extend))
    in_flight = SimpleNamespace(drop_late=lambda step: [f"a@{step - 2}/0", f"b@{step - 2}/1"])
    batches = Streamed(None, None, None, rewards, iter(()), in_flight, overlapped=True, queue=None)
    batches._drop_late(5)
    assert given_up == ["a@3/0", "b@3/1"]
