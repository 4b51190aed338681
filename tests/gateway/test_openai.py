"""OpenAI's own SDK as the client, unmodified."""

import json
import socket
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.gateway.reader import StreamedTurn, TurnReader
from megarl.gateway.requests import Request, RequestError
from megarl.gateway.server import listen, url_of
from megarl.gateway.service import Limits
from megarl.rollout.engine import EngineError
from tests.data.test_published_templates import TOOLS, user
from tests.gateway.conftest import MODEL, OWNER
from tests.waiting import wait_for

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'


def client_of(served, key=None):
    return openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=key or served.session().token, max_retries=0, timeout=60
    )


def texts(served, trajectory):
    """The text of the trajectory's live tokens."""
    ids = [i for i, live in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if live]
    return served.policy.tokenizer.decode(ids)


def test_a_conversation_with_tools_is_one_trajectory(serve):
    served = serve([CALL, "It rains."])
    session = served.session()
    client = client_of(served, session.token)
    messages = [{"role": "system", "content": "Be brief."}, user("Rain in Paris?")]
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    (choice,) = first.choices
    (made,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert (made.function.name, json.loads(made.function.arguments)) == (
        "weather",
        {"city": "Paris", "days": 2},
    )
    messages += [choice.message, {"role": "tool", "tool_call_id": made.id, "content": "rain"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, logprobs=True)
    assert second.choices[0].message.content == "It rains." and second.choices[0].finish_reason == "stop"
    asked = served.policy.asked
    assert (
        asked[1].prompt_ids[: len(asked[0].prompt_ids + asked[0].ids)] == asked[0].prompt_ids + asked[0].ids
    )
    assert second.usage.prompt_tokens == len(asked[1].prompt_ids)
    assert second.usage.completion_tokens == len(asked[1].ids)
    logs = second.choices[0].logprobs.content
    assert [one.logprob for one in logs] == asked[1].log_probs
    assert "".join(one.token for one in logs) == "It rains.<|im_end|>"
    (trajectory,) = session.trajectories()
    assert texts(served, trajectory) == f"{CALL}<|im_end|>It rains.<|im_end|>"


@pytest.mark.parametrize("words, content, reasoning, calls", [
    ("Well, it rains.  ", "Well, it rains.  ", None, 0),
    (f"I look.\n{CALL}\n{CALL}", "I look.", None, 2),
    ("<think>\nHm, so.\n</think>\n\nIt rains é漢.", "It rains é漢.", "Hm, so.", 0),
    (f"<think>\nHm.\n</think>\n\n{CALL}", None, "Hm.", 1),
    ("<tool_cal me", "<tool_cal me", None, 0),
])  # fmt: skip
@pytest.mark.parametrize("piece", [1, 5])
def test_a_streamed_answer_is_the_sum_of_its_parts(serve, words, content, reasoning, calls, piece):
    served = serve([words], template="qwen3", reasoning="qwen3", piece=piece)
    session = served.session()
    client = client_of(served, session.token)
    ask = {"model": MODEL, "messages": [user("Rain?")], "tools": TOOLS}
    whole = client.chat.completions.create(**ask).choices[0]
    said = {"content": "", "reasoning_content": ""}
    made, reasons, usages = [], [], []
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            delta = choice.delta
            said["content"] += delta.content or ""
            said["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            made += delta.tool_calls or []
            reasons.append(choice.finish_reason)
    assert (whole.message.content, getattr(whole.message, "reasoning_content", None)) == (content, reasoning)
    assert (said["content"] or None, said["reasoning_content"] or None) == (content, reasoning)
    assert len(made) == len(whole.message.tool_calls or []) == calls
    assert [one.function.arguments for one in made] == [
        one.function.arguments for one in whole.message.tool_calls or []
    ]
    assert [reason for reason in reasons if reason] == [whole.finish_reason]
    assert usages[-1].completion_tokens == len(served.policy.asked[-1].ids)
    recorded = session.tree.turns[-1].message
    assert (recorded["content"], recorded.get("reasoning_content")) == (content, reasoning)


def test_parts_come_while_the_policy_writes(serve):
    served, parts = serve(["word " * 400], delay=0.05, piece=4), 0  # the whole answer takes 25 s
    with client_of(served).chat.completions.create(model=MODEL, messages=[user("Go")], stream=True) as answer:
        for chunk in answer:
            parts += bool(chunk.choices[0].delta.content)
            if parts == 4:
                break
    assert parts == 4 and not served.policy.asked, "the answer had ended"


def test_an_answer_does_not_wait_for_its_first_part_to_be_acknowledged(serve):
    """Linux acknowledges after 40 ms. One short time of many counts, because other processes take time, too."""
    served = serve(["x"], tools=None)
    with httpx.Client(base_url=served.url, headers={"x-api-key": OWNER}) as client:
        client.get("/v1/models")
        wait_for(lambda: client.get("/v1/models").elapsed.total_seconds() < 0.03, 10, apart=0.0)


def test_choices_stops_lengths_and_sampling(serve):
    served = serve(["abc END def"])
    session = served.session()
    client = client_of(served, session.token)
    answer = client.chat.completions.create(
        model=MODEL, messages=[user("Go")], n=2, stop=["END", "zzz"], temperature=0.5, top_p=0.9, seed=7
    )
    assert [choice.message.content for choice in answer.choices] == ["abc ", "abc "]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert (served.policy.sampled[-1].temperature, served.policy.sampled[-1].top_p) == (0.5, 0.9)
    first, second = session.trajectories()
    assert texts(served, first) == texts(served, second) == "abc END"
    short = client.chat.completions.create(model=MODEL, messages=[user("Go")], max_completion_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("ab", "length")
    served = serve(["x"], fixed_sampling=True)
    client_of(served).chat.completions.create(model=MODEL, messages=[user("Go")], temperature=0.5)
    assert served.policy.sampled[-1].temperature == 1.0, "training samples the policy's own distribution"


@pytest.mark.parametrize("choice, forced", [
    ({"type": "function", "function": {"name": "add"}}, '<tool_call>\n{"name":"add", "arguments":'),
    ("required", '<tool_call>\n{"name":"'),
])  # fmt: skip
def test_a_forced_call_begins_with_tokens_that_the_policy_did_not_choose(serve, choice, forced):
    rest = 'add", "arguments":{"a": 1}}\n</tool_call>' if choice == "required" else '{"a": 1}}\n</tool_call>'
    served = serve([rest])
    session = served.session()
    answer = client_of(served, session.token).chat.completions.create(
        model=MODEL, messages=[user("1?")], tools=TOOLS, tool_choice=choice
    )
    (made,) = answer.choices[0].message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1})
    assert served.policy.tokenizer.decode(served.policy.asked[0].prompt_ids).endswith(forced)
    assert texts(served, session.trajectories()[0]) == rest + "<|im_end|>"


def test_a_call_cannot_be_forced_before_reasoning_that_the_template_opens(serve):
    served = serve(["x"], template="qwen3_5_think", reasoning="qwen3")
    with pytest.raises(openai.BadRequestError, match="begin with reasoning"):
        client_of(served).chat.completions.create(
            model=MODEL, messages=[user("1?")], tools=TOOLS, tool_choice="required"
        )


def test_reasoning_that_the_template_opens_is_reasoning(serve):
    served = serve(["Hm.\n</think>\n\nIt rains."], template="qwen3_5_think", reasoning="qwen3", piece=1)
    client = client_of(served)
    whole = client.chat.completions.create(model=MODEL, messages=[user("Rain?")]).choices[0].message
    assert (whole.reasoning_content, whole.content) == ("Hm.", "It rains.")
    said = {"reasoning_content": "", "content": ""}
    for chunk in client.chat.completions.create(model=MODEL, messages=[user("Rain?")], stream=True):
        for name in said:
            said[name] += getattr(chunk.choices[0].delta, name, None) or ""
    assert said == {"reasoning_content": "Hm.", "content": "It rains."}


def test_long_answers_are_streamed_as_they_are(serve):
    words = " ".join(f"é漢 {number} <tool" for number in range(60))
    served = serve([words], piece=3)
    parts = client_of(served).chat.completions.create(
        model=MODEL, messages=[user("Go")], tools=TOOLS, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == words


BAD = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "messages"),
    ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}, "messages[0].content[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools[0]"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0]",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokens": True}, "max_tokens"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"stream": True, "stream_options": ["include_usage"]}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
]


