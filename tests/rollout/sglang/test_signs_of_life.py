"""Whether an engine works or hangs, judged by what it computes: SGLang on the CPU, with responses that begin and end together."""

import os
import signal
import time

import pytest

from megarl.rollout.engine import EngineCapacity, EngineError, SamplingParams
from tests.rollout.sglang.test_engine import PROMPTS, UIDS, assert_serves

LONG = SamplingParams(temperature=1.0, max_new_tokens=100, seed=3, ignore_eos=True)


def signs(engine, prompts, uids, sampling):
    """The signs of life that were seen before the first response came, and the number of all responses."""
    flight, seen = engine.flight(), set()
    flight.add([engine.answer(uid, ids, sampling) for uid, ids in zip(uids, prompts, strict=True)])
    while not (landed := flight.take(0.005)):
        seen.add(engine.last_sign)
    return seen, len(landed) + len([g for _ in iter(lambda: len(flight), 0) for g in flight.take(60.0)])


def waits(engine, count, sampling):
    """The numbers of requests, of `count`, that waited for a place: at several times before the first response came, and after the last."""
    flight, seen = engine.flight(), set()
    flight.add([engine.answer(f"w/{number}", [5, 6, 7, number], sampling) for number in range(count)])
    while not flight.take(0.005):
        seen.add(engine.waiting)
    while len(flight):
        flight.take(60.0)
    return seen, engine.waiting


def hang(engine, prompts, uids, sampling, pid):
    """Stop process `pid` once the engine has computed something for the requests; the engine's error is raised."""
    timeout, engine.config.__dict__["request_timeout"] = engine.config.request_timeout, 0.5
    before = engine.last_sign

    async def stop() -> None:
        import asyncio

        while engine.last_sign == before:
            await asyncio.sleep(0.001)
        os.kill(pid, signal.SIGSTOP)

    answers = [engine.answer(uid, ids, sampling) for uid, ids in zip(uids, prompts, strict=True)]
    try:
        list(engine.as_completed([*answers, stop()]))
    finally:
        os.kill(pid, signal.SIGCONT)
        engine.config.__dict__["request_timeout"] = timeout


def test_an_engine_gives_signs_of_life_before_it_answers(engine, sync, model_a):
    sync(model_a, 140)
    seen, landed = engine.call(signs, PROMPTS, UIDS, LONG)
    assert len(seen) > 3 and landed == len(PROMPTS)
    assert max(seen) <= time.monotonic()


def test_an_engine_tells_how_many_requests_wait_for_a_place(engine, sync, model_a):
    """The engine decodes 64 of 80 requests at a time."""
    sync(model_a, 143)
    assert engine.call("capacity") == EngineCapacity(64, 8192)
    seen, after = engine.call(waits, 80, LONG)
    assert min(seen - {0}) == 16 and max(seen) <= 80 and after == 0


def test_an_engine_that_hangs_is_found_by_the_signs_that_do_not_come(engine, sync, model_a):
    sync(model_a, 141)
    pid = engine.call("pids")[0]
    with pytest.raises(EngineError, match=r"neither computed a step nor answered .* request_timeout=0\.5 s"):
        engine.call(hang, PROMPTS, UIDS, LONG, pid)
    sync(model_a, 142)
    assert_serves(engine, model_a, 142)
