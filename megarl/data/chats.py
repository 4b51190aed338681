"""Chats in rows of data: messages, the tools that they may call, and keywords for the chat template.

A message keeps all its fields (`tool_calls`, `reasoning_content`, `name`, `tool_call_id`, ...), because each chat template
reads fields of its own. `content` may be a text, null (OpenAI's form of a message that only calls tools) or
a list of texts as parts.

`TemplateForms` are the forms of a chat that a template can read, found by trying each on the template once.

Chat templates agree on the fields of a message, but not on the form of some of them. A template that is given the other
form either fails or, worse, writes Python's notation of it (`{'a': 1}`, `None`) into the text:

- arguments of calls: objects (Qwen, Llama, GLM, and every template that uses `tojson`), or JSON texts (DeepSeek-V3). transformers
  documents objects, and SGLang's server turns OpenAI's texts into objects before it renders them;
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

from megarl.config.checks.data import OWN_TEMPLATE_KEYS
from megarl.data.files import Column, find

Message = dict[str, Any]
TOOLS_KEY = "tools"
TEMPLATE_KWARGS_KEY = "chat_template_kwargs"  # the column that TRL's data sets have


@dataclass(frozen=True)
class ChatKeywords:
    """The keywords that the chat templates of a data set get in addition to the messages.

    Attributes:
        tools_key: the column of a row's tools, dotted or not; None: no row has any.
        config: `data.apply_chat_template_kwargs`; a row's own tools and keywords win.
    """

    tools_key: str | None = TOOLS_KEY
    config: Mapping[str, Any] | None = None

    @property
    def columns(self) -> list[str]:
        """The columns to read, if a row has them."""
        return [key for key in (self.tools_key, TEMPLATE_KWARGS_KEY) if key is not None]

    @property
    def needed(self) -> list[Column]:
        """The columns that a Parquet file must have: the tools' column, if the configuration gives it another name."""
        if self.tools_key in (None, TOOLS_KEY):
            return []
        return [Column(self.tools_key, "data.tools_key (null: rows have none)", by_row=True)]

    def of_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row's keywords: the configuration's, overridden by the row's own.

        Raises:
            ValueError: the tools are no list of objects, or the keywords no object.
        """
        return {**(self.config or {}), **self.own(row)}

    def own(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row's own keywords and, as `tools`, its tools. ValueError: as `of_row`."""
        own: dict[str, Any] = {}
        keywords = _from_json(row.get(TEMPLATE_KWARGS_KEY))
        if keywords is not None:
            if not isinstance(keywords, Mapping):
                raise ValueError(f"{TEMPLATE_KWARGS_KEY!r} must be an object, found {brief(keywords)}")
            for name in keywords:
                if name in OWN_TEMPLATE_KEYS:
                    raise ValueError(f"{TEMPLATE_KWARGS_KEY!r}: megarl sets {name} itself; leave it out")
            own.update(keywords)
        tools = _from_json(find(dict(row), self.tools_key)) if self.tools_key is not None else None
        if tools:
            if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
                raise ValueError(
                    f"{self.tools_key!r} must be a list of objects (JSON schemas of functions), found {brief(tools)}; "
                    "data.tools_key=null reads no tools"
                )
            own["tools"] = tools
        return own


