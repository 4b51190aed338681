"""A real engine, TP2 in float32 on the CPU, judges texts: log-probs of their tokens, and the most likely tokens, against Hugging Face's model."""

import numpy as np
import pytest
import torch

from megarl.rollout.sglang.judging import Judged, SGLangJudge, Text, read_judgement
from tests.rollout.conftest import CONTEXT

LONG = [(7 * place) % 330 for place in range(40)]
TEXTS = [
    Text("a/0", LONG, [3, 9, 329, 200, 4]),  # the last token of the vocabulary, too
    Text("a/1", LONG, [3, 9, 17, 1]),
    Text("b/0", [2], [5]),
    Text("c/0", [9, 8, 20], [(11 * place) % 330 for place in range(CONTEXT - 3 - 7)]),  # the longest possible
    Text("a/2", LONG, [250] * 30),
    Text("d/0", [4, 5], []),
]
TOP = 6


def judge(engine, texts: list[Text], top: int) -> list[Judged]:
    """Runs in the process of the shared engine, which generates in the other tests."""
    engine.__class__ = SGLangJudge
    return engine.judge(texts, top)


def test_log_probs_and_the_most_likely_tokens_are_those_of_hugging_face(engine, sync, model_a) -> None:
    """All texts are judged at once; texts of the same prompt find it in the cache."""
    sync(model_a, 61)
    engine.call("take_counts")
    found = engine.call(judge, TEXTS, TOP)
    assert engine.call("take_counts").cached_tokens == 2 * (len(LONG) - 1)
    for text, judged in zip(TEXTS, found, strict=True):
        assert judged.log_probs.shape == (len(text.response_ids),) and judged.log_probs.dtype == np.float32
        if not text.response_ids:
            assert judged.top.shape == (0, 2 * TOP)
            continue
        expected = distribution(model_a, text)
        ids = torch.tensor(text.response_ids)
        of_text = expected.gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(judged.log_probs), of_text, rtol=0, atol=1e-4)
        log_probs, numbers = torch.from_numpy(judged.top).chunk(2, dim=1)
        torch.testing.assert_close(log_probs, expected.topk(TOP).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(expected.gather(-1, numbers.long()), log_probs, rtol=0, atol=1e-4)
    for alone, judged in zip(engine.call(judge, TEXTS, 0), found, strict=True):
        np.testing.assert_allclose(alone.log_probs, judged.log_probs, rtol=0, atol=1e-5)
        assert alone.top.shape == (len(judged.log_probs), 0)


@torch.no_grad()
def distribution(model, text: Text) -> torch.Tensor:
    """Log-probs of all tokens at each position of the response."""
    logits = model.hf(torch.tensor([[*text.prompt_ids, *text.response_ids]])).logits[0]
    return logits[len(text.prompt_ids) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (Text("x/0", [1, 2], [3] * (CONTEXT - 8)), r"x/0: 122 tokens of prompt and response .* the 121 tokens"),
        (Text("x/1", [1, 2], [330]), "x/1: token 330, and the teacher's vocabulary has 330"),
        (Text("x/2", [], [3]), "x/2: the prompt is empty"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_judged_are_named(engine, sync, model_a, text, problem) -> None:
    if engine.call("weight_version") is None:
        sync(model_a, 62)
    with pytest.raises(ValueError, match=problem):
        engine.call(judge, [TEXTS[0], text], 0)


def test_an_answer_that_is_not_of_the_text_is_refused() -> None:
    from megarl.rollout.engine import EngineError

    meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": [(None, 1, None), (-1.0, 5, None)]}
    assert read_judgement(Text("a", [1], [5]), meta, 0).log_probs.tolist() == [-1.0]
    with pytest.raises(EngineError, match=r"a: finished by .* with 1 log-probs for 2 tokens"):
        read_judgement(Text("a", [1], [5, 6]), meta, 0)
    with pytest.raises(EngineError, match="abort"):
        read_judgement(Text("a", [1], [5]), meta | {"finish_reason": {"type": "abort"}}, 0)
