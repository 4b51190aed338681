"""OpenAI's Responses API, with OpenAI's own SDK as the client, unmodified."""

import json

import openai
import pytest

from tests.gateway.conftest import MODEL
from tests.gateway.test_openai import CALL, client_of

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_conversation_with_tools_is_one_trajectory(serve, by_name):
    words = [f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", "It rains."]
    served = serve(words, template="qwen3", reasoning="qwen3")
    session = served.session()
    client = client_of(served, session.token)
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}]
    ask = {"model": MODEL, "instructions": "Be brief.", "tools": TOOLS}
    first = client.responses.create(**ask, input=asked)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert (first.output[0].content[0].text, first.output_text, first.status) == (
        "Hm.",
        "I look.",
        "completed",
    )
    made = first.output[2]
    assert (made.name, json.loads(made.arguments)) == ("weather", {"city": "Paris", "days": 2})
    told = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
    if by_name:
        second = client.responses.create(**ask, input=[told], previous_response_id=first.id)
    else:
        second = client.responses.create(**ask, input=[*asked, *first.output, told])
    assert second.output_text == "It rains."
    before, after = served.policy.asked
    assert after.prompt_ids[: len(before.prompt_ids + before.ids)] == before.prompt_ids + before.ids
    assert served.policy.tokenizer.decode(after.prompt_ids).startswith("<|im_start|>system\nBe brief.")
    assert (second.usage.input_tokens, second.usage.output_tokens) == (len(after.prompt_ids), len(after.ids))
    (trajectory,) = session.trajectories()
    assert sum(trajectory.response_mask) == len(before.ids) + len(after.ids)
    with pytest.raises(openai.BadRequestError) as unknown:
        client.responses.create(**ask, input="a", previous_response_id="resp_0")
    assert unknown.value.param == "previous_response_id"


@pytest.mark.parametrize(
    "words", ["It rains é漢.", f"I look.\n{CALL}", f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}"]
)
@pytest.mark.parametrize("piece", [1, 6])
def test_a_streamed_response_is_the_response(serve, words, piece):
    served = serve([words], template="qwen3", reasoning="qwen3", piece=piece)
    client = client_of(served)
    ask = {"model": MODEL, "input": "Rain?", "tools": TOOLS}
    whole = client.responses.create(**ask)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        told = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")

    assert [item.type for item in told.output] == [item.type for item in whole.output]
    assert (told.output_text, told.usage.output_tokens) == (whole.output_text, whole.usage.output_tokens)
    for one, other in zip(told.output, whole.output, strict=True):
        if one.type == "function_call":
            assert (one.name, one.arguments) == (other.name, other.arguments)
        if one.type == "reasoning":
            assert one.content[0].text == other.content[0].text


BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "messages"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0]"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"background": True}, "background"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
]


def test_what_is_wrong_names_its_field_and_short_answers_say_so(serve):
    served = serve(["abc"])
    client = client_of(served)
    for change, param in BAD:
        with pytest.raises(openai.BadRequestError) as found:
            client.post("/responses", body={"model": MODEL, "input": "a", **change}, cast_to=object)
        assert found.value.param == param, change
    short = client.responses.create(model=MODEL, input="a", max_output_tokens=2)
    assert (short.output_text, short.status, short.incomplete_details.reason) == (
        "ab",
        "incomplete",
        "max_output_tokens",
    )
