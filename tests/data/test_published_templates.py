"""Oracles: transformers' `apply_chat_template` on published templates, and TRL's marks of what is generated."""

import copy
import itertools
import json
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.preferences import PreferenceDataset
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SftDataset, tokenize_chat
from tests.data.published_templates import tokenizer_with
from tests.data.shared import prompt_row

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": []},
        },
    },
]


def call(name, **arguments):
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def told(name, text):
    return {"role": "tool", "tool_call_id": "call00001", "name": name, "content": text}


PLAIN = [user("Hi there"), assistant("Hello <b>you</b>"), user("How are you?"), assistant("Fine\n\nthanks é")]
CALLS = [
    user("Rain in Paris?"),
    assistant("", reasoning_content="I look.", tool_calls=[call("weather", city="Paris é", days=2)]),
    told("weather", "rain"),
    assistant("It rains.", reasoning_content="So."),
    user("And 1 + 2?"),
    assistant("", reasoning_content="I add.", tool_calls=[call("add", a=1)]),
    told("add", "3"),
    assistant("3", reasoning_content="Done."),
]
WITH_TOOLS = [
    "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_6", "glm4moe", "llama3_1", "llama3_2",
    "lfm2_2_5_v2", "nemotron_3_nano", "gptoss", "muse_glimmer", "gemma4", "deepseekv3",
]  # fmt: skip
WITHOUT_TOOLS = [
    "gemma",
    "gemma3",
    "llama3",
    "phi3",
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "qwen2_5_vl",
]
NEEDS_TEXTS = ("deepseekv3",)  # the template concatenates arguments with texts


def with_texts(messages):
    """Arguments of calls as JSON texts, OpenAI's form."""
    changed = copy.deepcopy(messages)
    for message in changed:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    return changed


def with_null(messages):
    """Null for the content of messages that only call, OpenAI's form."""
    return [
        {**message, "content": None} if "tool_calls" in message and not message["content"] else message
        for message in messages
    ]


def rendered(tokenizer, name, messages, **keywords):
    """The rendering by transformers of messages in the documented form, or in the form that the template needs."""
    chat = with_texts(messages) if name in NEEDS_TEXTS else messages
    return tokenizer.apply_chat_template(chat, return_dict=True, **keywords)["input_ids"]


def write(path, rows):
    """Write rows in both formats; Arrow gives all structs of a column the fields of all of them."""
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return [path.with_suffix(suffix) for suffix in (".jsonl", ".parquet")]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_prompts_are_what_transformers_renders(tokenizer, tmp_path, name):
    own = tokenizer_with(tokenizer, name)
    chats = [CALLS[:1], CALLS[:3], CALLS[:-1]]
    tools = [TOOLS, TOOLS[:1], TOOLS[1:]]
    expected = [
        rendered(own, name, chat, tools=given, add_generation_prompt=True)
        for chat, given in zip(chats, tools, strict=True)
    ]
    for change in (list, with_texts):
        rows = [
            prompt_row(prompt=change(chat), tools=given) for chat, given in zip(chats, tools, strict=True)
        ]
        for file in write(tmp_path / "x", rows):
            table = PromptDataset(file, own, max_prompt_length=10_000).table
            assert table["prompt_ids"].to_pylist() == expected, file.suffix


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_prompts_of_templates_without_tools(tokenizer, tmp_path, name):
    own = tokenizer_with(tokenizer, name)
    for file in write(tmp_path / "x", [prompt_row(prompt=PLAIN[:3])]):
        (ids,) = PromptDataset(file, own, max_prompt_length=10_000).table["prompt_ids"].to_pylist()
        assert ids == rendered(own, name, PLAIN[:3], add_generation_prompt=True)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_null_content_is_what_transformers_renders_or_an_empty_text(tokenizer, tmp_path, name):
    """Null stays null where the template reads it, and is an empty text elsewhere: GLM-4.5's template would write "None", and others fail."""
    own = tokenizer_with(tokenizer, name)
    try:
        expected = rendered(own, name, with_null(CALLS[:-1]), add_generation_prompt=True)
    except TypeError:
        expected = None
    if expected is None or "None" in own.decode(expected):
        expected = rendered(own, name, CALLS[:-1], add_generation_prompt=True)
    for file in write(tmp_path / "x", [prompt_row(prompt=with_null(CALLS[:-1]))]):
        (ids,) = PromptDataset(file, own, max_prompt_length=10_000).table["prompt_ids"].to_pylist()
        assert ids == expected


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_preferences_are_what_transformers_renders(tokenizer, tmp_path, name):
    own = tokenizer_with(tokenizer, name)
    chosen, rejected = CALLS[5:6], [assistant("", tool_calls=[call("weather", city="Rome")])]
    row = {"prompt": CALLS[:5], "chosen": chosen, "rejected": rejected, "tools": TOOLS}
    expected = [rendered(own, name, [*CALLS[:5], *end], tools=TOOLS) for end in (chosen, rejected)]
    for file in write(tmp_path / "x", [row]):
        dataset = PreferenceDataset(file, own, max_length=10_000, end_at_eos=False)
        assert dataset.table["input_ids"].to_pylist() == [expected]


MARKED = [
    ("qwen2_5_training", CALLS), ("qwen3_training", CALLS), ("qwen3_instruct_2507_training", CALLS),
    ("qwen3_5_think_training", CALLS), ("qwen3_6_training", CALLS), ("glm4moe_training", CALLS), ("gptoss_training", CALLS),
    ("nemotron_3_nano_training", CALLS), ("muse_glimmer_training", CALLS), ("lfm2_2_5_v2", CALLS),
    ("gemma_training", PLAIN), ("llama3_training", PLAIN), ("phi3_training", PLAIN), ("cohere2_training", PLAIN),
    ("deepseekv3_training", PLAIN),
]  # fmt: skip


