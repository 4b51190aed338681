"""A response has the same tokens and log-probs, bit for bit, whatever else its engine does and has done."""

import asyncio
import random

from megarl.rollout.engine import SamplingParams
from tests.rollout.invariance import needs_invariance
from tests.rollout.test_streams import play_turns

pytestmark = needs_invariance

NUM_PROMPTS, TEMPLATE = 24, [40, 41, 42, 43, 44]
# 6 to 52 tokens each; all have a common prefix, some occur twice, others are prefixes of longer ones.
PROMPTS = [
    TEMPLATE + [50 + (at * (index // 2 + 3)) % 200 for at in range(1 + 2 * index)]
    for index in range(NUM_PROMPTS)
]
PROMPTS[5:8] = [PROMPTS[4], PROMPTS[20][:30], PROMPTS[20][:31]]
UIDS = [f"p{index}/0" for index in range(NUM_PROMPTS)]
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=40, seed=3)


def answers(engine, rows):
    """{uid: (tokens, log-probs)} of the prompts with these numbers, requested in this order."""
    generations = engine.call(
        "generate", [PROMPTS[row] for row in rows], [UIDS[row] for row in rows], SAMPLING
    )
    return {g.uid: (g.response_ids, g.log_probs) for g in generations}


def some(whole, rows):
    return {UIDS[row]: whole[UIDS[row]] for row in rows}


def assert_alone_as_together(engine, prompts, num_tokens, step=1):
    """Each prompt, or each `step`-th one, has the same tokens and log-probs requested with all others and alone; for engines of all kinds."""
    sampling = SamplingParams(temperature=1.0, max_new_tokens=num_tokens, seed=3, ignore_eos=True)
    uids = [f"p{index}/0" for index in range(len(prompts))]
    together = engine.call("generate", prompts, uids, sampling)
    for row in range(0, len(prompts), step):
        engine.call("flush_cache")
        (alone,) = engine.call("generate", prompts[row : row + 1], uids[row : row + 1], sampling)
        assert (alone.response_ids, alone.log_probs) == (together[row].response_ids, together[row].log_probs)


def late(engine, seed):
    """All prompts, each requested at some time within the first 60 ms, the time of some 5 decode steps."""
    delays = random.Random(seed)

    async def ask(row, seconds):
        await asyncio.sleep(seconds)
        return await engine.answer(UIDS[row], PROMPTS[row], SAMPLING)

    engine.flush_cache()
    asked = [ask(row, delays.uniform(0.0, 0.06)) for row in range(NUM_PROMPTS)]
    generations = [g for part in engine.as_completed(asked) for g in part]
    return {g.uid: (g.response_ids, g.log_probs) for g in generations}


def test_others_and_the_cache_have_no_part_in_a_response(engine, sync, model_a):
    sync(model_a, 80)
    everything = range(NUM_PROMPTS)
    whole = answers(engine, everything)
    assert len({len(tokens) for tokens, _ in whole.values()}) > 3  # they end one after the other
    assert answers(engine, everything) == whole  # with all prompts in the cache
    engine.call("flush_cache")
    assert answers(engine, everything[::-1]) == whole
    engine.call("flush_cache")
    half = list(everything[1::2])  # as after the loss of an engine that had answered the others
    assert answers(engine, half) == some(whole, half)
    for row in (0, 7, 23):
        engine.call("flush_cache")
        assert answers(engine, [row]) == some(whole, [row])
        assert answers(engine, [row]) == some(whole, [row])


def test_nor_when_they_were_asked_for(engine, sync, model_a):
    sync(model_a, 81)
    whole = answers(engine, range(NUM_PROMPTS))
    for seed in range(3):
        assert engine.call(late, seed) == whole


def test_what_was_generated_may_be_in_the_cache_or_not(engine, sync, model_a):
    """A prompt that continues a response: the response's part is cached, computed token by token, or is computed in one prefill."""
    sync(model_a, 82)
    first = answers(engine, range(16))
    longer = [PROMPTS[row] + first[UIDS[row]][0] + [45, 46] for row in range(16)]
    cached = engine.call("generate", longer, UIDS[:16], SAMPLING)
    engine.call("flush_cache")
    computed = engine.call("generate", longer, UIDS[:16], SAMPLING)
    assert [g.log_probs for g in cached] == [g.log_probs for g in computed]
    assert [g.response_ids for g in cached] == [g.response_ids for g in computed]


def test_trajectories_of_several_turns(engine, sync, model_a):
    sync(model_a, 83)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=60, seed=3, ignore_eos=True)
    uids = ["a/0", "b/0", "c/0", "d/0"]
    together = engine.call(play_turns, uids, sampling)
    engine.call("flush_cache")
    (alone,) = engine.call(play_turns, uids[:1], sampling)
    assert (alone.response_ids, alone.log_probs) == (together[0].response_ids, together[0].log_probs)
