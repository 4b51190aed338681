"""`run.json` (the facts of a run and its outcome), and the lines that a run prints when it starts."""

import errno
import json
import os
import platform
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from examples.tiny_model import make_tiny_model
from megarl import __version__
from megarl.config import DPOConfig, SFTConfig, TrainConfig, load_config, resolve, resolve_batches
from megarl.models import read_model_config
from megarl.report.data import read_run
from megarl.report.summary import status_of
from megarl.trainer.run import facts as facts_module
from megarl.trainer.run.facts import (
    RunGpus,
    data_text,
    model_text,
    opening_lines,
    read_facts,
    record_gpus,
    recorded,
    supervised_facts,
)
from megarl.util.gpus import Gpu

KEYS = ("data.train_files=x.jsonl", "data.max_length=8", "data.train_batch_size=2", "model.path=x", "optim.lr=1e-3", "max_token_len_per_gpu=16")  # fmt: skip


@pytest.fixture(scope="module")
def planned():
    config = resolve(load_config(SFTConfig, None, KEYS))
    return config, resolve_batches(config)


def test_a_run_that_ends_says_so(tmp_path, planned):
    with recorded(*planned, tmp_path):
        facts = read_facts(tmp_path)
        assert facts.outcome is None and facts.is_running
        assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "batch_plan.json", "run.json"}
    facts = read_facts(tmp_path)
    assert facts.outcome == "finished" and facts.ended >= facts.started and not facts.is_running
    assert facts.process == os.getpid() and facts.host == socket.gethostname()
    assert facts.versions["megarl"] == __version__ and facts.versions["Python"] == platform.python_version()
    assert {"torch", "megatron-core", "ray", "transformers"} <= facts.versions.keys()


def test_the_gpus_of_a_run_are_in_its_facts(tmp_path, planned, monkeypatch):
    """GPUs of two kinds, one kind in two pools; a machine that does not answer; and a pool of process slots."""
    cards = {
        "first": (Gpu("NVIDIA H200", "570", 141 << 30, 0),) * 8,
        "second": (Gpu("NVIDIA H100 80GB HBM3", "570", 80 << 30, 0),) * 8,
        "silent": None,
    }
    monkeypatch.setattr(facts_module, "on_node", lambda node_id, seconds, function: cards[node_id])

    class Pool(SimpleNamespace):
        def __len__(self):
            return len(self.devices)

    def pool(node, number, use_gpu=True):
        return Pool(use_gpu=use_gpu, devices=[SimpleNamespace(node_id=node)] * number)

    pools = [
        pool("first", 8),
        pool("second", 2),
        pool("first", 4),
        pool("silent", 8),
        pool("unknown", 1, False),
    ]
    record_gpus(pools, tmp_path)  # for a check of machines outside of a run
    assert read_facts(tmp_path) is None
    with recorded(*planned, tmp_path):
        record_gpus(pools[3:], tmp_path)
        assert read_facts(tmp_path).gpus == ()
        record_gpus(pools, tmp_path)
        expected = (RunGpus("NVIDIA H200", 12, 141 << 30), RunGpus("NVIDIA H100 80GB HBM3", 2, 80 << 30))
        assert read_facts(tmp_path).gpus == expected
    facts = read_facts(tmp_path)
    assert facts.gpus == expected and facts.outcome == "finished"


@pytest.mark.parametrize(
    ("error", "outcome", "word"),
    [
        (RuntimeError("actor rank 1 died\nwith a log"), "RuntimeError: actor rank 1 died", "failed"),
        (SystemExit(75), "told to end", "stopped"),
        (KeyboardInterrupt(), "told to end", "stopped"),
    ],
)
def test_a_run_that_raises_says_why(tmp_path, planned, error, outcome, word):
    with pytest.raises(type(error)), recorded(*planned, tmp_path):
        raise error
    assert read_facts(tmp_path).outcome == outcome
    (tmp_path / "metrics.jsonl").touch()
    status = status_of(read_run(tmp_path))
    assert status.word == word and outcome in status.text


@pytest.mark.parametrize("error", [RuntimeError("actor rank 1 died"), SystemExit(75)])
def test_an_outcome_that_cannot_be_written_does_not_hide_why_the_run_ended(
    tmp_path, planned, monkeypatch, error
):
    """A lost process is to be restarted, and 75 asks for another start, also where the disk is full."""

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with pytest.raises(type(error)) as ended, recorded(*planned, tmp_path):
        monkeypatch.setattr(facts_module, "write_text", full)
        raise error
    assert ended.value is error
    assert read_facts(tmp_path).outcome is None


