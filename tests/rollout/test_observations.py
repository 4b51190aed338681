"""What an environment says, as token ids: against whole conversations rendered by the chat template."""

import pytest

from megarl.data.tokenizer import load_tokenizer, render_prompt
from megarl.examples.tiny_model import train_tokenizer
from megarl.rollout.observations import Continuation, shorten
from tests.data.shared import shared_data

USER = {"role": "user", "content": "Tom has 3 pens and buys 4."}
TURN = {"role": "assistant", "content": "<<3+4>>"}
TOOL = {"role": "tool", "content": "7"}

# As Qwen3's: what an assistant thought is left out once another turn follows, and the last one gets an empty thought.
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
    # ended by the model's other end token, which stays: the template's is left out all the same
    other = generated(tokenizer, "<<3+4>>", "<|endoftext|>")
    assert tokenizer.decode(prompt + other + said).count("<<3+4>><|endoftext|>\n<|im_start|>user") == 1


def test_what_was_generated_keeps_its_tokens(tokenizer):
    """The text of a turn by other tokens than the tokenizer's: byte by byte."""
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
