"""Texts that are learnt beside the rewards: data.ptx and actor.ptx_coef."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import TrainConfig, check_config
from tests.config.conftest import lines_of

PTX = "data.ptx={{files: {folder}/val.parquet, batch_size: 8, max_length: 64{more}}}"
COEF = "actor_rollout_ref.actor.ptx_coef=0.5"


def problems(config: TrainConfig) -> list[str]:
    return lines_of(lambda: check_config(config))


@pytest.mark.parametrize("more", ["", ", text_key: text, truncation: split", ", response_key: answer"])
def test_what_fits(train: Callable[..., TrainConfig], folder: Path, more: str) -> None:
    check_config(train(PTX.format(folder=folder, more=more), COEF))


def test_a_coefficient_needs_texts_and_texts_a_coefficient(
    train: Callable[..., TrainConfig], folder: Path
) -> None:
    assert problems(train(COEF)) == [
        "actor_rollout_ref.actor.ptx_coef=0.5 needs data.ptx: files, batch_size and max_length of texts"
    ]
    assert problems(train(PTX.format(folder=folder, more=""))) == [
        "data.ptx needs actor_rollout_ref.actor.ptx_coef over 0; nothing reads it otherwise"
    ]


def test_all_that_is_wrong_at_once(train: Callable[..., TrainConfig], folder: Path) -> None:
    found = problems(
        train(
            PTX.format(folder=folder, more=""),
            COEF,
            "data.ptx.files=no/such.parquet",
            "data.ptx.max_length=129",
            "data.ptx.batch_size=3",
            "data.ptx.truncation=split",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
        )
    )
    assert len(found) == 4
    text = "\n".join(found)
    assert "data.ptx.batch_size=3 cannot be shared out evenly over the 2 data parallel ranks" in text
    assert "ppo_max_token_len_per_gpu=128 is less than data.ptx.max_length=129" in text
    assert f"data.ptx.files: the file no/such.parquet does not exist (working directory {Path.cwd()})" in text
    assert "data.ptx.truncation=split needs data.ptx.text_key" in text


def test_plain_text_has_no_response(train: Callable[..., TrainConfig], folder: Path) -> None:
    (found,) = problems(train(PTX.format(folder=folder, more=", text_key: a, response_key: b"), COEF))
    assert found.startswith("data.ptx.text_key='a' and data.ptx.response_key='b': texts are plain or chats")
