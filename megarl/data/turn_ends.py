"""What ends an assistant's turn in a chat template's text, and what opens one: read off the rendering of stand-ins."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.data.chats import Message
from megarl.data.tokenizer import render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[..., str]

TAG = re.compile(r"<[^<>\s]+>")
_STAND_IN = "0f6d3c9aQ"  # occurs in no template, and none changes it
QUESTION: Message = {"role": "user", "content": _STAND_IN + "?"}
_ANSWER: Message = {"role": "assistant", "content": _STAND_IN}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": _STAND_IN}}}
_PIECE = re.compile(r"<[^<>\s]+>|\n+|[^<\n]+|<")  # a border of tokens is a border of these


def as_a_policy_ends(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    message: Message,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """A rendered chat without what the template writes behind the end token of its last message, the assistant's; where
    turns end with the role token of the next message, with that."""
    ends = TurnEnds(
        tokenizer, lambda chat, open_turn=False: render_text(tokenizer, chat, open_turn, template_kwargs)
    )
    return ends.of_chat(text, message)


def common_beginning(opening: str, text: str) -> str:
    """The longest beginning of an opening, in whole pieces, with which the text begins."""
    shared = ""
    for piece in _PIECE.findall(opening):
        if not text.startswith(piece, len(shared)):
            break
        shared += piece
    return shared


def opening_of_turn(render: Render, messages: Sequence[Message]) -> str:
    """What the generation prompt writes behind these messages, in place of what the template may write there else."""
    before, opened = render(messages), render(messages, True)
    return opened[len(common_beginning(before, opened)) :]


class TurnEnds:
    """What ends a turn, by the rendering of stand-ins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, render: Render) -> None:
        self._eos, self._render = tokenizer.eos_token, render
        self._special = frozenset(tokenizer.all_special_tokens)

    @cached_property
    def _closing(self) -> str | None:
        """The last of the tags in a row that the template writes behind an answer; None: there is none."""
        behind = self._probe([QUESTION, _ANSWER]).rpartition(_STAND_IN)[2]
        tags = re.search(rf"({TAG.pattern})+", behind)
        return tags[1] if tags else None

    def _probe(self, messages: Sequence[Message]) -> str:
        try:
            return self._render(messages)
        except (
            ValueError
        ):  # a template that refuses a tool's message, or two of a kind, has no end that it would show
            return ""

    @cached_property
    def _openings(self) -> dict[str, str]:
        """The tag with which a message of a role begins behind an answer."""
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        told = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": _STAND_IN}
        found = {}
        for role, answer, message in (("user", _ANSWER, QUESTION), ("tool", called, told)):
            before, text = self._probe([QUESTION, answer]), self._probe([QUESTION, answer, message])
            tag = TAG.match(text[len(common_beginning(before, text)) :].lstrip())
            if tag:
                found[role] = tag[0]
        return found

    def next_message(self, text: str, position: int) -> int:
        """Where the first message behind a position begins."""
        tags = {*self._openings.values()}
        tags |= {tag[0] for tag in [TAG.match(opening_of_turn(self._render, [QUESTION]))] if tag}
        starts = [start for tag in tags if (start := text.find(tag, position)) >= 0]
        return min(starts, default=len(text))

    def _opening_after(self, message: Message) -> str:
        """The tag with which what answers a message begins, if it ends the message as well; else nothing."""
        role = "tool" if message.get("tool_calls") and "tool" in self._openings else "user"
        return self._openings.get(role, "") if self._closing is None else ""

    def of_chat(self, text: str, message: Message) -> str:
        """A chat that ends with an assistant's message as a policy would end it, who stops with a token that ends turns."""
        for token in (self._eos, self._closing):
            before, found, behind = text.rpartition(token) if token else ("", "", text)
            if found and not behind.strip():  # else it ends an earlier message
                return before + found
        return text + self._opening_after(message)

    def after(self, text: str, begin: int, limit: int, message: Message) -> tuple[int, str]:
        """Where the turn with text[begin:limit], or its last part, ends, and what has to be put behind the text for that.

        That is after the last end token: the tokenizer's; or the one that the template writes behind an answer; or another
        one, such as that of calls.
        """
        for token in (self._eos, self._closing):
            at = text.rfind(token, begin, limit) if token else -1
            if at >= 0:
                return at + len(token or ""), ""
        if self._closing is not None:
            tags = list(TAG.finditer(text, begin, limit))
            if tags and not text[tags[-1].end() : limit].strip():
                return tags[-1].end(), ""
        else:
            following = TAG.match(text, limit + len(text[limit:]) - len(text[limit:].lstrip()))
            if following and following[0] in {*self._openings.values()} | self._special:
                return following.end(), ""
            added = "" if text[limit:].strip() else self._opening_after(message)
            if added:
                return len(text) + len(added), added
        warnings.warn(
            f"the chat template does not end the assistant's messages with the tokenizer's end token "
            f"{self._eos!r}: a model trained on them does not learn to stop there",
            stacklevel=2,
        )
        return limit, ""
