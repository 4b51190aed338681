"""Text for supervised fine-tuning: the tokens of plain text that are learnt, the turns of chats, and long documents, which are split."""

import copy
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.loader import TableLoader
from megarl.data.sft import SFT_SCHEMA, SftDataset, split_tokens, tokenize_chat
from megarl.data.tokenizer import load_tokenizer
from tests.data.shared import render_prompt, shared_data

QUESTION = {"role": "user", "content": "Tom has 3 pens."}
ANSWER = {"role": "assistant", "content": "#### 3"}


def learnt(tokenizer, ids, mask):
    """The learnt stretches as texts."""
    texts, current = [], []
    for token, flag in zip([*ids, None], [*mask, False], strict=True):
        if flag:
            current.append(token)
        elif current:
            texts.append(tokenizer.decode(current))
            current = []
    return texts


def write_chats(path, chats):
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def test_learnt_is_what_the_model_generates(tokenizer):
    ids, mask = tokenize_chat(tokenizer, [QUESTION, ANSWER])
    prompt = render_prompt(tokenizer, [QUESTION])
    assert ids[: len(prompt)] == prompt  # the prompt that a rollout is started with
    assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert tokenizer.decode(ids[len(prompt) :]) == "#### 3<|im_end|>"
    assert ids[-1] == tokenizer.eos_token_id


def test_keywords_of_the_chat_template(tokenizer, tmp_path):
    """Templates of models that think read such keywords; every rendering of the chat gets them."""
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = (
        "{% for message in messages %}{{ who + message.role + ':\\n' + message.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ who + 'assistant:\\n' }}{% endif %}"
    )
    path = write_chats(tmp_path / "x.jsonl", [[QUESTION, ANSWER]])
    dataset = SftDataset(path, thinking, max_length=64, chat_template_kwargs={"who": "the "})
    text = thinking.decode(dataset.table["input_ids"][0].as_py())
    assert text == "the user:\nTom has 3 pens.<|im_end|>the assistant:\n#### 3<|im_end|>"


def test_every_assistant_message_is_learnt(tokenizer):
    chat = [
        {"role": "system", "content": "Count."},
        QUESTION,
        ANSWER,
        {"role": "user", "content": "And 2 more"},
        {"role": "assistant", "content": "#### 5"},
        {"role": "user", "content": "Thanks"},
    ]
    ids, mask = tokenize_chat(tokenizer, chat)
    assert learnt(tokenizer, ids, mask) == ["#### 3<|im_end|>", "#### 5<|im_end|>"]
    assert tokenizer.decode(ids).endswith("#### 5<|im_end|>")


def test_mask_agrees_with_the_templates_own_generation_marks(tokenizer):
    """Oracle: transformers computes the same mask for templates that mark what is generated."""
    marked = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "3 + 4 = 7 #### 7"}]
    ids, mask = tokenize_chat(tokenizer, chat)
    oracle = tokenizer.apply_chat_template(
        chat, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert oracle["input_ids"][: len(ids)] == ids
    assert [bool(flag) for flag in oracle["assistant_masks"]] == mask + [False] * (
        len(oracle["input_ids"]) - len(ids)
    )


def test_gsm8k_schema_with_dotted_response_key(tokenizer, tmp_path):
    rows = [
        {"prompt": [QUESTION], "extra_info": {"answer": "#### 3", "index": 0}},
        {"prompt": [QUESTION], "extra_info": {"answer": "1 + 2 = 3 #### 3", "index": 1}},
    ]
    path = tmp_path / "sft.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    table = SftDataset(path, tokenizer, max_length=64, response_key="extra_info.answer").table
    assert table.schema == SFT_SCHEMA
    assert table["uid"].to_pylist() == ["sft:0", "sft:1"]
    stretches = [learnt(tokenizer, row["input_ids"], row["loss_mask"]) for row in table.to_pylist()]
    assert stretches == [["#### 3<|im_end|>"], ["1 + 2 = 3 #### 3<|im_end|>"]]


def test_string_prompts_and_json_lines(tokenizer, tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"question": QUESTION["content"], "answer": ANSWER["content"]}) + "\n")
    dataset = SftDataset(path, tokenizer, max_length=64, prompt_key="question", response_key="answer")
    (row,) = dataset.table.to_pylist()
    assert (row["input_ids"], row["loss_mask"]) == tokenize_chat(tokenizer, [QUESTION, ANSWER])


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    "keys, line",
    [
        (
            {},
            "no column 'messages' (columns: question, answer); set data.response_key and data.prompt_key, or data.text_key",
        ),
        ({"response_key": "answer"}, "no column 'prompt' (columns: question, answer); set data.prompt_key"),
        (
            {"prompt_key": "question", "response_key": "extra.answer", "section": "data.ptx"},
            "no column 'extra.answer' (columns: question, answer); set data.ptx.response_key",
        ),
        ({"text_key": "text"}, "no column 'text' (columns: question, answer); set data.text_key"),
    ],
)
def test_missing_columns_are_one_line_a_file(tokenizer, tmp_path, suffix, keys, line):
    rows = [{"question": "Hi", "answer": "Hi"}] * 9
    for name in "ab":
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError) as error:
        SftDataset(f"{tmp_path}/*.{suffix}", tokenizer, max_length=64, **keys)
    assert str(error.value).splitlines() == [f"{tmp_path}/{name}.{suffix}: {line}" for name in "ab"]


