"""Requests that are interrupted while weights change or memory is released, and go on from where they were."""

import time
from dataclasses import replace

import numpy as np
import pytest

from megarl.data.routing import RoutingShape
from megarl.rollout.engine import EngineError, SamplingParams
from megarl.rollout.sglang.requests import CapturedRouting, Response
from tests.rollout.invariance import needs_invariance
from tests.rollout.sglang.test_engine import PROMPTS, UIDS, hf_greedy, hf_log_probs

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=100, seed=3, ignore_eos=True)


def take_off(engine, prompts, uids, sampling):
    """Start requests that run from now on, while the engine is called for other things."""
    engine.sign_before, engine.in_flight = engine.last_sign, engine.flight()
    engine.in_flight.add([engine.answer(uid, ids, sampling) for uid, ids in zip(uids, prompts, strict=True)])


def fly(engine, seconds):
    """The responses that have ended by then."""
    return engine.in_flight.take(seconds)


def fly_to_the_first_tokens(engine):
    """The responses that have ended when the engine has computed something for them."""
    found, end = [], time.monotonic() + 60
    while engine.last_sign == engine.sign_before and time.monotonic() < end:
        found += engine.in_flight.take(0.005)
    return found


def land(engine):
    found = []
    while len(engine.in_flight):
        found += engine.in_flight.take(60.0)
    return found


def interrupt_often(engine, seconds):
    """Interrupt all running requests again and again; returns all responses, and how many requests were open at each interruption."""
    found, open_ones = [], []
    while len(engine.in_flight):
        # The first time early: where this process stands still for a moment, the engine goes on, perhaps to the end of all responses.
        found += engine.in_flight.take(seconds if open_ones else seconds / 10)
        engine.release_memory(["kv_cache"])
        open_ones.append(len(engine.in_flight))
        engine.resume_memory(["kv_cache"])
    return found, open_ones


@needs_invariance
def test_an_interrupted_response_is_the_one_that_was_left_alone(engine, sync, model_a):
    sync(model_a, 120)
    prompts, uids = [ids[:20] for ids in PROMPTS] * 4, [f"p{row}/0" for row in range(4 * len(PROMPTS))]
    sampling = SamplingParams(temperature=1.0, max_new_tokens=100, seed=3)
    whole = {g.uid: g for g in engine.call("generate", prompts, uids, sampling)}
    assert len({len(g.response_ids) for g in whole.values()}) > 5  # some end early, by their end token
    engine.call(take_off, prompts, uids, sampling)
    found, open_ones = engine.call(interrupt_often, 0.03)
    assert sum(number > 0 for number in open_ones) > 1, open_ones
    assert sorted(g.uid for g in found) == sorted(uids)
    for generation in found:
        expected = whole[generation.uid]
        assert generation.response_ids == expected.response_ids, generation.uid
        assert generation.log_probs == expected.log_probs
        assert generation.finish_reason == expected.finish_reason


def test_a_response_goes_on_with_the_weights_that_came_meanwhile(engine, sync, model_a, model_b):
    """By Hugging Face: the response's first tokens are the old weights', and the rest is the new weights' continuation of them."""
    sync(model_a, 130)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    engine.call(take_off, PROMPTS, UIDS, greedy)
    early = engine.call(fly_to_the_first_tokens)
    sync(model_b, 131)
    late = engine.call(land)
    assert sorted(g.uid for g in early + late) == sorted(UIDS)
    late = [g for g in late if g.weight_version == 130]
    assert late
    for generation in late:
        assert generation.last_weight_version == 131
        prompt, ids = PROMPTS[UIDS.index(generation.uid)], list(generation.response_ids)
        by_a, by_b = hf_log_probs(model_a, prompt, ids), hf_log_probs(model_b, prompt, ids)
        is_a, is_b = (np.abs(np.subtract(generation.log_probs, by)) < 1e-4 for by in (by_a, by_b))
        changed = int(np.argmin(is_a))
        assert 0 < changed < 100 and is_a[:changed].all() and is_b[changed:].all(), generation.uid
        assert ids[:changed] == hf_greedy(model_a, prompt, changed)
        assert ids[changed:] == hf_greedy(model_b, prompt + ids[:changed], 100 - changed)


def take_off_and_listen(engine, prompts, uids, sampling):
    """As `take_off`, and the tokens of each response are also reported one by one."""
    engine.heard = {uid: [] for uid in uids}
    engine.in_flight = engine.flight()
    engine.in_flight.add(
        [
            engine.answer(uid, ids, sampling, heard=engine.heard[uid].append)
            for uid, ids in zip(uids, prompts, strict=True)
        ]
    )


def test_tokens_that_are_heard_are_those_of_the_response(engine, sync, model_a):
    sync(model_a, 150)
    engine.call(take_off_and_listen, PROMPTS, UIDS, SAMPLING)
    found, open_ones = engine.call(interrupt_often, 0.03)
    assert sum(number > 0 for number in open_ones) > 1, open_ones
    heard = engine.call("heard")
    for generation in found:
        parts = heard[generation.uid]
        assert len(parts) > 5 and [token for part in parts for token in part] == list(generation.response_ids)


def test_requests_that_come_meanwhile_wait(engine, sync, model_a, model_b):
    sync(model_a, 140)
    engine.call("begin_update", 141)
    engine.call(take_off, PROMPTS[:2], UIDS[:2], SAMPLING)
    assert engine.call(fly, 0.3) == []
    with pytest.raises(EngineError):
        engine.call("receive_weights")
        engine.call("finish_update")
    sync(model_b, 142)
    assert {(g.weight_version, g.last_weight_version) for g in engine.call(land)} == {(142, 142)}


