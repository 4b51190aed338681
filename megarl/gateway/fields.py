"""Fields of a request's JSON, checked; a wrong field raises a RequestError that names it."""

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.checks.data import OWN_TEMPLATE_KEYS
from megarl.data.chats import brief
from megarl.gateway.requests import Request, RequestError

_NAMES = {
    str: "a text",
    bool: "true or false",
    int: "an integer",
    list: "a list",
    dict: "an object",
    float: "a number",
}


def field(body: Mapping[str, Any], name: str, kind: type, place: str = "", required: bool = False) -> Any:
    """The field of an object; None if it is missing or null.

    Raises:
        RequestError: it is of another type, or is required and missing.
    """
    value, where = body.get(name), place + name
    if value is None:
        if required:
            raise RequestError(f"{where} is missing", param=where)
        return None
    fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{where} must be {_NAMES[kind]}, found {brief(value)}", param=where)
    return value


def number(body: Mapping[str, Any], name: str, least: float, most: float, kind: type = float) -> Any:
    """A number within bounds; None if it is missing.

    Raises:
        RequestError: it is no number, or outside the bounds.
    """
    value = field(body, name, kind)
    if value is not None and not least <= value <= most:
        raise RequestError(f"{name} must be between {least:g} and {most:g}, found {value:g}", param=name)
    return value


def refuse(body: Mapping[str, Any], names: Mapping[str, Sequence[Any]], why: str) -> None:
    """RequestError: a field has another value than those that change nothing."""
    for name, allowed in names.items():
        if body.get(name) is not None and body[name] not in allowed:
            raise RequestError(f"{name}={brief(body[name])}: {why}", param=name)


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that a body sets; the APIs, and SGLang's and vLLM's extensions of them, agree on the names."""
    bounds: dict[str, tuple[float, float, type]] = {
        "temperature": (0.0, 2.0, float),
        "top_p": (0.0, 1.0, float),
        "top_k": (-1, 1 << 30, int),
        "min_p": (0.0, 1.0, float),
        "repetition_penalty": (0.0, 2.0, float),
        "frequency_penalty": (-2.0, 2.0, float),
        "presence_penalty": (-2.0, 2.0, float),
        "seed": (-(1 << 63), (1 << 63) - 1, int),
    }
    found = {name: number(body, name, *limits) for name, limits in bounds.items()}
    return {name: value for name, value in found.items() if value is not None}


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of the chat template that a body sets.

    Raises:
        RequestError: one is none of the template's, such as another template, which would be a client's program in the engine's process.
    """
    given = field(body, "chat_template_kwargs", dict) or {}
    for name in ("chat_template", *OWN_TEMPLATE_KEYS):
        if name in given:
            where = f"chat_template_kwargs.{name}"
            raise RequestError(f"{where}: the gateway says this to the tokenizer itself", param=where)
    return given


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Texts that end an answer: a text or a list of them.

    Raises:
        RequestError: it is neither, or a text is empty.
    """
    value = body.get(name) or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts, found {brief(value)}", param=name)
    return tuple(texts)


def text_of(content: Any, place: str, kinds: Sequence[str]) -> str | None:
    """The text of content: a text, null, or a list of parts, whose texts are joined by line breaks.

    Raises:
        RequestError: another value, or a part that is no text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a text or a list of parts, found {brief(content)}", param=place)
    return "\n".join(part_text(part, f"{place}[{place_}]", kinds) for place_, part in enumerate(content))


def part_text(part: Any, place: str, kinds: Sequence[str]) -> str:
    """The text of a part of content. RequestError: it is no text, such as an image."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(part.get("text"), str):
        raise RequestError(f"{place}: this model reads texts alone, found {kind or brief(part)}", param=place)
    return part["text"]


def tool(name: Any, description: Any, parameters: Any, place: str) -> dict[str, Any]:
    """A tool in OpenAI's form.

    Raises:
        RequestError: it has no name, or its parameters are no JSON schema of an object.
    """
    if not isinstance(name, str) or not name:
        raise RequestError(f"{place}: a tool needs a name", param=place)
    schema = parameters
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(
            f"{place} ({name}): a tool needs a JSON schema of its parameters, an object, found {brief(schema)}",
            param=place,
        )
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description or "",
            "parameters": {"type": "object", "properties": {}, **schema},
        },
    }


def check_request(request: Request) -> Request:
    """The request, if it is complete.

    Raises:
        RequestError: there are no messages, or the last one is the assistant's; a tool is named that is not there.
    """
    if not request.messages:
        raise RequestError("messages is empty", param="messages")
    if request.messages[-1]["role"] == "assistant":
        raise RequestError(
            "the last message is the assistant's: a turn cannot be continued, end with the user's or a tool's message",
            param="messages",
        )
    names = [one["function"]["name"] for one in request.tools]
    if not request.tools and request.tool_choice not in ("auto", "none"):
        raise RequestError("tool_choice asks for a tool, and there are none", param="tool_choice")
    if isinstance(request.tool_choice, Mapping) and request.tool_choice["name"] not in names:
        raise RequestError(
            f"tool_choice names {request.tool_choice['name']!r}; there are {', '.join(names)}",
            param="tool_choice",
        )
    return request
