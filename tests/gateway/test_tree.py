"""Trajectories are checked against the engine's record of its requests and answers, prompts against the template's rendering."""

import json
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megarl.data.kept import KeptTokens
from megarl.data.tokenizer import render_text
from megarl.data.trajectories import Generation
from megarl.gateway.messages import assistant, call, is_turn
from megarl.gateway.prompts import TemplatePrompts
from megarl.gateway.tree import SessionTree
from tests.data.test_published_templates import TOOLS, user
from tests.gateway.policy import letters
from tests.gateway.published import published

# The token that ends a turn in each model; other models use the tokenizer's own. gpt-oss ends calls with another token.
ENDS = {
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "phi3": "<|end|>",
    "gptoss": "<|return|>",
    "glm4moe": "<|user|>",
    "deepseekv3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
CALL_ENDS = {"gptoss": "<|call|>", "glm4moe": "<|observation|>", "gemma4": "<|tool_response>"}
WITH_TOOLS = ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "lfm2_2_5_v2", "nemotron_3_nano", "gptoss", "gemma4", "deepseekv3"]  # fmt: skip
WITHOUT_TOOLS = ["gemma3", "phi3"]
KEYWORDS = {"tools": TOOLS}


@dataclass
class Record:
    """An engine that draws tokens from the complete vocabulary, each with a log-prob of its own, and records all requests."""

    tokenizer: object
    name: str
    numbers: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    asked: list[tuple[list[int], Generation]] = field(default_factory=list)
    tokens: int = 0

    def answer(self, prompt, calls=()):
        end = (CALL_ENDS if calls else ENDS).get(self.name) or ENDS.get(self.name, self.tokenizer.eos_token)
        ids = self.numbers.integers(0, 300, self.numbers.integers(1, 6)).tolist()
        ended = bool(self.numbers.random() < 0.8)
        ids += [self.tokenizer.convert_tokens_to_ids(end)] * ended
        given = prompt.all_ids()
        log_probs = [-float(self.tokens + place) for place in range(1, len(ids) + 1)]
        self.tokens += len(ids)
        places = np.arange(prompt.experts_from(), len(given) + len(ids) - 1, dtype="<u2")
        experts = np.broadcast_to(places[:, None, None], (len(places), 2, 1)).copy()
        kept = KeptTokens(np.repeat(np.array(log_probs, np.int32), 2), np.full(len(ids), 2, np.int32))
        generation = Generation(
            str(len(self.asked)), ids, log_probs, "stop" if ended else "length", len(self.asked) + 1,
            routed_experts=experts, kept=kept,
        )  # fmt: skip
        self.asked.append((given, generation))
        return generation, ended


def check(tree, record):
    """Check all guarantees against the engine's record."""
    by_log_prob = {
        log_prob: (given, generation, place)
        for given, generation in record.asked
        for place, log_prob in enumerate(generation.log_probs)
    }
    trained = []
    for trajectory in tree.trajectories("s"):
        whole = [*trajectory.prompt_ids, *trajectory.response_ids]
        begin = len(trajectory.prompt_ids)
        assert len(trajectory.response_mask) == len(trajectory.log_probs) == len(trajectory.response_ids)
        assert trajectory.response_mask[-1]
        for place, (live, log_prob) in enumerate(
            zip(trajectory.response_mask, trajectory.log_probs, strict=True)
        ):
            if not live:
                assert log_prob == 0.0
                continue
            given, generation, number = by_log_prob[log_prob]
            assert [*given, *generation.response_ids[: number + 1]] == whole[: begin + place + 1]
            trained.append(log_prob)
        assert trajectory.routed_experts[:, 0, 0].tolist() == list(range(len(whole) - 1))
        live = trajectory.response_mask
        assert trajectory.kept.counts.tolist() == [2 * chosen for chosen in live]
        drawn = [own for own, chosen in zip(trajectory.log_probs, live, strict=True) if chosen]
        assert trajectory.kept.ids.tolist() == [own for own in drawn for _ in range(2)]
        last = by_log_prob[trajectory.log_probs[-1]][1]
        assert trajectory.last_weight_version == last.weight_version
        assert trajectory.finish_reason == last.finish_reason
    assert sorted(trained) == sorted(by_log_prob), "each generated token once"


