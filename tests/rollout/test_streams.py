"""Responses of a real engine as they finish, and trajectories of several turns in which the engine is the policy."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from examples.tiny_model import train_tokenizer
from megarl.config.schema.rollout import MultiTurnConfig
from megarl.data.trajectories import Blocks, expand_prompts
from megarl.environments.environment import Environment, StepResult, Task
from megarl.rollout.engine import NoValidWeightsError, SamplingParams, WeightSyncError
from megarl.rollout.turns import Player
from megarl.trainer.stages.rollouts import answer_all
from megarl.trainer.workers.engine import EngineWorker
from tests.rollout.sglang.test_engine import PROMPTS, UIDS, hf_log_probs
from tests.trainer.trajectories import prompts

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=12, seed=3, ignore_eos=True)


def leave_early(engine):
    """One response of a stream that is closed before its other, long response ends; then further answers of the engine."""
    long = SamplingParams(max_new_tokens=100, ignore_eos=True)
    coroutines = [engine.answer("short/0", [5], SAMPLING), engine.answer("long/0", [6], long)]
    results = engine.as_completed(coroutines)
    (first,) = next(results)
    results.close()
    engine.flush_cache()  # SGLang refuses this while a request runs
    return first, engine.generate(PROMPTS[:2], UIDS[:2], SAMPLING)


def stream(engine, prompts, uids, sampling):
    """Answers as an engine's process streams them: each part has all responses that finished since the part before it."""
    return engine.as_completed(
        [engine.answer(uid, ids, sampling) for uid, ids in zip(uids, prompts, strict=True)]
    )


def test_a_stream_brings_the_same_as_a_call(engine, sync, model_a):
    sync(model_a, 60)
    parts = engine.call(stream, PROMPTS, UIDS, SAMPLING)
    by_uid = {generation.uid: generation for part in parts for generation in part}
    called = engine.call("generate", PROMPTS, UIDS, SAMPLING)
    assert [by_uid[uid].response_ids for uid in UIDS] == [g.response_ids for g in called]
    assert sum(len(part) for part in parts) == len(PROMPTS)


def test_responses_come_as_they_finish(engine, sync, model_a):
    """Of 64 responses that end at an end token, with different lengths, most come before the last one, the short ones first."""
    sync(model_a, 61)
    sampling = SamplingParams(temperature=1.5, max_new_tokens=100, seed=1)
    parts = engine.call(stream, [[5, 6, 7]] * 64, [f"p/{k}" for k in range(64)], sampling)
    lengths = [len(generation.response_ids) for part in parts for generation in part]
    assert len(parts) > 10 and len(set(lengths)) > 10
    assert lengths[0] < 20 and lengths[-1] == max(lengths)
    assert sum(length == 100 for length in lengths) < 32


def test_what_nobody_waits_for_is_aborted(engine, sync, model_a):
    sync(model_a, 62)
    expected = engine.call("generate", PROMPTS[:2], UIDS[:2], SAMPLING)
    first, after = engine.call(leave_early)
    assert first.uid == "short/0" and len(first.response_ids) == 12
    assert [g.response_ids for g in after] == [g.response_ids for g in expected]


def test_requests_are_refused_before_any_is_sent(engine, sync, model_a):
    sync(model_a, 63)
    with pytest.raises(ValueError, match="b: the prompt is empty"):
        engine.call("generate", [[5], []], ["a", "b"], SAMPLING)
    engine.call("begin_update", 64)
    with pytest.raises(NoValidWeightsError):
        engine.call("generate", [[5]], ["a"], SAMPLING)
    with pytest.raises(WeightSyncError):
        engine.call("finish_update")  # so that another update may begin


def answer_by_queue(engine, sampling):
    """120 requests of 6 prompts, through the queue of a controller whose only engine is this one; returns uids, response ids, and the calls."""
    worker, calls = EngineWorker.__new__(EngineWorker), []  # its constructor starts SGLang
    worker.engine, worker.players, worker._of = engine, None, {}

    def call(_, method, *args):
        found = getattr(worker, method)(*args)
        if method == "land":
            calls.append((sum(requests.num_rows for requests, _ in args[1]), found.waiting))
        return found

    group = SimpleNamespace(world_size=1, processes=[], call_rank=call)
    run = SimpleNamespace(
        restarts=None,
        blocks=Blocks(),
        wait=lambda refs, busy=(): refs,
        refuse_silence=lambda since, processes: None,
    )
    requests = expand_prompts(prompts(*"abcdef"), 20)
    table, *_ = answer_all(run, group, [(requests, sampling)], lambda part: None)
    return table["uid"].to_pylist(), table["response_ids"].to_pylist(), calls


