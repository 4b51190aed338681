"""A policy for the gateway's tests: writes scripted words in tokens that a tokenizer would not choose, and records all requests."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.rollout.engine import Generation, SamplingParams

EXPERTS = (2, 1)  # layers, top_k


def letters(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """A text as token ids, tokenised character by character and not as one text."""
    return [token for letter in text for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]


@dataclass
class Answered:
    """A request to the engine and its answer."""

    uid: str
    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float]


@dataclass
class WrittenPolicy:
    """Answers with `words` in turn, the last ones again and again; its log-probs count down over all tokens, its experts are positions of tokens.

    Attributes:
        delay: seconds for each piece of `piece` tokens.
        failure: raised instead of an answer, also during an answer that is in progress.
        aborted: uids of the requests that were cancelled.
        kept_free: the last tokens of the context, which a prompt may not have.
    """

    tokenizer: PreTrainedTokenizerBase
    words: list[str] = field(default_factory=lambda: ["Well."])
    end: int | None = None
    context_length: int = 100_000
    routed: bool = False
    delay: float = 0.0
    piece: int = 4
    failure: Exception | None = None
    version: int = 3
    asked: list[Answered] = field(default_factory=list)
    sampled: list[SamplingParams] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    tokens: int = 0
    kept_free: int = 1

    @property
    def longest_input(self) -> int:
        return self.context_length - self.kept_free

    async def answer(
        self,
        uid: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        experts_from: int = 0,
        heard: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        self.sampled.append(sampling)
        if self.failure is not None:
            raise self.failure
        end = self.tokenizer.eos_token_id if self.end is None else self.end
        words = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        ids = [*letters(self.tokenizer, words), end]
        reason = "stop" if len(ids) <= sampling.max_new_tokens else "length"
        ids = ids[: sampling.max_new_tokens]
        try:
            for start in range(0, len(ids), self.piece):
                await asyncio.sleep(self.delay)
                if self.failure is not None:
                    raise self.failure
                if heard is not None:
                    heard(ids[start : start + self.piece])
        except asyncio.CancelledError:
            self.aborted.append(uid)
            raise
        log_probs = [-float(self.tokens + place) for place in range(1, len(ids) + 1)]
        self.tokens += len(ids)
        self.asked.append(Answered(uid, list(prompt_ids), ids, log_probs))
        experts = None
        if self.routed:  # the position of each token, so that a test sees which tokens have experts
            positions = np.arange(experts_from, len(prompt_ids) + len(ids) - 1, dtype=np.uint16)
            experts = np.broadcast_to(positions[:, None, None], (len(positions), *EXPERTS)).copy()
        return Generation(uid, ids, log_probs, reason, self.version, routed_experts=experts)
