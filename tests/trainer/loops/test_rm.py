"""Training a reward model on real ranks, compared with a plain loop that applies the formula to transformers' model."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.checkpoints.hf.export import ExportPlan, write_hf_checkpoint
from megarl.cluster.ranks import RankInfo
from megarl.config import MegatronConfig, OptimConfig
from megarl.data.preferences import PREFERENCE_SCHEMA, ranking_lengths
from megarl.data.tokenizer import load_tokenizer
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.trainer.loops.rm import check_class, classifier_fields
from megarl.trainer.stages.reward_model import (
    AS_IT_IS,
    FILE,
    RewardNormalization,
    measure_normalization,
    read_normalization,
)
from megarl.trainer.workers.dispatch import ModelSpec, plan_rows
from megarl.trainer.workers.supervised import RMWorker
from tests.ranks import RankPool

SIZES = {"hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 4, "max_position_embeddings": 64}
# eps: Adam's first steps divide by the gradient's size; where that is almost 0, a small eps would amplify rounding errors.
OPTIM = OptimConfig(lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-4, clip_grad=0.5)
NUM_STEPS = 3
LAYOUTS = {
    "one": ("llama", 1, {}),
    "tp2-sp": ("qwen2", 2, {"tp": 2}),
    "pp2": ("llama", 2, {"pp": 2}),
    "cp2": ("qwen3", 2, {"cp": 2}),
    "dp2": ("llama", 2, {}),
    "tp2-cp2": ("llama", 4, {"tp": 2, "cp": 2}),
    "pp2-vpp2-dp2": ("qwen2", 4, {"pp": 2, "vpp": 2}),
    "tp2-ep2": ("qwen3_moe", 2, {"tp": 2, "ep": 2}),
    "pp2-ep2": ("deepseek_v3", 4, {"pp": 2, "ep": 2}),
}
SLOW = ("pp2", "tp2-cp2", "pp2-vpp2-dp2", "tp2-ep2", "pp2-ep2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with a scalar head, and one ("policy") with a language model's head."""
    out, texts = tmp_path_factory.mktemp("models"), arithmetic_texts(300)
    made = {
        family: make_tiny_model(out / family, texts, family=family, head="score", **SIZES)
        for family in ("llama", "qwen2", "qwen3")
    }
    for family in ("qwen3_moe", "deepseek_v3"):
        made[family] = make_tiny_model(out / family, texts, family=family, **SIZES)
        state = load_file(made[family] / "model.safetensors")
        del state["lm_head.weight"]
        state["score.weight"] = torch.randn(
            1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0)
        )
        save_file(state, made[family] / "model.safetensors", metadata={"format": "pt"})
    return {**made, "policy": make_tiny_model(out / "policy", texts, tie_word_embeddings=True, **SIZES)}


def rankings() -> pa.Table:
    """Eight rankings of 2 to 4 texts, some with ties, some with a margin."""
    generator = np.random.default_rng(3)
    scores = [[1, 0], [0, 2, 1], [4, 3, 2, 1], [1, 0], [5, 5, 1], [2, 7, 7, 0], [0, 1], [3, 9]]
    rows = [
        {
            "uid": f"p:{row}",
            "input_ids": [generator.integers(3, 500, generator.integers(2, 14)).tolist() for _ in own],
            "scores": [float(value) for value in own],
            "margin": 0.5 * (row % 3 == 0),
        }
        for row, own in enumerate(scores)
    ]
    return pa.Table.from_pylist(rows, schema=PREFERENCE_SCHEMA)


def _train(
    rank: int, world: int, folder: str, sizes: dict, table: pa.Table, plan: list, head_init: str, steps: int
) -> Any:
    megatron = MegatronConfig(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        sequence_parallel=sizes.get("tp", 1) > 1,
        dtype="float32",
    )
    info = RankInfo(rank, world, rank, "localhost", 0, "rm", "", (), "")
    worker = RMWorker(info, ModelSpec(folder, "value", megatron, OPTIM, steps, 60.0), head_init)
    found = [worker.train_rankings(table, plan) for _ in range(steps)]
    export = worker.export_plan(mtp=False)
    assert len(export.shards) == 1
    return found, worker.pack_export(0)