def test_a_queue_brings_the_same_as_a_call(engine, sync, model_a):
    """64 places, and a quarter more requests that wait: the 20 requests of a prompt are sent together, the last two prompts' when there is room."""
    sync(model_a, 65)
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=40)
    uids, found, calls = engine.call(answer_by_queue, sampling)
    asked = [[number + 1] for number in range(6) for _ in range(20)]
    expected = engine.call("generate", asked, uids, sampling)
    assert found == [generation.response_ids for generation in expected]
    sent = [count for count, _ in calls if count]
    assert sent[0] == 80 and sum(sent) == 120 and len(sent) > 1
    assert calls[-1][1] == 0


class Again(Environment):
    """Answers "again" to every turn."""

    async def step(self, turn):
        return StepResult([{"role": "user", "content": "again"}])


def play_turns(engine, uids, sampling):
    """Three turns of at most 6 tokens each, as if an end token had ended them."""
    tokenizer = train_tokenizer(["again"], 300)

    async def answer(uid, ids, sampling, experts_from=0):
        asked = dataclasses.replace(sampling, max_new_tokens=min(6, sampling.max_new_tokens))
        generation = await engine.answer(uid, ids, asked)
        return dataclasses.replace(generation, finish_reason="stop")

    player = Player(Again, MultiTurnConfig(max_assistant_turns=3), tokenizer, answer)
    version = engine.weight_version
    tasks = [Task(uid, "", None, "", "", {}) for uid in uids]
    plays = [player.play(task, ids, sampling, version) for task, ids in zip(tasks, PROMPTS, strict=False)]
    played = [generation for part in engine.as_completed(plays) for generation in part]
    return sorted(played, key=lambda generation: generation.uid)


def test_the_log_probs_of_all_turns_equal_hugging_face(engine, sync, model_a):
    """The log-probs of the complete conversation, as a trainer computes them; the noise depends on (seed, uid, turn)."""
    sync(model_a, 70)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=90, seed=3, ignore_eos=True)
    played = engine.call(play_turns, UIDS, sampling)
    alone = engine.call(play_turns, UIDS[:1], sampling)
    assert alone[0].response_ids == played[0].response_ids
    for prompt, generation in zip(PROMPTS, played, strict=True):
        ids, mask = generation.response_ids, torch.tensor(generation.response_mask)
        assert generation.num_turns == 3 and mask.sum() == 18 and not mask.all()
        expected = torch.tensor(hf_log_probs(model_a, prompt, ids, 0.7))
        torch.testing.assert_close(
            torch.tensor(generation.log_probs)[mask], expected[mask], atol=1e-4, rtol=0
        )
        assert not torch.tensor(generation.log_probs)[~mask].any()


@pytest.mark.parametrize(
    "changes",
    [
        {"min_p": 0.3},
        {"top_p": 0.5},
        {"top_k": 3},
        {"repetition_penalty": 1.8},
        {"frequency_penalty": 1.5, "presence_penalty": 1.5},
    ],
)
def test_what_is_sampled_follows_cuts_and_penalties(engine, sync, model_a, changes):
    """Log-probs are taken after temperature and penalties and before a cut; no token is from beyond the cut."""
    if engine.call("weight_version") is None:
        sync(model_a, 71)
    sampling = dataclasses.replace(SAMPLING, temperature=0.8, **changes)
    plain = engine.call("generate", PROMPTS, UIDS, dataclasses.replace(SAMPLING, temperature=0.8))
    sampled = engine.call("generate", PROMPTS, UIDS, sampling)
    assert [g.response_ids for g in sampled] != [g.response_ids for g in plain]
    again = engine.call("generate", PROMPTS, UIDS, sampling)
    assert [g.response_ids for g in again] == [g.response_ids for g in sampled]
    for prompt, generation in zip(PROMPTS, sampled, strict=True):
        with torch.no_grad():
            logits = model_a.hf(torch.tensor([prompt + generation.response_ids])).logits[0]
        for at, token in enumerate(generation.response_ids):
            row = penalised(logits[len(prompt) - 1 + at], generation.response_ids[:at], sampling)
            log_probs = torch.log_softmax(row / 0.8, -1)
            assert generation.log_probs[at] == pytest.approx(log_probs[token].item(), abs=2e-4)
            more_probable = log_probs[log_probs > log_probs[token]].exp()
            assert log_probs[token].exp() >= sampling.min_p * log_probs.exp().max() - 1e-6
            assert more_probable.sum() < sampling.top_p + 1e-5
            assert sampling.top_k == -1 or len(more_probable) < sampling.top_k


def penalised(logits, response, sampling):
    """The logits [vocabulary] after penalties, by their definitions; SGLang penalises only tokens of the response."""
    logits = logits.clone()
    seen = torch.tensor(sorted({*response}), dtype=torch.long)
    penalty = sampling.repetition_penalty
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    for token in set(response):
        logits[token] -= sampling.frequency_penalty * response.count(token) + sampling.presence_penalty
    return logits