def test_max_length(tokenizer, tmp_path):
    path = write_chats(tmp_path / "sft.jsonl", [[QUESTION, ANSWER]])
    ids, mask = tokenize_chat(tokenizer, [QUESTION, ANSWER])
    dataset = SftDataset(path, tokenizer, max_length=len(ids))
    assert dataset.num_truncated == 0
    with pytest.raises(ValueError, match=rf"sft\.jsonl row 0: the example has {len(ids)} tokens, more than"):
        SftDataset(path, tokenizer, max_length=len(ids) - 1)
    dataset = SftDataset(path, tokenizer, max_length=len(ids) - 1, truncation="right")
    assert dataset.table["input_ids"].to_pylist() == [ids[:-1]]
    assert dataset.table["loss_mask"].to_pylist() == [mask[:-1]]
    assert dataset.num_truncated == 1
    with pytest.raises(ValueError, match="row 0: cut to max_length 5, no token of the response is left"):
        SftDataset(path, tokenizer, max_length=5, truncation="right")


@pytest.mark.parametrize(
    "chat, message",
    [
        ([QUESTION], "there is no assistant message"),
        ([ANSWER], "the first message is the assistant's"),
        ([], "'messages' must be a non-empty list"),
        (None, "'messages' must be a non-empty list"),
        ([QUESTION, {"role": "assistant"}], "message 1 needs the string 'content'"),
    ],
)
def test_wrong_rows_are_named(tokenizer, tmp_path, chat, message):
    path = write_chats(tmp_path / "sft.jsonl", [[QUESTION, ANSWER], chat])
    with pytest.raises(ValueError, match=rf"sft\.jsonl row 1: .*{message}"):
        SftDataset(path, tokenizer, max_length=64)


def test_empty_response_is_named(tokenizer, tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "answer": ""}) + "\n")
    with pytest.raises(ValueError, match="row 0: 'answer' must be a non-empty string, found ''"):
        SftDataset(path, tokenizer, max_length=64, response_key="answer")


