"""Trajectories of several turns, with a policy whose words are scripted; test_streams has a real engine."""

import asyncio
import copy
import json
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.tiny_model import train_tokenizer
from megarl.config.schema.rollout import MultiTurnConfig
from megarl.data.kept import KeptTokens
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.calculator import Calculator
from megarl.environments.environment import Environment, StepResult, Task
from megarl.rollout.completions import Flight
from megarl.rollout.continuation import Continuation
from megarl.rollout.engine import EngineError, Generation, SamplingParams
from megarl.rollout.turns import Player, shorten, state_of
from tests.data.shared import render_prompt, shared_data

TOKENIZER = train_tokenizer(["Tom has 3 pens and buys 4. <<3+4>> #### 7"], 400)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
USER = {"role": "user", "content": "Tom has 3 pens and buys 4."}
PROMPT = render_prompt(TOKENIZER, [USER])
VERSION = 5


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@dataclass
class Policy:
    """Says `words` in turn; a token's log-prob is minus its position in the prompt and response."""

    words: list[str]
    asked: list[tuple[str, list[int], SamplingParams]] = field(default_factory=list)

    async def answer(self, uid, ids, sampling, experts_from=0):
        await asyncio.sleep(0)
        turn = len([None for asked, _, _ in self.asked if asked.partition("#")[0] == uid.partition("#")[0]])
        self.asked.append((uid, list(ids), sampling))
        said = [*ids_of(self.words[turn]), END]
        reason = "stop" if len(said) <= sampling.max_new_tokens else "length"
        said = said[: sampling.max_new_tokens]
        log_probs = [-float(len(ids) + place) for place in range(len(said))]
        return Generation(uid, said, log_probs, reason, VERSION)


class Script(Environment):
    """Answers with `results` in turn; an exception among them is raised, and a number is a pause in seconds."""

    made: list["Script"]

    def __init__(self, *results, first=None):
        self.results, self.first, self.turns, self.closed = list(results), first, [], False

    def reset(self, task):
        self.task = task
        return self.first

    def step(self, turn):
        self.turns.append(turn)
        result = self.results[len(self.turns) - 1]
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, float):
            time.sleep(result)
            return StepResult(done=True)
        return result

    def close(self):
        self.closed = True


def task(uid="p/0"):
    return Task(uid, USER["content"], None, "source", "7", {"index": 3})


def play(policy, make, tokens=200, limits=None, **options):
    """Play one trajectory, and check the properties that all trajectories have."""
    sampling = SamplingParams(max_new_tokens=tokens, seed=9)
    player = Player(make, limits or MultiTurnConfig(), TOKENIZER, policy.answer, **options)
    generation = asyncio.run(player.play(task(), PROMPT, sampling, VERSION))
    prompt = PROMPT if generation.prompt_ids is None else generation.prompt_ids
    ids, mask = list(generation.response_ids), list(generation.response_mask)
    assert len(ids) == len(mask) == len(generation.log_probs) and ids
    assert len(prompt) + len(ids) <= len(PROMPT) + tokens or not policy.asked
    for _, asked, _ in policy.asked:  # each request is a prefix of the ids that are trained on
        assert [*prompt, *ids][: len(asked)] == asked
    if any(mask):
        assert mask[-1]
        # chosen tokens have the log-probs that the policy gave them at these positions, the others have none
        places = [-float(len(prompt) + place) for place in range(len(ids))]
        expected = [place if chosen else 0.0 for place, chosen in zip(places, mask, strict=True)]
        assert generation.log_probs == expected
    return generation


def notes(generation):
    return json.loads(generation.environment_notes)


def say(text):
    return StepResult([{"role": "user", "content": text}])


def test_a_tool_is_called_and_its_answer_read():
    policy = Policy(["<<3+4>>", "#### 7"])
    generation = play(policy, Calculator)
    said = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(generation.response_ids) == f"<<3+4>><|im_end|>{said}#### 7<|im_end|>"
    lengths = len(ids_of("<<3+4>>")) + 1, len(ids_of(said)), len(ids_of("#### 7")) + 1
    assert generation.response_mask == [True] * lengths[0] + [False] * lengths[1] + [True] * lengths[2]
    assert (generation.num_turns, generation.finish_reason, generation.weight_version) == (2, "stop", 5)
    assert generation.environment_score is None and generation.prompt_ids is None
    told = [None, [{"role": "tool", "content": "7"}]]
    assert notes(generation) == {
        "numbers": {"num_turns": 2.0, "calculator_calls": 1.0, "calculator_errors": 0.0},
        "error": None,
        "turns": [list(turn) for turn in zip((0, lengths[0] + lengths[1]), map(state_of, told), strict=True)],
    }