def test_what_is_wrong_is_an_error_in_openais_form(serve):
    served = serve(["x"])
    client = client_of(served)
    for change, param in BAD:
        body = {"model": MODEL, "messages": [user("a")], **change}
        with pytest.raises(openai.BadRequestError) as found:
            client.post("/chat/completions", body=body, cast_to=object)
        assert found.value.param == param, change
        assert found.value.type == "invalid_request_error" and found.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=[user("a")])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"there is no model 'a/b'"):
        client.models.retrieve("a/b")
    assert client.models.retrieve(MODEL).id == MODEL
    method = httpx.put(f"{served.url}/v1/models", headers={"x-api-key": OWNER})
    assert (method.status_code, {*method.headers["allow"].split(", ")}) == (405, {"GET", "HEAD"})
    assert method.json()["error"]["message"] == "there is no PUT /v1/models"
    with pytest.raises(openai.AuthenticationError):
        client_of(served, "sk-other").chat.completions.create(model=MODEL, messages=[user("a")])
    for content in (b"{", b"[]", b"\xff"):
        answer = httpx.post(
            f"{served.url}/v1/chat/completions", content=content, headers={"x-api-key": OWNER}
        )
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert served.policy.asked == []


def test_a_function_without_parameters_needs_no_schema(serve):
    """OpenAI: "Omitting parameters defines a function with an empty parameter list." """
    served = serve(['<tool_call>\n{"name": "look"}\n</tool_call>'])
    client = client_of(served)
    tool = {"type": "function", "function": {"name": "look", "description": "Look around."}}
    answer = client.chat.completions.create(model=MODEL, messages=[user("Look")], tools=[tool])
    (made,) = answer.choices[0].message.tool_calls
    assert (made.function.name, made.function.arguments) == ("look", "{}")
    named = {"type": "function", "name": "look", "parameters": None}
    (item,) = client.responses.create(model=MODEL, input="Look", tools=[named]).output
    assert (item.name, item.arguments) == ("look", "{}")