def reworded(message, numbers):
    """A turn as clients send it back."""
    message = json.loads(json.dumps(message))
    if numbers.random() < 0.5:
        message.pop("reasoning_content", None)
    for one in message.get("tool_calls", ()):
        arguments = json.loads(one["function"]["arguments"])
        one["function"]["arguments"] = json.dumps(arguments, indent=numbers.choice([None, 1]))
    return message


def ask(tree, record, numbers, messages, keywords):
    """Make a request; returns the conversation with its answer."""
    prompt = tree.prompt(messages, keywords)
    called = keywords and numbers.random() < 0.3
    calls = [call(f"call{record.tokens:05}", "weather", '{"city": "Paris"}')] if called else []
    generation, ended = record.answer(prompt, calls)
    said = "" if calls else numbers.choice(["Yes.", "No.", f"It is {record.tokens}."])
    turn = tree.add(prompt, generation, assistant(said, numbers.choice(["", "Hm."]), calls), ended)
    return [*messages, turn.message], keywords


def answered(numbers, conversation):
    """The messages after the policy's turn: answers to its calls, or the user's next message."""
    calls = conversation[-1].get("tool_calls", ())
    told = [{"role": "tool", "tool_call_id": one["id"], "content": "rain"} for one in calls]
    return told or [user(numbers.choice(["And?", "Why?", "Go on."]))]


MOVES = st.sampled_from(["go on", "go on", "retry", "two", "edit", "compact", "tools"])


@pytest.mark.parametrize("name", [*WITH_TOOLS, *WITHOUT_TOOLS])
@settings(max_examples=10, phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink))
@given(moves=st.lists(st.tuples(MOVES, st.integers(0, 1 << 30)), max_size=6))
def test_ids_trained_on_are_those_that_the_engine_saw_each_once(name, moves):
    own, keywords = published(name), KEYWORDS if name in WITH_TOOLS else {}
    tree, record = SessionTree(TemplatePrompts(own)), Record(own, name)
    conversations = [ask(tree, record, random.Random(0), [user("Hi zebra")], keywords)]
    for move, seed in moves:
        numbers = random.Random(seed)
        old, used = numbers.choice(conversations)
        known, count = len(tree.turns), 1 + (move == "two")
        messages = [
            *(reworded(m, numbers) if m["role"] == "assistant" else m for m in old),
            *answered(numbers, old),
        ]
        if move == "retry":
            messages = old[:-1]
        elif move == "compact":
            messages = [user("What was said: " + str(len(old)))]
        elif move == "edit":
            messages = [user(old[0]["content"] + "!"), *old[1:], *answered(numbers, old)]
        elif move == "tools" and used:
            used = {"tools": TOOLS[:1]}
        conversations += [ask(tree, record, numbers, messages, used) for _ in range(count)]
        assert len(tree.turns) == known + count
        if move in ("go on", "two"):  # the request extends a turn with the same message
            parent = tree.turns[-1].prompt.parent
            assert is_turn(messages[len(old) - 1], parent.message)
            given = [*parent.prompt.all_ids(), *parent.generation.response_ids]
            assert record.asked[-1][0][: len(given)] == given
            new = own.decode(record.asked[-1][0][len(given) :])
            assert "zebra" not in new and messages[-1]["content"] in new, "the new messages alone"
    check(tree, record)


