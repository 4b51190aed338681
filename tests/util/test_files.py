"""Writes to a full disk: an error that names the target, and the target as it was before."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from megarl.checkpoints.hf.export import ExportPlan, write_hf_checkpoint
from megarl.checkpoints.hf.load import load_hf_weights
from megarl.config import TrainConfig, load_config, save_config
from megarl.data.files import write_parquet
from megarl.data.trajectories import PROMPT_SCHEMA
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, read_model_config
from megarl.trainer.run.logger import RunLogger, read_metrics
from megarl.util.files import naming, whole_file
from megarl.weight_sync.layouts import megatron_layout
from tests.disks import small_disk
from tests.weight_sync.shards import empty_shards, make_model

ALONE = ParallelLayout(world=1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_disk(tmp_path / "disk", 256) as folder:
        yield folder


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, ModelConfig, dict[str, torch.Tensor]]:
    """A model of 0.6 MB: its folder, its facts, its parameters on the one rank that holds it."""
    source = str(tmp_path / "model")
    make_model(source, vocab=2000)
    config = read_model_config(source)
    (parameters,) = empty_shards(megatron_layout(config, ALONE))
    load_hf_weights(source, config, ALONE, 0, parameters)
    return source, config, parameters


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def refuses(write: Callable[[], object], target: Path) -> None:
    with pytest.raises(OSError) as caught:
        write()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))


def test_a_file_is_there_whole_or_not_at_all(tmp_path) -> None:
    target = tmp_path / "new" / "file"
    with whole_file(target) as temporary:
        temporary.write_text("first")
        assert not target.exists()
    with pytest.raises(KeyError), whole_file(target) as temporary:
        temporary.write_text("half")
        raise KeyError("not of the file system")
    assert target.read_text() == "first" and os.listdir(target.parent) == ["file"]


def test_only_errors_of_the_file_system_are_renamed(tmp_path) -> None:
    with pytest.raises(TimeoutError, match="no answer within 5 s"), naming(tmp_path):
        raise TimeoutError("no answer within 5 s")
    with pytest.raises(PermissionError, match=f"Permission denied: '{tmp_path}'"), naming(tmp_path):
        raise OSError(errno.EACCES, "without a name")


def test_a_configuration(disk, tmp_path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart_ppo.yaml"
    config = load_config(TrainConfig, recipe)
    fill(disk)
    target = disk / "config.yaml"
    refuses(lambda: save_config(config, target), target)
    assert os.listdir(disk) == ["filler"]


def test_a_table(disk) -> None:
    target = disk / "step-000001.parquet"
    target.write_text("what was there before")
    rows = {name: [str(number) for number in range(2000)] for name in PROMPT_SCHEMA.names}
    noise = np.random.default_rng(1).integers(0, 2**31, (2000, 100), dtype=np.int64)
    table = pa.table({**rows, "prompt_ids": list(noise)})
    refuses(lambda: write_parquet(table, target), target)
    assert os.listdir(disk) == [target.name] and target.read_text() == "what was there before"


def test_metrics(disk) -> None:
    with RunLogger(disk, []) as logger:
        logger.log(1, {"loss": 1.0})
        fill(disk)
        refuses(lambda: logger.log(2, {"x" * 5000: 1.0}), disk / "metrics.jsonl")
        assert [row["step"] for row in read_metrics(disk)] == [1]
        (disk / "filler").unlink()
        logger.log(2, {"loss": 2.0})
    assert [row["loss"] for row in read_metrics(disk)] == [1.0, 2.0]


def test_an_exported_model(disk, model) -> None:
    source, config, parameters = model
    export = ExportPlan(config, ALONE, torch.float32)
    target = disk / "hf"
    target.mkdir()
    (target / "config.json").write_text("of an older export")
    refuses(
        lambda: write_hf_checkpoint(
            str(target), source, export, lambda shard: [export.pack(shard, 0, parameters)]
        ),
        target,
    )
    assert os.listdir(disk) == ["hf"] and os.listdir(target) == ["config.json"]
