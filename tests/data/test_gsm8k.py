import importlib.util
import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.gsm8k import convert_gsm8k, final_answer
from tests.data.shared import shared_data

ROWS = [
    {"question": "How many?", "answer": "First 1,200.\nThen 3.\n#### 1,203"},
    {"question": "How far?", "answer": "#### -4"},
]


def write_json_lines(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_row_by_hand(tmp_path):
    write_json_lines(tmp_path / "source" / "train.jsonl")
    write_json_lines(tmp_path / "source" / "test.jsonl", ROWS[:1])
    written = convert_gsm8k(str(tmp_path / "source"), tmp_path / "out")
    assert written == {split: tmp_path / "out" / f"{split}.parquet" for split in ("train", "test")}
    train = pq.read_table(written["train"]).to_pylist()
    assert train[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'How many? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1203"},
        "extra_info": {"split": "train", "index": 0, **ROWS[0]},
    }
    assert train[1]["reward_model"]["ground_truth"] == "-4"
    assert train[1]["extra_info"]["index"] == 1
    assert pq.read_table(written["test"]).to_pylist()[0]["extra_info"]["split"] == "test"
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_parquet_sources_give_the_same(tmp_path):
    """A folder as the Hub has it (main/train-00000-of-00001.parquet), and a single file."""
    write_json_lines(tmp_path / "json" / "train.jsonl")
    write_json_lines(tmp_path / "json" / "test.jsonl")
    expected = convert_gsm8k(str(tmp_path / "json"), tmp_path / "expected")
    (tmp_path / "hub" / "main").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(
            pa.Table.from_pylist(ROWS), tmp_path / "hub" / "main" / f"{split}-00000-of-00001.parquet"
        )
    from_folder = convert_gsm8k(str(tmp_path / "hub"), tmp_path / "folder")
    for split in ("train", "test"):
        assert pq.read_table(from_folder[split]).equals(pq.read_table(expected[split]))
    single = convert_gsm8k(
        str(tmp_path / "hub" / "main" / "test-00000-of-00001.parquet"), tmp_path / "single"
    )
    assert list(single) == ["test"]
    assert pq.read_table(single["test"]).equals(pq.read_table(expected["test"]))


def test_real_gsm8k(tmp_path):
    source = shared_data("gsm8k")
    written = convert_gsm8k(str(source), tmp_path)
    for split, size in (("train", 7473), ("test", 1319)):
        rows = pq.read_table(written[split]).to_pylist()
        assert len(rows) == size
        with (source / f"{split}.jsonl").open() as file:
            for row, original in zip(rows, map(json.loads, file), strict=True):
                assert row["extra_info"]["answer"] == original["answer"]
                # the pattern by which graders of GSM8K find the final answer
                match = re.search(r"#### (\-?[0-9\.\,]+)", original["answer"])
                assert row["reward_model"]["ground_truth"] == match.group(1).replace(",", "")


def test_rows_without_final_answer_are_named_and_nothing_is_written(tmp_path):
    rows = [ROWS[0], {"question": "Why?", "answer": "Because."}, {"question": "", "answer": "#### 1"}]
    write_json_lines(tmp_path / "source" / "train.jsonl", rows)
    write_json_lines(tmp_path / "source" / "test.jsonl")
    with pytest.raises(ValueError) as error:
        convert_gsm8k(str(tmp_path / "source"), tmp_path / "out")
    assert "train.jsonl row 1: the answer has no '####'" in str(error.value)
    assert "train.jsonl row 2: 'question' must be a non-empty string" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answer", ["no mark", "nothing after ####", "#### ,"])
def test_no_final_answer(answer):
    with pytest.raises(ValueError, match="no '####' with a final answer"):
        final_answer(answer)


def test_wrong_sources(tmp_path):
    write_json_lines(tmp_path / "half" / "train.jsonl")
    with pytest.raises(
        ValueError, match=r"half holds no test\*\.parquet or test\*\.jsonl, only: train\.jsonl"
    ):
        convert_gsm8k(str(tmp_path / "half"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"gone is neither a file, a folder nor a Hub id"):
        convert_gsm8k(str(tmp_path / "gone"), tmp_path / "out")
    with pytest.raises(ValueError, match="name of a single file must begin with train or test"):
        convert_gsm8k(str(write_json_lines(tmp_path / "data.jsonl")), tmp_path / "out")
    write_json_lines(tmp_path / "empty" / "train.jsonl")
    write_json_lines(tmp_path / "empty" / "test.jsonl", [])
    with pytest.raises(ValueError, match=r"the test split of .*empty has no rows"):
        convert_gsm8k(str(tmp_path / "empty"), tmp_path / "out")


def test_hub_id_without_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"openai/gsm8k is no local file .*pip install datasets"):
        convert_gsm8k("openai/gsm8k", tmp_path)


def run_command(*arguments):
    command = [sys.executable, "-m", "megarl.data.gsm8k", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_the_command_says_what_it_wrote(tmp_path):
    done = run_command("--source", str(shared_data("gsm8k")), "--out", str(tmp_path / "gsm8k"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"train: 7473 rows in {tmp_path}/gsm8k/train.parquet",
        f"test: 1319 rows in {tmp_path}/gsm8k/test.parquet",
    ]


def test_errors_of_the_command_are_one_line(tmp_path):
    done = run_command("--source", str(tmp_path / "gone"), "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {tmp_path}/gone is neither a file, a folder nor a Hub id such as openai/gsm8k\n"
    )
