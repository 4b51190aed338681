"""Adapters train like PEFT's adapters of the Hugging Face model, in every layout."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters, wrap_for_training
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.lora.lora import attach_adapters, only_adapters, rank_pieces
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.parallel import coords
from megarl.megatron.step import forward_only, train_step
from megarl.models import read_model_config
from megarl.models.lora import adapted_weights, adapter_pieces, logical_adapters
from tests.megatron.parity import OPTIM, VOCAB, batches, load_model, loss_of, take_steps, train_hugging_face
from tests.megatron.test_parity import GRID, make_case
from tests.ranks import RankPool

LORA = LoraConfig(rank=4, alpha=16)
FEW = ("one", "tp2", "pp2_vpp2", "tp2_sp_cp2", "tp2_sp_pp2_dp2")  # layouts; all others are slow
# PEFT initialises B with zeros, for which Adam divides by gradients that are only rounding; here all values are random.
STEADY = replace(OPTIM, eps=1e-4, clip_grad=0.05)


@dataclass(frozen=True)
class Adapted:
    """A model's folder, its adapters, and PEFT's results for both."""

    folder: str
    adapters: dict[str, torch.Tensor]
    expected: list[tuple[float, float]]


def peft_model(folder: str, lora: LoraConfig) -> Any:
    """The Hugging Face model with PEFT's adapters, which have random values."""
    torch.manual_seed(11)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"),
        PeftConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules="all-linear"
            if lora.target_modules == ("all-linear",)
            else list(lora.target_modules),
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
        ),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    """The adapters under their names in files, without PEFT's prefix."""
    names = {
        name: name.removeprefix("base_model.model.").replace(".default", "")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    tensors = dict(model.named_parameters())
    return {
        ours.replace("vector.weight", "vector"): tensors[name].detach().clone()
        for name, ours in names.items()
    }


def adapt(folder: str, lora: LoraConfig) -> Adapted:
    model = peft_model(folder, lora)
    adapters = adapters_of(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.parameters = lambda: iter(trained)
    return Adapted(folder, adapters, train_hugging_face(model, STEADY))


def place_adapters(chunks: list, case: Adapted, lora: LoraConfig, layout: ParallelLayout) -> None:
    config = read_model_config(case.folder)
    weights = adapted_weights(config, lora)
    assert {name: tuple(tensor.shape) for name, tensor in case.adapters.items()} == logical_adapters(
        config, lora
    )
    local = local_parameters(chunks)
    for tensor, box, name, place in adapter_pieces(rank_pieces(config, layout, coords()), weights, lora):
        local[name][place.slices].copy_(case.adapters[tensor][box.slices])


def _train(
    rank: int, world: int, case: Adapted, lora: LoraConfig, sizes: dict[str, Any], options: dict[str, Any]
) -> list[tuple[float, float]]:
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, case.folder, layout, **options)
    attach_adapters(chunks, config, layout, lora)
    place_adapters(chunks, case, lora, layout)
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, STEADY)
    return take_steps(chunks, optimizer, scheduler, layout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_case(tmp_path_factory.mktemp("lora"), tie_word_embeddings=False).folder


@pytest.fixture(scope="module")
def plain(folder: str) -> Adapted:
    return adapt(folder, LORA)


def check(
    ranks: RankPool, case: Adapted, lora: LoraConfig, world: int, sizes: dict[str, Any], **options: Any
) -> None:
    for history in ranks.run(_train, case, lora, sizes, options, world=world):
        for found, expected in zip(history, case.expected, strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in GRID]
)
def test_every_layout_trains_as_peft_does(ranks: RankPool, plain: Adapted, name: str) -> None:
    check(ranks, plain, LORA, *GRID[name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("one", "tp2", "tp2_sp")] + ["tp2_sp_pp2_dp2"],
)
@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, alpha=16, use_dora=True),
        LoraConfig(rank=4, alpha=3, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
    ],
    ids=["dora", "rslora_qv_down"],
)
def test_kinds_of_adapters(ranks: RankPool, folder: str, lora: LoraConfig, name: str) -> None:
    check(ranks, adapt(folder, lora), lora, *GRID[name])


@pytest.mark.parametrize("name", [pytest.param("one", marks=pytest.mark.slow), "pp2", "tp2_sp"])
def test_recomputed_activations(ranks: RankPool, plain: Adapted, name: str) -> None:
    check(ranks, plain, LORA, *GRID[name], recompute_granularity="full")