def test_contexts_bodies_and_requests_have_limits(serve):
    served = serve(["x"], context_length=120, limits=Limits(body_bytes=4000, requests=2))
    client = client_of(served)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as found:
            client.chat.completions.create(model=MODEL, messages=[user("a b" * 100)], stream=stream)
        assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        client.chat.completions.create(model=MODEL, messages=[user("a" * 5000)])
    assert large.value.status_code == 413
    for _ in range(2):
        client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert max(one.max_new_tokens for one in served.policy.sampled) < 60
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=[user("a")])


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_reaches_the_last_tokens_of_the_context_is_refused(serve, stream):
    """SGLang reads none of that length, and would end a streamed request as it ends one that failed: with the run."""
    served = serve(["x"])
    session = served.session()
    client = client_of(served, session.token)
    length = client.chat.completions.create(model=MODEL, messages=[user("a")]).usage.prompt_tokens
    served.policy.context_length, served.policy.kept_free = length + 5, 6
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model=MODEL, messages=[user("a")], stream=stream)
    assert found.value.code == "context_length_exceeded" and len(served.policy.asked) == 1
    served.policy.context_length += 1
    client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert len(served.policy.asked) == 2 and session.failure is None


def test_a_failed_engine_is_an_error_and_no_turn(serve):
    served = serve(["x"], failure=EngineError("gone"))
    session = served.session()
    client = client_of(served, session.token)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="gone"):
            client.chat.completions.create(model=MODEL, messages=[user("a")], stream=stream)
    assert not session.tree.turns and session.in_flight == 0
    served.policy.failure = None
    assert client.chat.completions.create(model=MODEL, messages=[user("a")]).choices[0].message.content == "x"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted_and_leaves_no_turn(serve, stream):
    served = serve(["word " * 200], delay=0.05, piece=8)
    session = served.session()
    client = client_of(served, session.token)
    if stream:
        answer = client.chat.completions.create(model=MODEL, messages=[user("a")], stream=True)
        next(iter(answer))
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).chat.completions.create(model=MODEL, messages=[user("a")])
    wait_for(lambda: served.policy.aborted and session.in_flight == 0)
    assert not session.tree.turns and session.trajectories() == []


