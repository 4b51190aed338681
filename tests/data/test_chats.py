import json

import pytest

from megarl.data.chats import ChatKeywords, check_messages

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
    """Templates ask whether a message has `tool_calls` at all. Null content and null arguments are said."""
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
        (assistant(content=[{"type": "image"}]), "message 1: 'content' has parts that are no texts"),
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
        ({"chat_template_kwargs": {"tokenize": True}}, "megarl itself says tokenize"),
    ],
)
def test_wrong_keywords_are_named(row, problem):
    with pytest.raises(ValueError, match=problem):
        ChatKeywords().of_row(row)
