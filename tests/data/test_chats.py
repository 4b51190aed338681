"""The forms of messages that small templates read; test_published_templates has the forms that published templates read."""

import copy
import json

import pytest

from megarl.data.chats import ChatKeywords, check_messages, template_forms
from megarl.data.tokenizer import render_text

USER = {"role": "user", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}


def assistant(**fields):
    return {"role": "assistant", **fields}


def test_all_fields_stay():
    chat = [
        {**USER, "name": "Ann"},
        assistant(content="", reasoning_content="r", tool_calls=[CALL], weight=0.5),
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "t"},
    ]
    assert check_messages(chat, "messages") == chat
    assert check_messages(json.dumps(chat), "messages") == chat
    as_text = [chat[0], {**chat[1], "tool_calls": json.dumps([CALL])}, chat[2]]
    assert check_messages(as_text, "messages") == chat


def test_null_fields_and_empty_calls_say_nothing():
    """Templates ask whether a message has `tool_calls` at all, so fields that say nothing are left out; null content of a call and null arguments
    stay."""
    chat = [
        USER,
        assistant(content=None, tool_calls=[CALL], name=None),
        assistant(content="b", tool_calls=[]),
    ]
    assert check_messages(chat, "messages") == [
        USER,
        assistant(content=None, tool_calls=[CALL]),
        assistant(content="b"),
    ]


@pytest.mark.parametrize(
    "message, problem",
    [
        ("a", "message 1 needs the string 'role'"),
        ({"role": "", "content": "a"}, "message 1 needs the string 'role'"),
        ({"role": "user", "content": None}, "message 1 needs the string 'content'"),
        (assistant(content=None), "message 1 needs the string 'content'.*only an assistant's"),
        (assistant(content=None, tool_calls=[]), "message 1 needs the string 'content'"),
        (assistant(content=3), "message 1 needs the string 'content'"),
        (assistant(content=[{"type": "image"}]), "message 1: 'content' has parts that are not texts"),
        (assistant(content="", tool_calls="f(x)"), "message 1: 'tool_calls' must be a list of calls"),
        (assistant(content="", tool_calls=["f"]), "message 1: 'tool_calls' must be a list of calls"),
        (
            assistant(content="", tool_calls=[{"function": {"name": "f", "arguments": '{"x": '}}]),
            "message 1: the arguments of the call of 'f' are no valid JSON",
        ),
    ],
)
def test_wrong_messages_are_named(message, problem):
    with pytest.raises(ValueError, match=problem):
        check_messages([USER, message], "messages")


def test_a_row_wins_over_the_configuration():
    tools, own = [{"name": "a"}], [{"name": "b"}]
    keywords = ChatKeywords(config={"tools": tools, "enable_thinking": True})
    assert keywords.of_row({}) == {"tools": tools, "enable_thinking": True}
    row = {"tools": own, "chat_template_kwargs": {"enable_thinking": False}}
    assert keywords.of_row(row) == {"tools": own, "enable_thinking": False}
    assert keywords.of_row({name: json.dumps(value) for name, value in row.items()}) == keywords.of_row(row)
    for nothing in (None, [], "", "[]"):
        assert keywords.of_row({"tools": nothing, "chat_template_kwargs": None})["tools"] == tools
    assert ChatKeywords("extra_info.tools").of_row({"extra_info": {"tools": own}}) == {"tools": own}
    assert ChatKeywords(None).of_row({"tools": own}) == {}


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"tools": "f"}, "'tools' must be a list of objects .*data.tools_key=null"),
        ({"tools": ["f"]}, "'tools' must be a list of objects"),
        ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' must be an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "megarl sets tokenize itself"),
    ],
)
def test_wrong_keywords_are_named(row, problem):
    with pytest.raises(ValueError, match=problem):
        ChatKeywords().of_row(row)


LOOP = "{{% for m in messages %}}{{{{ m.role }}}}:{}\n{{% endfor %}}"
CONTENT = LOOP.format("{{ m.content }}")
CALLS = LOOP.format("{{ m.content or '' }}{% for c in m.tool_calls or [] %}%s{% endfor %}")


def forms(template):
    return template_forms(template, ())


@pytest.mark.parametrize(
    "written, objects",
    [
        ("{{ c.function.arguments | tojson }}", True),
        (
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
            True,
        ),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}", True),
        ("{{ '(' + c.function.arguments + ')' }}", False),
        ("{{ c.function.arguments }}", False),  # it would write Python's notation of an object
    ],
)
def test_arguments(written, objects):
    assert forms(CALLS.replace("%s", written)).argument_objects is objects


def test_null_content():
    assert forms(CALLS.replace("%s", "{{ c.function.arguments | tojson }}")).null_content
    assert not forms(CONTENT).null_content  # it would write None
    assert not forms(LOOP.format("{{ ' ' + m.content }}")).null_content  # it fails on null


def test_parts():
    assert (forms(CONTENT).content_text, forms(CONTENT).content_parts) == (True, False)
    reads_both = LOOP.format(
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    )
    assert (forms(reads_both).content_text, forms(reads_both).content_parts) == (True, True)
    parts_alone = LOOP.format("{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert (forms(parts_alone).content_text, forms(parts_alone).content_parts) == (False, True)


def test_messages_are_rendered_in_the_form_that_is_read(tokenizer):
    own = copy.deepcopy(tokenizer)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    own.chat_template = CONTENT
    assert render_text(own, parts, False) == "user:a\n"
    with pytest.raises(ValueError, match="does not read content in parts, but a message of 'user' has 2"):
        render_text(own, [{"role": "user", "content": parts[0]["content"] * 2}], False)
    own.chat_template = LOOP.format("{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert (
        render_text(own, [{"role": "user", "content": "a"}], False) == "user:a"
    )  # jinja trims behind blocks
    flat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": null}'}]}]
    own.chat_template = CALLS.replace("%s", "{{ c.name }}{{ c.arguments | tojson }}")
    assert render_text(own, flat, False) == 'assistant:f{"x": null}'
    assert flat[0]["tool_calls"][0]["arguments"] == '{"x": null}'  # the caller's message is unchanged


def test_a_template_that_fails_on_a_type_is_a_users_error(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = LOOP.format("{{ ' ' + m.content + m.name }}")
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        render_text(own, [{"role": "user", "content": "a", "name": 3}], False)
