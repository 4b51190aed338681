"""What an environment says, as token ids that continue those of a conversation.

What was generated is never tokenised again: a policy may write the same text by other tokens than a tokenizer would,
and trained on those it would be trained on what it never did. So only the new part of the conversation is rendered: the
chat template is given a stand-in for the past, and what follows that is tokenised by itself.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.tokenizer import encode_texts, render_text
from megarl.environments.environment import Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STAND_IN = "0f6d3c9aQ"  # occurs in no template, and none changes it
_QUESTION = {"role": "user", "content": _STAND_IN + "?"}
_ANSWER = {"role": "assistant", "content": _STAND_IN}
SIDES = ("left", "right", "middle")


class Continuation:
    """The token ids of observations, for one chat template."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._kwargs = tokenizer, template_kwargs

    def after_turn(self, observation: Observation, ended: bool, last_id: int | None = None) -> list[int]:
        """What follows the policy's turn: the observation, and for messages the opening of its next turn.

        Args:
            ended: whether the turn's last token is an end token of the model. Then the template's own (which may be
                another one) is left out; otherwise the template ends the turn.
            last_id: that token. Where a template ends turns with the role token of the next message (GLM-4.5), it may be the
                observation's own first token, which is not written twice.

        Raises:
            ValueError: the template refuses the messages.
        """
        if isinstance(observation, str):
            return self._encode(observation)
        past = [{"role": "user", "content": "?"}, _ANSWER]
        ids = self._encode(self._after_stand_in([*past, *observation], True))
        end = self._encode(self._after_stand_in(past, False))[:1]
        special = {*end, last_id} & {*self._tokenizer.all_special_ids}
        return ids[1:] if ended and special.intersection(ids[:1]) else ids

    def after_prompt(self, prompt_ids: Sequence[int], observation: Observation) -> list[int]:
        """A prompt, which ends with the opening of the assistant's turn, and the observation before that (a text:
        after it).

        Raises:
            ValueError: the template refuses the messages, or the prompt does not end so.
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
        if text.count(_STAND_IN) != 1:
            raise ValueError("the chat template does not write the assistant's text as it is, once")
        return text.partition(_STAND_IN)[2]

    def _render(self, messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        return render_text(self._tokenizer, messages, open_turn, self._kwargs)

    def _encode(self, text: str) -> list[int]:
        return encode_texts(self._tokenizer, [text])[0]


def shorten(observation: Observation, most: int, side: str) -> Observation:
    """An observation whose texts have at most `most` characters each, and a mark where some were left out.

    Args:
        side: what is kept: "left" the beginning, "right" the end, "middle" half of each.
    """
    if isinstance(observation, str):
        return _shorten_text(observation, most, side)
    return [
        {**message, "content": _shorten_text(message["content"], most, side)}
        if isinstance(message.get("content"), str)
        else message
        for message in observation
    ]


def _shorten_text(text: str, most: int, side: str) -> str:
    assert side in SIDES, side
    if len(text) <= most:
        return text
    if side == "left":
        return text[:most] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - most :]
    half = most // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