def test_a_state_is_what_the_environment_says_or_names():
    """Equal texts are equal states, long texts are compared in full, and the name of a state takes the place of its text."""
    limits = MultiTurnConfig(max_tool_response_length=9)

    def states(*results):
        script = partial(Script, *results, StepResult(done=True))
        found = notes(play(Policy(["a"] * (len(results) + 1)), script, limits=limits))["turns"]
        return [state for _, state in found]

    begun, first, again, other = states(*(say("x" * 9 + end) for end in "aab"))
    assert first == again and len({begun, first, other}) == 3
    named = states(StepResult("still dark", state="door"), StepResult("also dark", state="door"))
    assert named == [begun, state_of("door"), state_of("door")]
    first = [{"role": "user", "content": "Go."}]
    assert notes(play(Policy(["a"]), partial(Script, StepResult(done=True), first=first)))["turns"] == [
        [0, state_of(first)]
    ]


def test_turns_have_noise_of_their_own_and_share_the_tokens():
    policy = Policy(["<<3+4>>", "<<1+1>>", "#### 7"])
    generation = play(policy, Calculator, tokens=100)
    assert [uid for uid, _, _ in policy.asked] == ["p/0", "p/0#1", "p/0#2"]
    assert {sampling.seed for _, _, sampling in policy.asked} == {9}
    rooms = [sampling.max_new_tokens for _, _, sampling in policy.asked]
    assert rooms == [100 - (len(ids) - len(PROMPT)) for _, ids, _ in policy.asked]
    assert len(generation.response_ids) <= 100


def test_experts_and_kept_tokens_go_through_turns():
    """The experts of a turn's last token and of the environment's tokens come with the next turn."""
    asked = []

    async def answer(uid, ids, sampling, experts_from):
        said = [*ids_of("a b"), END]
        asked.append((experts_from, len(ids) + len(said) - 1))
        experts = np.arange(*asked[-1], dtype=np.int16)[:, None, None]
        kept = KeptTokens(np.array(said, np.int32), np.ones(len(said), np.int32))
        return Generation(uid, said, [0.0] * len(said), "stop", VERSION, routed_experts=experts, kept=kept)

    script = Script(say("more"), StepResult(done=True))
    player = Player(lambda: script, MultiTurnConfig(), TOKENIZER, answer)
    found = asyncio.run(player.play(task(), PROMPT, SamplingParams(max_new_tokens=200), VERSION))
    assert found.num_turns == 2 and asked[0][0] == 0 and asked[1][0] == asked[0][1]
    whole = len(PROMPT) + len(found.response_ids) - 1
    assert found.routed_experts[:, 0, 0].tolist() == list(range(whole))
    assert found.kept.counts.tolist() == found.response_mask  # the environment's tokens were not drawn
    drawn = zip(found.response_ids, found.response_mask, strict=True)
    assert found.kept.ids.tolist() == [token for token, chosen in drawn if chosen]


@given(st.integers(1, 80))
@settings(max_examples=40)
def test_no_response_is_longer_than_it_may_be(tokens):
    generation = play(Policy(["<<3+4>>", "<<1+1>>", "#### 7"]), Calculator, tokens=tokens)
    whole = play(Policy(["<<3+4>>", "<<1+1>>", "#### 7"]), Calculator)
    assert list(whole.response_ids[: len(generation.response_ids)]) == list(generation.response_ids)
    short = len(generation.response_ids) < len(whole.response_ids)
    assert generation.finish_reason == ("length" if short else "stop")


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_no_request_is_longer_than_the_engine_takes(spare):
    """SGLang refuses inputs that reach the last tokens of its context, and the refusal would end the run."""
    first = [*PROMPT, *ids_of("<<3+4>>"), END]
    second = len(first) + len(
        Continuation(TOKENIZER).after_turn([{"role": "tool", "content": "7"}], True, END)
    )
    longest = second + spare
    policy = Policy(["<<3+4>>", "Tom has 7 pens. #### 7"])
    # All of it would fit the engine's context, which has six tokens more.
    generation = play(policy, Calculator, tokens=longest + 6 - len(PROMPT), longest_input=longest)
    assert [len(ids) for _, ids, _ in policy.asked] == [len(PROMPT), second][: 2 if spare >= 0 else 1]
    assert generation.finish_reason == "length" and notes(generation)["error"] is None
    assert len(generation.response_ids) == (len(first) if spare < 0 else longest + 1) - len(PROMPT)


