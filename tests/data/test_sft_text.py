"""Plain text for supervised fine-tuning: all tokens are learnt, long documents are split."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.sft import SFT_SCHEMA, SftDataset, split_tokens
from megarl.data.tokenizer import load_tokenizer
from tests.data.shared import shared_data

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


def test_a_start_token_is_the_tokenizers(tmp_path):
    """A Llama tokenizer puts <s> before a text, as in pretraining; an end that is there is not put twice."""
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
    ("text", "message"), [("", "non-empty string"), (3, "non-empty string"), ("a", "the text has 1 token")]
)
def test_wrong_texts_are_named(tokenizer, tmp_path, text, message):
    path = write(tmp_path / "x.jsonl", [TEXT, text])
    with pytest.raises(ValueError, match=rf"x\.jsonl row 1: .*{message}"):
        SftDataset(path, tokenizer, max_length=200, text_key="doc.text", append_eos=False)
