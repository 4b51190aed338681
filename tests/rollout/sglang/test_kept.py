"""The kept tokens that an engine reports, against Hugging Face's logits and its rules for leaving tokens out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megarl.config.schema.rollout import MOST_KEPT
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sglang.requests import KEPT, Response, sglang_sampling
from tests.rollout.sglang.test_engine import PROMPTS, UIDS
from tests.rollout.sglang.test_interruption import interrupt_often, piece, take_off

WARPERS = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}


def warped(model, prompt, response, temperature, **cuts):
    """The log-probs of Hugging Face's warped distribution at each token of the response: [response, vocabulary]."""
    with torch.no_grad():
        logits = model.hf(torch.tensor([prompt + list(response)])).logits[0, len(prompt) - 1 : -1]
    logits = logits / temperature
    for name, value in cuts.items():
        logits = WARPERS[name](value)(None, logits)
    return logits.log_softmax(-1)


def check(model, prompt, generation, temperature, **cuts):
    """The kept tokens are Hugging Face's, and the log-probs are from the distribution over them. Returns at how many tokens both sets are equal."""
    kept, same = generation.kept, 0
    bounds = np.cumsum([0, *kept.counts])
    assert kept.ids.dtype == kept.counts.dtype == np.int32
    assert len(kept.counts) == len(generation.response_ids) and bounds[-1] == len(kept.ids)
    expected = warped(model, prompt, generation.response_ids, temperature, **cuts)
    plain = warped(model, prompt, generation.response_ids, temperature)
    for at, token in enumerate(generation.response_ids):
        own = kept.ids[bounds[at] : bounds[at + 1]].tolist()
        assert token in own and len(set(own)) == len(own)
        wanted = expected[at].isfinite().nonzero()[:, 0].tolist()
        apart = sorted(set(own) ^ set(wanted))
        assert len(apart) <= (0 if "top_k" in cuts else 1), (own, wanted)
        same += not apart
        among = plain[at, own].log_softmax(-1)[own.index(token)].item()
        assert generation.log_probs[at] == pytest.approx(among, abs=1e-4)
    return same


@pytest.mark.parametrize(
    "cuts", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}], ids=lambda cuts: next(iter(cuts))
)
def test_kept_tokens_are_those_of_hugging_face(engine, sync, model_a, cuts):
    sync(model_a, 160)
    sampling = SamplingParams(
        temperature=0.8, max_new_tokens=12, seed=3, ignore_eos=True, return_kept=True, **cuts
    )
    generations = engine.call("generate", PROMPTS, UIDS, sampling)
    same = sum(check(model_a, p, g, 0.8, **cuts) for p, g in zip(PROMPTS, generations, strict=True))
    assert same >= 12 * len(PROMPTS) - 1  # except for a probability at the edge
    counts = np.concatenate([g.kept.counts for g in generations])
    if cuts == {"top_k": 5}:
        assert set(counts) == {5}
    else:
        assert len(set(counts)) > 3
    # Where top_k is given, the tokens are the same as without returned kept tokens: both are drawn from the same set.
    if "top_k" in cuts:
        plain = engine.call(
            "generate", PROMPTS, UIDS, SamplingParams(0.8, max_new_tokens=12, seed=3, ignore_eos=True, **cuts)
        )
        assert [g.response_ids for g in plain] == [g.response_ids for g in generations]
        assert all(g.kept is None for g in plain)


def test_an_interrupted_response_keeps_its_own(engine, sync, model_a):
    sync(model_a, 161)
    sampling = SamplingParams(max_new_tokens=100, seed=3, ignore_eos=True, top_p=0.8, return_kept=True)
    engine.call(take_off, PROMPTS, UIDS, sampling)
    found, open_ones = engine.call(interrupt_often, 0.05)
    assert sum(number > 0 for number in open_ones) > 1, open_ones
    for generation in found:
        prompt = PROMPTS[UIDS.index(generation.uid)]
        assert check(model_a, prompt, generation, 1.0, top_p=0.8) >= 97


def with_kept(answer, *sets):
    """The answer with these kept tokens, in one part for each of `sets`, as megarl's hook leaves them."""
    answer["meta_info"][KEPT] = [
        SimpleNamespace(
            lengths=np.array(list(map(len, part)), np.int32),
            token_ids=np.array([token for own in part for token in own], np.int32),
            logprobs=np.array([-0.25] * len(part), np.float32),
        )
        for part in sets
    ]
    return answer


def test_pieces_bring_the_kept_tokens_of_their_tokens():
    """An interrupted piece, one that SGLang had put back into its queue, and the last one, which came in two parts."""
    sampling = SamplingParams(max_new_tokens=6, top_k=3, return_kept=True)
    response = Response("a", sampling, frozenset([9]))
    assert response.add(with_kept(piece("abort", [4, 5]), [[4, 1], [5]]), 3, interrupted=True) is None
    assert response.add(piece("abort", [6]), 3, interrupted=True) is None
    assert response.ids == [4, 5]
    last = with_kept(piece("stop", [6, 9], version=5), [[6, 7, 8]], [[9]])
    found = response.add(last, 5, interrupted=False)
    assert found.response_ids == [4, 5, 6, 9] and found.log_probs == [-0.25] * 4
    assert found.kept.counts.tolist() == [2, 1, 3, 1] and found.kept.ids.tolist() == [4, 1, 5, 6, 7, 8, 9]


def test_sglang_is_given_a_number_of_kept_tokens():
    assert sglang_sampling(SamplingParams(top_p=0.9, return_kept=True), "a", ())["top_k"] == MOST_KEPT
    assert sglang_sampling(SamplingParams(top_k=7, return_kept=True), "a", ())["top_k"] == 7
    plain = sglang_sampling(SamplingParams(top_p=0.9), "a", ())
    assert plain["top_k"] == -1 and {"return_kept", "return_experts"}.isdisjoint(plain)
