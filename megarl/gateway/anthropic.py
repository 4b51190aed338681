"""Anthropic's Messages API: bodies of requests, answers, events of streams and errors, as JSON objects.

The form is that of https://docs.anthropic.com/en/api/messages. Reasoning is a block of type "thinking", whose signature is empty.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.gateway.fields import (
    check_request,
    field,
    number,
    part_text,
    sampling_of,
    stops,
    template_kwargs,
    text_of,
    tool,
)
from megarl.gateway.messages import Message, assistant, call, value_of
from megarl.gateway.requests import Answer, Delta, Request, RequestError

_NAMES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def parse(body: Mapping[str, Any]) -> Request:
    """The request of a body.

    Raises:
        RequestError: names the field that is wrong.
    """
    given = field(body, "messages", list, required=True)
    if number(body, "max_tokens", 1, 1 << 30, int) is None:
        raise RequestError("max_tokens is missing", param="max_tokens")
    system = text_of(body.get("system"), "system", ("text",))
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(given):
        messages += _messages(message, f"messages[{place}]")
    choice, tools = _choice(body.get("tool_choice")), _tools(field(body, "tools", list) or [])
    return check_request(
        Request(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            sampling=sampling_of(body),
            max_tokens=body["max_tokens"],
            stop=stops(body, "stop_sequences"),
            template_kwargs=template_kwargs(body),
        )
    )


def _messages(message: Any, place: str) -> list[Message]:
    """A message as one of ours, or several: results of tools are messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{place}.role must be user or assistant, found {role!r}", param=f"{place}.role")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RequestError(f"{place}.content must be a text or a list of blocks", param=f"{place}.content")
    results: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number_, block in enumerate(blocks):
        where, kind = f"{place}.content[{number_}]", block.get("type")
        if kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), f"{where}.content", ("text",)) or ""
            answered = field(block, "tool_use_id", str, f"{where}.", required=True)
            results.append({"role": "tool", "tool_call_id": answered, "content": text})
        elif kind == "tool_use" and role == "assistant":
            identity = field(block, "id", str, f"{where}.", required=True)
            name = field(block, "name", str, f"{where}.", required=True)
            calls.append(call(identity, name, json.dumps(block.get("input") or {}, ensure_ascii=False)))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(part_text(block, where, ("text",)))
    text = "\n".join(texts)
    if role == "assistant":
        return [assistant(text, "\n".join(thoughts), calls)]
    return [*results, *([{"role": role, "content": text}] if texts or not results else [])]


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    tools = []
    for number_, one in enumerate(given):
        place = f"tools[{number_}]"
        if not isinstance(one, dict) or one.get("type", "custom") != "custom":
            raise RequestError(f"{place}: tools that run on Anthropic's servers are not there", param=place)
        tools.append(tool(one.get("name"), one.get("description"), one.get("input_schema"), place))
    return tools


def _choice(choice: Any) -> str | Mapping[str, str]:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if choice is None or kind == "auto":
        return "auto"
    if kind in ("any", "none"):
        return "required" if kind == "any" else "none"
    if kind != "tool" or not isinstance(choice.get("name"), str):
        raise RequestError(
            "tool_choice.type must be auto, any, none, or tool with a name", param="tool_choice"
        )
    return {"name": choice["name"]}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    return blocks + [_use(one) for one in message.get("tool_calls", ())]


def _use(one: Mapping[str, Any]) -> dict[str, Any]:
    function = one["function"]
    arguments = value_of(function["arguments"])
    found = arguments if isinstance(arguments, dict) else {"arguments": function["arguments"]}
    return {"type": "tool_use", "id": one["id"], "name": function["name"], "input": found}


def _reason(answer: Answer) -> str:
    if answer.stop is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]


def message(answers: Sequence[Answer], body: Mapping[str, Any], identity: str, model: str) -> dict[str, Any]:
    """The object that answers a request."""
    (answer,) = answers
    return {
        **_head(identity, model),
        "content": _blocks(answer.message),
        "stop_reason": _reason(answer),
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_tokens},
    }


def _head(identity: str, model: str) -> dict[str, Any]:
    return {"id": identity, "type": "message", "role": "assistant", "model": model}


class Events:
    """The events of a streamed answer."""

    def __init__(self, body: Mapping[str, Any], identity: str, model: str) -> None:
        self._identity, self._model = identity, model
        self._number, self._open = -1, ""

    def of(self, event: Delta | Answer) -> Iterator[dict[str, Any]]:
        """The events that a part of an answer makes."""
        if self._number < 0:
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = {"input_tokens": event.num_prompt_tokens, "output_tokens": 0}
            head = {**_head(self._identity, self._model), **empty, "usage": usage}
            yield {"type": "message_start", "message": head}
            self._number = 0
        if isinstance(event, Delta):
            if self._open != event.kind:
                yield from self._close()
                empty_block: dict[str, Any] = {"type": "text", "text": ""}
                if event.kind == "reasoning":
                    empty_block = {"type": "thinking", "thinking": "", "signature": ""}
                yield self._start(empty_block, event.kind)
            thinking = {"type": "thinking_delta", "thinking": event.text}
            yield self._delta(
                thinking if event.kind == "reasoning" else {"type": "text_delta", "text": event.text}
            )
            return
        yield from self._close()
        for one in event.message.get("tool_calls", ()):
            use = _use(one)
            yield self._start({**use, "input": {}}, "call")
            partial = json.dumps(use["input"], ensure_ascii=False)
            yield self._delta({"type": "input_json_delta", "partial_json": partial})
            yield from self._close()
        delta = {"stop_reason": _reason(event), "stop_sequence": event.stop}
        usage = {"input_tokens": event.num_prompt_tokens, "output_tokens": event.num_tokens}
        yield {"type": "message_delta", "delta": delta, "usage": usage}

    def end(self) -> Iterator[dict[str, Any]]:
        """The last event."""
        yield {"type": "message_stop"}

    def _start(self, block: dict[str, Any], kind: str) -> dict[str, Any]:
        self._open = kind
        return {"type": "content_block_start", "index": self._number, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._number, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._number}
            self._open, self._number = "", self._number + 1


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = _NAMES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