@pytest.fixture
def own_tokenizer(tokenizer, tmp_path):
    """A copy of the tokenizer whose template may be changed."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return load_tokenizer(tmp_path / "tokenizer")


def test_template_that_rewrites_earlier_turns_is_refused(own_tokenizer):
    own_tokenizer.chat_template = (
        "{% for message in messages %}"
        "<|im_start|>{{ messages | length }}{{ message['content'] }}<|im_end|>"
        "{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"does not keep beginnings: .* message 1"):
        tokenize_chat(own_tokenizer, [QUESTION, ANSWER])


def test_template_without_end_token_warns(own_tokenizer):
    own_tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"
    with pytest.warns(UserWarning, match=r"does not end the assistant's messages with .* '<\|im_end\|>'"):
        ids, mask = tokenize_chat(own_tokenizer, [QUESTION, ANSWER])
    assert learnt(own_tokenizer, ids, mask) == ["#### 3|"]


def test_plain_template_on_a_sentencepiece_tokenizer():
    with pytest.warns(UserWarning, match="no chat template"):
        tokenizer = load_tokenizer(shared_data("stories260k"))
    ids, mask = tokenize_chat(tokenizer, [QUESTION, ANSWER, QUESTION, ANSWER])
    assert learnt(tokenizer, ids, mask) == ["#### 3</s>", "#### 3</s>"]


def test_sft_loader(tokenizer, tmp_path):
    path = write_chats(tmp_path / "sft.jsonl", [[QUESTION, ANSWER]] * 5)
    loader = TableLoader(SftDataset(path, tokenizer, max_length=64), 2, shuffle=True, seed=0)
    batches = list(loader)
    assert [batch.num_rows for batch in batches] == [2, 2]
    assert all(batch.schema == SFT_SCHEMA for batch in batches)
    assert len({uid for batch in batches for uid in batch["uid"].to_pylist()}) == 4


def test_rows_with_tools_and_keywords(own_tokenizer, tmp_path):
    own_tokenizer.chat_template = (
        "{{ style }}{% for t in tools or [] %}{{ t.name }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tools = {"tools": [{"name": "f"}], "chat_template_kwargs": {"style": "row"}}
    chats = {"messages": json.dumps([QUESTION, ANSWER]), **tools}, {"messages": [QUESTION, ANSWER]}
    pairs = [
        {"prompt": [QUESTION], "answer": "#### 3", **tools},
        {"prompt": json.dumps([QUESTION]), "answer": "#### 3"},
    ]
    for rows, key in ((chats, None), (pairs, "answer")):
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = SftDataset(
            path, own_tokenizer, max_length=64, response_key=key, chat_template_kwargs={"style": "all"}
        )
        texts = [own_tokenizer.decode(ids) for ids in dataset.table["input_ids"].to_pylist()]
        assert [text.partition("<")[0] for text in texts] == ["rowf", "all"]
        pq.write_table(pa.Table.from_pylist([rows[1]]), path.with_suffix(".parquet"))
        with pytest.raises(ValueError, match=r"x\.parquet: no column 'tool_list' .*set data.tools_key"):
            SftDataset(
                path.with_suffix(".parquet"),
                own_tokenizer,
                max_length=64,
                response_key=key,
                tools_key="tool_list",
            )


def test_a_turn_without_a_token_of_its_own_is_refused(own_tokenizer):
    own_tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
        "{% generation %}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="renders the assistant's messages to no tokens"):
        tokenize_chat(own_tokenizer, [QUESTION, {"role": "assistant", "content": ""}])


def test_a_turn_that_begins_inside_of_a_token_is_told(own_tokenizer):
    """The template's own rendering is learnt all the same."""
    own_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: pe{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: pe{% endif %}"
    )
    chat = [QUESTION, {"role": "assistant", "content": "ns."}]
    with pytest.warns(UserWarning, match="begins or ends inside of a token"):
        ids, mask = tokenize_chat(own_tokenizer, chat)
    assert own_tokenizer.decode(ids) == "user: peTom has 3 pens.<|im_end|>assistant: pens.<|im_end|>"
    assert "ns.<|im_end|>" in learnt(own_tokenizer, ids, mask)[0]


def test_a_turn_that_ends_inside_of_a_token_is_learnt_with_it(own_tokenizer):
    """Without that token nothing would end the turn."""
    own_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} pe{% if not loop.last %}ns\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ns\nassistant:{% endif %}"
    )
    chat = [QUESTION, {"role": "assistant", "content": "3"}, QUESTION, {"role": "assistant", "content": "4"}]
    assert len(own_tokenizer(" pens")["input_ids"]) == 1
    with pytest.warns(UserWarning, match="begins or ends inside of a token"):
        ids, mask = tokenize_chat(own_tokenizer, chat)
    assert learnt(own_tokenizer, ids, mask) == [" 3 pens", " 4 pe"]


