"""The prompts of a run by the configuration's section `data`: from one data set or several, loaded at once or streamed."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import train_tokenizer
from megarl.config import DataConfig, EvalConfig, TrainConfig
from megarl.config.loading import load_config
from megarl.config.schema.data import MixtureConfig, SamplerConfig
from megarl.trainer.stages.prompt_data import may_lack, read_prompts, training_prompts
from tests.data.shared import prompt_row

MODEL = "reward_model"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(arithmetic_texts(100), 400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 rows of falling difficulty in two files; the prompt of the last row is long."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = [
        prompt_row(
            "Tom has 3 pens. " * (9 if row == 19 else 1), truth=str(row), extra_info={"difficulty": -row}
        )
        for row in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:12]), folder / "a.parquet", row_group_size=3)
    pq.write_table(pa.Table.from_pylist(rows[12:]), folder / "b.parquet")
    return folder


def config(folder: Path, **keys) -> DataConfig:
    files = None if "mixture" in keys else f"{folder}/*.parquet"
    base = DataConfig(train_files=files, train_batch_size=4, max_prompt_length=32, max_response_length=8)
    return replace(base, **keys)


def truths(data: DataConfig, tokenizer, num_epochs=1) -> list[int]:
    loader, _ = training_prompts(data, tokenizer, lambda table: None)
    return [
        int(truth)
        for _ in range(num_epochs)
        for batch in loader
        for truth in batch["ground_truth"].to_pylist()
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_files(folder, tokenizer, streaming):
    data = config(folder, streaming=streaming, max_prompt_length=100)
    first, second = truths(data, tokenizer), truths(data, tokenizer, 2)[20:]
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert truths(replace(data, seed=2), tokenizer) != first
    assert truths(replace(data, shuffle=False), tokenizer) == list(range(20))
    assert truths(replace(data, sampler=SamplerConfig(name="sequential")), tokenizer) == list(range(20))
    assert truths(replace(data, train_max_samples=13, shuffle=False), tokenizer) == list(range(12))
    loader, num_filtered = training_prompts(replace(data, gen_batch_size=5), tokenizer, lambda table: None)
    assert [batch.num_rows for batch in loader] == [5] * 4 and num_filtered == 0 and loader.num_rows == 20


def test_long_prompts(folder, tokenizer):
    data = config(folder, filter_overlong_prompts=True)
    loader, num_filtered = training_prompts(data, tokenizer, lambda table: None)
    assert (loader.num_rows, num_filtered, len(loader)) == (19, 1, 4)
    loader, num_filtered = training_prompts(replace(data, streaming=True), tokenizer, lambda table: None)
    assert (loader.num_rows, num_filtered, len(loader)) == (20, 0, 5)  # the rows are not read yet
    assert [len(list(loader)) for _ in range(2)] == [4, 4]
    long = replace(data, filter_overlong_prompts=False)
    with pytest.raises(ValueError, match=r"b\.parquet row 7: the prompt has \d+ tokens"):
        training_prompts(long, tokenizer, lambda table: None)
    loader, _ = training_prompts(replace(long, streaming=True, shuffle=False), tokenizer, lambda table: None)
    with pytest.raises(ValueError, match=r"b\.parquet row 7: the prompt has \d+ tokens"):
        list(loader)


def test_curriculum(folder, tokenizer):
    sampler = SamplerConfig(name="curriculum", key="extra_info.difficulty")
    data = config(folder, max_prompt_length=100, sampler=sampler)
    assert truths(data, tokenizer) == list(reversed(range(20)))


@pytest.mark.parametrize("streaming", [False, True])
def test_mixture(folder, tokenizer, streaming):
    """Every four prompts have three of set a and one of set b, as their uids show."""
    mixture = {
        "a": MixtureConfig(files=f"{folder}/a.parquet", weight=0.75),
        "b": MixtureConfig(files=(f"{folder}/b.parquet",), weight=0.25),
    }
    data = config(folder, mixture=mixture, streaming=streaming, max_prompt_length=100)
    loader, _ = training_prompts(data, tokenizer, lambda table: None)
    assert (loader.num_rows, len(loader)) == (20, 5)
    batches = [[uid.split(":")[:2] for uid in batch["uid"].to_pylist()] for batch in loader]
    assert [batch.count(["a", "a"]) for batch in batches] == [3] * 5
    assert [batch.count(["b", "b"]) for batch in batches] == [1] * 5


@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_that_a_run_cannot_use(folder, tokenizer, streaming):
    def refuse(table):
        raise ValueError("no rule")

    with pytest.raises(ValueError, match="no rule"):
        list(
            training_prompts(config(folder, streaming=streaming, max_prompt_length=100), tokenizer, refuse)[0]
        )


@pytest.mark.parametrize("streaming", [False, True])
def test_files_without_the_columns(folder, tokenizer, streaming, tmp_path):
    """Missing columns are refused before a row is read, also with data.streaming; keys can name other columns."""
    rows = [{"question": "Tom has 3 pens.", "answer": str(row)} for row in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    data = config(tmp_path, streaming=streaming)
    with pytest.raises(
        ValueError, match=r"^\S+/x\.parquet: no column 'prompt', .*\(columns: question, answer\)[^\n]*$"
    ):
        training_prompts(data, tokenizer, lambda table: None)
    mixture = {name: MixtureConfig(files=data.train_files, weight=1) for name in "ab"}
    with pytest.raises(ValueError, match=r"^\S+/x\.parquet: no column 'prompt', [^\n]*$"):
        training_prompts(
            config(tmp_path, mixture=mixture, streaming=streaming), tokenizer, lambda table: None
        )
    named = replace(data, prompt_key="question", answer_key="answer")
    loader, _ = training_prompts(named, tokenizer, lambda table: None, ["data_source"])
    found = [row for batch in loader for row in batch.to_pylist()]
    assert sorted(int(row["ground_truth"]) for row in found) == list(range(20))
    assert {row["data_source"] for row in found} == {"unknown"}


@pytest.mark.parametrize(
    "keys, columns",
    [
        ([], set()),
        (["custom_reward_function.path=r.py"], {"data_source"}),
        (["reward.rule=gsm8k"], {"data_source"}),
        (["reward.gsm8k_rule_reward=true"], {"data_source"}),
        ([f"{MODEL}.enable=true"], {"data_source", "reward_model.ground_truth"}),
        ([f"{MODEL}.enable=true", f"{MODEL}.rule_weight=0.5"], set()),
        ([f"{MODEL}.enable=true", f"{MODEL}.rule_weight=0.5", "reward.rule=gsm8k"], {"data_source"}),
        ([f"{MODEL}.enable=true", "actor_rollout_ref.rollout.multi_turn.enable=true"], {"data_source"}),
    ],
)
def test_columns_that_no_reward_reads(keys, columns):
    needed = [
        "data.train_files=x",
        "data.train_batch_size=4",
        "data.max_prompt_length=9",
        "data.max_response_length=9",
    ]
    needed += ["actor_rollout_ref.model.path=m", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    needed += ["actor_rollout_ref.actor.optim.lr=1e-6"]
    assert may_lack(load_config(TrainConfig, None, [*needed, *keys])) == columns


def test_columns_that_an_evaluation_does_not_read():
    needed = ["model.path=m", "data.val_files=x", "data.max_prompt_length=9", "data.max_response_length=9"]
    assert may_lack(load_config(EvalConfig, None, needed)) == set()
    assert may_lack(load_config(EvalConfig, None, [*needed, "custom_reward_function.path=r.py"])) == {
        "data_source"
    }


def test_held_out_prompts(folder, tokenizer):
    data = config(folder, truncation="left", return_raw_input_ids=True)
    read = read_prompts(data, f"{folder}/b.parquet", tokenizer, max_samples=3)
    assert read.table["uid"].to_pylist() == ["b:0", "b:1", "b:2"] and "messages" in read.table.column_names
    assert (
        max(map(len, read_prompts(data, f"{folder}/b.parquet", tokenizer).table["prompt_ids"].to_pylist()))
        == 32
    )
