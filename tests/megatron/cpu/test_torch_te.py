"""The doubles of Transformer Engine's modules: what they save. (How they compute, test_parity and test_families see.)"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica

from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model
from megarl.megatron.parallel import init_parallel
from tests.megatron.test_build import KINDS
from tests.ranks import RankPool

Saved = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # key, whole shape, offset, shape


def _saved_by_rank(rank: int, world: int, kind: str, sizes: dict[str, Any]) -> list[Saved]:
    """What this rank would write to a distributed checkpoint."""
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
    """The tensors are those that one rank saves alone, but for the vocabulary's padding."""
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