def run_on_ranks(
    ranks: RankPool, folder: Path, world: int, sizes: dict, table: pa.Table, **options: Any
) -> list:
    layout = ParallelLayout(world=world, sp=sizes.get("tp", 1) > 1, **sizes)
    plan = plan_rows(ranking_lengths(table), layout, 48)
    assert len(plan[0]) > 1, "several micro-batches"
    head_init, steps = options.get("head_init", "normal"), options.get("steps", NUM_STEPS)
    return ranks.run(_train, str(folder), sizes, table, plan, head_init, steps, world=world)


def write(
    target: Path,
    source: Path,
    world: int,
    sizes: dict,
    results: list,
    normalization: RewardNormalization = AS_IT_IS,
) -> None:
    """Export what `_train` returned on all ranks."""
    config, layout = (
        read_model_config(str(source)),
        ParallelLayout(world=world, sp=sizes.get("tp", 1) > 1, **sizes),
    )
    write_hf_checkpoint(
        str(target),
        str(source),
        ExportPlan(config, layout, torch.float32, head="value"),
        lambda shard: [bundle for _, bundle in results],
        classifier_fields(config, load_tokenizer(source)),
        {FILE: normalization.to_json()},
    )


def plain_steps(model: torch.nn.Module, table: pa.Table) -> list[dict[str, float]]:
    """InstructGPT's eq. 1 with Llama 2's margin, text by text and pair by pair."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0
    )
    steps = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses, differences = [], []
        for row in table.to_pylist():
            rewards = [model(torch.tensor([ids])).logits[0, 0] for ids in row["input_ids"]]
            ranked = sorted(zip(row["scores"], rewards, strict=True), key=lambda pair: -pair[0])
            own = [
                good - bad
                for (score, good), (other, bad) in itertools.combinations(ranked, 2)
                if score > other
            ]
            losses.append(sum(-torch.sigmoid(d - row["margin"]).log() for d in own) / len(own))
            differences += own
        loss = sum(losses) / len(losses)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        optimizer.step()
        steps.append(
            {
                "train/loss": loss.item(),
                "train/grad_norm": norm.item(),
                "train/accuracy": sum(d.item() > 0 for d in differences) / len(differences),
                "train/margin": sum(d.item() for d in differences) / len(differences),
            }
        )
    return steps


@pytest.mark.parametrize(
    "name", [name if name not in SLOW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_training_is_that_of_transformers_in_every_layout(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Three steps; then the exported model, loaded from its files, gives the same scores as the model from the plain loop."""
    (family, world, sizes), table = LAYOUTS[name], rankings()
    model = AutoModelForSequenceClassification.from_pretrained(
        folders[family], dtype=torch.float32, num_labels=1
    ).eval()
    expected = plain_steps(model, table)
    assert expected[0]["train/loss"] > expected[-1]["train/loss"] > 0
    results = run_on_ranks(ranks, folders[family], world, sizes, table)
    for found, _ in results:
        for step, wanted in zip(found, expected, strict=True):
            assert {name: step[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)

    write(tmp_path / "rm", folders[family], world, sizes, results, RewardNormalization(0.5, 2.0, 3))
    tokenizer = load_tokenizer(folders[family])
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
    assert type(exported) is type(model) and exported.config.num_labels == 1
    weights = exported.state_dict()
    for tensor, wanted in model.state_dict().items():
        torch.testing.assert_close(weights[tensor], wanted, rtol=0, atol=2e-6, msg=tensor)
    for row in table.to_pylist():
        # All texts of a row form one batch: transformers finds each text's last token by the padding token in config.json.
        batch = tokenizer.pad({"input_ids": row["input_ids"]}, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            scores = exported(**batch).logits[:, 0]
            wanted = torch.cat([model(torch.tensor([ids])).logits[0] for ids in row["input_ids"]])
        # Mixtures of experts amplify differences in the last digit of the weights, by the processor.
        within = {"rtol": 1e-5, "atol": 1e-5} if "ep" not in sizes else {"rtol": 1e-4, "atol": 5e-5}
        torch.testing.assert_close(scores, wanted, **within)
    assert read_normalization(tmp_path / "rm") == RewardNormalization(0.5, 2.0, 3)


def test_a_policy_becomes_a_reward_model(ranks: RankPool, folders: dict[str, Path], tmp_path: Path) -> None:
    """A new head begins at zero: the loss is log 2, half of the pairs are right, and the model's other weights have no
    gradient yet. The exported model is a classification model without the language model's head."""
    table = rankings().slice(1, 4)
    table = table.set_column(3, "margin", pa.array([0.0] * 4, pa.float32()))
    results = run_on_ranks(ranks, folders["policy"], 2, {"tp": 2}, table, head_init="zeros", steps=1)
    (step,), _ = results[0]
    assert step["train/loss"] == pytest.approx(np.log(2)) and step["train/accuracy"] == 0.5
    assert step["train/grad_norm"] > 0 and step["train/margin"] == 0
    write(tmp_path / "rm", folders["policy"], 2, {"tp": 2}, results)
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").state_dict()
    before = AutoModelForSequenceClassification.from_pretrained(folders["policy"], num_labels=1).state_dict()
    assert exported.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], exported[name])}
    assert moved == {"score.weight"}


