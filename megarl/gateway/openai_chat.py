"""OpenAI's Chat Completions API: bodies of requests, answers, parts of streams and errors, as JSON objects.

The form is that of https://platform.openai.com/docs/api-reference/chat; `reasoning_content` is the field that SGLang, vLLM and
DeepSeek add to messages.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.gateway.fields import (
    check_request,
    field,
    number,
    refuse,
    sampling_of,
    stops,
    template_kwargs,
    text_of,
    tool,
)
from megarl.gateway.messages import Message, assistant, call
from megarl.gateway.requests import Answer, Delta, Request, RequestError

_UNSUPPORTED = {
    "functions": ([],),
    "function_call": ("none",),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "audio": (),
    "prediction": (),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
_NAMES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
MOST_CHOICES = 64  # as many as a session may have in flight (service.Limits)


def parse(body: Mapping[str, Any]) -> Request:
    """The request of a body.

    Raises:
        RequestError: names the field that is wrong.
    """
    refuse(body, _UNSUPPORTED, "the policy's own distribution is sampled, and its texts alone are read")
    given = field(body, "messages", list, required=True)
    most = number(body, "max_completion_tokens", 1, 1 << 30, int) or number(
        body, "max_tokens", 1, 1 << 30, int
    )
    field(field(body, "stream_options", dict) or {}, "include_usage", bool, "stream_options.")
    return check_request(
        Request(
            messages=[_message(message, f"messages[{place}]") for place, message in enumerate(given)],
            tools=_tools(field(body, "tools", list) or []),
            tool_choice=_choice(body.get("tool_choice")),
            sampling=sampling_of(body),
            max_tokens=most,
            stop=stops(body, "stop"),
            n=number(body, "n", 1, MOST_CHOICES, int) or 1,
            template_kwargs=template_kwargs(body),
            log_probs=field(body, "logprobs", bool) or False,
        )
    )


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object", param=place)
    role = field(message, "role", str, f"{place}.", required=True)
    role = "system" if role == "developer" else role
    content = text_of(
        message.get("content"), f"{place}.content", ("text", "input_text", "output_text", "refusal")
    )
    if role == "assistant":
        calls = [
            _call(one, f"{place}.tool_calls[{i}]") for i, one in enumerate(message.get("tool_calls") or [])
        ]
        return assistant(content, message.get("reasoning_content") or message.get("reasoning"), calls)
    if role not in ("system", "user", "tool"):
        raise RequestError(
            f"{place}.role is {role!r}; there are system, user, assistant, tool", param=f"{place}.role"
        )
    if content is None:
        raise RequestError(f"{place}.content is missing", param=f"{place}.content")
    if role == "tool":
        answered = field(message, "tool_call_id", str, f"{place}.", required=True)
        return {"role": role, "tool_call_id": answered, "content": content}
    return {"role": role, "content": content}


def _call(one: Any, place: str) -> dict[str, Any]:
    function = one.get("function") if isinstance(one, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} must be a call of a function, with its name", param=place)
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):  # some clients read OpenAI's text and send the value
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call(str(one.get("id") or ""), function["name"], arguments)


def _tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    tools = []
    for number_, one in enumerate(given):
        place = f"tools[{number_}]"
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{place} must be {{type: function, function: {{...}}}}", param=place)
        tools.append(
            tool(function.get("name"), function.get("description"), function.get("parameters") or {}, place)
        )
    return tools


def _choice(choice: Any) -> str | Mapping[str, str]:
    if choice in (None, "auto", "none", "required"):
        return choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            "tool_choice must be auto, none, required or {type: function, function: {name: ...}}",
            param="tool_choice",
        )
    return {"name": function["name"]}


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of a request and its answers."""
    given, said = answers[0].num_prompt_tokens, sum(answer.num_tokens for answer in answers)
    return {"prompt_tokens": given, "completion_tokens": said, "total_tokens": given + said}


def completion(
    answers: Sequence[Answer], body: Mapping[str, Any], identity: str, model: str
) -> dict[str, Any]:
    """The object that answers a request."""
    choices = [
        {
            "index": answer.index,
            "message": {"content": None, **answer.message},
            "finish_reason": answer.finish_reason,
            "logprobs": _log_probs(answer) if body.get("logprobs") else None,
        }
        for answer in sorted(answers, key=lambda answer: answer.index)
    ]
    return {
        "id": identity,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(answers),
    }


def _log_probs(answer: Answer) -> dict[str, Any]:
    tokens = [
        {"token": text, "logprob": log_prob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, log_prob in answer.tokens
    ]
    return {"content": tokens, "refusal": None}


class Chunks:
    """The parts of a streamed answer."""

    def __init__(self, body: Mapping[str, Any], identity: str, model: str) -> None:
        self._body, self._answers = body, list[Answer]()
        self._head = {
            "id": identity,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()

    def of(self, event: Delta | Answer) -> Iterator[dict[str, Any]]:
        """The parts that an event makes."""
        if event.index not in self._begun:
            self._begun.add(event.index)
            yield self._chunk(event.index, {"role": "assistant", "content": ""})
        if isinstance(event, Delta):
            name = "reasoning_content" if event.kind == "reasoning" else "content"
            yield self._chunk(event.index, {name: event.text})
            return
        self._answers.append(event)
        for place, one in enumerate(event.message.get("tool_calls", ())):
            yield self._chunk(event.index, {"tool_calls": [{"index": place, **one}]})
        logs = _log_probs(event) if self._body.get("logprobs") else None
        yield self._chunk(event.index, {}, event.finish_reason, logs)

    def end(self) -> Iterator[dict[str, Any]]:
        """The last part, if the request asks for usage."""
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield {**self._head, "choices": [], "usage": usage(self._answers)}

    def _chunk(
        self, index: int, delta: Mapping[str, Any], reason: str | None = None, logs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logs}
        return {**self._head, "choices": [choice]}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = _NAMES.get(error.status, "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
