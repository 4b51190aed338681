"""What the policy's tokens say: reasoning, content and calls of tools, by the parsers of SGLang that belong to its model.

Guarantees, each asserted by a test:

- what is told of an unfinished text is the beginning of what the finished one says, or the finished text is taken as it was told: the
  message of a streamed answer is the sum of its parts;
- a stop text ends an answer with the token that completes it; what the engine generated beyond is dropped, and trained on by nobody.
"""

from __future__ import annotations

import bisect
import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.gateway.messages import Message, assistant, call
from megarl.gateway.requests import Delta, Request, RequestError
from megarl.rollout.engine import Generation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL = 32  # tokens that are decoded again with each further one
_BROKEN = "\ufffd"  # what a character is decoded as while tokens of it are missing
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Parts:
    """What a text says; calls as (name, arguments as JSON text)."""

    reasoning: str
    content: str
    calls: Sequence[tuple[str, str]] = ()


class TurnReader:
    """Reads turns of one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """Args: tool_parser, reasoning_parser: SGLang's names; None: text is content.

        Raises:
            ValueError: SGLang has no such parser; names the parsers that it has.
        """
        self.tokenizer = tokenizer
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self._special = frozenset(tokenizer.all_special_ids)
        if tool_parser is not None:
            from sglang.srt.function_call.function_call_parser import FunctionCallParser

            _check_name("tool parser", tool_parser, FunctionCallParser.ToolCallParserEnum)
        if reasoning_parser is not None:
            from sglang.srt.parser.reasoning_parser import ReasoningParser

            _check_name("reasoning parser", reasoning_parser, ReasoningParser.DetectorMap)

    def opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends within reasoning, which the template has opened."""
        if self._reasoning_parser is None:
            return False
        start = self._reasoning(False).detector.think_start_token
        return bool(start) and self.tokenizer.decode(prompt_ids[-16:]).rstrip().endswith(start.rstrip())

    def forced(self, request: Request) -> str:
        """The text with which a turn must begin so that it calls the tool that the request wants; empty: it wants none.

        Raises:
            RequestError: the parser does not know how calls of this model begin.
        """
        if not request.tools or request.tool_choice in ("auto", "none"):
            return ""
        names = [tool["function"]["name"] for tool in request.tools]
        if isinstance(request.tool_choice, Mapping):
            names = [request.tool_choice["name"]]
        detector = self._tools(request.tools).detector
        if not detector.supports_structural_tag():
            raise RequestError(
                f'the tool parser {self._tool_parser!r} cannot begin a call: use tool_choice "auto"',
                param="tool_choice",
            )
        info = detector.structure_info()
        begins = [info(name).begin for name in names]
        same = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*begins, strict=False))
        return "".join(letters[0] for letters in same)

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens: where there is a parser, with special tokens, which it may need, but without those at the end."""
        end = len(ids)
        while end and ids[end - 1] in self._special:
            end -= 1
        plain = self._tool_parser is None and self._reasoning_parser is None
        return self.tokenizer.decode(list(ids[:end]), skip_special_tokens=plain)

    def read(self, text: str, request: Request, in_reasoning: bool) -> Parts:
        """What a finished text says. `in_reasoning`: the prompt has opened the reasoning."""
        reasoning = ""
        if self._reasoning_parser is not None:
            found, rest = self._reasoning(in_reasoning).parse_non_stream(text)
            reasoning, text = (found or "").strip(), rest or ""
            text = text.strip() if reasoning or in_reasoning else text
        if not request.tools or request.tool_choice == "none" or self._tool_parser is None:
            return Parts(reasoning, text)
        parser = self._tools(request.tools)
        try:
            content, calls = parser.parse_non_stream(text)
        except Exception:  # SGLang's parsers fail in many ways on calls that are JSON of another form, such as a list (0.5.21)
            return Parts(reasoning, text)
        # Half of a surrogate pair, of which the policy may write the escape, has no bytes in UTF-8: no client could be told.
        made = [(item.name, _SURROGATE.sub(_BROKEN, item.parameters or "{}")) for item in calls if item.name]
        return Parts(reasoning, content.strip() if made else text, made)

    def call_mark(self, request: Request) -> str | None:
        """The text with which calls begin; None: no calls are read; empty: the format has no such text."""
        if not request.tools or request.tool_choice == "none" or self._tool_parser is None:
            return None
        return self._tools(request.tools).detector.bot_token.strip()

    def settled(self, text: str, stops: Sequence[str], call_mark: str | None, in_reasoning: bool) -> Parts:
        """What an unfinished text says for certain, whatever follows."""
        reasoning = ""
        if self._reasoning_parser is not None:
            from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector as Base

            parser = self._reasoning(in_reasoning)
            detector = parser.detector
            if type(detector).detect_and_parse is not Base.detect_and_parse:
                return Parts("", "")  # a format of its own
            found, rest = parser.parse_non_stream(text)
            reasoning, text = found or "", rest or ""
            if not text:  # the reasoning may end here
                for mark in (detector.think_end_token, detector.tool_start_token):
                    reasoning = _before(reasoning, mark) if mark else reasoning
            elif not reasoning:
                text = _before(text, detector.think_start_token)
            reasoning = reasoning.strip()
            text = text.lstrip() if reasoning or in_reasoning else text
        if call_mark is not None:
            text = _before(text, call_mark) if call_mark else ""
        for stop in stops:
            text = _before(text, stop)
        return Parts(reasoning, text.rstrip().rstrip(_BROKEN))

    def _reasoning(self, in_reasoning: bool) -> Any:
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        return ReasoningParser(self._reasoning_parser, stream_reasoning=False, force_reasoning=in_reasoning)

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        if self._tool_parser is None:
            raise RequestError(
                "this model is served without a tool parser, so that its calls could not be read",
                param="tools",
            )
        return FunctionCallParser([Tool(**tool) for tool in tools], self._tool_parser)

    def check_tools(self, request: Request) -> None:
        """RequestError: the request has tools and there is no parser for their calls."""
        if request.tools and request.tool_choice != "none":
            self._tools(request.tools)


class StreamedTurn:
    """A turn while it is generated, and at its end.

    Args:
        forced: the text with which the turn begins, and which the policy did not write.
    """

    def __init__(
        self, reader: TurnReader, request: Request, index: int, prompt_ids: Sequence[int], forced: str
    ) -> None:
        self._reader, self._request, self._index = reader, request, index
        self._in_reasoning = not forced and reader.opens_reasoning(prompt_ids)
        self._forced, self._num_prompt_tokens = forced, len(prompt_ids)
        self._call_mark = reader.call_mark(request)
        self._text, self._ids = forced, list[int]()  # the text of all tokens but the last ones, and these
        self._told = Parts("", "")

    def heard(self, ids: Sequence[int]) -> list[Delta]:
        """The parts that further tokens make certain."""
        self._ids += ids
        text = self._reader.text(self._ids)
        if len(self._ids) > 2 * _TAIL:
            tail = self._reader.text(self._ids[_TAIL:])
            # What is before the tail, a space included that some decoders (Llama 2's, Mistral's) leave out before the first word of a text.
            head = text[: len(text) - len(tail)]
            # Else a token's text depends on the token before it.
            if tail and _BROKEN not in head and text.endswith(tail):
                self._text, self._ids, text = self._text + head, self._ids[_TAIL:], tail
        return self._tell(
            self._reader.settled(self._text + text, self._request.stop, self._call_mark, self._in_reasoning)
        )

    def end(self, generation: Generation) -> tuple[Generation, Message, str | None, list[Delta]]:
        """The generation up to a stop text, the message, the stop text, and the remaining parts of the message."""
        generation, text, stop = _cut(self._reader, generation, self._request.stop)
        parts = self._reader.read(self._forced + text, self._request, self._in_reasoning)
        told = self._told
        if not parts.reasoning.startswith(told.reasoning):
            parts = replace(parts, reasoning=told.reasoning)
        if not parts.content.startswith(told.content):
            parts = replace(parts, content=told.content)
        deltas = self._tell(parts)
        calls = [call(f"call_{secrets.token_hex(8)}", name, arguments) for name, arguments in parts.calls]
        return generation, assistant(parts.content, parts.reasoning, calls), stop, deltas

    def _tell(self, parts: Parts) -> list[Delta]:
        told, self._told = self._told, parts
        new = [("reasoning", told.reasoning, parts.reasoning), ("content", told.content, parts.content)]
        deltas = []
        for kind, before, text in new:
            if not text.startswith(before):  # wait for what the finished text says
                self._told = told
                return []
            if text != before:
                deltas.append(Delta(self._index, kind, text[len(before) :], self._num_prompt_tokens))
        return deltas


def _check_name(what: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"SGLang has no {what} {name!r}; it has {', '.join(sorted(known))}")


def _before(text: str, mark: str) -> str:
    """The text before a mark, or before what may become one."""
    found = text.find(mark)
    if found >= 0:
        return text[:found]
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[len(text) - length :]):
            return text[: len(text) - length]
    return text


def _cut(
    reader: TurnReader, generation: Generation, stops: Sequence[str]
) -> tuple[Generation, str, str | None]:
    """A generation up to the token that completes the first stop text, its text without that, and the stop text."""
    ids = list(generation.response_ids)
    text = reader.text(ids)
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return generation, text, None
    place, stop = min(found)
    end = place + len(stop)
    count = 1 + bisect.bisect_left(range(1, len(ids)), True, key=lambda n: len(reader.text(ids[:n])) >= end)
    dropped = len(ids) - count
    experts = generation.routed_experts
    if experts is not None and dropped:
        experts = experts[:-dropped]
    cut = replace(
        generation,
        response_ids=ids[:count],
        log_probs=list(generation.log_probs)[:count],
        finish_reason="stop",
        routed_experts=experts,
        kept=None if generation.kept is None else generation.kept.first(count),
    )
    return cut, text[:place], stop
