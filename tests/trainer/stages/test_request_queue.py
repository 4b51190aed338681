"""Which engine gets which prompt, and when; engines and their clock are simulated."""

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from megarl.cluster import WorkerDied
from megarl.data.trajectories import expand_prompts
from megarl.rollout.engine import EngineCapacity, SamplingParams
from megarl.trainer.stages.request_queue import APART, PromptRequests, RequestQueue, by_prompt, joined
from megarl.trainer.stages.rollouts import answer_all
from megarl.trainer.workers.dispatch import Landed
from tests.trainer.trajectories import prompts

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def group_of(name, n=2, tokens=10, longest=20):
    return PromptRequests([f"{name}/{row}" for row in range(n)], tokens, longest, name)


def names(dealt):
    return [[prompt.content for prompt in own] for own in dealt]


def queue_of(*capacities):
    """A queue for engines with these capacities: (requests, tokens)."""
    queue = RequestQueue(SimpleNamespace(world_size=len(capacities), processes=[]))
    queue.capacities = {number: EngineCapacity(*capacity) for number, capacity in enumerate(capacities)}
    return queue


def deal(queue, groups):
    return names(queue.deal(groups, sum(len(group.uids) for group in groups)))


def test_a_first_wave_is_spread_evenly_and_prompts_stay_together():
    queue = queue_of((8, 10**6), (8, 10**6))
    groups = [group_of(name) for name in "abcde"]
    assert deal(queue, groups) == [["a", "c", "e"], ["b", "d"]]
    assert Counter(queue.engine_of.values()) == {0: 6, 1: 4}
    assert {uid.split("/")[0] for uid, engine in queue.engine_of.items() if engine == 1} == {"b", "d"}


def test_a_wave_is_as_large_as_the_engines_and_a_little_more():
    queue = queue_of((8, 10**6), (4, 10**6))
    groups = [group_of(f"p{number}", 1) for number in range(100)]
    first = deal(queue, groups)
    # Each engine gets a quarter more requests than it computes at a time; these wait within the engine.
    assert [len(own) for own in first] == [8 + 2, 4 + 1]
    assert deal(queue, groups[15:]) == [[], []]  # no engine has reported room


def test_the_cache_bounds_the_first_wave():
    """A prompt counts as 30 tokens: ten of its own, and half of the longest response for each of its samples."""
    queue = queue_of((64, 100), (64, 20))
    groups = [group_of(f"p{number}") for number in range(20)]
    # The bound is 125 tokens: 100 and a quarter. The other engine gets one prompt, although that may need more than its cache.
    assert [len(own) for own in deal(queue, groups)] == [4, 1]


def test_the_engine_with_room_gets_the_next_prompt():
    queue = queue_of((4, 10**6), (4, 10**6), (4, 10**6))
    groups = [group_of(f"p{number}", 1) for number in range(40)]
    deal(queue, groups)
    queue.waiting = {0: 1, 1: 0, 2: 1}  # the second engine decodes all of its requests
    assert [len(own) for own in deal(queue, groups[15:])] == [0, 0, 0]  # but it has as many as allowed
    for uid in [uid for uid, engine in queue.engine_of.items() if engine == 1][:2]:
        del queue.engine_of[uid]
    assert deal(queue, groups[15:]) == [[], ["p15"], []]
    # Two places became free between two calls, so that two requests may wait.
    del queue.engine_of["p15/0"]
    queue.landed = {1: 2}
    assert deal(queue, groups[16:]) == [[], ["p16", "p17"], []]


def test_at_the_end_an_engine_keeps_no_more_waiting_than_its_share():
    """The last prompts go to the engine that has room."""
    queue = queue_of((16, 10**6), (16, 10**6))
    groups = [group_of(f"p{number}", 1) for number in range(3)]
    queue.engine_of = {f"q{number}": number % 2 for number in range(28)}  # 14 of 16 places of each are taken
    queue.waiting = {0: 0, 1: 2}
    assert [len(own) for own in deal(queue, groups)] == [2, 0]


def test_a_lost_engine_gets_nothing():
    queue = queue_of((8, 10**6), (8, 10**6))
    queue.lost = {0}
    assert deal(queue, [group_of("a"), group_of("b")]) == [[], ["a", "b"]]


def test_no_more_prompts_are_looked_at_than_there_is_room_for():
    queue, looked = queue_of((2, 10**6)), []

    def endless():
        while True:
            looked.append(len(looked))
            yield group_of(f"p{looked[-1]}")

    (own,) = names(queue.deal(endless(), 1000))
    assert len(own) == 2 and len(looked) <= 3
    queue.waiting = {0: 4}
    assert names(queue.deal(endless(), 1000)) == [[]] and len(looked) <= 3


def test_requests_of_a_prompt_that_are_sampled_differently_stay_together():
    sampled, greedy = SamplingParams(), SamplingParams(temperature=0.0, max_new_tokens=7)
    parts = [(expand_prompts(prompts("a", "b"), 2), sampled), (expand_prompts(prompts("a", "b"), 1), greedy)]
    parts[1] = (parts[1][0].set_column(0, "uid", pa.array(["a/greedy", "b/greedy"])), greedy)
    first, second = by_prompt(parts, lambda uid: uid != "a/1")
    assert list(first.uids) == ["a/0", "a/greedy"] and list(second.uids) == ["b/0", "b/1", "b/greedy"]
    assert (first.tokens, first.longest) == (1, sampled.max_new_tokens)
    (mine, how), (others, how_others) = joined(parts, [first, second])
    assert mine["uid"].to_pylist() == ["a/0", "b/0", "b/1"] and how is sampled
    assert others["uid"].to_pylist() == ["a/greedy", "b/greedy"] and how_others is greedy