def test_the_status_of_a_run_without_an_outcome(tmp_path, planned):
    """The run is "running" while its process lives on this machine; if it was killed or is on another machine, there is no end known."""
    with recorded(*planned, tmp_path):
        (tmp_path / "metrics.jsonl").touch()
        assert status_of(read_run(tmp_path)).word == "running"
        facts = read_facts(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    younger = psutil.Process().create_time() - 60  # so that another process seems to have its pid now
    for changed in (
        replace(facts, process=gone.pid),
        replace(facts, host="elsewhere"),
        replace(facts, started=younger),
    ):
        (tmp_path / "run.json").write_text(json.dumps(vars(changed)))
        assert status_of(read_run(tmp_path)).word == "no end known", changed


REPOSITORY = Path(__file__).resolve().parents[3]


def lines(schema: type, recipe: str, *overrides: str, **facts: str) -> list[str]:
    config = resolve(load_config(schema, REPOSITORY / "recipes" / recipe, overrides))
    return opening_lines(config, resolve_batches(config), 40, facts, Path("runs/x"))


def test_the_demo_fits_on_a_screen_and_says_what_a_person_needs() -> None:
    found = lines(
        TrainConfig, "quickstart_ppo.yaml", data="train.parquet: 6,000 prompts", validation="test.parquet"
    )
    assert len(found) <= 20 and max(map(len, found)) <= 120
    text = "\n".join(found)
    for part in (
        "model       outputs/demo/sft/hf",
        "data        train.parquet: 6,000 prompts",
        "validation  test.parquet, after every 10 steps",
        "steps       40, each of 128 prompts x 1 response = 128 trajectories of at most 56 tokens",
        "adv_estimator=gae, lr 0.0003 (critic 0.001), KL to the reference in the reward x 0.001",
        "critic     4        tp1 x pp2 x cp1 x dp2  4 x 32 (16 a dp rank)   max 2048 tokens",
        "in runs/x: config.yaml (every key)",
        "megarl report runs/x, or: tensorboard --logdir runs/x/tensorboard",
        "trainer.save_freq=N",
    ):
        assert part in text, part


RECIPES = [
    path
    for path in sorted((REPOSITORY / "recipes").glob("*.yaml"))
    if re.search(r"^# Run: +megarl train", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("recipe", [path.name for path in RECIPES])
def test_every_recipe_that_trains_fits_on_a_screen(recipe: str) -> None:
    assert len(lines(TrainConfig, recipe)) <= 22


def test_what_changes_with_the_configuration() -> None:
    text = "\n".join(
        lines(
            TrainConfig, "quickstart_ppo.yaml", "algorithm.use_kl_in_reward=false", "trainer.save_freq=5",
            "trainer.logger=[console]", "custom_reward_function.path=reward.py",
        )
    )  # fmt: skip
    assert "no reference policy" in text and "compute_score of reward.py" in text
    assert "checkpoints/" in text and "no checkpoints" not in text and "tensorboard" not in text


def test_tuning_says_how_many_examples(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, ["1 + 1 = 2"], hidden_size=64, ffn_hidden_size=128, num_layers=2)
    model = read_model_config(str(tmp_path))
    assert model_text("m", model).startswith("m: qwen2, 2 layers of 64, 0.")
    config = load_config(SFTConfig, REPOSITORY / "recipes/quickstart_sft.yaml", ["data.val_files=v.parquet"])
    facts = supervised_facts(config, model, 4000, 10)
    assert facts["data"] == "outputs/demo/data/sft.parquet: 4,000 examples"
    assert facts["validation"] == "v.parquet: 10 examples"
    text = "\n".join(lines(SFTConfig, "quickstart_sft.yaml", **facts))
    assert "40, each of 64 examples of at most 64 tokens" in text and "rollouts/" not in text
    config = load_config(DPOConfig, REPOSITORY / "recipes/three_stages_dpo_cpu.yaml", [])
    assert supervised_facts(config, model, 7, None)["data"].endswith(": 7 rankings")
    config = load_config(DPOConfig, REPOSITORY / "recipes/three_stages_dpo_cpu.yaml", ["dpo.loss_type=kto"])
    assert supervised_facts(config, model, 7, None)["data"].endswith(": 7 examples")


def test_several_files_are_counted() -> None:
    assert (
        data_text(("a.parquet", "b.parquet", "c.parquet"), 1234, "prompts")
        == "a.parquet and 2 more: 1,234 prompts"
    )
    assert data_text(None, 5, "prompts") == "data.mixture: 5 prompts"
