"""Prompts of the gateway as token ids, by the chat template of the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.tokenizer import encode_texts, render_text
from megarl.gateway.messages import Message
from megarl.gateway.tree import PolicyTurn
from megarl.rollout.continuation import Continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TemplatePrompts:
    """Renders with a tokenizer's chat template (`megarl.gateway.tree.Render`)."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`template_kwargs`: keywords of the template; those of a conversation take their place."""
        self._tokenizer, self._kwargs = tokenizer, dict(template_kwargs or {})

    def begin(self, messages: Sequence[Message], keywords: Mapping[str, Any], forced: str) -> list[int]:
        """The ids of a whole conversation and the opening of the assistant's turn.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        return self._encode(
            render_text(self._tokenizer, messages, True, {**self._kwargs, **keywords}) + forced
        )

    def go_on(
        self, turn: PolicyTurn, messages: Sequence[Message], keywords: Mapping[str, Any], forced: str
    ) -> list[int]:
        """The ids that follow a turn: its closing, unless the policy wrote that, the messages, and the opening of the next turn.

        Raises:
            ValueError: the chat template refuses the messages.
        """
        last_id = turn.generation.response_ids[-1] if turn.ended else None
        calls = turn.message.get("tool_calls", ())
        following = Continuation(self._tokenizer, {**self._kwargs, **keywords})
        ids = following.after_turn(messages, turn.ended, last_id, calls)
        return [*ids, *self._encode(forced)]

    def _encode(self, text: str) -> list[int]:
        return encode_texts(self._tokenizer, [text])[0]