@pytest.mark.parametrize(
    "limits, num_turns",
    [
        ({"max_assistant_turns": 1}, 1),
        ({"max_assistant_turns": 2}, 2),
        ({"max_user_turns": 1}, 2),
        ({"max_user_turns": 2}, 3),
        ({}, 4),
    ],
)
def test_turns_are_limited(limits, num_turns):
    policy = Policy(["<<3+4>>"] * 3 + ["#### 7"])
    generation = play(policy, Calculator, limits=MultiTurnConfig(**limits))
    assert generation.num_turns == num_turns and generation.finish_reason == "stop"
    assert notes(generation)["numbers"]["calculator_calls"] == min(
        num_turns, 3
    )  # the environment gets the last turn, too


def test_the_environment_is_told_and_scores():
    made = []

    def make():
        made.append(
            Script(
                StepResult("no", score=0.25, numbers={"tries": 1}), StepResult(score=1, numbers={"tries": 1})
            )
        )
        return made[-1]

    generation = play(Policy(["5", "7"]), make)
    (script,) = made
    assert script.task == task()
    assert [(turn.number, turn.text, turn.finish_reason) for turn in script.turns] == [
        (0, "5", "stop"),
        (1, "7", "stop"),
    ]
    assert script.turns[1].token_ids == [*ids_of("7"), END]
    assert generation.environment_score == 1.0 and notes(generation)["numbers"]["tries"] == 2.0
    assert script.closed


def test_a_first_observation_is_part_of_the_prompt():
    told = {"role": "user", "content": "You have 2 tries."}
    policy = Policy(["7"])
    generation = play(policy, partial(Script, StepResult(done=True), first=[told]), tokens=60)
    assert generation.prompt_ids == render_prompt(TOKENIZER, [USER, told])
    assert list(generation.response_ids) == [*ids_of("7"), END]
    assert policy.asked[0][2].max_new_tokens == 60 - (len(generation.prompt_ids) - len(PROMPT))
    full = play(Policy(["7"]), partial(Script, first=[told]), tokens=5)
    assert "leaves no room" in notes(full)["error"]


def test_the_template_ends_a_turn_that_was_stopped_by_another_token():
    stop = ids_of("7")[-1]
    policy = Policy(["7"])

    async def answer(uid, ids, sampling, experts_from):
        generation = await policy.answer(uid, ids, sampling)
        return Generation(uid, generation.response_ids[:-1], generation.log_probs[:-1], "stop", VERSION)

    player = Player(
        partial(Script, say("go"), StepResult()), MultiTurnConfig(max_user_turns=1), TOKENIZER, answer, [stop]
    )
    policy.words.append("7")
    generation = asyncio.run(player.play(task(), PROMPT, SamplingParams(max_new_tokens=50), VERSION))
    assert TOKENIZER.decode(generation.response_ids) == (
        "7<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n7"
    )


@pytest.mark.parametrize(
    "results, error",
    [
        ([say("go"), KeyError("lost")], "step: KeyError: 'lost'"),
        ([say("go"), SystemExit(3)], "step: RuntimeError: SystemExit(3)"),
        ([say("go"), StopIteration()], "step: RuntimeError"),
        ([say("go"), 30.0], "step: no answer within 2 s"),
        ([say("go"), "a text"], "step: it returned 'a text', not a StepResult"),
        ([say("go"), StepResult(score=float("nan"))], "step: score=nan is no finite number"),
        ([say("go"), StepResult(numbers={"x": "y"})], "step: x='y' is no finite number"),
        ([say("go"), StepResult([{"content": "x"}])], "must be a text or a list of chat messages"),
        ([say("go"), StepResult(np.zeros(3))], "must be a text or a list of chat messages"),
        ([say("go"), StepResult(numbers=None)], "step: numbers=None is no mapping"),
        (
            [say("go"), replace(say("on"), state={(0, 1): "x"})],
            "its state cannot be written as JSON: keys must be",
        ),
    ],
)
def test_an_environment_that_fails_costs_its_trajectory(results, error):
    limit = 2.0 if isinstance(results[-1], float) else 60.0  # the other steps may take long on a busy machine
    generation = play(
        Policy(["5", "6", "7"]), partial(Script, *results), limits=MultiTurnConfig(step_timeout=limit)
    )
    assert error in notes(generation)["error"]
    assert not any(generation.response_mask) and generation.environment_score is None
    assert generation.num_turns == 2 and len(generation.response_ids) > 4  # the turns are kept for inspection


