"""Turns in small templates, each of which has one peculiarity of a model family."""

import copy
import random

import pytest

from megarl.data.sft import tokenize_chat
from megarl.data.tokenizer import encode_texts, render_text
from megarl.data.turns import find_turns
from tests.data.test_published_templates import CALLS, assistant, call, told, user
from tests.data.test_published_templates import stretches as texts_of

HEADER = "{% macro open(role) %}<|im_start|>{{ role }}\n{% endmacro %}"
# reasoning is shown after the last user's message only, as Qwen3 does
DROPS_REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# turns end with the tag of the next message, as GLM-4.5's do
ENDS_WITH_NEXT = (
    "{% for m in messages %}{{ {'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|observation|>', "
    "'system': '<|system|>'}[m.role] }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def own(tokenizer):
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens(
        {
            "additional_special_tokens": [
                "<|user|>",
                "<|assistant|>",
                "<|observation|>",
                "<|system|>",
                "<|end|>",
            ]
        }
    )
    return made


def learnt(tokenizer, template, chat):
    tokenizer.chat_template = template
    ids, mask = tokenize_chat(tokenizer, chat)
    whole = encode_texts(tokenizer, [render_text(tokenizer, chat, False)])[0]
    assert ids[: len(whole)] == whole[: len(ids)], "what is learnt is the template's own rendering"
    return texts_of(tokenizer, ids, mask)


def test_turns_of_a_template_that_drops_earlier_reasoning(own):
    chat = [
        user("a"),
        assistant("b", reasoning_content="r"),
        user("c"),
        assistant("d", reasoning_content="s"),
    ]
    assert learnt(own, DROPS_REASONING, chat) == ["b<|im_end|>", "<think>s</think>d<|im_end|>"]
    assert learnt(own, DROPS_REASONING, CALLS) == [
        '[weather {"city": "Paris é", "days": 2}]<|im_end|>',
        "It rains.<|im_end|>",
        '<think>I add.</think>[add {"a": 1}]<|im_end|>',
        "<think>Done.</think>3<|im_end|>",
    ]


def test_random_chats_are_learnt_whole(own):
    """The texts of every turn are learnt, and nothing of any other message, whatever messages repeat of each other."""
    own.chat_template = DROPS_REASONING
    numbers = random.Random(0)
    words = ["a", "b", " b\n", "assistant", "<b>", "user\n", "a b", "é", "漢", "\n\n", "3"]
    for _ in range(100):
        chat, expected = [user("u0")], []
        last = numbers.randrange(4)
        for turn in range(last + 1):
            said = "".join(numbers.choices(words, k=4)) + "."
            reason = f"r{turn}" if numbers.random() < 0.7 else None
            chat.append(assistant(said, **({"reasoning_content": reason} if reason else {})))
            shown = f"<think>{reason}</think>" if reason and turn == last else ""
            expected.append(f"{shown}{said}<|im_end|>")
            if turn < last:
                chat.append(user("".join(numbers.choices(words, k=3)) + "?"))
        ids, mask = tokenize_chat(own, chat)
        assert texts_of(own, ids, mask) == expected, chat


def test_turns_that_end_with_the_next_role(own):
    chat = [
        user("a"),
        assistant("", tool_calls=[call("f")]),
        told("f", "t"),
        assistant("b"),
        user("c"),
        assistant("d"),
    ]
    found = learnt(own, ENDS_WITH_NEXT, chat)
    assert found == ["\n[f]<|observation|>", "\nb<|user|>", "\nd<|user|>"]
    found = learnt(own, ENDS_WITH_NEXT, [*chat[:4], {"role": "system", "content": "s"}, chat[-1]])
    assert found == ["\n[f]<|observation|>", "\nb<|system|>", "\nd<|user|>"]
    assert learnt(own, ENDS_WITH_NEXT, chat[:2]) == ["\n[f]<|observation|>"]
    ids, _ = tokenize_chat(own, chat)
    assert ids[-1] == own.convert_tokens_to_ids("<|user|>")


def test_an_end_that_is_not_the_tokenizers(own):
    """Gemma ends turns with a token of its own; what follows it is not learnt."""
    template = (
        "{% for m in messages %}<|user|>{{ m.content }}<|end|>\n\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>{% endif %}"
    )
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert learnt(own, template, chat) == ["b<|end|>", "d<|end|>"]


def test_what_cannot_be_found_names_what_can(own):
    """Turns before the last two messages are summed up by the template."""
    own.chat_template = (
        "{% for m in messages %}{% if loop.index0 > 1 or loop.length < 3 %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% else %}.{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    with pytest.raises(ValueError, match=r"assistant's message 1, or.*message 3 can be learnt.*generation"):
        find_turns(own, chat)
    assert len(find_turns(own, chat, only_last=True).spans) == 1


def test_content_that_the_template_leaves_out_is_refused(own):
    own.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.text }}<|im_end|>\n{% endfor %}"
    )
    own.chat_template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(ValueError, match="does not write the content of message 1, 'b'"):
        find_turns(own, [user("a"), assistant("b")])


def test_reasoning_that_the_template_leaves_out_is_warned_about(tokenizer):
    chat = [user("a"), assistant("b", reasoning_content="why")]
    with pytest.warns(UserWarning, match="does not write the reasoning_content"):
        find_turns(tokenizer, chat)
