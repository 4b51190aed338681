"""OpenAI's Responses API: bodies of requests, answers and events of streams, as JSON objects; errors are those of Chat Completions.

The form is that of https://platform.openai.com/docs/api-reference/responses. An assistant's message of ours is several items: a reasoning,
a message, calls.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.gateway.fields import (
    check_request,
    field,
    number,
    refuse,
    sampling_of,
    template_kwargs,
    text_of,
    tool,
)
from megarl.gateway.messages import Message, assistant, call
from megarl.gateway.requests import Answer, Delta, Request, RequestError

_UNSUPPORTED = {"background": (False,), "prompt": (), "conversation": (), "top_logprobs": (0,)}
_TEXTS = ("input_text", "output_text", "text", "refusal")


def parse(body: Mapping[str, Any], earlier: Sequence[Message] = ()) -> Request:
    """The request of a body.

    Args:
        earlier: the conversation that `previous_response_id` stands for.

    Raises:
        RequestError: names the field that is wrong.
    """
    refuse(body, _UNSUPPORTED, "the gateway has no such thing")
    wanted = (field(body, "text", dict) or {}).get("format") or {"type": "text"}
    refuse(
        {"text.format": wanted},
        {"text.format": ({"type": "text"},)},
        "the policy's own distribution is sampled",
    )
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise RequestError("input must be a text or a list of items", param="input")
    instructions = field(body, "instructions", str)
    head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        choice = {"name": choice["name"]}
    elif choice not in (None, "auto", "none", "required"):
        raise RequestError(
            "tool_choice must be auto, none, required or {type: function, name: ...}", param="tool_choice"
        )
    return check_request(
        Request(
            messages=[*head, *earlier, *_messages(items)],
            tools=_tools(field(body, "tools", list) or []),
            tool_choice=choice or "auto",
            sampling=sampling_of(body),
            max_tokens=number(body, "max_output_tokens", 1, 1 << 30, int),
            template_kwargs=template_kwargs(body),
        )
    )


def conversation(request: Request, body: Mapping[str, Any], answer: Answer) -> list[Message]:
    """What a later request's `previous_response_id` stands for: instructions are not carried over."""
    return [*request.messages[bool(body.get("instructions")) :], answer.message]


def _messages(items: Sequence[Any]) -> list[Message]:
    """Items as messages; neighbouring items of the assistant are one."""
    messages: list[Message] = []
    text, thoughts = "", ""
    calls: list[dict[str, Any]] = []

    def close() -> None:
        nonlocal text, thoughts, calls
        if text or thoughts or calls:
            messages.append(assistant(text, thoughts, calls))
        text, thoughts, calls = "", "", []

    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", param=where)
        kind = item.get("type") or "message"
        # A message has reasoning, then text, then calls: an item out of this order begins the next message.
        if kind == "reasoning":
            if text or calls:
                close()
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())][:1]
            thoughts = str(parts[0].get("text", "")) if parts and isinstance(parts[0], dict) else ""
        elif kind == "function_call":
            identity = field(item, "call_id", str, f"{where}.", required=True)
            name = field(item, "name", str, f"{where}.", required=True)
            calls.append(call(identity, name, field(item, "arguments", str, f"{where}.") or "{}"))
        elif kind == "function_call_output":
            close()
            identity = field(item, "call_id", str, f"{where}.", required=True)
            output = text_of(item.get("output"), f"{where}.output", _TEXTS) or ""
            messages.append({"role": "tool", "tool_call_id": identity, "content": output})
        elif kind == "message":
            role = field(item, "role", str, f"{where}.", required=True)
            said = text_of(item.get("content"), f"{where}.content", _TEXTS)
            if role == "assistant":
                if text or calls:
                    close()
                text = said or ""
                continue
            if role not in ("user", "system", "developer") or said is None:
                raise RequestError(f"{where}: a message needs a role and content", param=where)
            close()
            messages.append({"role": "system" if role == "developer" else role, "content": said})
        else:
            raise RequestError(f"{where}: items of type {kind!r} are not there", param=where)
    close()
    return messages


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    tools = []
    for place, one in enumerate(given):
        where = f"tools[{place}]"
        if not isinstance(one, dict) or one.get("type") != "function":
            raise RequestError(f"{where}: tools that run on OpenAI's servers are not there", param=where)
        tools.append(tool(one.get("name"), one.get("description"), one.get("parameters") or {}, where))
    return tools


def _reasoning(text: str) -> dict[str, Any]:
    said = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{secrets.token_hex(8)}", "type": "reasoning", "summary": [], "content": said}


