"""The ranks of actor, critic and reference with adapters, called as by the controller."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.kl import FULL_KL
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.checkpoints.hf.adapters import AdapterExport, write_peft_adapter
from megarl.checkpoints.hf.export import ExportPlan, assemble
from megarl.cluster.ranks import RankInfo
from megarl.config import LoraConfig, MegatronConfig, OptimConfig
from megarl.data.sft import trained_tokens
from megarl.data.trajectories import list_lengths
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import (
    MicroBatching,
    ModelSpec,
    PolicyUpdate,
    forward_plan,
    plan_rows,
    update_plan,
)
from megarl.trainer.workers.model import ModelWorker
from megarl.trainer.workers.scalar_heads import ActorCriticWorker, CriticWorker
from megarl.trainer.workers.supervised import SFTWorker
from tests.megatron.hf import make_table, save_model
from tests.ranks import RankPool
from tests.trainer.test_runs import losses_of
from tests.trainer.workers.test_actor import TEMPERATURE, hugging_face

LORA, CRITIC_LORA = LoraConfig(rank=4, alpha=8), LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))
CUT = MicroBatching(mini_batch_size=4, max_tokens=24, micro_batch_size=None)
MEAN = LossAggregation("token-mean")
HOW = PolicyUpdate(MEAN, PolicyLossOptions(0.2, 0.2, None), None, None, seed=0)

LAYOUTS = {
    "one": (1, {}),
    "tp2_dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2_vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "overlapped_dp2": (2, {"overlap_grad_reduce": True, "dtype": "bfloat16"}),
    "float16": (1, {"dtype": "float16"}),
    "float8_base_tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    """A model whose head is tied to its embedding."""
    folder = tmp_path_factory.mktemp("model")
    return str(folder), save_model(folder, tied=True)


def table() -> pa.Table:
    """Trajectories with all columns that updates read."""
    found = make_table()
    lengths = [len(mask) for mask in found["response_mask"].to_pylist()]
    generator = np.random.default_rng(1)
    for name in ("old_log_probs", "values", "returns"):
        column = [generator.normal(size=length).astype(np.float32) for length in lengths]
        found = found.append_column(name, pa.array(column))
    return found


def make(
    kind: str,
    rank: int,
    world: int,
    folder: str,
    megatron: dict[str, Any],
    base: dict[str, Any] | None = None,
) -> ModelWorker:
    """kind: "plain" (without adapters), "actor", "critic" or "both"; `base`: further `lora` keys of the role that owns the base model."""
    info = RankInfo(rank, world, rank, "localhost", 0, kind, "", (), "")
    lora = replace(LORA, **(base or {}))
    spec = ModelSpec(
        folder, "lm", MegatronConfig(**megatron), OptimConfig(lr=3e-2), num_updates=4, timeout=60.0, lora=lora
    )
    critic = replace(spec, head="value", optim=OptimConfig(lr=1e-2, clip_grad=0.1), lora=CRITIC_LORA)
    if kind == "critic":
        return CriticWorker(info, replace(critic, lora=replace(CRITIC_LORA, **(base or {}))))
    if kind == "both":
        return ActorCriticWorker(info, spec, TEMPERATURE, None, critic)
    return ActorWorker(info, replace(spec, lora=LoraConfig()) if kind == "plain" else spec, TEMPERATURE)


def _work(
    rank: int,
    world: int,
    kind: str,
    folder: str,
    megatron: dict[str, Any],
    base: dict[str, Any] | None = None,
    away: bool = False,
) -> dict[str, list]:
    """Two rounds of all calls of the kind; with `away` its memory leaves the device and returns before each call."""
    worker, rows = make(kind, rank, world, folder, megatron, base), table()
    shares = forward_plan(rows, worker.layout, CUT)
    plan, counts = update_plan(rows, worker.layout, CUT, 3)
    calls: dict[str, tuple] = {}
    if kind != "actor":
        calls |= {
            "compute_values": (rows, shares),
            "update_values": (rows, plan, counts, MEAN, 0.5),
        }
    if kind != "critic":
        calls |= {
            "compute_log_probs": (rows, shares, "old_log_probs"),
            "compute_ref_log_probs": (rows, shares, "ref_log_probs"),
            "update_policy": (rows, plan, counts, HOW),
        }
    found: dict[str, list] = {name: [] for name in calls}
    for _ in range(2):
        for name, arguments in calls.items():
            if away:
                worker.release_memory(list(worker.parts))
                assert not sum(part.device_bytes() for part in worker.parts.values())
                worker.resume_memory(list(worker.parts))
            found[name].append(getattr(worker, name)(*arguments))
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Both values are equal bit for bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_critic_on_the_actors_base_is_as_good_as_one_of_its_own(
    ranks: RankPool, model: tuple[str, PreTrainedModel], name: str
) -> None:
    world, megatron = LAYOUTS[name]
    base = {"base_dtype": "float8", "base_block": 8} if name.startswith("float8") else {}
    both = ranks.run(_work, "both", model[0], megatron, base, True, world=world)
    alone = [ranks.run(_work, kind, model[0], megatron, base, world=world) for kind in ("actor", "critic")]
    for found, actor, critic in zip(both, *alone, strict=True):
        assert_same(found, actor | critic)
        first, second = found["update_policy"], found["update_values"]
        for steps in (*first, *second):
            assert len(steps) == 2 and all(np.isfinite(step["grad_norm"]) for step in steps)
    values = [calls for found in both for calls in [found["compute_values"]] if calls[0] is not None]
    assert values and not np.array_equal(values[0][0][1]["values"][0], values[0][1][1]["values"][0])


def _plain(rank: int, world: int, folder: str) -> Any:
    worker, rows = make("plain", rank, world, folder, {}), table()
    return worker.compute_log_probs(rows, forward_plan(rows, worker.layout, CUT), "ref_log_probs")


def test_the_reference_is_the_model_without_adapters(
    ranks: RankPool, model: tuple[str, PreTrainedModel]
) -> None:
    """The reference is the same before and after updates, while the policy changes."""
    (expected,) = ranks.run(_plain, model[0], world=1)
    (found,) = ranks.run(_work, "actor", model[0], {}, world=1)
    for columns in found["compute_ref_log_probs"]:
        assert_same(columns, expected)
    before, after = (columns[1]["old_log_probs"][0] for columns in found["compute_log_probs"])
    np.testing.assert_array_equal(before, expected[1]["ref_log_probs"][0])
    assert np.abs(after - before).max() > 0.01


def _full_kl(rank: int, world: int, folder: str, megatron: dict[str, Any], lora: LoraConfig) -> tuple:
    """After a step: the column of exact KLs to the reference, the exported weights, and a step with the KL in the loss."""
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    spec = ModelSpec(folder, "lm", MegatronConfig(**megatron), OptimConfig(lr=3e-2), 4, 60.0, lora=lora)
    worker, rows = ActorWorker(info, spec, TEMPERATURE), table()
    whole = replace(CUT, mini_batch_size=rows.num_rows)
    plan, counts = update_plan(rows, worker.layout, whole, 3)
    worker.update_policy(rows, plan, counts, HOW)
    columns = worker.compute_full_kl(rows, forward_plan(rows, worker.layout, CUT), "old_log_probs")
    worker.export_plan(False)
    bundle = worker.pack_export(0)
    options = PolicyLossOptions(0.2, 0.2, None, kl_coef=0.5, kl_kind=FULL_KL)
    (step,) = worker.update_policy(rows, plan, counts, replace(HOW, options=options))
    return columns, bundle, step


@pytest.mark.parametrize(
    ("world", "megatron", "lora"),
    [
        (1, {}, LORA),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, replace(LORA, use_dora=True)),
        (2, {"pipeline_model_parallel_size": 2}, replace(LORA, target_modules=("v_proj", "up_proj"))),
    ],
    ids=["one", "tp2_dora", "pp2"],
)
def test_the_exact_kl_to_the_reference_and_the_merged_weights(
    ranks: RankPool,
    model: tuple[str, PreTrainedModel],
    world: int,
    megatron: dict[str, Any],
    lora: LoraConfig,
) -> None:
    """The export is the policy as a Hugging Face model, against which the KL is checked; the reference needs no second copy."""
    folder, reference = model
    results = ranks.run(_full_kl, folder, megatron, lora, world=world)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    layout = ParallelLayout.from_config(MegatronConfig(**megatron), world)
    export = ExportPlan(read_model_config(folder), layout, torch.float32)
    merged.load_state_dict(assemble(export, 0, [bundle for _, bundle, _ in results]), strict=False)
    merged.tie_weights()
    expected = hugging_face([("", merged), ("", reference)], table())
    found = next(columns for columns, _, _ in results if columns is not None)
    for name, (values, offsets) in found[1].items():
        for place, row in enumerate(found[0]):
            wanted = expected[name][row].numpy()
            np.testing.assert_allclose(
                values[offsets[place] : offsets[place + 1]], wanted, rtol=1e-4, atol=2e-5
            )
    mean = float(torch.cat(expected["full_kl"]).sum()) / sum(map(sum, table()["response_mask"].to_pylist()))
    assert mean > 1e-3
    for _, _, step in results:
        assert step["actor/kl_loss"] == pytest.approx(mean, rel=1e-3)


def _bytes(rank: int, world: int, kind: str, folder: str, megatron: dict[str, Any]) -> dict[str, int]:
    worker, rows = make(kind, rank, world, folder, megatron), table()
    plan, counts = update_plan(rows, worker.layout, CUT, 3)
    worker.update_policy(rows, plan, counts, HOW)
    if kind == "both":
        worker.update_values(rows, plan, counts, MEAN, 0.5)
    (found,) = worker.memory()
    return found


PADDING = 4 * 4096  # bytes: buffers are padded so that ranks have equal shares


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_only_adapters_have_gradients_and_optimizer_states(
    ranks: RankPool, model: tuple[str, PreTrainedModel], dtype: str, size: int
) -> None:
    """Optimizer states are Adam's two and, for bfloat16 weights, float32 copies. Reference and critic have no model of their own."""
    folder, reference = model
    every = sum(parameter.numel() for parameter in reference.parameters())
    heads, groups, hidden, ffn, head_size = 4, 2, 32, 48, 8
    shapes = {
        "q_proj": (heads * head_size, hidden),
        "k_proj": (groups * head_size, hidden),
        "v_proj": (groups * head_size, hidden),
        "o_proj": (hidden, heads * head_size),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    actors = 4 * LORA.rank * sum(map(sum, shapes.values()))
    critics = 4 * CRITIC_LORA.rank * sum(sum(shapes[name]) for name in CRITIC_LORA.target_modules) + hidden
    (found,) = ranks.run(_bytes, "both", folder, {"dtype": dtype}, world=1)
    states = 8 + (4 if size == 2 else 0)
    expected = {
        "weights": size * every,
        "adapters": size * actors,
        "gradients": 4 * actors,
        "optimizer": states * actors,
        "critic_adapters": size * critics,
        "critic_gradients": 4 * critics,
        "critic_optimizer": states * critics,
        "on_host": 0,
        "sync_buffers": 0,
    }
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert 0 <= found[name] - wanted <= PADDING, (name, found[name], wanted)
    (plain,) = ranks.run(_bytes, "plain", folder, {"dtype": dtype}, world=1)
    assert plain["optimizer"] >= states * every and plain["gradients"] >= 4 * every


def test_a_value_head_that_the_folder_has_is_begun_with(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("scored")
    save_model(folder, tied=True)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"score.weight": torch.full((1, 32), 0.25)}, folder / "model.safetensors", {"format": "pt"}
    )
    both, alone = (ranks.run(_work, kind, str(folder), {}, world=1)[0] for kind in ("both", "critic"))
    assert_same(both["compute_values"], alone["compute_values"])


