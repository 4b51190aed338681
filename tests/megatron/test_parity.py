"""Loss, gradient norm and the loss after one optimizer step: Hugging Face's model and every layout agree."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.moe.moe_layer import MoELayer
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from examples.tiny_model import make_tiny_model
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import wrap_for_training
from megarl.megatron.optimizer import build_optimizer
from tests.megatron.parity import (
    OPTIM,
    VOCAB,
    Case,
    check,
    load_model,
    take_steps,
    train_gathering,
    train_hugging_face,
)
from tests.ranks import RankPool


def make_case(folder: Path, model_class: type = Qwen2ForCausalLM, **changes: Any) -> Case:
    torch.manual_seed(5)
    config = model_class.config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **changes,
    )
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return Case(str(folder), train_hugging_face(model))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(
        tmp_path_factory.mktemp("llama"), LlamaForCausalLM, tie_word_embeddings=False, rope_theta=100.0
    )


GRID = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2_given": (2, {"pp": 2, "chunk_layers": (1, 3)}),
    "pp2_vpp2_given": (2, {"pp": 2, "vpp": 2, "chunk_layers": (1, 2, 0, 1)}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2_sp_pp2": (4, {"tp": 2, "sp": True, "pp": 2}),
    "tp2_sp_cp2": (4, {"tp": 2, "sp": True, "cp": 2}),
    "pp2_vpp2_dp2": (4, {"pp": 2, "vpp": 2}),
    "tp2_sp_pp2_dp2": (8, {"tp": 2, "sp": True, "pp": 2}),
}


def test_the_test_clips_gradients(untied: Case) -> None:
    """Otherwise the grids below would not see a wrong norm in the next loss."""
    assert untied.expected[0][1] > OPTIM.clip_grad


@pytest.mark.parametrize("name", GRID)
def test_every_layout_trains_as_hugging_face_does(ranks: RankPool, untied: Case, name: str) -> None:
    world, sizes = GRID[name]
    check(ranks, untied, world, sizes)


@pytest.mark.parametrize("name", ["one", "tp2", "pp2", "pp2_vpp2", "tp2_sp_pp2"])
def test_tied_embeddings_stay_one_weight(ranks: RankPool, tied: Case, name: str) -> None:
    world, sizes = GRID[name]
    check(ranks, tied, world, sizes)


def test_llama_has_no_biases_and_its_own_rotary_base(ranks: RankPool, llama: Case) -> None:
    check(ranks, llama, 2, {"tp": 2, "sp": True})


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_activations_change_nothing(ranks: RankPool, untied: Case, granularity: str) -> None:
    check(ranks, untied, 2, {"tp": 2, "sp": True}, recompute_granularity=granularity)


@pytest.mark.parametrize("distributed", [True, False])
def test_overlapped_reduction_changes_nothing(ranks: RankPool, untied: Case, distributed: bool) -> None:
    check(ranks, untied, 2, {}, overlap=True, distributed=distributed)


GATHERED = {"replicas": (2, {}), "stages": (4, {"pp": 2}), "tensors": (4, {"tp": 2, "sp": True})}


@pytest.mark.parametrize("name", GATHERED)
def test_weights_that_are_gathered_late_are_the_same_bits(ranks: RankPool, untied: Case, name: str) -> None:
    world, sizes = GATHERED[name]
    for late, early in zip(
        ranks.run(train_gathering, untied, sizes, True, world=world),
        ranks.run(train_gathering, untied, sizes, False, world=world),
        strict=True,
    ):
        assert late.history == early.history
        assert late.weights == early.weights
        assert late.incomplete > 0 and early.incomplete == 0  # before the gathering


def _read_by_others(rank: int, world: int, folder: str, overlap: bool) -> dict[str, list[bool]]:
    """Two steps with a bucket for each weight. Returns: by name, whether a weight was gathered when a module other than its owner read it."""
    layout = ParallelLayout(world=world)
    options = {"overrides": {"moe_shared_expert_overlap": overlap}}
    _, chunks = load_model(rank, folder, layout, **options)
    (chunk,) = wrap_for_training(
        chunks, overlap_grad_reduce=True, overlap_param_gather=True, overrides={"bucket_size": 1}
    )
    found: dict[str, list[bool]] = {}

    def look(name: str, weight: torch.nn.Parameter, *unused: Any) -> None:
        group = chunk.param_to_bucket_group[weight]
        there = group.param_gather_dispatched and group.param_gather_handle is None
        found.setdefault(name, []).append(there)

    for module in chunk.modules():
        if isinstance(module, GatedDeltaNet):
            module.in_proj.register_forward_hook(partial(look, "conv1d", module.conv1d.weight))
        elif isinstance(module, MoELayer):
            # Shared experts begin after the router and before other experts.
            gate = module.shared_experts.gate_weight
            module.router.register_forward_hook(partial(look, "gate_weight", gate))
    take_steps([chunk], *build_optimizer([chunk], OPTIM), layout)
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_weights_that_other_modules_read_are_gathered_before(
    ranks: RankPool, tmp_path: Path, overlap: bool
) -> None:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 4, "vocab_size": VOCAB}
    make_tiny_model(tmp_path / "model", ["two words"], family="qwen3_next", **sizes)
    for found in ranks.run(_read_by_others, str(tmp_path / "model"), overlap, world=2):
        if not overlap:
            del found["gate_weight"]  # the module with the gate is called itself, after the router
        assert {name: all(there) for name, there in found.items()} == dict.fromkeys(found, True)
        assert "conv1d" in found


def test_plain_optimizer_changes_nothing(ranks: RankPool, untied: Case) -> None:
    check(ranks, untied, 4, {"tp": 2}, distributed=False)


def test_bfloat16_comes_close(ranks: RankPool, untied: Case) -> None:
    """8 bits of mantissa: 2**-8 per rounding; the loss is a mean over all tokens."""
    check(ranks, untied, 2, {"tp": 2, "sp": True}, tolerance=2e-2, dtype=torch.bfloat16)