def test_slow_answers_and_crowds_are_refused(serve):
    served = serve(["word " * 200], delay=0.2, limits=Limits(request_seconds=0.3, in_flight=2))
    client = client_of(served)
    with pytest.raises(openai.APIStatusError) as late:
        client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert late.value.status_code == 504 and len(served.policy.aborted) == 1
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model=MODEL, messages=[user("a")], n=3)


def test_requests_beyond_a_rate_are_told_when_to_come_again(serve):
    served = serve(["x"], limits=Limits(requests_per_minute=3))
    client, other, owner = client_of(served), client_of(served), client_of(served, OWNER)
    ask = {"model": MODEL, "messages": [user("a")]}
    for _ in range(3):
        client.chat.completions.create(**ask)
    for refused in (
        lambda: client.chat.completions.create(**ask, stream=True),
        lambda: client.responses.create(model=MODEL, input="a"),
        client.models.list,
    ):
        with pytest.raises(openai.RateLimitError) as error:
            refused()
        assert (
            error.value.code == "rate_limit_exceeded" and error.value.response.headers["retry-after"] == "20"
        )
    message = httpx.post(f"{served.url}/v1/messages", headers={"x-api-key": client.api_key}, json={})
    assert message.status_code == 429 and message.json()["error"]["type"] == "rate_limit_error"
    other.chat.completions.create(**ask)  # another session has its own rate
    for _ in range(3):
        owner.models.list()
    with pytest.raises(openai.RateLimitError):  # requests without a session share a rate
        owner.models.list()
    served.now[0] = 19.9
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**ask)
    served.now[0] = 20.0
    client.chat.completions.create(**ask)
    served.now[0] = 1000.0  # at most a minute's requests are saved up
    for _ in range(3):
        client.chat.completions.create(**ask)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**ask)


def test_a_client_waits_as_it_is_told(serve, monkeypatch):
    served, slept = serve(["x"], limits=Limits(requests_per_minute=30)), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        served.now[0] += seconds

    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(sleep=sleep, time=time.time))
    client = client_of(served).with_options(max_retries=2)
    for _ in range(31):
        client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert slept == [2.0] and len(served.policy.asked) == 31


def test_sessions_are_begun_scored_and_ended_over_http(serve):
    served = serve(["x"])
    owner = httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {OWNER}"})
    begun = owner.post("/sessions", json={"uid": "p/0"}).json()
    agent = httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {begun['key']}"})
    assert agent.post("/sessions").status_code == 401
    client_of(served, begun["key"]).chat.completions.create(model=MODEL, messages=[user("a")])
    client_of(served, OWNER).chat.completions.create(model=MODEL, messages=[user("b")])  # without a session
    assert agent.post("/session/score", json={"score": "good"}).status_code == 400
    assert agent.post("/session/score", json={"score": 0.5}).json() == {"uid": "p/0", "score": 0.5}
    seen = agent.get("/session/trajectories").json()
    ended = agent.post("/session/end").json()
    (only,) = ended["trajectories"]
    assert seen == ended and (ended["uid"], only["uid"], only["score"]) == ("p/0", "p/0.0", 0.5)
    assert only["response_ids"] == served.policy.asked[0].ids and all(only["response_mask"])
    assert agent.post("/session/end").status_code == 401


def test_idle_sessions_end_and_there_are_only_so_many(serve):
    served = serve(["x"], limits=Limits(idle_seconds=10, sessions=1))
    client = client_of(served)
    client.chat.completions.create(model=MODEL, messages=[user("a")])
    owner = httpx.Client(base_url=served.url, headers={"x-api-key": OWNER})
    assert owner.post("/sessions").status_code == 429
    served.now[0] = 11.0
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert owner.post("/sessions").status_code == 200
    assert [model.id for model in client_of(served, OWNER).models.list()] == [MODEL]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", ['["weather", "Paris"]', '"weather"', "5", '{"name": ["weather"]}'])
def test_a_malformed_call_is_content(serve, body, stream):
    words = f"<tool_call>\n{body}\n</tool_call>"
    served = serve([words])
    session = served.session()
    answer = client_of(served, session.token).chat.completions.create(
        model=MODEL, messages=[user("Rain?")], tools=TOOLS, stream=stream
    )
    if stream:
        said = "".join(part.choices[0].delta.content or "" for part in answer)
    else:
        said = answer.choices[0].message.content
    assert said == words
    (trajectory,) = session.trajectories()
    assert texts(served, trajectory) == f"{words}<|im_end|>" and all(trajectory.response_mask)