@pytest.mark.parametrize("failing", ["__init__", "reset", "close"])
def test_so_does_one_that_fails_at_either_end(failing):
    def fail(*args):
        raise OSError("no server")

    cls = type("Broken", (Script,), {failing: fail})
    generation = play(Policy(["5"]), lambda: cls(StepResult(done=True)))
    assert notes(generation)["error"] == f"{failing}: OSError: no server"
    assert not any(generation.response_mask)
    assert generation.num_turns == (1 if failing == "close" else 0)
    assert len(generation.response_ids) == (2 if failing == "close" else 1)


def test_one_that_answers_when_all_is_over_harms_nobody(monkeypatch):
    threads, raised, over = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", raised.append)

    class Late(Script):
        def step(self, turn):
            threads.append(threading.current_thread())
            over.wait(60)
            return super().step(turn)

    late = partial(Late, StepResult(done=True))
    generation = play(Policy(["5"]), late, limits=MultiTurnConfig(step_timeout=0.1))
    assert notes(generation)["error"] == "step: no answer within 0.1 s"
    over.set()
    threads[0].join()
    assert not raised


def test_the_time_in_which_the_loop_stands_still_is_not_the_environments(monkeypatch):
    """Between two calls the engine's process runs no loop, for minutes while the models learn, a checkpoint is written or scores are
    awaited; what has come by then is read by several passes of the loop."""
    still, clock, asked, answer = [0.0], time.monotonic, asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + still[0])

    class Remote(Environment):
        async def step(self, turn):
            asked.set()
            await answer.wait()
            for _ in range(9):
                await asyncio.sleep(0)
            return StepResult(done=True, score=1.0)

    player = Player(Remote, MultiTurnConfig(step_timeout=60), TOKENIZER, Policy(["5"]).answer)
    loop = asyncio.new_event_loop()
    flight = Flight(loop)
    flight.add([player.play(task(), PROMPT, SamplingParams(max_new_tokens=20), VERSION)])
    loop.run_until_complete(asked.wait())
    still[0] = 600.0
    answer.set()
    (generation,) = flight.take(30)
    loop.close()
    assert (notes(generation)["error"], generation.environment_score) == (None, 1.0)


def test_scores_and_numbers_may_be_those_of_numpy():
    result = StepResult(done=True, score=np.float32(0.5), numbers={"moves": np.int64(3)})
    generation = play(Policy(["5"]), partial(Script, result))
    assert (notes(generation)["error"], generation.environment_score) == (None, 0.5)
    assert notes(generation)["numbers"]["moves"] == 3.0


@pytest.mark.parametrize("cause", ["cancelled", "engine"])
def test_an_environment_is_closed_whatever_ends_its_trajectory(cause):
    script, asked = Script(), asyncio.Event()

    async def answer(uid, ids, sampling, experts_from):
        asked.set()
        if cause == "engine":
            raise EngineError("gone")
        await asyncio.sleep(100)

    async def begin_and_cancel():
        player = Player(lambda: script, MultiTurnConfig(), TOKENIZER, answer)
        playing = asyncio.create_task(player.play(task(), PROMPT, SamplingParams(), VERSION))
        await asyncio.wait([asyncio.create_task(asked.wait())])
        if cause == "cancelled":
            playing.cancel()
        await asyncio.wait([playing])
        return playing.cancelled()

    assert asyncio.run(begin_and_cancel()) == (cause == "cancelled")
    assert script.closed


def test_what_the_engine_raises_is_no_fault_of_the_environment():
    async def answer(uid, ids, sampling, experts_from):
        raise EngineError("gone")

    player = Player(Calculator, MultiTurnConfig(), TOKENIZER, answer)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(player.play(task(), PROMPT, SamplingParams(), VERSION))


