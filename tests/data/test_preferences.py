"""Preferences as chats: what is learnt from each, and rows that are refused."""

import copy
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.tiny_model import train_tokenizer
from megarl.data.preferences import (
    PREFERENCE_SCHEMA,
    PreferenceChats,
    PreferenceDataset,
    PreferenceKeys,
    best_answers,
    ranking_lengths,
    read_answers,
    read_ranking,
    texts_of,
    tokenize_whole_chat,
)
from megarl.data.sft import tokenize_chat

QUESTION = {"role": "user", "content": "Tom has 3 pens."}
GOOD, BAD = "#### 3", "#### 4"


def answer(text):
    return {"role": "assistant", "content": text}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


PAIRS = {
    "messages and texts": {"prompt": [QUESTION], "chosen": GOOD, "rejected": BAD},
    "texts": {"prompt": QUESTION["content"], "chosen": GOOD, "rejected": BAD},
    "messages after the prompt": {"prompt": [QUESTION], "chosen": [answer(GOOD)], "rejected": [answer(BAD)]},
    "whole chats": {"chosen": [QUESTION, answer(GOOD)], "rejected": [QUESTION, answer(BAD)]},
    "whole chats beside their prompt": {
        "prompt": [QUESTION],
        "chosen": [QUESTION, answer(GOOD)],
        "rejected": [QUESTION, answer(BAD)],
    },
    "whole chats beside the question alone": {
        "prompt": QUESTION["content"],
        "chosen": [QUESTION, answer(GOOD)],
        "rejected": [QUESTION, answer(BAD)],
    },
    "a prompt with other white space": {
        "prompt": f" {QUESTION['content']}\n",
        "chosen": [QUESTION, answer(GOOD)],
        "rejected": [QUESTION, answer(BAD)],
    },
    "null columns of rankings": {
        "prompt": [QUESTION], "chosen": GOOD, "rejected": BAD, "responses": None, "ranks": None
    },
}  # fmt: skip


@pytest.mark.parametrize("row", PAIRS.values(), ids=PAIRS)
def test_every_form_of_a_pair_is_the_same_pair(row):
    ranking = read_ranking(row, PreferenceKeys())
    assert ranking.chats == [[QUESTION, answer(GOOD)], [QUESTION, answer(BAD)]]
    assert ranking.scores == [1.0, 0.0] and ranking.margin == 0.0


