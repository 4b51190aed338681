"""A configuration that is valid, on files that exist."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import (
    EvalConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
    check_config,
    load_config,
    resolve,
    resolve_batches,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model (its config.json) and two data files."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("train-0.parquet", "train-1.parquet", "val.parquet"):
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.fixture
def train_yaml(folder: Path) -> Path:
    """PPO on 4 devices: actor TP2 x PP2, critic PP2 x DP2, engines of TP2."""
    path = folder / "train.yaml"
    path.write_text(f"""\
data:
  train_files: {folder}/train-*.parquet
  val_files: {folder}/val.parquet
  train_batch_size: 16
  max_prompt_length: 24
  max_response_length: 40
actor_rollout_ref:
  model: {{path: {folder}/model}}
  actor:
    ppo_mini_batch_size: 8
    ppo_max_token_len_per_gpu: 128
    ppo_epochs: 2
    optim: {{lr: 1e-6}}
    megatron: {{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}}
  rollout: {{n: 3, tensor_model_parallel_size: 2}}
critic:
  optim: {{lr: 1e-5}}
  megatron: {{pipeline_model_parallel_size: 2}}
trainer: {{n_gpus_per_node: 4}}
""")
    return path


@pytest.fixture
def train(train_yaml: Path) -> Callable[..., TrainConfig]:
    """The configuration of `train_yaml` with overrides."""
    return lambda *overrides: load_config(TrainConfig, train_yaml, overrides)


@pytest.fixture
def grpo(train: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    """The configuration of `train_yaml` with GRPO and with overrides."""
    return lambda *overrides: train("algorithm.adv_estimator=grpo", "critic=null", *overrides)


@pytest.fixture
def examples(folder: Path) -> list[str]:
    """The keys of a supervised run on 4 devices: TP2 x DP2."""
    return [
        f"data.train_files={folder}/train-0.parquet",
        "data.max_length=64",
        "data.train_batch_size=8",
        f"model.path={folder}/model",
        "optim.lr=1e-3",
        "max_token_len_per_gpu=128",
        "trainer.n_gpus_per_node=4",
        "megatron.tensor_model_parallel_size=2",
    ]


@pytest.fixture
def sft(examples: list[str]) -> Callable[..., SFTConfig]:
    return lambda *overrides: load_config(SFTConfig, None, [*examples, *overrides])


@pytest.fixture
def rm(examples: list[str]) -> Callable[..., RMConfig]:
    return lambda *overrides: load_config(RMConfig, None, [*examples, *overrides])


@pytest.fixture
def evaluation(folder: Path) -> Callable[..., EvalConfig]:
    required = [
        f"data.val_files={folder}/val.parquet",
        "data.max_prompt_length=24",
        "data.max_response_length=40",
        f"model.path={folder}/model",
        "trainer.n_gpus_per_node=2",
    ]
    return lambda *overrides: load_config(EvalConfig, None, [*required, *overrides])


def lines_of(function: Callable[[], Any]) -> list[str]:
    """The problems that a call's ValueError lists, without its first line."""
    with pytest.raises(ValueError) as caught:
        function()
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def problems(config: Any) -> list[str]:
    """The problems that `check_config` finds in a configuration."""
    return lines_of(lambda: check_config(config))


def batches_of(config: Any) -> Any:
    """The plan of an unresolved configuration."""
    return resolve_batches(resolve(config))