def test_trajectories_do_not_wait_for_each_other():
    """The steps of 40 trajectories meet at a barrier: if they were called one after the other, or on the loop, none would pass it."""
    meeting, of_the_loop = threading.Barrier(40, timeout=30), asyncio.Barrier(40)

    class Meeting(Environment):
        def step(self, turn):
            meeting.wait()
            return StepResult(done=True)

    class Waiting(Environment):
        async def step(self, turn):
            await asyncio.wait_for(of_the_loop.wait(), 30)
            return StepResult(done=True)

    async def all_of(make):
        player = Player(make, MultiTurnConfig(), TOKENIZER, Policy(["5"]).answer)
        sampling = SamplingParams(max_new_tokens=20)
        plays = [player.play(task(f"p/{row}"), PROMPT, sampling, VERSION) for row in range(40)]
        return await asyncio.gather(*plays)

    for make in (Meeting, Waiting):
        assert all(notes(generation)["error"] is None for generation in asyncio.run(all_of(make)))


def test_a_task_has_keywords_of_its_own_for_the_template():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template += "{% if add_generation_prompt and short %}{{ short }}{% endif %}"
    generations = []
    for keywords in (None, {"short": "<short>"}):
        player = Player(
            partial(Script, say("go"), StepResult()),
            MultiTurnConfig(),
            tokenizer,
            Policy(["5", "7"]).answer,
            (),
            {"short": "?"},
        )
        own = replace(task(), template_kwargs=keywords)
        sampling = SamplingParams(max_new_tokens=99, seed=9)
        generations.append(asyncio.run(player.play(own, PROMPT, sampling, VERSION)))
    texts = [tokenizer.decode(generation.response_ids) for generation in generations]
    assert [text.partition("assistant\n")[2] for text in texts] == ["?7<|im_end|>", "<short>7<|im_end|>"]


TURN = {"role": "assistant", "content": "<<3+4>>"}
TOOL = {"role": "tool", "content": "7"}
# Like Qwen3's: an assistant's reasoning is left out once another turn follows, and the last turn gets empty reasoning.
THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ c }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# An assistant's turn has no end token; the next message begins with a token.
UNENDED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Tom has 3 pens and buys 4. <<3+4>> #### 7"], 400)


@pytest.fixture
def with_template(tokenizer):
    default = tokenizer.chat_template

    def change(template):
        tokenizer.chat_template = template
        return tokenizer

    yield change
    tokenizer.chat_template = default


def generated(tokenizer, text, end="<|im_end|>"):
    return tokenizer(text, add_special_tokens=False)["input_ids"] + (
        [tokenizer.convert_tokens_to_ids(end)] if end else []
    )


def test_a_continued_conversation_is_the_one_that_the_template_writes(tokenizer):
    prompt = render_prompt(tokenizer, [USER])
    continued = prompt + generated(tokenizer, "<<3+4>>")
    continued += Continuation(tokenizer).after_turn([TOOL], ended=True)
    assert continued == render_prompt(tokenizer, [USER, TURN, TOOL])
    two = [TOOL, {"role": "user", "content": "And then?"}]
    continued = prompt + generated(tokenizer, "<<3+4>>") + Continuation(tokenizer).after_turn(two, ended=True)
    assert continued == render_prompt(tokenizer, [USER, TURN, *two])


def test_qwen_writes_a_tool_as_a_user():
    tokenizer = load_tokenizer(str(shared_data("qwen2.5_tokenizer")), False)
    prompt = render_prompt(tokenizer, [USER])
    said = Continuation(tokenizer).after_turn([TOOL], ended=True)
    assert prompt + generated(tokenizer, "<<3+4>>") + said == render_prompt(tokenizer, [USER, TURN, TOOL])
    assert "<tool_response>\n7\n</tool_response>" in tokenizer.decode(said)
    # a turn that ended with the model's other end token keeps it; the template's end token is left out all the same
    other = generated(tokenizer, "<<3+4>>", "<|endoftext|>")
    assert tokenizer.decode(prompt + other + said).count("<<3+4>><|endoftext|>\n<|im_start|>user") == 1


def test_what_was_generated_keeps_its_tokens(tokenizer):
    """A turn's text in tokens that the tokenizer would not choose: byte by byte."""
    single = [generated(tokenizer, letter, None)[0] for letter in "<<3+4>>"]
    assert tokenizer.decode(single) == "<<3+4>>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = Continuation(tokenizer).after_turn([TOOL], ended=True)
    text = tokenizer.decode([*render_prompt(tokenizer, [USER]), *single, end, *said])
    assert text == tokenizer.apply_chat_template(
        [USER, TURN, TOOL], tokenize=False, add_generation_prompt=True
    )