def _fine_tune(
    rank: int, world: int, folder: str, lora: LoraConfig, megatron: dict[str, Any], examples: pa.Table
) -> tuple[list[float], Any]:
    """The losses of three steps, and the adapters exported after them."""
    info = RankInfo(rank, world, rank, "localhost", 0, "sft", "", (), "")
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, clip_grad=1.0)
    worker = SFTWorker(info, ModelSpec(folder, "lm", MegatronConfig(**megatron), optim, 3, 60.0, lora=lora))
    plan = plan_rows(list_lengths(examples, "input_ids"), worker.layout, 64)
    losses = [worker.train_examples(examples, plan, trained_tokens(examples))["train/loss"] for _ in range(3)]
    worker.adapter_plan()
    return losses, worker.pack_adapters()


def test_fine_tuning_follows_peft_from_its_own_adapter(
    ranks: RankPool, model: tuple[str, PreTrainedModel], tmp_path: Path
) -> None:
    """The losses of three steps and the adapters after them equal PEFT's."""
    folder, _ = model
    torch.manual_seed(7)
    begun = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        PeftConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    with torch.no_grad():
        for name, parameter in begun.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    begun.save_pretrained(tmp_path / "begun")
    generator = np.random.default_rng(2)
    ids = [generator.integers(0, 300, length).tolist() for length in (9, 30, 4, 17, 12, 25, 8, 21)]
    examples = pa.table(
        {"input_ids": ids, "loss_mask": [[index > 2 for index, _ in enumerate(row)] for row in ids]}
    )
    expected = losses_of(begun, itertools.repeat(examples))
    world, megatron = LAYOUTS["tp2_dp2"]
    lora = replace(LORA, adapter_path=str(tmp_path / "begun"))
    results = ranks.run(_fine_tune, folder, lora, megatron, examples, world=world)
    assert results[0][0] == pytest.approx(expected, rel=1e-5)
    layout = ParallelLayout.from_config(MegatronConfig(**megatron), world)
    export = AdapterExport(read_model_config(folder), layout, lora, torch.float32)
    write_peft_adapter(str(tmp_path / "ended"), folder, export, [bundle for _, bundle in results])
    ended = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "ended")
    tensors = dict(ended.named_parameters())
    for name, parameter in begun.named_parameters():
        torch.testing.assert_close(tensors[name].data, parameter.data, rtol=1e-4, atol=1e-4)