@pytest.mark.parametrize("name, chat", MARKED)
def test_marks_of_a_template_are_the_mask(tokenizer, tmp_path, name, chat):
    own = tokenizer_with(tokenizer, name)
    tools = TOOLS if chat is CALLS else None
    oracle = own.apply_chat_template(chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    row = {"messages": with_texts(chat), **({} if tools is None else {"tools": json.dumps(tools)})}
    for file in write(tmp_path / "x", [row]):
        (found,) = SftDataset(file, own, max_length=10_000).table.to_pylist()
        length = len(found["input_ids"])
        assert found["input_ids"] == oracle["input_ids"][:length]
        assert [*map(int, found["loss_mask"])] == oracle["assistant_masks"][:length]
        assert not any(oracle["assistant_masks"][length:])


def stretches(tokenizer, ids, mask):
    """The learnt stretches as texts."""
    places = [list(group) for learnt, group in itertools.groupby(range(len(ids)), mask.__getitem__) if learnt]
    return [tokenizer.decode([ids[place] for place in group]) for group in places]


UNMARKED = [
    ("qwen2_5", CALLS), ("qwen3_instruct_2507", CALLS), ("qwen3_vl", CALLS), ("glm4moe", CALLS), ("glm4moe", CALLS[:6]),
    ("glm4moe", PLAIN), ("lfm2_v2", CALLS), ("gemma", PLAIN), ("gemma3", PLAIN), ("llama3", PLAIN), ("phi3", PLAIN),
    ("phi3_5", PLAIN), ("cohere", PLAIN), ("cohere2", PLAIN), ("lfm2", PLAIN), ("qwen2_5_vl", PLAIN),
]  # fmt: skip


@pytest.mark.parametrize("name, chat", UNMARKED)
def test_turns_are_those_that_trl_marks(tokenizer, name, chat):
    """The turns are found in the template as it was published. TRL also learns the line break behind the end token, and for Qwen2.5 the line break of
    the generation prompt."""
    tools = {"tools": TOOLS} if chat is not PLAIN else {}
    own, marked = tokenizer_with(tokenizer, name), tokenizer_with(tokenizer, f"{name}_training")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not write the reasoning_content")
        found = stretches(own, *tokenize_chat(own, chat, tools))
    oracle = marked.apply_chat_template(chat, **tools, return_dict=True, return_assistant_tokens_mask=True)
    expected = stretches(marked, oracle["input_ids"], oracle["assistant_masks"])
    assert [text.strip("\n") for text in found] == [text.strip("\n") for text in expected]


QWEN3 = [
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris é", "days": 2}}\n</tool_call><|im_end|>',
    "It rains.<|im_end|>",
    '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
    "<think>\nDone.\n</think>\n\n3<|im_end|>",
]


def test_qwen3_is_learnt_as_it_shows_each_turn(tokenizer):
    """Qwen3's template drops the reasoning of turns before the last user message; its own rendering is learnt."""
    own = tokenizer_with(tokenizer, "qwen3")
    ids, mask = tokenize_chat(own, CALLS, {"tools": TOOLS})
    assert ids == own.apply_chat_template(CALLS, tools=TOOLS, return_dict=True)["input_ids"][: len(ids)]
    assert stretches(own, ids, mask) == QWEN3


def test_qwen3_with_reasoning_in_the_content(tokenizer):
    own = tokenizer_with(tokenizer, "qwen3")
    chat = [
        user("a"),
        assistant("<think>\nb\n</think>\n\nc"),
        user("d"),
        assistant("<think>\ne\n</think>\n\nf"),
    ]
    assert stretches(own, *tokenize_chat(own, chat)) == ["c<|im_end|>", "<think>\ne\n</think>\n\nf<|im_end|>"]


def test_generation_prompts_that_think_are_not_learnt(tokenizer):
    """A rollout is given the text of the generation prompt, "<think>" here; a finished turn may lack that text."""
    own = tokenizer_with(tokenizer, "qwen3_6")
    found = stretches(own, *tokenize_chat(own, CALLS, {"tools": TOOLS}))
    assert found[1] == "It rains.<|im_end|>"
    assert found[3] == "Done.\n</think>\n\n3<|im_end|>"
    opened = own.apply_chat_template(CALLS[:-1], tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert opened.endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize("name", ["llama3", "lfm2", "qwen2_5_vl", "phi3", "deepseek_r1_distill"])
def test_templates_that_drop_calls_are_refused_where_calls_are_learnt(tokenizer, tmp_path, name):
    own = tokenizer_with(tokenizer, name)
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="does not write the tool_calls of message 1"),
    ):
        tokenize_chat(own, CALLS[:2])
    rows = [{"prompt": CALLS[:1], "chosen": CALLS[1:2], "rejected": PLAIN[1:2]}]
    (file, _) = write(tmp_path / "x", rows)
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="does not write the tool_calls of the last"),
    ):
        PreferenceDataset(file, own, max_length=10_000)


def test_a_turn_that_a_template_writes_around_another_message_is_refused(tokenizer):
    """Gemma 4's template puts the tool's answer before the text of the turn that called the tool."""
    own = tokenizer_with(tokenizer, "gemma4")
    chat = [*CALLS[:1], assistant("I look.", tool_calls=CALLS[1]["tool_calls"]), *CALLS[2:4]]
    with pytest.raises(ValueError, match=r"message 1, .*cannot be told apart"):
        tokenize_chat(own, chat, {"tools": TOOLS})