def test_a_line_is_one_trajectory_and_branches_share_what_is_before_them():
    tokenizer = published("qwen2_5")
    tree, record = SessionTree(TemplatePrompts(tokenizer)), Record(tokenizer, "own")

    def turn(messages, said):
        prompt = tree.prompt(messages, {})
        return tree.add(prompt, record.answer(prompt)[0], assistant(said), True)

    first = turn([user("a")], "A")
    line = [user("a"), assistant("A"), user("b")]
    second = turn(line, "B")
    (only,) = tree.trajectories("s/0")
    assert (only.uid, only.num_turns, sum(only.response_mask)) == (
        "s/0.0", 2, len(first.generation.response_ids) + len(second.generation.response_ids),
    )  # fmt: skip
    again = turn(line, "B")  # a retry: same prompt, another turn with the same message
    assert again.prompt is second.prompt
    third = turn([*line, assistant("B"), user("c")], "C")
    assert third.prompt.parent is again, "the latest of equals"
    left, right = tree.trajectories("s")
    assert [sum(left.response_mask), sum(right.response_mask)] == [
        len(second.generation.response_ids),
        sum(len(one.generation.response_ids) for one in (first, again, third)),
    ]
    assert left.weight_version == right.weight_version == 1
    assert (left.last_weight_version, right.last_weight_version) == (2, 4)
    other = turn([user("b")], "A")
    assert other.prompt.parent is None and len(tree.trajectories("s")) == 3
    check(tree, record)


def test_players_share_no_turn():
    """Two players whose messages are equal, word for word, and a third one that gets the policy's answers to another player."""
    tokenizer = published("qwen2_5")
    tree, record = SessionTree(TemplatePrompts(tokenizer)), Record(tokenizer, "own")

    def turn(player, messages, said):
        prompt = tree.prompt(messages, {}, player=player)
        return tree.add(prompt, record.answer(prompt)[0], assistant(said), True)

    start, line = [user("a")], [user("a"), assistant("A"), user("b")]
    white = turn("white", start, "A")
    black = turn("black", start, "A")
    assert black.prompt is not white.prompt and black.prompt.parent is None
    assert turn("white", line, "B").prompt.parent is white and turn("black", line, "B").prompt.parent is black
    assert turn("red", line, "C").prompt.parent is None, "the policy's words to another player are a prompt"
    turn("white", [user("c")], "D")
    assert tree.players == ["white", "black", "red"]
    found = tree.trajectories("p/0")
    assert [(one.uid, one.player) for one in found] == [
        ("p/0.0.black", "black"),
        ("p/0.1.red", "red"),
        ("p/0.2.white", "white"),
        ("p/0.3.white", "white"),
    ]
    assert [one.num_turns for one in found] == [2, 1, 2, 1]
    check(tree, record)


def test_other_tools_begin_a_root_of_their_own():
    tokenizer = published("qwen2_5")
    tree, record = SessionTree(TemplatePrompts(tokenizer)), Record(tokenizer, "own")
    prompt = tree.prompt([user("a")], KEYWORDS)
    tree.add(prompt, record.answer(prompt)[0], assistant("A"), True)
    line = [user("a"), assistant("A"), user("b")]
    assert tree.prompt(line, {"tools": TOOLS[:1]}).parent is None
    assert tree.prompt(line, KEYWORDS).parent is not None


def test_a_request_without_an_answer_is_no_trajectory():
    tree = SessionTree(TemplatePrompts(published("qwen2_5")))
    tree.prompt([user("a")], {})
    assert tree.trajectories("s") == []


def test_what_counts_as_the_same_turn():
    made = assistant("Hi ", "Hm.", [call("c1", "f", '{"a": 1, "b": 2}')])
    assert is_turn({**made, "content": "Hi"}, made)
    assert is_turn(assistant("Hi", None, [call("c1", "f", '{"b":2,"a":1}')]), made)
    assert not is_turn(assistant("Ho", None, made["tool_calls"]), made)
    assert not is_turn(assistant("Hi", "Ah.", made["tool_calls"]), made)
    assert not is_turn(assistant("Hi"), made)
    assert not is_turn(assistant("Hi", None, [call("c2", "f", '{"a": 1, "b": 2}')]), made)
    assert not is_turn(assistant("Hi", None, [call("c1", "g", '{"a": 1, "b": 2}')]), made)
    assert not is_turn(assistant("Hi", None, [call("c1", "f", "{}")]), made)
    assert not is_turn({"role": "user", "content": "Hi"}, assistant("Hi"))