TEXT = "Tom has 3 pens. " * 8


def write(path, texts):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([{"doc": {"text": text}} for text in texts]), path)
    else:
        path.write_text("".join(json.dumps({"doc": {"text": text}}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_all_tokens_and_the_end_are_learnt(tokenizer, tmp_path, name):
    path = write(tmp_path / name, [TEXT, "#### 3"])
    table = SftDataset(path, tokenizer, max_length=200, text_key="doc.text").table
    assert table.schema == SFT_SCHEMA and table["uid"].to_pylist() == ["x:0", "x:1"]
    for ids, mask, text in zip(
        table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), [TEXT, "#### 3"], strict=True
    ):
        assert tokenizer.decode(ids) == text + tokenizer.eos_token and all(mask) and len(mask) == len(ids)
    without = SftDataset(path, tokenizer, max_length=200, text_key="doc.text", append_eos=False).table
    assert without["input_ids"].to_pylist() == [ids[:-1] for ids in table["input_ids"].to_pylist()]


def test_texts_cannot_end_with_a_token_that_is_not_there(tokenizer, tmp_path):
    path, without = write(tmp_path / "texts.jsonl", ["one two"]), copy.deepcopy(tokenizer)
    without.eos_token = None
    with pytest.raises(ValueError, match=r"row 0: the tokenizer has no end token .* data\.append_eos=false"):
        SftDataset(path, without, max_length=200, text_key="doc.text")
    assert len(SftDataset(path, without, max_length=200, text_key="doc.text", append_eos=False)) == 1


def test_a_start_token_is_the_tokenizers(tmp_path):
    """A Llama tokenizer puts <s> before a text, as in pretraining; an end token that is there is not added again."""
    with pytest.warns(UserWarning, match="no chat template"):
        tokenizer = load_tokenizer(shared_data("stories260k"))
    path = write(tmp_path / "x.jsonl", ["Once upon a time"])
    (ids,) = SftDataset(path, tokenizer, max_length=64, text_key="doc.text").table["input_ids"].to_pylist()
    assert ids == [*tokenizer("Once upon a time")["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize(("length", "max_length"), [(2, 2), (10, 10), (11, 10), (19, 10), (20, 10), (37, 5)])
def test_pieces_learn_every_token_but_the_first_once(length, max_length):
    ids = list(range(100, 100 + length))
    pieces = split_tokens(ids, max_length)
    assert all(2 <= len(piece) <= max_length for piece in pieces)
    assert [token for piece in pieces for token in piece[1:]] == ids[1:]


def test_long_documents(tokenizer, tmp_path):
    path = write(tmp_path / "x.jsonl", ["#### 3", TEXT])
    whole = SftDataset(path, tokenizer, max_length=200, text_key="doc.text").table["input_ids"].to_pylist()
    length = len(whole[1])
    options = {"max_length": 20, "text_key": "doc.text"}
    message = rf"row 1: the example has {length} tokens, .* set truncation to right or split"
    with pytest.raises(ValueError, match=message):
        SftDataset(path, tokenizer, **options)
    cut = SftDataset(path, tokenizer, truncation="right", **options)
    assert cut.table["input_ids"].to_pylist() == [whole[0], whole[1][:20]] and cut.num_truncated == 1
    split = SftDataset(path, tokenizer, truncation="split", **options)
    assert split.num_split == 1 and split.num_truncated == 0
    assert split.table["input_ids"].to_pylist() == [whole[0], *split_tokens(whole[1], 20)]
    assert split.table["uid"].to_pylist()[:3] == ["x:0", "x:1/0", "x:1/1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "non-empty string"),
        (3, "non-empty string"),
        ("a", "the text has 1 token"),
        ("cut \ud83d", "half of a surrogate pair"),
    ],
)
def test_wrong_texts_are_named(tokenizer, tmp_path, text, message):
    path = write(tmp_path / "x.jsonl", [TEXT, text])
    with pytest.raises(ValueError, match=rf"x\.jsonl row 1: .*{message}"):
        SftDataset(path, tokenizer, max_length=200, text_key="doc.text", append_eos=False)
