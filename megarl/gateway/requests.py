"""A request to the policy and its answer, whichever API they came by, and what can be wrong with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.gateway.messages import Message

INVALID, UNAUTHORIZED, UNKNOWN, WRONG_METHOD, TOO_LARGE, BUSY, UNAVAILABLE, LATE = (
    400,
    401,
    404,
    405,
    413,
    429,
    503,
    504,
)


class RequestError(Exception):
    """A request that cannot be answered; each API has its own form for it.

    Attributes:
        status: of HTTP.
        param: the field that is wrong, if one is.
        code: OpenAI's, such as "context_length_exceeded".
        retry_after: seconds after which the same request may be answered; None: unknown.
    """

    def __init__(
        self,
        message: str,
        status: int = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.retry_after = retry_after


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        messages: the whole conversation; the last one is not the assistant's.
        tools: in OpenAI's form, {"type": "function", "function": {"name", "description", "parameters"}}.
        tool_choice: "auto", "none", "required", or {"name": ...}.
        sampling: fields of `SamplingParams` that the client has set.
        max_tokens: most tokens of an answer; None: as many as there is room for.
        stop: texts that end an answer and are not part of it.
        template_kwargs: of the chat template.
        log_probs: whether the answer has its tokens.
        player: whose request it is, where the policy has several names; None: it has one.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, str] = "auto"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_probs: bool = False
    player: str | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the chat template, `tools` among them."""
        return {**self.template_kwargs, **({"tools": [*self.tools]} if self.tools else {})}


@dataclass(frozen=True)
class Delta:
    """A part of an answer in progress: of choice `index`, "reasoning" or "content"; the prompt has so many tokens."""

    index: int
    kind: str
    text: str
    num_prompt_tokens: int


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    Attributes:
        index: of the choice.
        message: the assistant's.
        finish_reason: "stop", "length" or "tool_calls".
        stop: the text of `Request.stop` that ended it.
        tokens: (text, log-prob) of each token, if the request asks for them.
    """

    index: int
    message: Message
    finish_reason: str
    stop: str | None
    tokens: Sequence[tuple[str, float]]
    num_prompt_tokens: int
    num_tokens: int
