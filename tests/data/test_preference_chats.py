"""Preferences as chats: what is learnt of each, and what is refused."""

import copy
import json
from pathlib import Path

import pytest

from megarl.data.preference_chats import PreferenceChats, chats_of
from megarl.data.preferences import PreferenceKeys
from megarl.examples.tiny_model import train_tokenizer

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
    chats = chats_of(found).to_pylist()
    assert len(chats) == 5 and chats_of(found, [1]).to_pylist() == chats[2:]
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
    """A template that sums up what is before the last two messages shows no earlier turn."""
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