def test_arguments_may_come_back_as_an_object(serve):
    served = serve([CALL, "It rains."])
    session = served.session()
    client = client_of(served, session.token)
    ask = {"model": MODEL, "messages": [user("Rain?")], "tools": TOOLS}
    (made,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
    function = {"name": made.function.name, "arguments": json.loads(made.function.arguments)}
    call = {"id": made.id, "type": "function", "function": function}
    ask["messages"] += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": made.id, "content": "rain"}]  # fmt: skip
    client.chat.completions.create(**ask)
    (trajectory,) = session.trajectories()
    assert trajectory.num_turns == 2


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_no_unicode_reach_the_client_and_come_back(serve, stream):
    """The policy writes the first half of an emoji's escape."""
    served = serve([CALL.replace("Paris", r"Paris \ud83d"), "It rains."])
    session = served.session()
    client = client_of(served, session.token)
    ask = {"model": MODEL, "messages": [user("Rain?")], "tools": TOOLS}
    if stream:
        parts = [part.choices[0].delta for part in client.chat.completions.create(**ask, stream=True)]
        (made,) = [call for part in parts for call in part.tool_calls or []]
    else:
        (made,) = client.chat.completions.create(**ask).choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Paris \ufffd", "days": 2}
    function = {"name": made.function.name, "arguments": made.function.arguments}
    call = {"id": made.id, "type": "function", "function": function}
    ask["messages"] += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": made.id, "content": "rain"}]  # fmt: skip
    assert client.chat.completions.create(**ask).choices[0].message.content == "It rains."
    (trajectory,) = session.trajectories()
    assert trajectory.num_turns == 2


def test_a_text_that_is_no_unicode_is_refused(serve):
    served = serve(["x"])
    body = json.dumps({"model": MODEL, "messages": [user("cut \ud83d")]})
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers={"x-api-key": OWNER})
    assert answer.status_code == 400 and "surrogate" in answer.json()["error"]["message"]


def test_a_seed_repeats_the_noise_of_an_answer(serve):
    """The engine's noise depends on seed and uid."""
    served = serve(["x"])
    for client in (client_of(served), client_of(served, OWNER)):
        for _ in range(2):
            client.chat.completions.create(model=MODEL, messages=[user("a")], n=2, seed=7)
    assert {one.uid for one in served.policy.asked} == {"seeded.0", "seeded.1"}
    client.chat.completions.create(model=MODEL, messages=[user("a")])
    assert served.policy.asked[-1].uid not in ("seeded.0", "seeded.1")


def test_a_long_answer_is_streamed_where_a_decoder_leaves_out_the_first_space():
    """As Llama 2's does: only the first word of a text loses its space."""
    pieces = ["<unk>", "</s>", "▁", *"abcde", *(f"▁{letter}" for letter in "abcde")]
    vocab, merges = (
        {piece: place for place, piece in enumerate(pieces)},
        [("▁", letter) for letter in "abcde"],
    )
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    words = " ".join("abcde" * 60)
    turn = StreamedTurn(TurnReader(tokenizer), Request([user("x")]), 0, [2], "")
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    assert "".join(delta.text for token in ids for delta in turn.heard([token])) == words


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80")])
def test_it_listens_on_interfaces_of_both_protocols(host, url):
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with listen(host, 0) as listener:
        address = listener.getsockname()
        assert address[0] == host
        with socket.create_connection(address[:2], timeout=10):
            pass
    assert url_of(host, 80) == url


def test_a_key_is_found_without_a_look_at_other_sessions(serve, monkeypatch):
    """There may be thousands of them, for each request."""

    class NotWalked(dict):
        def walk(self):
            raise AssertionError("all sessions are walked over")

        __iter__ = keys = values = items = walk

    served = serve(["x"])
    session = served.session()
    with monkeypatch.context() as patch:
        patch.setattr(served.gateway, "_sessions", NotWalked(served.gateway._sessions))
        assert served.gateway.session(session.token) is session
        with pytest.raises(RequestError, match="no session has this key"):
            served.gateway.session("another")
