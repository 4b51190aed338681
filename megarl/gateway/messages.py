"""Chat messages as the gateway keeps them, whichever API they came by: one form, so that they can be compared.

A message has `role` ("system", "user", "assistant" or "tool") and `content`, a text; an assistant's may be None. An assistant's message
may have `reasoning_content` and `tool_calls` (OpenAI's form, arguments as JSON text), a tool's message has `tool_call_id`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]


def assistant(
    content: str | None, reasoning: str | None = None, calls: Sequence[Mapping[str, Any]] = ()
) -> Message:
    """An assistant's message; empty parts are left out."""
    message: Message = {"role": "assistant", "content": content or (None if calls or reasoning else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [dict(call) for call in calls]
    return message


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool; arguments as JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def is_turn(given: Mapping[str, Any], turn: Mapping[str, Any]) -> bool:
    """Whether an assistant's message of a request is a turn of the policy, as it was answered before.

    White space around texts, and how the JSON of arguments is written, do not count, since clients change them. Reasoning counts only if
    the client sends it: most leave it out.
    """
    if given["role"] != "assistant" or _text(given, "content") != _text(turn, "content"):
        return False
    if _text(given, "reasoning_content") not in ("", _text(turn, "reasoning_content")):
        return False
    calls, made = given.get("tool_calls", ()), turn.get("tool_calls", ())
    return len(calls) == len(made) and all(map(_same_call, calls, made))


def are_same(given: Sequence[Message], kept: Sequence[Message]) -> bool:
    """Whether messages of a request are those of an earlier one: the assistant's as in `is_turn`, others to the letter."""
    return len(given) == len(kept) and all(
        is_turn(one, other) if other["role"] == "assistant" else one == other
        for one, other in zip(given, kept, strict=True)
    )


def _text(message: Mapping[str, Any], key: str) -> str:
    return (message.get(key) or "").strip()


def _same_call(given: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    if given["id"] != made["id"] or given["function"]["name"] != made["function"]["name"]:
        return False
    return value_of(given["function"]["arguments"]) == value_of(made["function"]["arguments"])


def value_of(arguments: str) -> Any:
    """The value of a JSON text; a text that is not JSON, as it is. NaN and Infinity, which JSON does not have, are texts."""
    try:
        return json.loads(arguments, parse_constant=str)
    except ValueError:
        return arguments