def _on_and_off(rank: int, world: int, case: Adapted, sizes: dict[str, Any]) -> list[torch.Tensor] | None:
    """Log-probs of a model without adapters, with new ones, with adapters switched off, and on; from the last stage's ranks."""
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, case.folder, layout)
    head, found = lm_head(vocab_size=VOCAB, chunk_tokens=16), []

    def add() -> None:
        found.append(forward_only(chunks, batches(layout), head))

    add()
    attach_adapters(chunks, config, layout, LORA)
    add()  # new adapters change nothing
    place_adapters(chunks, case, LORA, layout)
    with only_adapters(chunks, None):
        add()
    add()
    return None if found[0][0] is None else [torch.cat(outputs) for outputs in found]


def test_adapters_that_are_off_change_nothing(ranks: RankPool, plain: Adapted) -> None:
    results = ranks.run(_on_and_off, plain, {"tp": 2, "sp": True, "pp": 2}, world=4)
    for result in filter(None, results):
        without, new, off, on = result
        assert torch.equal(new, without) and torch.equal(off, without)
        assert (on - without).abs().max() > 0.01


def _starts(rank: int, world: int, folder: str, lora: LoraConfig, sizes: dict[str, Any]) -> list:
    """This rank's part of each adapter before training."""
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, folder, layout)
    attach_adapters(chunks, config, layout, lora, seed=3)
    local, weights = local_parameters(chunks), adapted_weights(config, lora)
    pieces = adapter_pieces(rank_pieces(config, layout, coords()), weights, lora)
    return [(tensor, box, local[name][place.slices].clone()) for tensor, box, name, place in pieces]


def test_adapters_start_alike_in_every_layout(ranks: RankPool, folder: str) -> None:
    """A is uniform up to 1 / sqrt(in), as in PEFT; B is zero; magnitudes are the norms of the rows."""
    lora = LoraConfig(rank=4, use_dora=True)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    shapes = logical_adapters(read_model_config(folder), lora)
    whole = {name: tensor for name, _, tensor in ranks.run(_starts, folder, lora, {}, world=1)[0]
             if tensor.shape == shapes[name]}  # fmt: skip
    for rank in ranks.run(_starts, folder, lora, {"tp": 2, "sp": True, "pp": 2}, world=4):
        for name, box, tensor in rank:
            weight = state[name.split(".lora_")[0] + ".weight"]
            if "magnitude" in name:
                torch.testing.assert_close(tensor, weight[box.slices].norm(dim=1))
            elif "lora_B" in name:
                assert not tensor.any()
            elif name in whole:
                assert torch.equal(tensor, whole[name][box.slices])
    drawn = {name: tensor for name, tensor in whole.items() if "lora_A" in name}
    assert len(drawn) == 4 * 7
    for name, tensor in drawn.items():
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() < bound and abs(tensor.mean()) < bound / 5, name
    assert len({tensor.sum().item() for tensor in drawn.values()}) == len(drawn), (
        "each has numbers of its own"
    )


def _moved(rank: int, world: int, case: Adapted) -> tuple[float, float]:
    """Shares of A's larger elements that have changed, after one step and after 20."""
    layout = ParallelLayout(world=world)
    config, chunks = load_model(rank, case.folder, layout, dtype=torch.bfloat16)
    attach_adapters(chunks, config, layout, LORA)
    place_adapters(chunks, case, LORA, layout)
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, replace(OPTIM, lr=1e-4, eps=1e-8))
    local = {name: t for name, t in local_parameters(chunks).items() if name.endswith(".lora.a")}
    assert {tensor.dtype for tensor in local.values()} == {torch.bfloat16}
    before = torch.cat([tensor.flatten() for tensor in local.values()]).clone()
    head, shares = lm_head(vocab_size=VOCAB, chunk_tokens=16), []
    for step in range(20):
        train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
        if step in (0, 19):
            now = torch.cat([tensor.flatten() for tensor in local.values()])
            shares.append((now != before)[before.abs() > 0.125].float().mean().item())
    return tuple(shares)


def test_steps_too_small_for_bfloat16_add_up(ranks: RankPool, plain: Adapted) -> None:
    """Elements from 1/8 on are 2**-10 apart: a step of 1e-4 changes none of them, 20 such steps do."""
    ((once, often),) = ranks.run(_moved, plain, world=1)
    assert once == 0 and often > 0.5
