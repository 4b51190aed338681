"""Real runs that learn from preferences or texts: DPO, KTO, and PPO with an auxiliary language-model loss."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.cli.main import main
from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.trainer.test_dapo import ONE_DEVICE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small preference task."""
    folder = tmp_path_factory.mktemp("preferences")
    sizes = {"texts": 40, "sft": 40, "rankings": 40, "train": 40, "test": 9}
    options = [f"--num-{name}={number}" for name, number in sizes.items()]
    assert main(["make-task", str(folder), "--preferences", *options, "--hidden-size=64"]) == 0
    return folder


def run_dpo(preferences: Path, run: Path, *keys: str) -> list[dict[str, float]]:
    """Six steps on data that is a single batch."""
    succeed(
        "dpo", "recipes/three_stages_dpo_cpu.yaml", f"data.train_files={preferences}/data/rankings.parquet",
        f"data.val_files={preferences}/data/pairs_test.parquet", f"model.path={preferences}/model",
        "data.train_batch_size=40", "data.max_length=60", "optim.lr=1e-3", "optim.lr_warmup_steps=0",
        "trainer.total_training_steps=6", "trainer.test_freq=3", f"trainer.default_local_dir={run}", *keys,
    )  # fmt: skip
    return list(steps(run))


def test_dpo_begins_at_the_reference_and_learns(preferences: Path, tmp_path: Path) -> None:
    """While the policy equals the reference, every implicit reward is 0 and the loss is log 2; on a single batch of data it then falls."""
    run = tmp_path / "run"
    found = run_dpo(preferences, run)
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[0]["train/margin"] == pytest.approx(0.0, abs=1e-5)
    assert all(after["train/loss"] < before["train/loss"] for before, after in pairwise(found))
    assert [step["step"] for step in found if "val/loss" in step] == [3, 6]
    last = found[-1]
    assert last["val/margin"] == pytest.approx(last["val/reward_better"] - last["val/reward_worse"], abs=1e-5)
    AutoModelForCausalLM.from_pretrained(run / "hf")


@pytest.mark.parametrize("keys", [("simpo", "dpo.beta=2", "dpo.gamma=0.5"), ("orpo", "dpo.beta=0.3")])
def test_losses_without_a_reference_learn(preferences: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    kind, *more = keys
    found = run_dpo(preferences, tmp_path / "run", f"dpo.loss_type={kind}", "dpo.label_smoothing=0", *more)
    assert all(after["train/loss"] < before["train/loss"] for before, after in pairwise(found))
    assert found[-1]["val/margin"] > found[2]["val/margin"]


def test_kto_begins_at_the_reference_and_learns_from_labels(preferences: Path, tmp_path: Path) -> None:
    """Each pair gives a desirable and an undesirable example. The loss begins at half of the mean of their weights."""
    files = ("data.train_files={0}/data/pairs_test.parquet", "data.train_batch_size=18", "dpo.loss_type=kto")
    keys = [
        key.format(preferences)
        for key in (*files, "dpo.label_smoothing=0", "dpo.beta=0.3", "dpo.desirable_weight=1.2")
    ]
    found = run_dpo(preferences, tmp_path / "run", *keys)
    assert found[0]["train/loss"] == pytest.approx((1.2 + 1.0) / 4, abs=1e-5)
    assert found[0]["train/kl_baseline"] == pytest.approx(0.0, abs=1e-4)
    assert all(after["train/loss"] < before["train/loss"] for before, after in pairwise(found))
    assert found[-1]["train/margin"] > 0 and found[-1]["val/loss"] < found[2]["val/loss"]


def test_an_auxiliary_language_model_loss(preferences: Path, task: Path, tmp_path: Path) -> None:
    """In each step the loss on texts equals transformers' on the same batches of the loader."""
    run, files = tmp_path / "run", preferences / "data/texts.parquet"
    succeed(
        "train", *PPO, *on(task, run), *ONE_DEVICE, "critic.megatron.pipeline_model_parallel_size=1",
        "trainer.total_training_steps=2",
        f"data.ptx={{files: {files}, text_key: text, batch_size: 4, max_length: 60}}",
        "actor_rollout_ref.actor.ptx_coef=2", "actor_rollout_ref.actor.optim.lr=1e-9",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )  # fmt: skip
    found = steps(run)
    texts = SftDataset(files, load_tokenizer(str(task / "model")), max_length=60, text_key="text")
    loader = TableLoader(texts, 4, shuffle=True, seed=1)
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    losses = []
    for batch in (batch for batch, _ in zip(loader, range(4), strict=False)):
        for ids in batch["input_ids"].to_pylist():
            tokens = torch.tensor([ids])
            with torch.no_grad():
                logits = model(tokens).logits[0, :-1].log_softmax(-1)
            losses.append(-logits.gather(1, tokens[0, 1:, None])[:, 0])
    # A step has two mini-batches with four texts each.
    for step, part in zip(found, (losses[:8], losses[8:]), strict=True):
        assert step["actor/ptx_loss"] == pytest.approx(torch.cat(part).mean().item(), rel=1e-4)
        assert step["actor/updates"] == 2
