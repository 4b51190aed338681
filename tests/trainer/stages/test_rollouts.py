from types import SimpleNamespace

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import SamplingConfig
from megarl.data.trajectories import Blocks, expand_prompts, take
from megarl.rollout.engine import SamplingParams
from megarl.trainer.stages import rollouts
from tests.trainer.trajectories import answer, prompts


class FakeEngines:
    """Two engines."""

    def __init__(self):
        self.world_size, self.calls = 2, []

    def stream_each(self, method, per_rank_args):
        assert method == "stream" and len(per_rank_args) == self.world_size
        self.calls.append(per_rank_args)
        return per_rank_args


class FakeRun:
    """Answers two at a time, the last requests first."""

    blocks, restarts = Blocks(), None

    def put(self, value):
        return value

    def stream(self, streams):
        table = pa.concat_tables([answer(requests) for requests, *_ in streams if requests.num_rows])
        rows = list(range(table.num_rows))
        for start in range(0, len(rows), 2):
            yield take(table, rows[::-1][start : start + 2])


def config(n=2, estimator="grpo"):
    rollout = SimpleNamespace(n=n, temperature=0.8, top_p=1.0, top_k=-1)
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        data=SimpleNamespace(max_response_length=9),
        algorithm=SimpleNamespace(adv_estimator=estimator),
    )


def test_rows_are_the_prompts_order_and_all_were_handed_on():
    handed, engines = [], FakeEngines()
    table = rollouts.roll_out(FakeRun(), engines, prompts("a", "b", "c"), config(), 7, handed.append)
    assert table["uid"].to_pylist() == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    uids = [uid for part in handed for uid in part["uid"].to_pylist()]
    assert uids != sorted(uids) and sorted(uids) == table["uid"].to_pylist()
    ((first, sampling, apart), (second, *_)) = engines.calls[0]
    assert sampling == SamplingParams(temperature=0.8, max_new_tokens=9, seed=7)
    assert apart == 2 * rollouts.APART  # of two engines
    # the samples of a prompt are answered by one engine: they share its prefix
    assert not set(first["prompt_uid"].to_pylist()) & set(second["prompt_uid"].to_pylist())


def test_trajectories_are_handed_on_while_others_are_generated():
    events = []

    class Run(FakeRun):
        def stream(self, streams):
            for table in super().stream(streams):
                events.append("finished")
                yield table

    requests = expand_prompts(prompts("a", "b"), 2)
    rollouts.generate(Run(), FakeEngines(), requests, SamplingParams(), lambda table: events.append("asked"))
    assert events == ["finished", "asked"] * 2


def test_remax_asks_for_a_greedy_answer_to_each_prompt_too():
    engines, handed = FakeEngines(), []
    table = rollouts.roll_out(
        FakeRun(), engines, prompts("a", "b"), config(n=1, estimator="remax"), 7, handed.append
    )
    assert table["uid"].to_pylist() == ["a/0", "b/0", "a/greedy", "b/greedy"]
    assert table["prompt_uid"].to_pylist() == ["a", "b", "a", "b"]
    assert [calls[0][1].temperature for calls in engines.calls] == [0.8, 0.0]
    assert sum(part.num_rows for part in handed) == 4


@given(st.permutations(list(range(6))))
@settings(deadline=None)
def test_any_order_is_put_back(order):
    requests = expand_prompts(prompts("a", "b", "c"), 2)
    table = answer(requests)
    assert rollouts.in_order(take(table, order), requests["uid"].to_pylist())["response_ids"].equals(
        table["response_ids"]
    )


def test_validation_samples_as_its_section_says():
    section = SamplingConfig(temperature=0.5, top_p=0.9, top_k=7, n=4)
    found = rollouts.sampling_params(section, 11, 3)
    assert found == SamplingParams(temperature=0.5, top_p=0.9, top_k=7, max_new_tokens=11, seed=3)
