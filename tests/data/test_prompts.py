import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.prompts import PromptDataset, PromptLoader, truncate
from megarl.data.tokenizer import render_prompt
from megarl.data.trajectories import PROMPT_SCHEMA


def make_row(text="Tom has 3 pens.", truth="7", **changes):
    row = {
        "data_source": "megarl/arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 4, "answer": "#### 7"},
    }
    return {**row, **changes}


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_prompt_table(tokenizer, tmp_path):
    path = write(tmp_path / "train.parquet", [make_row(), make_row("Ann has 2 cups and buys 5.", "2")])
    dataset = PromptDataset(path, tokenizer, max_prompt_length=64)
    assert dataset.table.schema == PROMPT_SCHEMA
    assert len(dataset) == 2
    first, second = dataset.table.to_pylist()
    assert [first["uid"], second["uid"]] == ["train:0", "train:1"]
    assert first["prompt_ids"] == render_prompt(tokenizer, make_row()["prompt"])
    assert tokenizer.decode(second["prompt_ids"]) == (
        "<|im_start|>user\nAnn has 2 cups and buys 5.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first["data_source"], second["ground_truth"]) == ("megarl/arithmetic", "2")
    assert json.loads(first["extra_info"]) == {"split": "train", "index": 4, "answer": "#### 7"}


def test_files_of_one_name_have_uids_of_their_own(tokenizer, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        write(tmp_path / folder / "train.parquet", [make_row()])
    dataset = PromptDataset(f"{tmp_path}/*/train.parquet", tokenizer, max_prompt_length=64)
    assert dataset.table["uid"].to_pylist() == ["train:0", "train#2:0"]


def test_other_columns_than_ours(tokenizer, tmp_path):
    """No extra_info, a ground truth that is a list, and messages under another key."""
    row = make_row(reward_model={"ground_truth": ["7", "seven"]}, chat={"turns": make_row()["prompt"]})
    del row["extra_info"], row["prompt"]
    path = write(tmp_path / "x.parquet", [row])
    table = PromptDataset(path, tokenizer, max_prompt_length=64, prompt_key="chat.turns").table
    assert table["ground_truth"].to_pylist() == ['["7", "seven"]']
    assert table["extra_info"].to_pylist() == ["{}"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": []}, r"'prompt' must be a non-empty list of \{role, content\}, found \[\]"),
        ({"prompt": None}, "'prompt' must be a non-empty list .* found None"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt' message 0 needs the string 'content'"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "ground_truth' is null"),
        ({"reward_model": None}, "no 'reward_model.ground_truth': reward_model holds NoneType"),
        ({"data_source": None}, "'data_source' must be a string, found None"),
    ],
)
def test_wrong_rows_are_named_by_file_and_row(tokenizer, tmp_path, changes, message):
    path = write(tmp_path / "train.parquet", [make_row(), make_row(**changes), make_row()])
    with pytest.raises(ValueError, match=rf"train\.parquet row 1: .*{message}"):
        PromptDataset(path, tokenizer, max_prompt_length=64)


def test_missing_column_is_named(tokenizer, tmp_path):
    path = write(tmp_path / "train.parquet", [make_row()])
    with pytest.raises(ValueError, match=r"train\.parquet row 0: no 'question': the row holds \["):
        PromptDataset(path, tokenizer, max_prompt_length=64, prompt_key="question")


def test_missing_file_is_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"gone\.parquet does not exist"):
        PromptDataset(tmp_path / "gone.parquet", tokenizer, max_prompt_length=64)


def test_file_without_rows(tokenizer, tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([make_row()]).slice(1), path)
    with pytest.raises(ValueError, match=r"no prompts in .*train\.parquet: the files have no rows"):
        PromptDataset(path, tokenizer, max_prompt_length=64)


def test_overlong_prompts(tokenizer, tmp_path):
    rows = [make_row(), make_row("Tom has 3 pens. " * 9), make_row()]
    path = write(tmp_path / "train.parquet", rows)
    long = render_prompt(tokenizer, rows[1]["prompt"])
    with pytest.raises(ValueError, match=rf"row 1: the prompt has {len(long)} tokens, more than .* 20"):
        PromptDataset(path, tokenizer, max_prompt_length=20)
    filtered = PromptDataset(path, tokenizer, max_prompt_length=20, filter_overlong_prompts=True)
    assert filtered.table["uid"].to_pylist() == ["train:0", "train:2"]
    assert filtered.num_filtered == 1
    left = PromptDataset(path, tokenizer, max_prompt_length=20, truncation="left")
    assert left.table["prompt_ids"].to_pylist()[1] == long[-20:]
    with pytest.raises(ValueError, match="all 3 rows are longer than max_prompt_length 2"):
        PromptDataset(path, tokenizer, max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(ValueError, match="truncation must be one of error, left, right, middle, found 'top'"):
        PromptDataset(path, tokenizer, max_prompt_length=20, truncation="top")


@pytest.mark.parametrize(
    "truncation, kept", [("left", [6, 7, 8, 9, 10]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 8, 9, 10])]
)
def test_truncate(truncation, kept):
    assert truncate([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 5, truncation) == kept
    assert truncate([1, 2], 5, truncation) == [1, 2]


def test_prompt_loader_yields_prompt_tables(tokenizer, tmp_path):
    path = write(tmp_path / "train.parquet", [make_row(truth=str(row)) for row in range(5)])
    dataset = PromptDataset(path, tokenizer, max_prompt_length=64)
    batches = list(PromptLoader(dataset, 2, shuffle=True, seed=0))
    assert [batch.num_rows for batch in batches] == [2, 2]
    assert all(batch.schema == PROMPT_SCHEMA for batch in batches)
    for batch in batches:
        assert [f"train:{truth}" for truth in batch["ground_truth"].to_pylist()] == batch["uid"].to_pylist()