class Engines:
    """Two engines that answer one request a call, the oldest first; `dies`: the number of calls after which engine 1 dies."""

    world_size = 2

    def __init__(self, dies=None):
        self.processes = [SimpleNamespace(rank=rank, mark=f"m{rank}") for rank in range(2)]
        self.has: list[list[str]] = [[], []]
        self.log: list[tuple[int, list[str]]] = []
        self.answered, self.calls, self.dies = Counter(), 0, dies

    def call_rank(self, engine, method, *args):
        return engine, getattr(self, method)(engine, *args)

    def begin_generation(self, engine, of, anew):
        if anew:
            self.has[engine].clear()
        return EngineCapacity(2, 10**6), list(self.has[engine])

    def land(self, engine, seconds, parts, of):
        assert seconds == APART * 2
        uids = [uid for requests, _ in parts for uid in requests["uid"].to_pylist()]
        self.log.append((engine, uids))
        self.has[engine] += uids
        self.calls += 1
        ended = [self.has[engine].pop(0)] if self.has[engine] else []
        self.answered.update(ended)
        return Landed(pa.table({"uid": ended}) if ended else None, 0, seconds / 2)


class Run:
    blocks = None

    def __init__(self, engines, restarts=None):
        self.engines, self.restarts, self.gone = engines, restarts, False
        if restarts is not None:
            restarts.run = self

    def wait(self, calls, busy=()):
        assert {*busy} <= {"m0", "m1"}
        engines = self.engines
        if any(engine == 1 for engine, _ in calls) and (
            self.gone or (engines.dies is not None and engines.calls > engines.dies)
        ):
            self.gone, engines.dies = True, None
            process = SimpleNamespace(role="rollout", rank=1, host="h", pid=3, log_path="l")
            raise WorkerDied(process, "killed", "")
        return [answer for _, answer in calls]

    def refuse_silence(self, since, processes):
        pass


class Restarts:
    def __init__(self, come_late):
        self.come_late, self.replaced, self.revived = come_late, 0, 0

    def revive(self, failure):
        self.revived, self.run.gone = self.revived + 1, False
        self.run.engines.has[1] = []

    def lose(self, failure):
        return [failure.rank]

    def serve_all(self):
        pass

    def replace_lost(self):
        self.replaced += 1


def answered(engines, run, count=10):
    requests, handed = expand_prompts(prompts(*(f"p{number}" for number in range(count // 2))), 2), []
    table, idle, _ = answer_all(
        run, engines, [(requests, SamplingParams())], lambda part: handed.extend(part["uid"].to_pylist())
    )
    assert table["uid"].to_pylist() == requests["uid"].to_pylist()
    assert sorted(handed) == sorted(table["uid"].to_pylist())  # no trajectory is lost or repeated
    assert idle >= 0.0
    return handed


def test_all_are_answered_once():
    engines = Engines()
    answered(engines, Run(engines))
    assert set(engines.answered.values()) == {1}
    engine_of = {uid: engine for engine, uids in engines.log for uid in uids}
    # Ten answers at one a call need ten calls: an engine without requests is not called.
    assert len(engines.log) == 10
    assert all(engine_of[f"p{number}/0"] == engine_of[f"p{number}/1"] for number in range(5))


def test_the_work_of_a_call_does_not_grow_with_engines_times_requests(monkeypatch):
    """The controller collects the marks of working engines from all requests at most twice a call, not once for each engine."""
    passes, marks = [], RequestQueue.marks.fget
    monkeypatch.setattr(RequestQueue, "marks", property(lambda queue: passes.append(queue) or marks(queue)))
    engines = Engines()
    engines.processes *= 50
    queue = RequestQueue(engines)
    queue.open(Run(engines))
    queue.deal([group_of("a", 1)], 1)
    queue.exchange(Run(engines), [[], []])
    assert len(passes) == 2


def test_what_a_failed_generation_has_left_behind_is_given_up():
    """Prompts return in the next epoch with the same uids: otherwise their old answers would be taken for new ones."""
    engines = Engines()
    engines.has = [["p1/0", "x/0"], ["p1/1"]]
    answered(engines, Run(engines))
    assert "x/0" not in engines.answered


@pytest.mark.parametrize("dies", [0, 2, 5])
@pytest.mark.parametrize("come_late", [False, True])
def test_the_prompts_of_a_lost_engine_go_back_into_the_queue(dies, come_late):
    engines, restarts = Engines(dies), Restarts(come_late)
    run = Run(engines, restarts)
    answered(engines, run)
    assert (restarts.revived, restarts.replaced) == ((0, 1) if come_late else (1, 0))
    # Requests that engine 0 answered during the call in which engine 1 died are not sent again.
    kept = [uid for engine, uids in engines.log for uid in uids if engine == 0]
    assert len(kept) == len(set(kept))
    if come_late:  # engine 1 is not called again: engine 0 answers all
        assert 1 not in [engine for engine, _ in engines.log[dies + 2 :]]


def test_without_restarts_a_lost_engine_ends_the_run():
    engines = Engines(dies=2)
    with pytest.raises(WorkerDied):
        answered(engines, Run(engines))


def test_engines_idle_less_than_with_equal_parts(monkeypatch):
    """Long answers cluster by prompt; each engine has 96 requests on average, and computes 4 at a time."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    dealing = importlib.import_module("dealing")
    options = SimpleNamespace(
        engines=8, prompts=96, samples=8, median=300.0, longest=1600, spread=0.8, within=0.3, base=6.0, each=0.05, draws=2
    )  # fmt: skip
    found = dealing.compare(options, places=4)
    before, after = found["equal_parts"], found["as_room"]
    assert after["seconds"] < 0.9 * before["seconds"]
    assert after["idle"] < 0.5 * before["idle"]
