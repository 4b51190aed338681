"""Examples with labels: rows that are read, rows that are refused, and responses to other prompts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.data.labels import LABELLED_SCHEMA, LabelledChats, LabelledKeys, mismatched, mismatched_chats
from megarl.data.sft import tokenize_chat

GOOD, BAD = "#### 3", "#### 4"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LABELLED = [
    {"prompt": "Tom has 3 pens.", "completion": GOOD, "label": True},
    {"prompt": "Ann has 4 pens.", "completion": GOOD, "label": False},
]
PAIR = {"prompt": "Tim has 3 pens.", "completion": None, "label": None, "chosen": GOOD, "rejected": BAD}
TRL = {"prompt": [user("Ann has 4 pens.")], "completion": [answer(GOOD)], "label": False}
WHOLE = {"completion": [user("Hi"), answer(GOOD)], "label": True}


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_labels_and_pairs_in_one_file(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, name: str) -> None:
    rows = [dict.fromkeys(PAIR) | row for row in (*LABELLED, PAIR)]
    table = LabelledChats(write(tmp_path / name, rows), tokenizer, max_length=64).table
    assert table["uid"].to_pylist() == ["x:0", "x:1", "x:2/0", "x:2/1"]
    assert table["desirable"].to_pylist() == [True, False, True, False]
    asked = [
        ("Tom has 3 pens.", GOOD),
        ("Ann has 4 pens.", GOOD),
        ("Tim has 3 pens.", GOOD),
        ("Tim has 3 pens.", BAD),
    ]
    for row, (prompt, response) in zip(table.to_pylist(), asked, strict=True):
        ids, mask = tokenize_chat(tokenizer, [user(prompt), answer(response)], only_last=True)
        assert (row["input_ids"], row["loss_mask"]) == (ids, mask)


def test_messages_whole_chats_and_renamed_columns(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [*LABELLED[:1], TRL, WHOLE, LABELLED[1], {"prompt": "Hi", "chosen": GOOD, "rejected": BAD}]
    table = LabelledChats(write(tmp_path / "x.jsonl", rows), tokenizer, max_length=64).table
    assert table["desirable"].to_pylist() == [True, False, True, False, True, False]
    texts = table["input_ids"].to_pylist()
    assert texts[2] == texts[4] == tokenize_chat(tokenizer, [user("Hi"), answer(GOOD)], only_last=True)[0]
    renamed = [
        {"q": {"a": row["prompt"]}, "text": row["completion"], "good": row["label"]} for row in LABELLED
    ]
    keys = LabelledKeys("q.a", "text", "good", "c", "r")
    found = LabelledChats(write(tmp_path / "y.jsonl", renamed), tokenizer, max_length=64, keys=keys).table
    assert found["input_ids"].to_pylist()[0] == texts[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Hi", "completion": GOOD}, "no 'label'"),
        ({"prompt": "Hi", "completion": GOOD, "label": 1}, r"'label' must be true \(desirable\) or false, found 1"),
        ({"prompt": "Hi", "completion": GOOD, "label": None}, r"'label' must be true \(desirable\) or false"),
        ({"completion": GOOD, "label": True}, "'completion' is a text, but the row has no prompt before it"),
        ({"prompt": "Hi", "chosen": GOOD}, "no 'rejected'"),
        ({"prompt": "Hi", "responses": [GOOD, BAD], "ranks": [1, 2]}, "no 'chosen'"),
        ({"prompt": "Hi " * 90, "completion": GOOD, "label": True}, "a chat has .* more than max_length 64"),
    ],
)  # fmt: skip
def test_wrong_rows_are_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "x.jsonl", [LABELLED[0], row])
    with pytest.raises(ValueError, match=rf"x\.jsonl row 1: .*{message}"):
        LabelledChats(path, tokenizer, max_length=64)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"prompt": "Hi", "responses": [GOOD, BAD], "ranks": [1, 2]},
            "no column 'completion', 'label' (columns: prompt, responses, ranks); set data.response_key "
            "(or data.chosen_key and data.rejected_key, for pairs); data.label_key",
        ),
        ({"prompt": "Hi", "chosen": GOOD}, "no column 'rejected' (columns: prompt, chosen); set data.rejected_key"),
    ],
)  # fmt: skip
def test_missing_columns_are_one_line(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: dict[str, Any], line: str
) -> None:
    path = write(tmp_path / "x.parquet", [row] * 9)
    with pytest.raises(ValueError) as error:
        LabelledChats(path, tokenizer, max_length=64)
    assert str(error.value) == f"{path}: {line}"


def test_long_rows_may_be_left_out(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [*LABELLED, {**PAIR, "rejected": BAD * 30}])
    found = LabelledChats(path, tokenizer, max_length=64, truncation="drop")
    assert found.num_dropped == 1 and len(found) == 2


def examples(prompts: list[int]) -> pa.Table:
    """One example per prompt: a prompt of two tokens, and a response of two tokens more than there are examples before it."""
    rows = [
        {
            "uid": str(row),
            "input_ids": [prompt, prompt] + [100 + row] * (row + 2),
            "loss_mask": [False] * 2 + [True] * (row + 2),
            "desirable": True,
        }
        for row, prompt in enumerate(prompts)
    ]
    return pa.Table.from_pylist(rows, schema=LABELLED_SCHEMA)


@pytest.mark.parametrize(
    "prompts", [[1, 2], [1, 2, 3, 4], [1, 1, 2, 2, 3, 3], [1, 2, 1, 3, 1, 2], [7, 8, 7, 8]]
)
def test_every_response_is_once_beside_another_prompt(prompts: list[int]) -> None:
    table = examples(prompts)
    used = Counter()
    for row, (ids, mask) in enumerate(
        zip(*(column.to_pylist() for column in mismatched_chats(mismatched(table, 99)).columns), strict=True)
    ):
        assert ids[:2] == [prompts[row]] * 2 and mask == [False] * 2 + [True] * (len(ids) - 2)
        (other,) = {token - 100 for token in ids[2:]}
        assert prompts[other] != prompts[row] and len(ids) == other + 4
        used[other] += 1
    assert used == Counter(range(len(prompts)))


def test_with_a_prompt_an_example_it_is_trls_rotation() -> None:
    """The same rotation as in TRL's KTOTrainer: (x_1, y_n), (x_2, y_1), ..., (x_n, y_(n-1))."""
    table = mismatched(examples([1, 2, 3]), 5)
    assert table["kl_input_ids"].to_pylist() == [
        [1, 1, 102, 102, 102],
        [2, 2, 100, 100],
        [3, 3, 101, 101, 101],
    ]


def test_a_prompt_of_most_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="3 of 5 examples have the same prompt: KTO compares with"):
        mismatched(examples([1, 2, 1, 3, 1]), 99)