def test_padding_that_is_the_end_token_is_not_named(folders: dict[str, Path]) -> None:
    """Otherwise transformers would take the end token for padding, and the token before it for the last of the text."""
    config, tokenizer = read_model_config(str(folders["policy"])), load_tokenizer(folders["policy"])
    fields = classifier_fields(config, tokenizer)
    assert fields["architectures"] == ["Qwen2ForSequenceClassification"]
    assert fields["pad_token_id"] == tokenizer.pad_token_id is not None
    tokenizer.pad_token = tokenizer.eos_token
    assert classifier_fields(config, tokenizer)["pad_token_id"] is None


def test_a_reward_model_without_a_class_in_transformers_is_refused(tmp_path: Path) -> None:
    """Of the Qwen3.5 models, only dense language models have such a class."""
    for number, (family, vision) in enumerate((("qwen3_5", True), ("qwen3_5_moe", False))):
        folder = make_tiny_model(tmp_path / str(number), ["some text"], family=family, vision=vision)
        with pytest.raises(
            ValueError, match=r"transformers 5\.12\.1 has such a class for qwen3_5_text models alone"
        ):
            check_class(str(folder), read_model_config(str(folder)))
    folder = make_tiny_model(tmp_path / "text", ["some text"], family="qwen3_5")
    config = read_model_config(str(folder))
    check_class(str(folder), config)
    (name,) = classifier_fields(config, load_tokenizer(folder))["architectures"]
    assert name == "Qwen3_5TextForSequenceClassification" and hasattr(transformers, name)


def test_reference_answers_have_mean_zero() -> None:
    outputs = np.array([1.0, 2.0, 6.0], np.float32)
    mean = measure_normalization(outputs, "mean")
    assert mean == RewardNormalization(3.0, 1.0, 3)
    assert mean.apply(outputs).tolist() == [-2.0, -1.0, 3.0]
    both = measure_normalization(outputs, "mean_std").apply(outputs)
    assert both.mean() == pytest.approx(0, abs=1e-6) and both.std() == pytest.approx(1)
    assert both.dtype == np.float32
    with pytest.raises(ValueError, match="the 2 reference answers all get the reward 4"):
        measure_normalization(np.full(2, 4.0, np.float32), "mean_std")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a JSON object with the numbers mean and std"),
        ("[]", "must be a JSON object"),
        ('{"mean": 1.0}', "KeyError: 'std'"),
        ('{"mean": 1.0, "std": 0.0}', "std=0.0 positive"),
        ('{"mean": NaN, "std": 1.0}', "mean=nan must be finite"),
    ],
)
def test_a_wrong_normalization_is_named(tmp_path: Path, content: str, message: str) -> None:
    assert read_normalization(tmp_path) == AS_IT_IS
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError, match=f"{FILE}.*{message}"):
        read_normalization(tmp_path)


def test_a_normalization_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(RewardNormalization(0.1, 3.0, 7).to_json())
    assert read_normalization(str(tmp_path)) == RewardNormalization(0.1, 3.0, 7)
    assert json.loads((tmp_path / FILE).read_text()) == {"mean": 0.1, "std": 3.0, "num_answers": 7}