def _text(text: str, status: str = "completed") -> dict[str, Any]:
    content = [_part(text)] if status == "completed" else []
    identity = f"msg_{secrets.token_hex(8)}"
    return {"id": identity, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _called(one: Mapping[str, Any]) -> dict[str, Any]:
    identity, function = f"fc_{secrets.token_hex(8)}", one["function"]
    return {"id": identity, "type": "function_call", "call_id": one["id"], "status": "completed", **function}


def response(answers: Sequence[Answer], body: Mapping[str, Any], identity: str, model: str) -> dict[str, Any]:
    """The object that answers a request."""
    (answer,) = answers
    message = answer.message
    output = [_reasoning(message["reasoning_content"])] if message.get("reasoning_content") else []
    output += [_text(message["content"])] if message.get("content") else []
    output += [_called(one) for one in message.get("tool_calls", ())]
    return _finished(answer, body, identity, model, output)


def _finished(
    answer: Answer, body: Mapping[str, Any], identity: str, model: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    given, said = answer.num_prompt_tokens, answer.num_tokens
    short = answer.finish_reason == "length"
    return {
        **_head(body, identity, model),
        "status": "incomplete" if short else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "output": output,
        "usage": {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": given + said,
        },
    }


def _head(body: Mapping[str, Any], identity: str, model: str) -> dict[str, Any]:
    echoed = ("instructions", "previous_response_id", "temperature", "top_p", "max_output_tokens")
    return {
        "id": identity,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "metadata": body.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": True,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "usage": None,
        **{name: body.get(name) for name in echoed},
    }


class Events:
    """The events of a streamed answer."""

    def __init__(self, body: Mapping[str, Any], identity: str, model: str) -> None:
        self._body, self._identity, self._model = body, identity, model
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item in progress, a message or a reasoning
        self._said = ""
        self._number = 0

    def of(self, event: Delta | Answer) -> Iterator[dict[str, Any]]:
        """The events that a part of an answer makes."""
        for made in self._events(event):
            yield {**made, "sequence_number": self._number}
            self._number += 1

    def end(self) -> Iterator[dict[str, Any]]:
        """Nothing follows the answer."""
        return iter(())

    def _events(self, event: Delta | Answer) -> Iterator[dict[str, Any]]:
        if not self._number:
            head = _head(self._body, self._identity, self._model)
            yield {"type": "response.created", "response": head}
            yield {"type": "response.in_progress", "response": head}
        if isinstance(event, Delta):
            kind = "message" if event.kind == "content" else "reasoning"
            if self._open is None or self._open["type"] != kind:
                yield from self._close()
                yield from self._start(kind)
            self._said += event.text
            name = "output_text" if kind == "message" else "reasoning_text"
            yield {"type": f"response.{name}.delta", **self._where(), "delta": event.text, **self._logs(kind)}
            return
        yield from self._close()
        for one in event.message.get("tool_calls", ()):
            item = _called(one)
            at = {"output_index": len(self._output), "item_id": item["id"]}
            blank = {**item, "arguments": "", "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": at["output_index"], "item": blank}
            arguments, name = item["arguments"], item["name"]
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {
                "type": "response.function_call_arguments.done",
                **at,
                "arguments": arguments,
                "name": name,
            }
            yield {"type": "response.output_item.done", "output_index": at["output_index"], "item": item}
            self._output.append(item)
        finished = _finished(event, self._body, self._identity, self._model, self._output)
        yield {"type": f"response.{finished['status']}", "response": finished}

    def _start(self, kind: str) -> Iterator[dict[str, Any]]:
        item = _text("", "in_progress") if kind == "message" else {**_reasoning(""), "content": []}
        self._open, self._said = item, ""
        yield {"type": "response.output_item.added", "output_index": len(self._output), "item": item}
        part = _part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        yield {"type": "response.content_part.added", **self._where(), "part": part}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        kind, text, where = self._open["type"], self._said, self._where()
        name = "output_text" if kind == "message" else "reasoning_text"
        part = _part(text) if kind == "message" else {"type": "reasoning_text", "text": text}
        yield {"type": f"response.{name}.done", **where, "text": text, **self._logs(kind)}
        yield {"type": "response.content_part.done", **where, "part": part}
        item = {**self._open, "content": [part]}
        if kind == "message":
            item["status"] = "completed"
        yield {"type": "response.output_item.done", "output_index": len(self._output), "item": item}
        self._output.append(item)
        self._open = None

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    @staticmethod
    def _logs(kind: str) -> dict[str, Any]:
        return {"logprobs": []} if kind == "message" else {}