def ids_of(tokenizer, token):
    return tokenizer.convert_tokens_to_ids(token)


# Templates that render a chat without reasoning so that it begins like the shorter chat before it; DeepSeek's and GLM's add reasoning.
KEEPS_BEGINNINGS = ["qwen2_5", "qwen3", "llama3_1", "lfm2_2_5_v2", "gptoss", "gemma3"]


@pytest.mark.parametrize("name", KEEPS_BEGINNINGS)
def test_a_continued_prompt_is_what_the_template_writes(name):
    """Turns consist of tokens that a tokenizer would not choose for the same text; the prompt's text is still the template's."""
    own = published(name)
    keywords = KEYWORDS if name in WITH_TOOLS else {}
    tree = SessionTree(TemplatePrompts(own))
    messages = [user("Rain in Paris?")]
    for number, question in enumerate(["And in Rome?", "Thanks."]):
        prompt = tree.prompt(messages, keywords)
        message = assistant(f"It rains {number}.")
        whole = render_text(own, [*messages, message, user("?")], False, keywords)
        text = whole[len(own.decode(prompt.all_ids())) :].partition(message["content"])
        end = "<|end|>" if name == "gptoss" else ENDS.get(name, own.eos_token)
        said = [*letters(own, text[0] + text[1]), ids_of(own, end)]
        tree.add(prompt, Generation("s", said, [-1.0] * len(said), "stop", 1), message, True)
        messages = [*messages, message, user(question)]
    ids = tree.prompt(messages, keywords).all_ids()
    assert own.decode(ids) == render_text(own, messages, True, keywords)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3_instruct_2507", "lfm2_2_5_v2", "gptoss", "gemma4", "glm4moe", "llama3_1"]
)
def test_answers_of_tools_are_written_behind_the_call(name):
    """Also by templates that render an answer only next to its call (gpt-oss, Gemma 4)."""
    own = published(name)
    tree, record = SessionTree(TemplatePrompts(own)), Record(own, name)
    prompt = tree.prompt([user("Rain?")], KEYWORDS)
    message = assistant(None, None, [call("call00001", "weather", '{"city": "Paris"}')])
    end = CALL_ENDS.get(name) or ENDS.get(name, own.eos_token)
    said = [*letters(own, "x"), ids_of(own, end)]
    tree.add(prompt, Generation("s", said, [-1.0] * len(said), "stop", 1), message, True)
    told = {"role": "tool", "tool_call_id": "call00001", "content": "it pours"}
    own_part = own.decode(tree.prompt([user("Rain?"), message, told], KEYWORDS).ids)
    whole = render_text(own, [user("Rain?"), message, told], True, KEYWORDS)
    assert (
        "it pours" in own_part and whole.endswith(own_part) and end not in own_part.partition("it pours")[0]
    )
    assert record.asked == []


@pytest.mark.parametrize("name, end, following", [("gptoss", "<|return|>", "<|start|>user"), ("cohere2", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>")])  # fmt: skip
def test_a_turn_is_not_ended_twice(name, end, following):
    """gpt-oss writes another end token where a message follows; Command R7B writes two tokens, and the model wrote both."""
    own = published(name)
    tree = SessionTree(TemplatePrompts(own))
    prompt = tree.prompt([user("a")], {})
    said = [*letters(own, "A"), ids_of(own, end)]
    tree.add(prompt, Generation("s", said, [-1.0] * len(said), "stop", 1), assistant("A"), True)
    ids = tree.prompt([user("a"), assistant("A"), user("b")], {}).ids
    assert own.decode(ids).startswith(following)
