"""docs/data.md: its code blocks, unchanged, and the configuration keys that it names."""

import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megarl.cli.main import main
from megarl.config import TrainConfig, check_config, resolve
from megarl.config.loading import load_config
from megarl.data.preferences import PreferenceChats, PreferenceDataset, PreferenceKeys
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.processes.scorer import make_scorer
from megarl.rewards.sample import Sample
from megarl.trainer.stages.inputs import load_train_inputs
from tests.fixtures.runs import command, environment, steps

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/data.md").read_text()
# Code blocks whose first line is a comment with their file name.
BLOCKS = dict(re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^\$ megarl (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with the page's files and the results of its scripts."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, text in BLOCKS.items():
            (folder / name).write_text(text)
        assert main(COMMANDS[0].split()) == 0
        for name in BLOCKS:
            if name.endswith(".py"):
                runpy.run_path(name)
        yield folder


def test_the_example_is_what_a_run_reads(folder: Path) -> None:
    config = load_config(TrainConfig, "my_grpo.yaml")
    check_config(config)
    with make_scorer(config) as scorer:
        inputs = load_train_inputs(resolve(config), scorer)
        assert (inputs.loader.num_rows, inputs.num_steps, inputs.num_filtered) == (800, 20, 0)
        (held_out,) = inputs.validation
        row = held_out.prompts.slice(0, 1).to_pylist()[0]
        prompt = inputs.tokenizer.decode(row["prompt_ids"])
        a, b = map(int, re.search(r"user\nWhat is (\d+) \+ (\d+)\?<\|im_end\|>", prompt).groups())
        assert row["ground_truth"] == str(a + b) and row["data_source"] == "unknown"
        answers = {"right": row["ground_truth"], "wrong": f"{a + b + 1}", "none": "so"}
        scorer.submit(
            [
                Sample(uid, row["data_source"], prompt, text, row["ground_truth"], "{}")
                for uid, text in answers.items()
            ]
        )
        scores = scorer.collect()
    assert {uid: score.score for uid, score in scores.items()} == {"right": 1.0, "wrong": 0.2, "none": 0.0}
    assert scores["right"].numbers == {"right": 1.0}


def test_rows_of_other_forms_are_read(folder: Path) -> None:
    tokenizer = load_tokenizer("outputs/demo/model", False)
    keys = [
        "data.prompt_key=prompt",
        "data.answer_key=reward_model.ground_truth",
        "custom_reward_function.path=null",
    ]
    config = load_config(
        TrainConfig,
        "my_grpo.yaml",
        [*keys, "data.train_files=verl_rows.parquet", "data.val_files=null", "trainer.test_freq=-1"],
    )
    with make_scorer(config) as scorer:
        assert load_train_inputs(resolve(config), scorer).loader.num_rows == 64
    assert len(SftDataset("sft.jsonl", tokenizer, max_length=64, response_key="response")) == 2
    preferences = PreferenceDataset("preferences.jsonl", tokenizer, max_length=64).table
    assert preferences["scores"].to_pylist() == [[1.0, 0.0], [-1.0, -3.0, -2.0]]
    chats = PreferenceChats(
        "preferences.jsonl", tokenizer, max_length=64, max_tokens=256, keys=PreferenceKeys()
    )
    assert len(chats) == 2


def test_questions_and_answers_as_gsm8k_has_them(folder: Path) -> None:
    """The keys of the page's command read files in GSM8K's format; GSM8K itself is not downloaded here."""
    (command,) = [command for command in COMMANDS if "hf://" in command]
    keys = [key for key in command.split()[2:] if not key.startswith("data.train_files")]
    rows = [{"question": f"{number} + 1?", "answer": f"One more.\n#### {number + 1}"} for number in range(64)]
    pq.write_table(pa.Table.from_pylist(rows), "gsm8k.parquet")
    files = ["data.train_files=gsm8k.parquet", "data.val_files=null", "trainer.test_freq=-1"]
    config = load_config(TrainConfig, "my_grpo.yaml", [*keys, *files, "custom_reward_function.path=null"])
    check_config(config)
    with make_scorer(config) as scorer:
        inputs = load_train_inputs(resolve(config), scorer)
        rows = [row for batch in inputs.loader for row in batch.to_pylist()]
        (truth,) = [row["ground_truth"] for row in rows if row["uid"] == "gsm8k:6"]
        scorer.submit([Sample(text, "unknown", "", text, truth, "{}") for text in ("#### 7", "#### 8")])
        assert {uid: score.score for uid, score in scorer.collect().items()} == {"#### 7": 1.0, "#### 8": 0.0}


@pytest.mark.parametrize("name", ["val_sets.yaml", "mixture.yaml"])
def test_sections_fit_into_a_recipe(folder: Path, name: str) -> None:
    section = yaml.safe_load(BLOCKS[name])
    if name == "mixture.yaml":
        section["data"]["train_files"] = None
        (folder / "sums").mkdir()
        for file in ("sums/x.parquet", "a.jsonl", "b.jsonl"):
            (folder / file).write_bytes(b"")
    (folder / f"my_{name}").write_text(json.dumps({"base": "my_grpo.yaml", **section}))
    check_config(load_config(TrainConfig, f"my_{name}"))


def test_the_keys_that_the_page_names_are_there() -> None:
    reference = (ROOT / "docs/config.md").read_text()
    named = set(
        re.findall(r"`((?:data|reward|reward_model|custom_reward_function)\.[a-z_0-9.]+)(?:=[^`]*)?`", PAGE)
    )
    named -= {"reward_model.ground_truth", "reward_model.style"}  # columns, not keys
    assert len(named) > 20
    assert [key for key in sorted(named) if f"`{key}`" not in reference] == []


def test_the_page_has_its_blocks() -> None:
    assert {
        "my_data.py",
        "my_reward.py",
        "my_grpo.yaml",
        "verl_rows.py",
        "sft_rows.py",
        "preference_rows.py",
    } <= set(BLOCKS)
    assert COMMANDS[:2] == ["make-task outputs/demo", "train my_grpo.yaml"]


@pytest.mark.slow
def test_the_example_runs(folder: Path) -> None:
    """The page's command, unchanged except for the number of steps."""
    overrides = ["trainer.total_training_steps=2", "trainer.test_freq=2"]
    result = subprocess.run(
        command(*COMMANDS[1].split(), *overrides),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = steps(folder / "outputs/my_grpo")
    assert [step["step"] for step in found] == [1, 2] and "val/score/unknown" in found[-1]
    assert 0 <= found[-1]["reward/right"] <= 1
