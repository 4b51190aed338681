"""Texts that an engine judges: the log-probs that its model gives their tokens, and its most likely tokens, by prompts' passes alone.

A request asks for no new token, and for the log-probs of its input from a place on (SGLang 0.5.21: `max_new_tokens=0`, `logprob_start_len`).
The engine's model is that of its folder and stays so: there is no version to sync.

Guarantees, each asserted by a test:

- log-probs, of the texts' tokens and of the most likely ones, are those of the model at `judging_temperature`;
- texts with the same prompt share its computation: one goes first, the others find it in the cache;
- a text that does not fit the context, or has an unknown token, is refused by its name.
"""

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.rollout.engine import EngineError
from megarl.rollout.sglang.engine import SGLangEngine


@dataclass(frozen=True)
class Text:
    """A prompt, and the response to it, whose tokens are judged."""

    uid: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


@dataclass(frozen=True)
class Judged:
    """What a model says of a response.

    Attributes:
        log_probs: float32 [response], of its tokens.
        top: float32 [response, 2 k], the log-probs of the k most likely tokens at each place, the most likely first, and then their ids.
    """

    log_probs: np.ndarray
    top: np.ndarray


class SGLangJudge(SGLangEngine):
    """An engine that judges texts by the model of its folder."""

    def judge(self, texts: Sequence[Text], top: int = 0) -> list[Judged]:
        """Judge texts; returns the results in the texts' order. The engine gets all texts at once, but for those that wait for their prompt.

        Args:
            top: how many of the most likely tokens are named at each place.

        Raises:
            ValueError: names a text that does not fit the context, or has unknown tokens.
            EngineError: the engine gave no sign of life for `request_timeout`.
        """
        self._require_version()
        prompts: dict[tuple[int, ...], list[int]] = {}
        for number, text in enumerate(texts):
            self._check(text)
            prompts.setdefault(tuple(text.prompt_ids), []).append(number)
        found: dict[int, Judged] = {}

        async def of_prompt(numbers: Sequence[int]) -> None:
            first, *others = numbers
            found[first] = await self._judged(texts[first], top)
            results = await asyncio.gather(*(self._judged(texts[number], top) for number in others))
            found.update(zip(others, results, strict=True))

        for _ in self.as_completed([of_prompt(numbers) for numbers in prompts.values()]):
            pass
        return [found[number] for number in range(len(texts))]

    def _check(self, text: Text) -> None:
        """ValueError: a text that SGLang cannot judge completely."""
        length = len(text.prompt_ids) + len(text.response_ids)
        if not len(text.prompt_ids):
            raise ValueError(f"{text.uid}: the prompt is empty, and nothing says where its response begins")
        if length > self.longest_input:
            raise ValueError(
                f"{text.uid}: {length} tokens of prompt and response do not fit the {self.longest_input} tokens that the teacher's engine takes"
            )
        most, vocab_size = max(*text.prompt_ids, *text.response_ids), self._model["vocab_size"]
        if most >= vocab_size:
            raise ValueError(f"{text.uid}: token {most}, and the teacher's vocabulary has {vocab_size}")

    async def _judged(self, text: Text, top: int) -> Judged:
        if not len(text.response_ids):
            return Judged(np.empty(0, np.float32), np.empty((0, 2 * top), np.float32))
        async with self._gate.passed():
            answer = await ask_judgement(self._engine.tokenizer_manager, text, top)
            self._last_answer = time.monotonic()
            self._counts.count(answer)
        return read_judgement(text, answer["meta_info"], top)


async def ask_judgement(manager: Any, text: Text, top: int) -> Mapping[str, Any]:
    """SGLang's answer to a text. `manager`: its TokenizerManager."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=[*map(int, text.prompt_ids), *map(int, text.response_ids)],
        sampling_params={"max_new_tokens": 0, "temperature": 1.0},
        return_logprob=True,
        logprob_start_len=len(text.prompt_ids) - 1,  # of the tokens after this one
        top_logprobs_num=top,
        # k numbers a place as one array, not as objects
        return_flat_raw_top_logprobs=top > 0,
        return_flat_raw_top_logprobs_b64=top > 0,
    )
    async with aclosing(manager.generate_request(request, None)) as answers:
        return await anext(answers)


def read_judgement(text: Text, meta: Mapping[str, Any], top: int) -> Judged:
    """Read the log-probs from SGLang's answer.

    Raises:
        EngineError: the answer does not fit the text.
    """
    count, reason = len(text.response_ids), meta["finish_reason"]
    entries = meta.get("input_token_logprobs") or []
    if reason["type"] != "length" or len(entries) != count + 1:
        raise EngineError(
            f"{text.uid}: finished by {reason}, with {len(entries) - 1} log-probs for {count} tokens"
        )
    log_probs = np.array([value for value, _, _ in entries[1:]], np.float32)
    likely = np.empty((count, 2 * top), np.float32)
    if top:
        assert meta["input_top_logprobs_null_prefix"] == 1, "nothing predicts the first of the tokens"
        for half, (name, kind) in enumerate((("val", "<f4"), ("idx", "<i4"))):
            array = np.frombuffer(base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"]), kind)
            likely[:, half * top : (half + 1) * top] = array.reshape(count, top)
    return Judged(log_probs, likely)
