"""Fine-tuning and reward models: what is refused, and what the batch arithmetic says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import (
    RMConfig,
    SFTConfig,
    batch_summary,
    batch_table,
    check_config,
    load_config,
    resolve,
    resolve_batches,
)
from megarl.config.notes import notes
from tests.config.conftest import lines_of


@pytest.fixture
def rm(folder: Path) -> Callable[..., RMConfig]:
    required = [
        f"data.train_files={folder}/train-0.parquet",
        "data.max_length=64",
        "data.train_batch_size=8",
        f"model.path={folder}/model",
        "optim.lr=1e-3",
        "max_token_len_per_gpu=128",
        "trainer.n_gpus_per_node=4",
        "megatron.tensor_model_parallel_size=2",
    ]
    return lambda *overrides: load_config(RMConfig, None, [*required, *overrides])


def test_what_is_right_is_accepted(
    rm: Callable[..., RMConfig], sft: Callable[..., SFTConfig], folder: Path
) -> None:
    for config in (rm, sft):
        check_config(
            config(
                f"data.val_files={folder}/val.parquet",
                "trainer.test_freq=2",
                "trainer.save_best=true",
                "trainer.early_stop_patience=3",
            )
        )
    check_config(sft("data.text_key=text", "data.truncation=split"))
    files = f"data.normalize_files={folder}/val.parquet"
    check_config(rm(files, "data.normalize_response_key=answer", "data.normalize=mean_std"))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.save_best=true"],
            "trainer.save_best=true needs trainer.test_freq: the best model is that of the lowest val/loss",
        ),
        (
            ["trainer.early_stop_patience=2"],
            "trainer.early_stop_patience=2 counts validations: it needs trainer.test_freq",
        ),
        (["trainer.save_freq=0"], "trainer.save_freq=0: it must be -1 (never) or at least 1"),
        (
            ["data.truncation=split"],
            "data.truncation=split is for plain text (data.text_key): a chat is not cut into several",
        ),
        (
            ["data.text_key=text", "data.response_key=answer"],
            "data.response_key is of chats, but data.text_key='text' reads plain text; give one of them",
        ),
    ],
)
def test_fine_tuning(sft: Callable[..., SFTConfig], overrides: list[str], problem: str) -> None:
    assert lines_of(lambda: check_config(sft(*overrides))) == [problem]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.normalize_response_key=answer"],
            "data.normalize_response_key='answer' is a column of data.normalize_files, which is null",
        ),
        (["data.normalize_max_samples=0"], "data.normalize_max_samples=0: it must be -1 (all) or at least 1"),
        (
            ["model.mtp=keep"],
            "model.mtp=keep: a reward model predicts no tokens, so it has no such layers; leave it out",
        ),
        (["model.head_init=ones"], "model.head_init='ones' is unknown; megarl has zeros, normal"),
        (
            ["data.train_batch_size=7"],
            "data.train_batch_size=7 cannot be shared out evenly over the 2 data parallel ranks of megatron; a "
            "multiple of 2 is needed",
        ),
    ],
)
def test_reward_models(rm: Callable[..., RMConfig], overrides: list[str], problem: str) -> None:
    assert lines_of(lambda: check_config(rm(*overrides))) == [problem]


def test_reference_answers_without_a_use(rm: Callable[..., RMConfig], folder: Path) -> None:
    config = rm("data.normalize=none", f"data.normalize_files={folder}/val.parquet")
    assert lines_of(lambda: check_config(config)) == [
        "data.normalize_files: data.normalize=none uses no reference answers; leave one of them out"
    ]


def test_the_arithmetic_counts_rankings(rm: Callable[..., RMConfig]) -> None:
    config = rm()
    assert resolve(config).trainer.default_local_dir == "outputs/megarl/rm"
    plan = resolve_batches(config)
    assert (plan.model.dp, plan.update.sequences_per_mini_batch) == (2, 8)
    assert batch_table(plan)[1][3:] == ("1 x 8 (4 a dp rank)", "max 128 tokens")
    assert batch_summary(plan) == "8 rankings, each text of at most 64 tokens"


@pytest.mark.parametrize(
    ("command", "override", "note"),
    [
        ("sft", "trainer.early_stop_min_delta=1", "has no effect without trainer.early_stop_patience"),
        ("sft", "data.append_eos=false", "has no effect without data.text_key"),
        ("sft", "data.prompt_key=q", "has no effect without data.response_key"),
        ("rm", "data.normalize_max_samples=5", None),
    ],
)
def test_keys_in_vain_are_told(
    rm: Callable[..., RMConfig],
    sft: Callable[..., SFTConfig],
    command: str,
    override: str,
    note: str | None,
) -> None:
    config = {"rm": rm, "sft": sft}[command](override)
    key = override.partition("=")[0]
    assert notes(config, [key]) == ([] if note is None else [f"{key} {note}"])


def test_keys_that_another_key_leaves_without_effect(
    rm: Callable[..., RMConfig], sft: Callable[..., SFTConfig]
) -> None:
    assert notes(rm("data.normalize=none"), ["data.normalize_max_samples"]) == [
        "data.normalize_max_samples has no effect without data.normalize"
    ]
    (note,) = notes(sft("data.text_key=text"), ["data.text_key", "data.prompt_key"])
    assert note.startswith("data.prompt_key has no effect with data.text_key")
