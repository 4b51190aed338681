from types import SimpleNamespace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import SamplingConfig
from megarl.data.trajectories import Blocks, expand_prompts, take
from megarl.rollout.engine import EngineCapacity, SamplingParams
from megarl.trainer.stages import rollouts
from megarl.trainer.stages.request_queue import APART
from megarl.trainer.workers.dispatch import Landed
from tests.trainer.trajectories import answer, prompts


class FakeEngines:
    """Two engines that answer two requests a call, the newest first."""

    def __init__(self):
        self.world_size, self.sent, self.seconds = 2, [[], []], set()
        self.processes = [SimpleNamespace(rank=rank, mark=f"m{rank}") for rank in range(2)]
        self.has = [[], []]

    def call_rank(self, engine, method, *args):
        return getattr(self, method)(engine, *args)

    def begin_generation(self, engine, of, anew):
        assert anew and not self.has[engine]
        return EngineCapacity(64, 10**6), []

    def land(self, engine, seconds, parts, of):
        self.seconds.add(seconds)
        self.sent[engine] += parts
        for requests, _ in parts:
            self.has[engine] += [requests.slice(row, 1) for row in range(requests.num_rows)]
        ended = [self.has[engine].pop() for _ in range(min(2, len(self.has[engine])))]
        return Landed(answer(pa.concat_tables(ended)) if ended else None, 0, seconds)


class FakeRun:
    blocks, restarts = Blocks(), None

    def wait(self, refs, busy=()):
        return refs

    def refuse_silence(self, since, processes):
        pass


def config(n=2, estimator="grpo"):
    rollout = SimpleNamespace(n=n, temperature=0.8, top_p=1.0, top_k=-1, min_p=0.0)
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        data=SimpleNamespace(max_response_length=9),
        algorithm=SimpleNamespace(adv_estimator=estimator),
    )


def test_rows_are_the_prompts_order_and_all_were_handed_on():
    handed, engines = [], FakeEngines()
    table, *_ = rollouts.roll_out(FakeRun(), engines, prompts("a", "b", "c"), config(), 7, handed.append)
    assert table["uid"].to_pylist() == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    uids = [uid for part in handed for uid in part["uid"].to_pylist()]
    assert uids != sorted(uids) and sorted(uids) == table["uid"].to_pylist()
    ((first, sampling),), ((second, _),) = engines.sent
    assert sampling == SamplingParams(temperature=0.8, max_new_tokens=9, seed=7)
    assert engines.seconds == {2 * APART}  # for two engines
    # One engine answers all samples of a prompt, since they share the prefix in its cache.
    assert not set(first["prompt_uid"].to_pylist()) & set(second["prompt_uid"].to_pylist())


def test_trajectories_are_handed_on_while_others_are_generated():
    events = []

    class Run(FakeRun):
        def wait(self, refs, busy=()):
            events.append("finished" if any(isinstance(ref, Landed) for ref in refs) else "opened")
            return refs

    requests = expand_prompts(prompts("a", "b"), 3)
    rollouts.generate(Run(), FakeEngines(), requests, SamplingParams(), lambda table: events.append("asked"))
    assert events == ["opened", *["finished", "asked", "asked"] * 2]


def test_remax_asks_for_a_greedy_answer_to_each_prompt_too():
    """The same engine generates a prompt's samples and its greedy answer, which does not wait for other samples."""
    engines, handed = FakeEngines(), []
    table, *_ = rollouts.roll_out(
        FakeRun(), engines, prompts("a", "b"), config(n=1, estimator="remax"), 7, handed.append
    )
    assert table["uid"].to_pylist() == ["a/0", "b/0", "a/greedy", "b/greedy"]
    assert table["prompt_uid"].to_pylist() == ["a", "b", "a", "b"]
    for parts, name in zip(engines.sent, "ab", strict=True):
        assert [(requests["uid"].to_pylist(), how.temperature) for requests, how in parts] == [
            ([f"{name}/0"], 0.8),
            ([f"{name}/greedy"], 0.0),
        ]
    assert sum(part.num_rows for part in handed) == 4


@given(st.permutations(list(range(6))))
def test_any_order_is_put_back(order):
    requests = expand_prompts(prompts("a", "b", "c"), 2)
    table = answer(requests)
    assert rollouts.in_order(take(table, order), requests["uid"].to_pylist())["response_ids"].equals(
        table["response_ids"]
    )


def test_validation_samples_as_its_section_says():
    section = SamplingConfig(temperature=0.5, top_p=0.9, top_k=7, n=4)
    found = rollouts.sampling_params(section, 11, 3)
    assert found == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=11, seed=3, return_experts=False
    )
