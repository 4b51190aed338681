"""Forms of a chat that a template can read: found by trying each on the template, once.

Chat templates agree on the fields of a message, but not on the form of some of them. A template that is given the other
form either fails or, what is worse, writes Python's notation of it (`{'a': 1}`, `None`) into the text:

- arguments of calls: objects (Qwen, Llama, GLM, and whatever goes through `tojson`), or JSON texts (DeepSeek-V3). An
  object is what transformers documents, and what SGLang's server makes of OpenAI's texts before it renders them;
- null content: a template that would write `None`, or fails, is given an empty text, as SGLang's server does;
- content as a list of parts: a template that does not read parts is given the text of the only part, and one that reads
  nothing else a list of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megarl.data.chats import Message, function_of

_PROBE = "0f6d3c9aQ"  # occurs in no template, and none changes it
_QUESTION: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class TemplateForms:
    """Which forms a template reads.

    Attributes:
        argument_objects: arguments of calls as objects; else as JSON texts.
        null_content: null as content; else an empty text.
        content_text: content as a text; else as a list of parts alone.
        content_parts: content as a list of parts; else as a text alone.
    """

    argument_objects: bool
    null_content: bool
    content_text: bool
    content_parts: bool

    def adapt(self, message: Mapping[str, Any]) -> Message:
        """A checked message in the forms that the template reads.

        Raises:
            ValueError: the content has several parts, and the template reads none.
        """
        adapted = dict(message)
        if adapted.get("tool_calls"):
            adapted["tool_calls"] = [self._call(call) for call in adapted["tool_calls"]]
        content = adapted.get("content")
        if content is None and not self.null_content:
            adapted["content"] = ""
        if isinstance(content, list) and not self.content_parts:
            if len(content) != 1:
                raise ValueError(
                    f"the chat template does not read content in parts, but a message of {message['role']!r} has "
                    f"{len(content)}; make them one text"
                )
            adapted["content"] = content[0]["text"]
        if isinstance(content, str) and not self.content_text:
            adapted["content"] = [{"type": "text", "text": content}]
        return adapted

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(function_of(call))
        if "arguments" in function:
            read = as_object if self.argument_objects else _as_text
            function["arguments"] = read(function["arguments"])
        return {**call, "function": function} if isinstance(call.get("function"), Mapping) else function


def as_object(arguments: Any) -> Any:
    """An object that is given as JSON text; other texts, of which some tools take one as it is, stay texts."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@lru_cache(maxsize=64)
def template_forms(template: str, special_tokens: tuple[tuple[str, Any], ...]) -> TemplateForms:
    """The forms that a template reads.

    Args:
        special_tokens: the tokenizer's, by name (`special_tokens_map`), which templates write.
    """
    # takes a second of a core: ranks that read no text do without
    from transformers.utils.chat_template_utils import render_jinja_template

    def shows(content: Any, arguments: Any, expected: str, never: str) -> bool:
        calls = [
            {"id": "call00001", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
        ]
        answer = {"role": "assistant", "content": content}
        chat = [_QUESTION, answer if arguments is None else {**answer, "tool_calls": calls}]
        try:
            ((text,), _) = render_jinja_template(
                conversations=[chat], chat_template=template, **dict(special_tokens)
            )
        except Exception:  # a template is a program of somebody's, and may fail in any way
            return False
        return expected in text and never not in text

    probe = {"key": _PROBE + "v"}
    objects = shows("", probe, _PROBE + "v", repr(probe))
    texts = shows("", json.dumps(probe), _PROBE + "v", repr(probe))
    objects = objects or not texts
    # A template that does not show calls says nothing about null: it fails on it, writes it, or leaves it out.
    null = shows(None, probe if objects else json.dumps(probe), "", "None")
    text = shows(_PROBE, None, _PROBE, "[{")
    parts = shows([{"type": "text", "text": _PROBE}], None, _PROBE, "'text'")
    return TemplateForms(objects, null, text or not parts, parts)


def adapted(
    messages: Sequence[Mapping[str, Any]], template: str, special_tokens: Mapping[str, Any]
) -> list[Message]:
    """Messages in the forms that a template reads. ValueError: see `TemplateForms.adapt`."""
    tokens = {name: value for name, value in special_tokens.items() if isinstance(value, str)}
    forms = template_forms(template, tuple(sorted(tokens.items())))
    return [forms.adapt(message) for message in messages]
