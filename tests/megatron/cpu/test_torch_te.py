"""The stand-ins for Transformer Engine's modules: the tensors that they save, and RMS norm against Hugging Face's module.
(test_parity and test_families check their results.)"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model
from megarl.megatron.cpu.torch_te import rms_norm
from megarl.megatron.parallel import init_parallel
from tests.megatron.test_build import KINDS
from tests.ranks import RankPool

Saved = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # key, global shape, offset, shape


def _saved_by_rank(rank: int, world: int, kind: str, sizes: dict[str, Any]) -> list[Saved]:
    """The tensors that this rank would write to a distributed checkpoint."""
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    (model,) = build_model(KINDS[kind], layout, dtype=torch.float32)
    state = model.sharded_state_dict()
    apply_factories(state)
    return [
        (tensor.key, tensor.global_shape, tensor.global_offset, tensor.data.shape)
        for tensor in nested_values(state)
        if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id)
    ]


@pytest.mark.parametrize("kind", ["experts", "latent"])
@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "sp": True, "ep": 2}, {"tp": 2, "sp": True, "pp": 2, "ep": 2}, {"ep": 2, "etp": 2}],
    ids=str,
)
def test_ranks_save_every_element_of_the_same_tensors_once(
    ranks: RankPool, kind: str, sizes: dict[str, Any]
) -> None:
    """The tensors equal the ones that a single rank saves, except for the vocabulary's padding."""
    whole = {key: shape for key, shape, _, _ in ranks.run(_saved_by_rank, kind, {}, world=1)[0]}
    assert any(key.endswith("experts.experts.linear_fc1.weight") for key in whole)
    written: Counter[str] = Counter()
    places = set()
    for saved in ranks.run(_saved_by_rank, kind, sizes, world=4):
        for key, shape, offset, local in saved:
            vocabulary = "embedding" in key or "output_layer" in key
            assert shape[1:] == whole[key][1:] if vocabulary else shape == whole[key]
            assert (key, offset) not in places
            places.add((key, offset))
            written[key] += 0 if vocabulary else math.prod(local)
    expected = {
        key: 0 if "embedding" in key or "output_layer" in key else math.prod(shape)
        for key, shape in whole.items()
    }
    assert written == expected


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_values_and_gradients_are_hugging_faces(eps: float) -> None:
    torch.manual_seed(0)
    oracle = Qwen2RMSNorm(48, eps).double()
    with torch.no_grad():
        oracle.weight.normal_(1.0, 0.3)
    x = torch.randn(5, 7, 48, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 7, 48)
    expected = oracle(x)
    expected_grads = torch.autograd.grad(expected, (x, oracle.weight), grad.double())
    own_x, own_weight = (t.detach().float().requires_grad_() for t in (x, oracle.weight))
    out = rms_norm(own_x, own_weight, eps)
    grads = torch.autograd.grad(out, (own_x, own_weight), grad)
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-6)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=2e-6, atol=2e-6)


def test_bfloat16_is_computed_in_float32_and_a_frozen_weight_has_no_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    weight = torch.randn(64).bfloat16()
    out = rms_norm(x, weight, 1e-6)
    wide = torch.nn.functional.rms_norm(x.detach().float(), (64,), weight.float(), 1e-6)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.dtype == torch.bfloat16