def read_chat(value: Any) -> Any:
    """The list of messages in a JSON text; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            messages = json.loads(value)
        except ValueError:
            return value
        is_chat = isinstance(messages, list) and all(
            isinstance(item, dict) and "role" in item for item in messages
        )
        if messages and is_chat:  # "[]" is a text, such as the answer that there are none
            return messages
    return value


def check_messages(messages: Any, key: str) -> list[Message]:
    """Check a chat: a non-empty list of messages, or such a list as JSON text.

    Returns:
        The messages with all their fields but null ones (`content` may be null) and empty lists of calls; calls that are
        given as JSON text are lists.

    Raises:
        ValueError: naming the message that is wrong.
    """
    messages = read_chat(messages)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key!r} must be a non-empty list of {{role, content}}, found {brief(messages)}")
    return [_message(message, f"{key!r} message {position}") for position, message in enumerate(messages)]


def prompt_messages(prompt: Any, key: str) -> list[Message]:
    """A prompt as chat messages: it is a list of them (or JSON text of one), or the text of one message, the user's.

    Raises:
        ValueError: it is neither, or an empty text.
    """
    prompt = read_chat(prompt)
    if prompt == "":
        raise ValueError(f"{key!r} is an empty text")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return check_messages(prompt, key)


def _message(message: Any, place: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or not role:
        raise ValueError(f"{place} needs the string 'role', found {brief(message)}")
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    calls = _calls(kept.pop("tool_calls", []), place)
    if calls:  # some templates take an empty list for a message that calls
        kept["tool_calls"] = calls
    content = kept.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ValueError(
                f"{place}: 'content' has parts that are not texts, {brief(content)}; only {{type: text, text: ...}} can "
                "be read"
            )
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{place} needs the string 'content', found {brief(message)}")
    elif content is None and not _may_lack_content(kept):
        raise ValueError(
            f"{place} needs the string 'content', found {brief(message)}: only an assistant's message with tool_calls or "
            "reasoning may have none"
        )
    return kept


def _may_lack_content(message: Message) -> bool:
    """Whether a message says something without content. Reasoning has several field names, so any further field counts."""
    others = {name for name, value in message.items() if value and name not in ("role", "content", "name")}
    return message["role"] == "assistant" and bool(others)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """The calls of a message, as a list: a template would take each character of a text for a call."""
    found = _from_json(calls) or []
    if not isinstance(found, list) or not all(isinstance(call, Mapping) for call in found):
        raise ValueError(f"{place}: 'tool_calls' must be a list of calls, found {brief(calls)}")
    for call in found:
        function = function_of(call)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
            try:
                json.loads(arguments)
            except ValueError as error:
                raise ValueError(
                    f"{place}: the arguments of the call of {function.get('name')!r} are no valid JSON: {error}"
                ) from None
    return [dict(call) for call in found]


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with name and arguments of a call: its `function` (OpenAI's form), or the call itself."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def lost_call(message: Mapping[str, Any], text: str) -> str | None:
    """The name of a call of the message that is missing in a rendering of it; None: none is missing."""
    names = [function_of(call).get("name") for call in message.get("tool_calls") or ()]
    return next((name for name in names if isinstance(name, str) and name not in text), None)


def check_calls_shown(message: Mapping[str, Any], text: str, name: str) -> None:
    """Raise ValueError if a call of the message `name`, which is to be learnt, is missing in its rendering."""
    lost = lost_call(message, text)
    if lost is not None:
        raise ValueError(
            f"the chat template does not write the tool_calls of {name} (a call of {lost!r}), so that it would teach a "
            "turn without them; use a template that does, or write the call into the content"
        )


def _from_json(value: Any) -> Any:
    """The value of a JSON text; None for an empty text; other values, and texts that are no JSON, unchanged."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value


def brief(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


STAND_IN = "0f6d3c9aQ"  # a text that occurs in no template, and that none changes
_QUESTION: Message = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class TemplateForms:
    """The forms that a template reads.

    Attributes:
        argument_objects: arguments of calls as objects; else as JSON texts.
        null_content: null as content; else an empty text.
        content_text: content as a text; else only as a list of parts.
        content_parts: content as a list of parts; else only as a text.
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
    """The object in a JSON text; other texts stay texts, because some tools take a plain text."""
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
            {"id": "call00001", "type": "function", "function": {"name": STAND_IN, "arguments": arguments}}
        ]
        answer = {"role": "assistant", "content": content}
        chat = [_QUESTION, answer if arguments is None else {**answer, "tool_calls": calls}]
        try:
            ((text,), _) = render_jinja_template(
                conversations=[chat], chat_template=template, **dict(special_tokens)
            )
        except Exception:  # a template is a program, and may fail in any way
            return False
        return expected in text and never not in text

    probe = {"key": STAND_IN + "v"}
    objects = shows("", probe, STAND_IN + "v", repr(probe))
    texts = shows("", json.dumps(probe), STAND_IN + "v", repr(probe))
    objects = objects or not texts
    # A template that does not show calls says nothing about null: it fails on it, writes it, or leaves it out.
    null = shows(None, probe if objects else json.dumps(probe), "", "None")
    text = shows(STAND_IN, None, STAND_IN, "[{")
    parts = shows([{"type": "text", "text": STAND_IN}], None, STAND_IN, "'text'")
    return TemplateForms(objects, null, text or not parts, parts)


def adapted(
    messages: Sequence[Mapping[str, Any]], template: str, special_tokens: Mapping[str, Any]
) -> list[Message]:
    """Messages in the forms that a template reads. ValueError: see `TemplateForms.adapt`."""
    tokens = {name: value for name, value in special_tokens.items() if isinstance(value, str)}
    forms = template_forms(template, tuple(sorted(tokens.items())))
    return [forms.adapt(message) for message in messages]