def test_a_whole_chat_may_have_more_before_the_prompt():
    """As HuggingFaceH4/orca_dpo_pairs has it: the prompt is the question, the chats begin with a system message."""
    system, earlier = {"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}
    for before in ([system], [system, earlier, answer("Hello")]):
        row = {"prompt": QUESTION["content"]} | {
            key: [*before, QUESTION, answer(text)] for key, text in (("chosen", GOOD), ("rejected", BAD))
        }
        assert read_ranking(row, PreferenceKeys()).chats == [row["chosen"], row["rejected"]]
    # A question that is asked again after the answer is no prompt.
    after = [answer("What?"), QUESTION, answer(GOOD)]
    row = {"prompt": [QUESTION], "chosen": after, "rejected": BAD}
    assert read_ranking(row, PreferenceKeys()).chats[0] == [QUESTION, *after]


def test_an_empty_list_in_json_is_a_text():
    """No chat is empty, but an answer may be that there is nothing: no calls, no results."""
    row = {"prompt": "The even primes above 2, as JSON?", "chosen": "[]", "rejected": "[4]"}
    chats = read_ranking(row, PreferenceKeys()).chats
    assert [chat[-1] for chat in chats] == [answer("[]"), answer("[4]")]


def test_ranks_fall_and_scores_rise():
    row = {"prompt": "Hi", "responses": ["a", "b", "c"]}
    assert read_ranking({**row, "ranks": [2, 1, 2]}, PreferenceKeys()).scores == [-2.0, -1.0, -2.0]
    assert read_ranking({**row, "scores": [0.5, 7, -1]}, PreferenceKeys()).scores == [0.5, 7.0, -1.0]


def test_all_keys_can_be_renamed():
    keys = PreferenceKeys("q.text", "win", "lose", "m", "answers", "places", "points")
    assert set(keys.columns()) == {"q.text", "win", "lose", "m", "answers", "places", "points"}
    ranking = read_ranking({"q": {"text": "Hi"}, "win": "a", "lose": "b", "m": 2}, keys)
    assert ranking.chats[0] == [{"role": "user", "content": "Hi"}, answer("a")] and ranking.margin == 2.0
    row = {"q": {"text": "Hi"}, "answers": ["a", "b"], "m": 0}
    assert read_ranking({**row, "places": [1, 2]}, keys).scores == [-1.0, -2.0]
    assert read_ranking({**row, "points": [1, 2]}, keys).scores == [1.0, 2.0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi", "chosen": GOOD}, "no 'rejected'"),
        ({"chosen": GOOD, "rejected": BAD}, "'chosen' is a text, but the row has no prompt"),
        ({"prompt": "Hi", "chosen": "", "rejected": BAD}, "'chosen' is an empty text"),
        ({"chosen": [answer(GOOD)], "rejected": [answer(BAD)]}, "'chosen' begins with the assistant's message, but"),
        (
            {"prompt": "Hi", "chosen": [QUESTION, answer(GOOD)], "rejected": BAD},
            "'chosen' begins with a message of 'user' and does not have the prompt in it",
        ),
        ({"prompt": "Hi", "chosen": GOOD, "rejected": [QUESTION]}, "the last message of 'rejected' is of 'user'"),
        ({"prompt": "Hi", "chosen": GOOD, "rejected": 3}, "'rejected' must be a non-empty list"),
        ({"prompt": 3, "chosen": GOOD, "rejected": BAD}, "'prompt' must be a non-empty list"),
        ({"prompt": "Hi", "responses": ["a"], "ranks": [1]}, "'responses' must be a list of two or more"),
        ({"prompt": "Hi", "responses": ["a", "b"]}, "one of 'ranks' and 'scores' must be given, found neither"),
        (
            {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2], "scores": [1, 2]},
            "one of 'ranks' and 'scores' must be given, found both",
        ),
        ({"prompt": "Hi", "responses": ["a", "b"], "ranks": [1]}, "'ranks' must have a number for each of the 2"),
        ({"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, None]}, "'ranks' must have a number for each"),
        ({"prompt": "Hi", "responses": ["a", "b"], "scores": [2, 2]}, "all 'scores' are equal"),
    ],
)  # fmt: skip
def test_wrong_rows_are_named(tokenizer, tmp_path, row, message):
    path = write_rows(tmp_path / "x.jsonl", [PAIRS["texts"], row])
    with pytest.raises(ValueError, match=rf"x\.jsonl row 1: .*{message}"):
        PreferenceDataset(path, tokenizer, max_length=64)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("row", "keys", "missing", "setting"),
    [
        (
            {"question": "Hi", "good": GOOD, "bad": BAD},
            {"prompt": "text"},
            "'text', 'chosen', 'rejected'",
            "data.prompt_key; data.chosen_key; data.rejected_key (or data.responses_key, for several that are ranked)",
        ),
        (
            {"prompt": "Hi", "chosen": GOOD},
            {},
            "'rejected'",
            "data.rejected_key (or data.responses_key, for several",
        ),
        ({"prompt": "Hi", "responses": ["a", "b"]}, {}, "'scores'", "data.scores_key or data.ranks_key"),
        ({"prompt": "Hi", "chosen": GOOD, "rejected": BAD}, {"margin": "m"}, "'m'", "data.margin_key"),
    ],
)
def test_missing_columns_are_one_line(tokenizer, tmp_path, suffix, row, keys, missing, setting):
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row] * 9), path)
    else:
        write_rows(path, [row] * 9)
    with pytest.raises(ValueError) as error:
        PreferenceDataset(path, tokenizer, max_length=64, keys=PreferenceKeys(**keys))
    assert str(error.value).startswith(
        f"{path}: no column {missing} (columns: {', '.join(row)}); set {setting}"
    )
    assert "\n" not in str(error.value)