def piece(reason, ids, version=3):
    """An answer in SGLang's format."""
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "weight_versions": [{"version": str(version), "start": 0, "end": len(ids)}] if ids else None,
            "output_token_logprobs": [(-0.5, token, None) for token in ids],
        },
    }


def test_pieces_make_a_response():
    response = Response("a", SamplingParams(max_new_tokens=6), frozenset([9]))
    assert response.add(piece("abort", [4, 5]), 3, interrupted=True) is None
    assert response.rest.max_new_tokens == 4
    waited = piece("abort", [])
    assert response.add(waited, 4, interrupted=True) is None
    waited["meta_info"]["weight_versions"] = [{"version": "4", "start": 0, "end": 0}]
    assert response.add(waited, 4, interrupted=True) is None
    whole = response.add(piece("stop", [6, 9], version=5), 5, interrupted=False)
    assert (whole.response_ids, whole.log_probs, whole.finish_reason) == ([4, 5, 6, 9], [-0.5] * 4, "stop")
    assert (whole.weight_version, whole.last_weight_version) == (3, 5)


@pytest.mark.parametrize(
    "ids, ignore_eos, reason",
    [
        ([4, 9], False, "stop"),
        ([4] * 6, False, "length"),
        ([4] * 5 + [9], True, "length"),
        ([4, 9], True, None),
    ],
)
def test_a_response_may_be_whole_when_it_is_interrupted(ids, ignore_eos, reason):
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=ignore_eos)
    found = Response("a", sampling, frozenset([9])).add(piece("abort", ids), 3, interrupted=True)
    assert (found and found.finish_reason) == reason


def test_a_response_that_can_be_continued_no_more_has_ended():
    response = Response("a", SamplingParams(max_new_tokens=6), room=3)
    assert response.add(piece("abort", [4, 5, 6]), 3, interrupted=True) is None
    whole = response.add(piece("abort", [7]), 3, interrupted=True)
    assert (whole.response_ids, whole.finish_reason) == ([4, 5, 6, 7], "length")


def test_responses_that_are_interrupted_at_the_end_of_the_models_context(engine, sync, model_a):
    """SGLang ends responses two tokens before the end, and refuses inputs that reach the last six tokens."""
    sync(model_a, 120)
    context = engine.call("context_length")
    prompt = [1 + token % 50 for token in range(context - 20)]
    uids = [f"p{row}/0" for row in range(16)]
    engine.call(take_off, [prompt] * len(uids), uids, replace(SAMPLING, max_new_tokens=20))
    found, _ = engine.call(interrupt_often, 0.001)
    assert sorted(g.uid for g in found) == sorted(uids)
    assert {g.finish_reason for g in found} == {"length"}
    assert {len(g.response_ids) for g in found} <= {14, 15, 16, 17, 18}


def test_what_a_penalty_has_to_see_is_not_cut():
    sampling = SamplingParams(max_new_tokens=6, presence_penalty=0.5)
    response = Response("a", sampling, frozenset([9]), routing=ROUTING, experts_start=1)
    assert response.add(with_experts(piece("abort", [4, 5]), 3), 3, interrupted=True) is None
    assert response.ids == [] and response.rest.max_new_tokens == 6
    assert response.experts == [] and response.experts_from == 1


# The second and the third of three layers have experts, two for each token.
ROUTING = CapturedRouting(3, (1, 2), RoutingShape(2, 2, 8))


def with_experts(answer, num_tokens):
    """The answer with the experts of its tokens in the format of SGLang's scheduler; here an expert's number is that of its layer."""
    layers = np.arange(3, dtype="<u2")[None, :, None] + np.zeros((num_tokens, 1, 2), "<u2")
    answer["meta_info"]["routed_experts"] = layers.tobytes()
    return answer


def test_pieces_bring_the_experts_of_tokens_not_known_yet():
    """A prompt of 4 tokens, the first 2 with known experts: an interrupted piece, a piece that lost its experts, and the last piece."""
    response = Response(
        "a", SamplingParams(max_new_tokens=6), frozenset([9]), routing=ROUTING, experts_start=2
    )
    assert response.experts_from == 2
    assert response.add(with_experts(piece("abort", [4, 5]), 3), 3, interrupted=True) is None
    assert response.experts_from == 5  # the last of 6 tokens has not passed through the model
    lost = piece("abort", [6])  # its request was put back into SGLang's queue, and aborted there
    assert response.add(lost, 3, interrupted=True) is None
    assert response.ids == [4, 5] and response.experts_from == 5
    whole = response.add(with_experts(piece("stop", [6, 9]), 2), 3, interrupted=False)
    assert whole.response_ids == [4, 5, 6, 9] and whole.routed_experts.shape == (5, 2, 2)
    assert whole.routed_experts.dtype == np.uint8 and (whole.routed_experts == [[[1, 1], [2, 2]]]).all()


@pytest.mark.parametrize(
    "answer, interrupted",
    [(piece("abort", [4]), False), (piece("stop", [4], version=2), False), (piece("error", [4]), True)],
)
def test_what_ends_otherwise_is_refused(answer, interrupted):
    with pytest.raises(EngineError, match=r"a: finished by .*instead of 3"):
        Response("a", SAMPLING).add(answer, 3, interrupted)
