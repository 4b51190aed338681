"""Weights with merged adapters have the same results as the adapters, and are made one at a time."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import LoraConfig
from megarl.gpu_test.slices import weight_by_torch
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.lora.lora import attach_adapters, only_adapters
from megarl.megatron.lora.merged import MergedParameters
from megarl.megatron.parallel import coords, init_parallel
from megarl.megatron.step import forward_only
from tests.megatron.parity import batches
from tests.megatron.test_build import CONFIG, EXPERTS
from tests.ranks import RankPool

VOCAB = 500  # the vocabulary of `batches`
DORA = LoraConfig(rank=4, alpha=16, use_dora=True)


def _move(chunks: list) -> None:
    """Give B random values, equal on replicas."""
    for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
        if parameter.requires_grad and ".lora.b" in name:
            place = (coords().ep, coords().etp) if ".experts." in name else (0, coords().tp)
            own = place if parameter.tensor_model_parallel else place[:1]
            generator = torch.Generator().manual_seed(hash((len(name), *own)) % 1000)
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def _compare(rank: int, world: int, sizes: dict[str, Any], lora: LoraConfig, moe: bool) -> tuple:
    """Merged tensors' names, log-probs with adapters, and with merged weights. Names and other tensors must be the model's."""
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    config = replace(CONFIG, vocab_size=VOCAB, moe=EXPERTS if moe else None)
    chunks = build_model(config, layout, dtype=torch.float32)
    names = list(local_parameters(chunks))
    attach_adapters(chunks, config, layout, replace(lora, rank=2), adapter="lora_value")
    attach_adapters(chunks, config, layout, lora)
    _move(chunks)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    with only_adapters(chunks, "lora"):
        expected = forward_only(chunks, batches(layout), head)
    merged, local = MergedParameters(chunks), local_parameters(chunks)
    assert list(merged) == names and len(merged) == len(names)
    order = names if rank % 2 else names[::-1]  # ranks may read weights in any order
    made = {name: merged[name] for name in order}
    # The inputs from which kernels compute the weights give the same bits.
    computed = merged.computed()
    assert all(torch.equal(weight_by_torch(one), made[name]) for name, one in computed.items())
    moved = [name for name in names if made[name].data_ptr() != local[name].data_ptr()]
    assert set(moved) == set(computed)
    for name in moved:
        local[name].copy_(made[name])
    with only_adapters(chunks, None):
        found = forward_only(chunks, batches(layout), head)
    return moved, expected, found


@pytest.mark.parametrize(
    ("world", "sizes", "lora", "moe"),
    [
        (2, {"tp": 2, "sp": True}, DORA, False),
        (2, {"tp": 2, "sp": True, "ep": 2}, DORA, True),
        (2, {"pp": 2}, LoraConfig(rank=4, target_modules=("v_proj", "up_proj"), shared_a=True), False),
    ],
    ids=["tp2_dora", "experts_dora", "pp2_some"],
)
def test_merged_weights_compute_what_adapters_do(
    ranks: RankPool, world: int, sizes: dict[str, Any], lora: LoraConfig, moe: bool
) -> None:
    for moved, expected, found in ranks.run(_compare, sizes, lora, moe, world=world):
        kinds = {name.split(".", 3)[3] for name in moved}
        if lora.target_modules != ("all-linear",):
            assert kinds == {"self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"}
        elif moe:
            assert "mlp.experts.linear_fc2.weight1" in kinds
        else:
            assert kinds == {
                "self_attention.linear_qkv.weight",
                "self_attention.linear_proj.weight",
                "mlp.linear_fc1.weight",
                "mlp.linear_fc2.weight",
            }
        for one, other in zip(expected, found, strict=True):
            if one is not None:
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def _read(rank: int, world: int) -> tuple[int, int]:
    """How often weights are merged more than once if each is read by slices, and how many merged weights exist at a time."""
    layout = ParallelLayout(world=world)
    init_parallel(layout, rank, world)
    chunks = build_model(CONFIG, layout, dtype=torch.float32)
    adapters = attach_adapters(chunks, CONFIG, layout, LoraConfig(rank=4))
    made: list[weakref.ref] = []
    most = 0
    for adapter in adapters:

        def merge(*arguments: Any, plain: Any = adapter.merged) -> Tensor:
            nonlocal most
            most = max(most, 1 + sum(found() is not None for found in made))
            weight = plain(*arguments)
            made.append(weakref.ref(weight))
            return weight

        adapter.merged = merge
    merged = MergedParameters(chunks)
    for name in merged:
        for row in range(3):
            _ = merged[name][row].sum()
    return len(made) - len(adapters), most


def test_one_merged_weight_exists_at_a_time(ranks: RankPool) -> None:
    assert ranks.run(_read, world=1) == [(0, 1)]
