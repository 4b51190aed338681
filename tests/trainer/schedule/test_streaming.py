"""Responses that continue from step to step; no process is started."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow as pa
import pytest

from megarl.config import FilterGroupsConfig
from megarl.trainer.schedule.in_flight import InFlight, InFlightPrompt
from megarl.trainer.schedule.modes import make_batches
from megarl.trainer.schedule.streaming import Streamed
from megarl.trainer.stages.nonfinite import NotFinite
from tests.trainer.healthy import configuration
from tests.trainer.trajectories import answer, prompts, scored


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


def test_engines_go_on_while_scores_are_awaited(monkeypatch):
    """Else no environment would be answered for minutes, and engines at rest would seem to hang."""
    log = []

    class SlowRewards(FakeRewards):
        def ask_model(self, roles, table, phase):
            return None

        def awaits(self, table, seconds):
            return len(log) < 2

        def collect(self, table, when, by_model):
            log.append("collect")
            return scored({"a": [1.0]})

    monkeypatch.setattr(Streamed, "_land", lambda self, run: log.append("land"))
    in_flight = SimpleNamespace(
        finished=lambda: [SimpleNamespace(table=lambda: pa.table({"uid": ["a/0"]}))],
        num_prompts=1,
        keep=lambda groups, trained: log.append("keep"),
    )
    run = SimpleNamespace(timed=lambda phase: nullcontext())
    roles = SimpleNamespace(reward_model=None, memory=SimpleNamespace(phase=None))
    queue = SimpleNamespace(apart=0.0)
    batches = Streamed(
        configuration(), run, roles, SlowRewards(), iter(()), in_flight, overlapped=True, queue=queue
    )
    batches._score(run, roles, 3)
    assert log == ["land", "land", "collect", "keep"]


def test_the_engines_have_their_caches_while_scores_are_awaited_after_a_reward_models():
    """Without them an engine refuses a request, and the run ends; a new engine has no weights before the queue is opened."""
    log, phases = [], []

    class MixedRewards(FakeRewards):
        def ask_model(self, roles, table, phase):
            with phase("score_model"):
                return "scores"

        def awaits(self, table, seconds):
            return log.count("land") < 2

        def collect(self, table, when, by_model):
            log.append(f"collect with {by_model}")
            return scored({"a": [1.0]})

    @contextmanager
    def held(name):
        phases.append(name)
        yield

    class Landing(Streamed):
        def _land(self, run):
            assert phases[-1] == "generate"
            log.append("land")

    in_flight = SimpleNamespace(
        finished=lambda: [SimpleNamespace(table=lambda: pa.table({"uid": ["a/0"]}))],
        num_prompts=1,
        keep=lambda groups, trained: log.append("keep"),
    )
    run = SimpleNamespace(timed=lambda phase: nullcontext(), wait=lambda refs: refs)
    engines = SimpleNamespace(devices=devices("0", "a"), call=log.append)
    judge = SimpleNamespace(group=SimpleNamespace(devices=devices("0", "a")))
    roles = SimpleNamespace(
        engines=engines, reward_model=judge, memory=SimpleNamespace(phase=held, held=held)
    )
    queue = SimpleNamespace(apart=0.0, open=lambda run: log.append("open"))
    given = (configuration(), run, roles, MixedRewards(), iter(()), in_flight)
    Landing(*given, overlapped=False, queue=queue)._score(run, roles, 3)
    assert log == ["interrupt", "go_on", "open", "land", "land", "collect with scores", "keep"]
    assert phases == ["score_model", "generate"]
    # Where no score is awaited the caches stay away: the models may learn next.
    Landing(*given, overlapped=False, queue=queue)._score(run, roles, 3)
    assert log[-4:] == ["interrupt", "go_on", "collect with scores", "keep"] and phases[-1] == "score_model"


def test_scores_of_trajectories_that_are_dropped_are_given_up():
    """Otherwise the scorer would keep the scores to the end of the run."""
    given_up = []
    rewards = SimpleNamespace(scorer=SimpleNamespace(give_up=given_up.extend))
    in_flight = SimpleNamespace(drop_late=lambda step: [f"a@{step - 2}/0", f"b@{step - 2}/1"])
    batches = Streamed(None, None, None, rewards, iter(()), in_flight, overlapped=True, queue=None)
    batches._drop_late(5)
    assert given_up == ["a@3/0", "b@3/1"]


@pytest.mark.parametrize("greedy", [False, True])
def test_no_requests_are_made_of_prompts_that_engines_have(monkeypatch, greedy):
    """Engines that have room look for further prompts in every call, and most of the thousands in flight are with engines."""
    in_flight = InFlight(FilterGroupsConfig(), 3, 4 + greedy, 1, 50)
    in_flight.ask(prompts("a", "b", "c"), version=1)
    sent, some, new = in_flight.prompts.values()
    whole = {one.uid: pa.concat_tables(one.requests(4, greedy)) for one in in_flight.prompts.values()}
    in_flight.receive(answer(whole[some.uid].slice(0, 1)))
    own = [*whole[sent.uid]["uid"].to_pylist(), *whole[some.uid]["uid"].to_pylist()[1:3]]
    queue = SimpleNamespace(engine_of=dict.fromkeys(own, 0))
    config = configuration(
        "actor_rollout_ref.rollout.n=4", f"algorithm.adv_estimator={'remax' if greedy else 'grpo'}"
    )
    made, requests = [], InFlightPrompt.requests

    def counted(asked, n, greedy):
        made.append(asked.uid)
        return requests(asked, n, greedy)

    monkeypatch.setattr(InFlightPrompt, "requests", counted)
    batches = Streamed(config, None, None, None, iter(()), in_flight, overlapped=True, queue=queue)
    found = {prompt.content[0][0]["prompt_uid"][0].as_py(): prompt for prompt in batches._unsent()}
    assert made == [some.uid, new.uid] == list(found)
    for one, left in ((some, whole[some.uid].slice(3)), (new, whole[new.uid])):
        assert found[one.uid].uids == left["uid"].to_pylist()
        assert pa.concat_tables([table for table, _ in found[one.uid].content]).equals(left)


def test_a_generation_has_as_many_prompts_as_the_data_says():
    filtered = "algorithm.filter_groups.enable=true"
    config = configuration("trainer.mode=partial_rollouts", "data.gen_batch_size=48", filtered)
    roles = SimpleNamespace(engines=None)
    batches = make_batches(config, None, roles, None, 50, iter(()), None, None)
    assert batches.in_flight.gen_batch_size == 48 and batches.in_flight.num_prompts == 16
