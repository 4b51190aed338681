"""The text of new messages as the token ids that continue a conversation, for one chat template."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.chats import STAND_IN
from megarl.data.tokenizer import encode_texts, render_text
from megarl.environments.environment import Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION = {"role": "user", "content": STAND_IN + "?"}
_ANSWER = {"role": "assistant", "content": STAND_IN}
_LAST_TAG = re.compile(r"(<[^<>\s]+>)\s*$")


class Continuation:
    """Observations as token ids that continue a conversation, for one chat template."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._kwargs = tokenizer, template_kwargs

    def after_turn(
        self,
        observation: Observation,
        ended: bool,
        last_id: int | None = None,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The token ids that follow the policy's turn: the observation, and for messages the opening of its next turn.

        Args:
            ended: whether the turn's last token is an end token of the model. Then the template's own end token (which may
                be another one) is left out; otherwise the template ends the turn.
            last_id: that token. Where a template ends turns with the role token of the next message (GLM-4.5), it may be the
                observation's own first token, which is not written twice.
            calls: the turn's `tool_calls`, where the observation has tools' answers; some templates show none without the call.

        Raises:
            ValueError: the template refuses the messages.
        """
        if isinstance(observation, str):
            return self._encode(observation)
        closing, text = self._following(observation, calls)
        ids = self._encode(text)
        if not ended:
            return ids
        special = {*self._tokenizer.all_special_ids}
        tags = [*itertools.takewhile(special.__contains__, ids)]
        if last_id in tags:
            return ids[tags.index(last_id) + 1 :]
        return ids[1:] if tags and special.intersection(self._encode(closing)[:1]) else ids

    def _following(
        self, observation: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str]:
        """(the template's closing of a turn, all template text after the turn's own text, closing included)."""
        past = [{"role": "user", "content": "?"}, _ANSWER]
        told = observation[0].get("content") if calls and observation[0]["role"] == "tool" else None
        try:
            text = self._after_stand_in([*past, *observation], True)
            if not isinstance(told, str) or told.strip() in text:
                return self._after_stand_in(past, False), text
        except ValueError:
            if told is None:
                raise
        called = [past[0], {"role": "assistant", "content": "", "tool_calls": list(calls)}]
        before, text = self._render(called, False), self._render([*called, *observation], True)
        if not text.startswith(before):
            raise ValueError("the chat template writes calls otherwise when their answers follow")
        tag = _LAST_TAG.search(before)
        closing = tag[0] if tag and tag[1] in self._tokenizer.all_special_tokens else ""
        return closing, closing + text[len(before) :]

    def after_prompt(self, prompt_ids: Sequence[int], observation: Observation) -> list[int]:
        """The ids of a prompt with an observation put before the opening of the assistant's turn, with which the prompt ends (a text
        is put after that opening).

        Raises:
            ValueError: the template refuses the messages, or the prompt does not end with that opening.
        """
        if isinstance(observation, str):
            return [*prompt_ids, *self._encode(observation)]
        before = self._render([_QUESTION], False)
        opened = self._render([_QUESTION], True)
        after = self._render([_QUESTION, *observation], True)
        if not opened.startswith(before) or not after.startswith(before):
            raise ValueError("the chat template writes a message otherwise when another one follows it")
        opening = self._encode(opened[len(before) :])
        start = len(prompt_ids) - len(opening)
        if list(prompt_ids[start:]) != opening:
            raise ValueError("the prompt does not end with the opening of the assistant's turn")
        return [*prompt_ids[:start], *self._encode(after[len(before) :])]

    def _after_stand_in(self, messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        text = self._render(messages, open_turn)
        if text.count(STAND_IN) != 1:
            raise ValueError("the chat template does not write the assistant's text as it is, once")
        return text.partition(STAND_IN)[2]

    def _render(self, messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        return render_text(self._tokenizer, messages, open_turn, self._kwargs)

    def _encode(self, text: str) -> list[int]:
        return encode_texts(self._tokenizer, [text])[0]