def test_the_template_ends_a_turn_that_the_model_did_not(tokenizer):
    said = Continuation(tokenizer).after_turn([TOOL], ended=False)
    assert said[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert said[1:] == Continuation(tokenizer).after_turn([TOOL], ended=True)


def test_a_template_that_rewrites_the_past(with_template):
    tokenizer = with_template(THINKING)
    said = Continuation(tokenizer).after_turn([TOOL], ended=True)
    assert tokenizer.decode(said) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


def test_templates_without_end_tokens_lose_nothing(with_template):
    said = Continuation(with_template(UNENDED)).after_turn([TOOL], ended=True)
    assert with_template(UNENDED).decode(said) == "<|im_start|>tool: 7<|im_start|>assistant: "
    said = Continuation(with_template(PLAIN)).after_turn([TOOL], ended=True)
    assert with_template(PLAIN).decode(said) == "\ntool: 7\nassistant: "


def test_keywords_reach_the_template(with_template):
    tokenizer = with_template("{{ mode }}" + PLAIN + "{{ mode }}")
    said = Continuation(tokenizer, {"mode": "short"}).after_turn([TOOL], ended=True)
    assert tokenizer.decode(said).endswith("assistant: short")


def test_a_text_continues_the_turn_as_it_is(tokenizer):
    assert tokenizer.decode(Continuation(tokenizer).after_turn(" = 7", ended=False)) == " = 7"
    prompt = render_prompt(tokenizer, [USER])
    assert Continuation(tokenizer).after_prompt(prompt, "3") == prompt + generated(tokenizer, "3", None)


def test_a_first_observation_comes_before_the_turn_is_opened(tokenizer):
    told = {"role": "user", "content": "You have 9 tries."}
    prompt = render_prompt(tokenizer, [USER])
    assert Continuation(tokenizer).after_prompt(prompt, [told]) == render_prompt(tokenizer, [USER, told])
    with pytest.raises(ValueError, match="does not end with the opening"):
        Continuation(tokenizer).after_prompt(prompt[:-2], [told])


def test_what_a_template_cannot_do_is_said(with_template):
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        + ("{{ m['content'] }}{% endfor %}")
    )
    with pytest.raises(ValueError, match="no tools"):
        Continuation(with_template(refusing)).after_turn([TOOL], ended=True)
    shouting = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="does not write the assistant's text as it is"):
        Continuation(with_template(shouting)).after_turn([TOOL], ended=True)


def test_long_texts_are_shortened():
    assert shorten("0123456789", 10, "left") == "0123456789"
    assert shorten("0123456789", 4, "left") == "0123...(truncated)"
    assert shorten("0123456789", 4, "right") == "(truncated)...6789"
    assert shorten("0123456789", 4, "middle") == "01...(truncated)...89"
    assert shorten("0123456789", 1, "middle") == "...(truncated)..."
    messages = [{"role": "tool", "content": "0123456789", "name": "longer than four"}]
    assert shorten(messages, 4, "left") == [{**messages[0], "content": "0123...(truncated)"}]


def test_a_token_that_ends_the_turn_and_begins_the_observation_is_written_once(with_template):
    """A policy of such a template ends its turn with the next message's first token."""
    tokenizer = with_template(UNENDED)
    first = tokenizer.convert_tokens_to_ids("<|im_start|>")
    whole = Continuation(tokenizer).after_turn([TOOL], ended=True)
    assert Continuation(tokenizer).after_turn([TOOL], ended=True, last_id=first) == whole[1:]
    other = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert Continuation(tokenizer).after_turn([TOOL], ended=True, last_id=other) == whole
    assert Continuation(tokenizer).after_turn([TOOL], ended=False, last_id=None) == whole


@pytest.mark.parametrize("broken", [[{"role": "user", "content": "cut \ud83d"}], "cut \ud83d"])
def test_an_observation_that_is_no_unicode_costs_its_trajectory(broken):
    generation = play(Policy(["a", "b"]), lambda: Script(StepResult(broken), StepResult(done=True)))
    assert "surrogate" in notes(generation)["error"] and not any(generation.response_mask)