def test_a_margin_must_be_a_number(tokenizer, tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [{**PAIRS["texts"], "m": 1.5}, {**PAIRS["texts"], "m": "much"}])
    with pytest.raises(ValueError, match=r"x\.jsonl row 1: 'm' must be a number, found 'much'"):
        PreferenceDataset(path, tokenizer, max_length=64, keys=PreferenceKeys(margin="m"))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_texts_are_what_a_policy_writes_and_a_reward_model_reads(tokenizer, tmp_path, suffix):
    """Prompt and response with its end token, as in SFT and in trajectories; pairs and rankings in one file."""
    rows = [
        {**PAIRS["null columns of rankings"]},
        {"prompt": [QUESTION], "chosen": None, "rejected": None, "responses": [GOOD, BAD, "5"], "ranks": [1, 2, 3]},
    ]  # fmt: skip
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_rows(path, rows)
    table = PreferenceDataset(path, tokenizer, max_length=64).table
    assert table.schema == PREFERENCE_SCHEMA and table["uid"].to_pylist() == ["x:0", "x:1"]
    texts = [tokenize_chat(tokenizer, [QUESTION, answer(text)])[0] for text in (GOOD, BAD, "5")]
    assert texts[0][-1] == tokenizer.eos_token_id
    assert table["input_ids"].to_pylist() == [texts[:2], texts]
    assert table["scores"].to_pylist() == [[1.0, 0.0], [-1.0, -2.0, -3.0]]
    assert texts_of(table)["input_ids"].to_pylist() == [*texts[:2], *texts]
    assert texts_of(table.take([1, 0]))["input_ids"].to_pylist() == [*texts, *texts[:2]]
    assert ranking_lengths(table).tolist() == [sum(map(len, texts[:2])), sum(map(len, texts))]


def test_texts_can_end_as_the_template_ends_them(tokenizer):
    chat = [QUESTION, answer(GOOD)]
    whole = tokenize_whole_chat(tokenizer, chat, end_at_eos=False)
    assert tokenizer.decode(whole).endswith("#### 3<|im_end|>\n")
    assert tokenize_whole_chat(tokenizer, chat, end_at_eos=True) == whole[:-1]


def test_long_texts_and_long_rankings(tokenizer, tmp_path):
    rows = [PAIRS["texts"], {**PAIRS["texts"], "rejected": BAD * 9}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    whole = PreferenceDataset(path, tokenizer, max_length=99).table
    short, long = (max(map(len, texts)) for texts in whole["input_ids"].to_pylist())
    assert short < long
    with pytest.raises(
        ValueError, match=rf"x\.jsonl row 1: a text has {long} tokens, more than max_length {short}"
    ):
        PreferenceDataset(path, tokenizer, max_length=short)
    cut = PreferenceDataset(path, tokenizer, max_length=short, truncation="right")
    assert cut.num_truncated == 1
    assert cut.table["input_ids"].to_pylist()[1][1] == whole["input_ids"].to_pylist()[1][1][:short]
    dropped = PreferenceDataset(path, tokenizer, max_length=short, truncation="drop")
    assert dropped.num_dropped == 1 and dropped.table["uid"].to_pylist() == ["x:0"]
    total = int(ranking_lengths(whole)[1])
    with pytest.raises(
        ValueError, match=rf"x\.jsonl row 1: the 2 texts have {total} tokens .* raise it to {total}"
    ):
        PreferenceDataset(path, tokenizer, max_length=99, max_tokens=total - 1)
    assert len(PreferenceDataset(path, tokenizer, max_length=99, max_tokens=total)) == 2


def test_reference_answers(tokenizer, tmp_path):
    rows = [
        {"prompt": "Hi", "responses": ["a", "b", "c"], "scores": [1, 3, 3]},
        {"prompt": "Hi", "chosen": "d", "rejected": "e"},
    ]
    table = PreferenceDataset(write_rows(tmp_path / "x.jsonl", rows), tokenizer, max_length=64).table
    hi = {"role": "user", "content": "Hi"}
    texts = [tokenize_chat(tokenizer, [hi, answer(text)])[0] for text in ("b", "d")]
    assert best_answers(table, None)["input_ids"].to_pylist() == texts
    assert best_answers(table, 1)["input_ids"].to_pylist() == texts[:1]
    path = write_rows(
        tmp_path / "y.jsonl", [{"prompt": "Hi", "extra": {"answer": text}} for text in ("b", "d")]
    )
    options = {"prompt_key": "prompt", "max_length": 64, "end_at_eos": True}
    found = read_answers(path, tokenizer, response_key="extra.answer", **options)
    assert found["input_ids"].to_pylist() == texts
    with pytest.raises(ValueError, match=r"y\.jsonl row 0: no 'extra.other'"):
        read_answers(path, tokenizer, response_key="extra.other", **options)
    line = r"y\.jsonl: no column 'question', 'answer' \(columns: prompt, extra\); set data.prompt_key; data.normalize_res"
    with pytest.raises(ValueError, match=line):
        read_answers(path, tokenizer, response_key="answer", **options | {"prompt_key": "question"})


def test_a_text_ends_as_a_policy_ends_it(tokenizer):
    """If the turns of a template end with the next role's token, a policy stops at that token."""
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    own.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    chat = [QUESTION, answer("5")]
    whole = tokenize_whole_chat(own, chat, end_at_eos=False)
    assert tokenize_whole_chat(own, chat, end_at_eos=True) == [*whole, own.convert_tokens_to_ids("<|user|>")]


def test_rows_with_tools_and_keywords(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{{ style }}{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}|{{ m.content }}{% endfor %}"
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{"name": "f"}]}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([row, {**row, "tools": None}]), path)
    config = {"style": "s", "tools": [{"name": "g"}]}
    table = PreferenceDataset(path, own, max_length=64, chat_template_kwargs=config, end_at_eos=False).table
    texts = [[own.decode(ids) for ids in row] for row in table["input_ids"].to_pylist()]
    assert texts == [["sf|a|b", "sf|a|c"], ["sg|a|b", "sg|a|c"]]
    options = {"prompt_key": "prompt", "response_key": "chosen", "max_length": 64, "end_at_eos": False}
    answers = read_answers(path, own, chat_template_kwargs=config, **options)
    assert [own.decode(ids) for ids in answers["input_ids"].to_pylist()] == ["sf|a|b", "sg|a|b"]
    with pytest.raises(ValueError, match=r"x\.parquet: no column 'list' .*set data.tools_key"):
        PreferenceDataset(path, own, max_length=64, tools_key="list")


