"""Where in a rendered chat the assistant's turns are: the characters that the model itself would have to generate.

Guarantees, each asserted by a test:

- the text is the template's rendering of the whole chat, whatever is found in it, and nothing is taken for a turn that
  has not been verified on that text;
- a turn begins behind what the generation prompt writes, as far as the template writes that into the chat, and ends with
  what ends a generation: the end token; or, where turns have none of their own (GLM-4.5), the role token of the next
  message, which the last turn is given, too;
- a call that a learnt turn does not show, or a turn that shows nothing of its message, is an error.

A turn is found in one of two ways. Where the template keeps beginnings, the chat up to the turn and through it are
rendered. Templates that write a message otherwise when others follow (Qwen3 drops earlier reasoning) are given the whole chat
with marks in the turns' texts: if the rendering is the same but for the marks, they say where each turn is.

`TurnEnds` finds the tags that end and open an assistant's turn from the rendering of stand-ins.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.data.chats import STAND_IN, Message, as_object, check_calls_shown, function_of
from megarl.data.tokenizer import render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[..., str]

TAG = re.compile(r"<[^<>\s]+>")
QUESTION: Message = {"role": "user", "content": STAND_IN + "?"}
_ANSWER: Message = {"role": "assistant", "content": STAND_IN}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": STAND_IN}}}
_PIECE = re.compile(r"<[^<>\s]+>|\n+|[^<\n]+|<")  # a border of tokens is a border of these


def as_a_policy_ends(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    message: Message,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """A rendered chat up to the end token of its last message, the assistant's; where turns end with the role token of the
    next message, up to and with that token."""
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
    """The text that the generation prompt adds behind these messages."""
    before, opened = render(messages), render(messages, True)
    return opened[len(common_beginning(before, opened)) :]


class TurnEnds:
    """The texts that end a turn, found by rendering stand-ins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, render: Render) -> None:
        self._eos, self._render = tokenizer.eos_token, render
        self._special = frozenset(tokenizer.all_special_tokens)

    @cached_property
    def _closing(self) -> str | None:
        """The last of the tags in a row that the template writes behind an answer; None: there is none."""
        behind = self._probe([QUESTION, _ANSWER]).rpartition(STAND_IN)[2]
        tags = re.search(rf"({TAG.pattern})+", behind)
        return tags[1] if tags else None

    def _probe(self, messages: Sequence[Message]) -> str:
        try:
            return self._render(messages)
        except ValueError:  # a template that refuses a tool's message, or two of one role, shows no end
            return ""

    @cached_property
    def _openings(self) -> dict[str, str]:
        """By role, the tag with which a message begins behind an answer."""
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        told = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": STAND_IN}
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
        """The tag that begins the answer to a message, if it ends the message as well; else an empty text."""
        role = "tool" if message.get("tool_calls") and "tool" in self._openings else "user"
        return self._openings.get(role, "") if self._closing is None else ""

    def of_chat(self, text: str, message: Message) -> str:
        """A chat that ends with an assistant's message, ended as a policy ends it: with a token that ends turns."""
        for token in (self._eos, self._closing):
            before, found, behind = text.rpartition(token) if token else ("", "", text)
            if found and not behind.strip():  # else it ends an earlier message
                return before + found
        return text + self._opening_after(message)

    def after(self, text: str, begin: int, limit: int, message: Message) -> tuple[int, str]:
        """Where the turn with text[begin:limit], or its last part, ends, and the text that must be added for it.

        The end is behind the last end token: the tokenizer's; or the one that the template writes behind an answer; or
        another one, such as the end of calls.
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


Span = tuple[int, int]

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_MARK = re.compile(r"Qz7mark(\d+)([abc])zQ")


@dataclass(frozen=True)
class RenderedTurns:
    """A chat as the template renders it, with the assistant's turns.

    Attributes:
        text: the rendering, and behind it the token that ends the last turn if the template leaves it to the next
            message.
        spans: of each turn, in the order of the messages: characters of the text, the end not included.
    """

    text: str
    spans: list[Span]


def find_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any] | None = None,
    only_last: bool = False,
) -> RenderedTurns:
    """The assistant's turns of a chat.

    Args:
        messages: checked ones (`check_messages`).
        only_last: the last turn alone is looked for.

    Raises:
        ValueError: the template refuses the messages; a turn cannot be found in its rendering (names the messages that can);
            the template does not show what a message says.
    """

    def render(chat: Sequence[Message], open_turn: bool = False) -> str:
        return render_text(tokenizer, chat, open_turn, template_kwargs)

    whole = render(messages)
    positions = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    positions = positions[-1:] if only_last else positions
    ends = TurnEnds(tokenizer, render)
    found: dict[int, Span] = {}
    text = whole
    marks: dict[int, list[int]] | None = None
    for number in positions:
        place = _by_beginnings(render, messages, number, whole)
        if place is None:  # the template writes earlier messages otherwise when others follow
            marks = _marked(render, messages, whole) if marks is None else marks
            place = _by_marks(render, messages, number, whole, marks, ends)
        if place is None:
            continue
        start, begin, limit = place  # the end is between the last two
        end, added = ends.after(whole, begin, limit, messages[number])
        found[number] = (start, end)
        if added:
            text = whole + added
    missing = [number for number in positions if number not in found]
    for number in missing:
        check_calls_shown(messages[number], whole, f"message {number}")  # a simpler reason, if it applies
    if missing:
        raise ValueError(_not_found(missing, sorted(found)))
    for number, (start, end) in found.items():
        _check_shown(messages[number], text[start:end], number, number == positions[-1])
    return RenderedTurns(text, [found[number] for number in positions])


def _not_found(missing: Sequence[int], found: Sequence[int]) -> str:
    def names(numbers: Sequence[int]) -> str:
        return ", ".join(map(str, numbers))

    rest = (
        f"message {names(found)} can be learnt, so end the chat there"
        if found
        else "no message can be learnt"
    )
    return (
        "the chat template does not keep beginnings: its rendering of the chat up to the assistant's message "
        f"{names(missing)}, or through it, is not how the whole chat begins, and the message is not found in the whole chat "
        f"either, so the assistant's text cannot be told apart; {rest}, or mark generated text in the template with "
        "{% generation %}"
    )


def _by_beginnings(
    render: Render, messages: Sequence[Message], number: int, whole: str
) -> tuple[int, int, int] | None:
    """(where the turn starts, from where its end is looked for, where the message ends); None: the template does not
    keep beginnings."""
    through = render(messages[: number + 1])
    opened = render(messages[:number], True)
    if not whole.startswith(through):
        return None
    if whole.startswith(opened):
        start = len(opened)
    else:  # the template shows only a part of its generation prompt in a finished turn, such as no "<think>"
        before = render(messages[:number])
        if not whole.startswith(before) or not opened.startswith(before):
            return None
        start = len(before) + len(common_beginning(opened[len(before) :], whole[len(before) :]))
        if start == len(before):
            return None
    return (start, start, len(through)) if start <= len(through) else None


def _marked(render: Render, messages: Sequence[Message], whole: str) -> dict[int, list[int]]:
    """Positions in the whole text that lie inside of a message's own text, by message; empty: none are known.

    Marks at both ends of the texts of all messages are tried first, then fewer: a template may look at how a text begins or
    ends, and then writes the chat otherwise.
    """
    for letters, roles in (
        ("abc", None),
        ("bc", None),
        ("abc", "assistant"),
        ("bc", "assistant"),
        ("b", None),
    ):
        chat = [
            _with_marks(message, number, letters) if roles in (None, message["role"]) else message
            for number, message in enumerate(messages)
        ]
        try:
            text = render(chat)
        except ValueError:  # it refuses a marked text, so that nothing is found by it
            continue
        if _MARK.sub("", text) != whole:
            continue
        inside: dict[int, dict[str, int]] = {}
        cut = 0
        for match in _MARK.finditer(text):
            # A name that a later message repeats marks that one as well: the first place is the message's own.
            inside.setdefault(int(match[1]), {}).setdefault(match[2], match.start() - cut)
            cut += len(match[0])
        return {number: sorted(places.values()) for number, places in inside.items()}
    return {}


def _with_marks(message: Message, number: int, letters: str) -> Message:
    """A message with marks in its texts (a: where the first begins, b: where the last ends) and its last call (c)."""

    def mark(text: str, first: bool, last: bool) -> str:
        """White space at the ends of a text, which templates strip, stays outside of the marks."""
        core = text.strip()
        before = f"Qz7mark{number}azQ" if first and "a" in letters else ""
        after = f"Qz7mark{number}bzQ" if last and "b" in letters else ""
        return text.replace(core, before + core + after, 1) if core else text

    marked = dict(message)
    texts = [name for name in (*REASONING_FIELDS, "content") if _is_text(marked.get(name))]
    for name in texts:
        marked[name] = mark(marked[name], name == texts[0], name == texts[-1])
    if not marked.get("tool_calls") or "c" not in letters:
        return marked
    call = dict(marked["tool_calls"][-1])
    function = dict(function_of(call))
    arguments = as_object(function.get("arguments"))
    values = (
        [key for key, value in arguments.items() if _is_text(value)] if isinstance(arguments, dict) else []
    )
    if values:
        function["arguments"] = {**arguments, values[-1]: arguments[values[-1]] + f"Qz7mark{number}czQ"}
    else:
        function["name"] = f"{function.get('name')}Qz7mark{number}czQ"
    call = {**call, "function": function} if isinstance(call.get("function"), Mapping) else function
    marked["tool_calls"] = [*marked["tool_calls"][:-1], call]
    return marked


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _by_marks(
    render: Render,
    messages: Sequence[Message],
    number: int,
    whole: str,
    inside: Mapping[int, Sequence[int]],
    ends: TurnEnds,
) -> tuple[int, int, int] | None:
    """As `_by_beginnings`, around positions inside of the turn; None: where it begins or ends is not found."""
    opening = opening_of_turn(render, messages[:number]) or opening_of_turn(render, [QUESTION])
    first = TAG.match(opening)
    own = inside.get(number)
    if not own or first is None:
        return None
    begin = whole.rfind(first[0], 0, own[0])
    shared = common_beginning(opening, whole[begin:]) if begin >= 0 else ""
    # The first tag alone may begin any message.
    if not shared or (shared == first[0] and shared != opening.strip()):
        return None
    start, limit = begin + len(shared), ends.next_message(whole, own[-1])
    others = [place for message, places in inside.items() if message != number for place in places]
    if start > own[0] or any(begin < place < limit for place in others):
        return None  # the template puts one message into another, or leaves out the opening of the turn
    return start, own[-1], limit


def _check_shown(message: Message, text: str, number: int, is_last: bool) -> None:
    """Raise ValueError if a call is not in the text of its turn, or nothing of the message is."""
    check_calls_shown(message, text, f"message {number}")
    for name, said in _said(message):
        if said.strip() and said.strip().splitlines()[-1].strip() not in text:
            if name == "content" and not message.get("tool_calls"):
                raise ValueError(
                    f"the chat template does not write the content of message {number}, {said[:60]!r}, as it is"
                )
            if name == "content" or is_last:  # templates drop earlier reasoning on purpose
                warnings.warn(
                    f"the chat template does not write the {name} of an assistant's message, so it is not learnt",
                    stacklevel=2,
                )


def _said(message: Message) -> Iterator[tuple[str, str]]:
    """The texts of a message by field; of content the part behind its reasoning."""
    content = message.get("content")
    for part in [{"text": content}] if isinstance(content, str) else content or ():
        yield "content", part["text"].rpartition("</think>")[2]
    for name in REASONING_FIELDS:
        if isinstance(message.get(name), str):
            yield name, message[name]
