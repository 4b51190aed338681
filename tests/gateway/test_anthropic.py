"""Anthropic's own SDK as the client, unmodified."""

import json

import pytest

from megarl.gateway.service import Limits
from megarl.rollout.engine import EngineError
from tests.gateway.conftest import MODEL

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
ASK = {"model": MODEL, "max_tokens": 1000}


def sdk():
    """Imported only in these tests, because it would add a seventh to the imports of each collection of all tests."""
    return pytest.importorskip("anthropic", reason="requirements/dev.txt has the SDK")


def client_of(served, key=None):
    return sdk().Anthropic(
        base_url=served.url, api_key=key or served.session().token, max_retries=0, timeout=60
    )


def user(content):
    return {"role": "user", "content": content}


def test_a_conversation_with_tools_is_one_trajectory(serve):
    served = serve(
        [f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", "It rains."],
        template="qwen3",
        reasoning="qwen3",
    )
    session = served.session()
    client = client_of(served, session.token)
    messages = [user([{"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}}])]
    system = [{"type": "text", "text": "Be brief."}]
    first = client.messages.create(**ASK, system=system, messages=messages, tools=TOOLS)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (first.content[0].thinking, first.content[1].text) == ("Hm.", "I look.")
    assert first.stop_reason == "tool_use" and first.content[2].input == {"city": "Paris", "days": 2}
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
        for block in first.content[2:]
    ]
    messages += [
        {"role": "assistant", "content": first.content},
        user([*results, {"type": "text", "text": "So?"}]),
    ]
    count = client.messages.count_tokens(model=MODEL, system=system, messages=messages, tools=TOOLS)
    second = client.messages.create(**ASK, system=system, messages=messages, tools=TOOLS)
    assert second.content[0].text == "It rains." and second.stop_reason == "end_turn"
    before, after = served.policy.asked
    assert after.prompt_ids[: len(before.prompt_ids + before.ids)] == before.prompt_ids + before.ids
    assert count.input_tokens == second.usage.input_tokens == len(after.prompt_ids)
    assert second.usage.output_tokens == len(after.ids)
    own = served.policy.tokenizer.decode(after.prompt_ids)
    assert own.startswith("<|im_start|>system\nBe brief.") and own.count("<tool_response>\nrain") == 2
    (trajectory,) = session.trajectories()
    assert sum(trajectory.response_mask) == len(before.ids) + len(after.ids)


@pytest.mark.parametrize(
    "words", ["It rains é漢.", f"I look.\n{CALL}", f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}", CALL]
)
@pytest.mark.parametrize("piece", [1, 6])
def test_a_streamed_answer_is_the_message(serve, words, piece):
    served = serve([words], template="qwen3", reasoning="qwen3", piece=piece)
    client = client_of(served)
    whole = client.messages.create(**ASK, messages=[user("Rain?")], tools=TOOLS)
    with client.messages.stream(**ASK, messages=[user("Rain?")], tools=TOOLS) as stream:
        events = list(stream)
        told = stream.get_final_message()
    kinds = [event.type for event in events]
    assert events[0].message.usage.input_tokens == told.usage.input_tokens == whole.usage.input_tokens > 0
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(told.content)

    def said(message):
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert said(told) == said(whole) and told.stop_reason == whole.stop_reason
    assert told.usage.output_tokens == whole.usage.output_tokens == len(served.policy.asked[-1].ids)


@pytest.mark.parametrize(
    ("written", "told"), [(r'"Paris \ud83d"', "Paris \ufffd"), ("NaN", "NaN"), ("1e999", "Infinity")]
)
def test_input_that_json_cannot_tell_reaches_the_client_and_comes_back(serve, written, told):
    """The policy writes half of an emoji's escape, or numbers of Python's JSON alone."""
    words = CALL.replace('"Paris"', written)
    served = serve([words, words, "It rains."])
    session = served.session()
    client, messages = client_of(served, session.token), [user("Rain?")]
    with client.messages.stream(**ASK, messages=messages, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**ASK, messages=messages, tools=TOOLS)
    (used,), (call,) = whole.content, streamed.content
    assert used.input == call.input == {"city": told, "days": 2}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "rain"}
    messages += [{"role": "assistant", "content": whole.content}, user([result])]
    client.messages.create(**ASK, messages=messages, tools=TOOLS)
    assert [one.num_turns for one in session.trajectories()] == [1, 2]


def test_stops_lengths_and_choices_of_tools(serve):
    served = serve(["abc END def"])
    client = client_of(served)
    answer = client.messages.create(**ASK, messages=[user("Go")], stop_sequences=["END"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (
        "abc ",
        "stop_sequence",
        "END",
    )
    answer = client.messages.create(model=MODEL, max_tokens=2, messages=[user("Go")])
    assert (answer.content[0].text, answer.stop_reason) == ("ab", "max_tokens")
    served = serve(['{"city": "Rome"}}\n</tool_call>', CALL])
    client = client_of(served)
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        served.policy.words[:] = ['{"city": "Rome"}}\n</tool_call>']
        answer = client.messages.create(**ASK, messages=[user("Go")], tools=TOOLS, tool_choice=choice)
        assert answer.content[0].input == {"city": "Rome"}
    served.policy.words[:] = [CALL]
    answer = client.messages.create(**ASK, messages=[user("Go")], tools=TOOLS, tool_choice={"type": "none"})
    assert answer.content[0].text == CALL


BAD = [
    ({"messages": []}, "messages is empty"),
    ({"max_tokens": None}, "max_tokens is missing"),
    (
        {"messages": [user([{"type": "image", "source": {}}])]},
        r"messages\[0\].content\[0\]: this model reads texts",
    ),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "tool", "content": "b"}]}, r"messages\[0\].role"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\] \(f\): a tool needs a JSON schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, r"tools\[0\]"),
    ({"tool_choice": {"type": "any"}}, "there are none"),
]


def test_what_is_wrong_is_an_error_in_anthropics_form(serve):
    served = serve(["x"], context_length=200, limits=Limits(body_bytes=9000))
    client = client_of(served)
    for change, text in BAD:
        body = {
            key: value
            for key, value in {**ASK, "messages": [user("a")], **change}.items()
            if value is not None
        }
        with pytest.raises(sdk().BadRequestError, match=text) as found:
            client.post("/v1/messages", body=body, cast_to=object)
        assert (found.value.body["type"], found.value.body["error"]["type"]) == (
            "error",
            "invalid_request_error",
        )
    with pytest.raises(sdk().BadRequestError, match="maximum context length"):
        client.messages.create(**ASK, messages=[user("a b" * 200)])
    with pytest.raises(sdk().NotFoundError, match="claude"):
        client.messages.create(model="claude", max_tokens=5, messages=[user("a")])
    with pytest.raises(sdk().AuthenticationError):
        client_of(served, "sk-other").messages.create(**ASK, messages=[user("a")])
    with pytest.raises(sdk().RequestTooLargeError):
        client.messages.create(**ASK, messages=[user("a" * 10_000)])
    served.policy.failure = EngineError("gone")
    with pytest.raises(sdk().APIStatusError, match="gone") as failed:
        client.messages.create(**ASK, messages=[user("a")])
    assert (failed.value.status_code, failed.value.body["error"]["type"]) == (503, "overloaded_error")
    assert json.dumps(failed.value.body)