BEFORE = [
    {"role": "user", "content": "Ann has 3 pens."},
    {"role": "assistant", "content": "I see."},
    {"role": "user", "content": "How many?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["Ann has 3 pens. How many? I see. Sure: 7 cups"], 300)


def read(tmp_path: Path, tokenizer, rows: list[dict], **keywords) -> PreferenceChats:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keywords = {"max_length": 200, "max_tokens": 400, **keywords}
    return PreferenceChats([file], tokenizer, keys=PreferenceKeys(), **keywords)


def test_only_the_last_message_is_learnt(tmp_path: Path, tokenizer) -> None:
    rows = [
        {"prompt": BEFORE, "chosen": "3 pens", "rejected": "cups"},
        {"prompt": "How many?", "responses": ["7", "Sure: 7", "8"], "ranks": [2, 1, 2]},
    ]
    found = read(tmp_path, tokenizer, rows).table
    assert found["scores"].to_pylist() == [[1.0, 0.0], [-2.0, -1.0, -2.0]]
    chats = texts_of(found).to_pylist()
    assert len(chats) == 5 and texts_of(found.slice(1, 1)).to_pylist() == chats[2:]
    for chat, answer in zip(chats, ["3 pens", "cups", "7", "Sure: 7", "8"], strict=True):
        learnt = [token for token, own in zip(chat["input_ids"], chat["loss_mask"], strict=True) if own]
        assert tokenizer.decode(learnt) == f"{answer}<|im_end|>"
        assert tokenizer.decode(chat["input_ids"]).endswith(f"assistant\n{answer}<|im_end|>")


def test_long_chats_are_refused_or_left_out(tmp_path: Path, tokenizer) -> None:
    rows = [
        {"prompt": "How many?", "chosen": "7", "rejected": "8"},
        {"prompt": "How many?", "chosen": "7 " * 100, "rejected": "8"},
    ]
    with pytest.raises(ValueError, match=r"row 1.* more than max_length 60; raise it or set truncation"):
        read(tmp_path, tokenizer, rows, max_length=60)
    found = read(tmp_path, tokenizer, rows, max_length=60, truncation="drop")
    assert (len(found), found.num_dropped) == (1, 1)
    with pytest.raises(ValueError, match="tokens together, more than max_token_len_per_gpu 20"):
        read(tmp_path, tokenizer, rows[:1], max_tokens=20)


def test_only_the_last_turn_need_be_found(tokenizer, tmp_path):
    """A template that sums up all messages before the last two shows no earlier turn."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{% for m in messages %}{% if loop.revindex < 3 %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% else %}.{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    row = {"prompt": [user, said, user], "chosen": "good", "rejected": "bad"}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    chats = PreferenceChats(path, own, max_length=99, max_tokens=999, keys=PreferenceKeys())
    (found,) = chats.table.to_pylist()
    learnt = [
        own.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
        for ids, mask in zip(found["input_ids"], found["loss_mask"], strict=True)
    ]
    assert learnt == ["good<|im_end|>", "bad<|im_end|>"]
