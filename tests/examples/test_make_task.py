"""`megarl make-task`: the files that the three stages begin with, and models of any family."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megarl.cli.main import main
from megarl.data.preferences import PreferenceChats, PreferenceKeys
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.models import read_model_config

SMALL = [
    "--num-texts=9", "--num-sft=8", "--num-rankings=7", "--num-train=6", "--num-test=5", "--hidden-size=32",
    "--num-layers=1",
]  # fmt: skip


def test_the_recipes_can_read_what_is_made(tmp_path: Path) -> None:
    """Within the lengths that recipes/three_stages_*.yaml allow."""
    assert main(["make-task", str(tmp_path), "--preferences", *SMALL]) == 0
    assert read_model_config(str(tmp_path / "model")).num_layers == 1
    tokenizer, data = load_tokenizer(str(tmp_path / "model")), tmp_path / "data"
    read = {"tokenizer": tokenizer, "max_length": 48}
    assert len(SftDataset(data / "texts.parquet", **read, text_key="text")) == 9
    demonstrations = SftDataset(data / "sft.parquet", **read, response_key="extra_info.answer")
    assert len(demonstrations) == 8
    assert max(map(sum, demonstrations.table["loss_mask"].to_pylist())) <= 8  # data.max_response_length
    for name, count in (("rankings", 7), ("pairs_test", 5)):
        keys = PreferenceKeys()
        assert len(PreferenceChats(data / f"{name}.parquet", **read, max_tokens=4096, keys=keys)) == count
    assert [pq.read_metadata(data / f"{name}.parquet").num_rows for name in ("train", "test")] == [6, 5]


def test_two_tasks_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["make-task", str(tmp_path), "--preferences", "--calculator", *SMALL]) == 2
    assert "--calculator and --preferences are two tasks" in capsys.readouterr().err


def test_the_model_may_be_of_any_family(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-task", str(tmp_path), "--family", "glm_moe_dsa", *SMALL]) == 0
    assert read_model_config(str(tmp_path / "model")).family == "glm_moe_dsa"
    assert main(["make-task", str(tmp_path), "--family", "qwen9", *SMALL]) == 2
    assert "family must be one of qwen2, llama" in capsys.readouterr().err
