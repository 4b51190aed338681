"""The bytes that a rank holds under Megatron-FSDP equal the plan within 5 %."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.costs.shared import gathered_bytes, unreduced_bytes
from megarl.costs.tensors import ModelUse, stage_tensors, training_bytes
from megarl.layout.grid import ParallelLayout
from megarl.megatron import fsdp
from megarl.megatron.build import unwrap
from megarl.megatron.heads.outputs import lm_head, value_head
from megarl.megatron.offload import gradients_of, optimizer_of, weights_of
from megarl.megatron.step import train_step
from megarl.models import read_model_config
from tests.costs.measure import _loss
from tests.costs.models import build, make_models
from tests.megatron.parity import VOCAB, batches
from tests.ranks import RankPool

Terms = dict[str, int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(Path(tmp_path_factory.mktemp("models")), ["llama", "qwen2"])


def _measure(
    rank: int, world: int, folder: str, sizes: dict[str, Any], options: dict[str, Any]
) -> tuple[Terms, Terms]:
    """This rank's bytes after a step, with the step's peaks of gathered weights and of unreduced gradients; and the planned bytes."""
    built = build(rank, world, folder, sizes, **options)
    (chunk,) = built.chunks
    head = value_head if options.get("head") == "value" else lm_head(vocab_size=VOCAB, chunk_tokens=16)
    gathered, unreduced = [0], [0]

    def look(*unused: Any) -> None:
        gathered.append(fsdp.gathered_bytes(chunk))
        groups = chunk.param_and_grad_buffer.parameter_groups
        buffers = [group.main_grad_buffer for group in groups if group.main_grad_buffer.is_data_distributed]
        buckets = (
            bucket for buffer in buffers for bucket in buffer.temporary_bucket_allocator.buckets.values()
        )
        unreduced.append(sum(bucket.data.untyped_storage().nbytes() for bucket in buckets))

    for layer in unwrap([chunk])[0].decoder.layers:
        layer.mlp.register_forward_hook(look)
    for parameter in fsdp.parameters_of(chunk).values():
        parameter.register_post_accumulate_grad_hook(look)
    assert train_step(built.chunks, built.optimizer, built.scheduler, batches(built.layout), head, _loss).ok
    found = {
        "weights": weights_of(built.chunks).device_bytes(),
        "gradients": gradients_of(built.chunks).device_bytes(),
        "optimizer": optimizer_of(built.chunks, built.optimizer).device_bytes(),
        "gathered": max(gathered),
        "unreduced": max(unreduced),
    }
    use = ModelUse(
        built.config,
        built.layout,
        tokens=64,
        evaluated=0,
        head=options.get("head", "lm"),
        itemsize=options.get("dtype", torch.float32).itemsize,
        fsdp=options["fsdp"],
        fused=False,
    )
    tensors = stage_tensors(use, 0)
    held = training_bytes(use, tensors, 0)
    planned = {
        "weights": held.weights,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "gathered": gathered_bytes(use, tensors)[1],
        "unreduced": max(unreduced_bytes(use, tensors).values()),
    }
    return found, planned


CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {}, {"fsdp": fsdp.FULL}),
    (2, {}, {"fsdp": fsdp.FULL, "dtype": torch.bfloat16, "head": "value"}),
    (4, {"tp": 2, "sp": True}, {"fsdp": fsdp.FULL, "dtype": torch.bfloat16}),
    (2, {}, {"fsdp": "optim_grads", "dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("world", "sizes", "options"), CASES)
def test_the_shares_are_planned(
    ranks: RankPool, folders: dict[str, str], world: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    """Sums over all ranks, since their shards of a bucket differ in padding; for temporary memory, the rank with the most."""
    results = ranks.run(_measure, folders["qwen2"], sizes, options, world=world)
    planned = results[0][1]
    for term in ("weights", "gradients", "optimizer"):
        assert sum(found[term] for found, _ in results) == pytest.approx(world * planned[term], rel=0.05), (
            term
        )
    for term in ("gathered", "unreduced"):
        most = max(found[term] for found, _ in results)
        assert (most == 0) == (planned[term] == 0), term
        assert most == pytest.approx(planned[term], rel=0.05), (term, most, planned[term])


def test_shares_of_a_large_model_are_those_of_its_weights() -> None:
    """Qwen2.5-7B as a critic on 8 ranks: padding is less than 1 %, and the rest follows from the sizes of its config."""
    config = read_model_config(str(Path(__file__).parents[2] / "recipes/models/qwen2.5-7b"))
    hidden, ffn, layers = 3584, 18944, 28
    layer = hidden * (2 * hidden + 2 * 512 + 3 * ffn + 2) + hidden + 2 * 512
    outside = 152064 * hidden + hidden + hidden  # the embedding, the last norm, the value head
    use = ModelUse(
        config, ParallelLayout(world=8), tokens=64, evaluated=0, head="value", fsdp=fsdp.FULL, fused=False
    )
    tensors = stage_tensors(use, 0)
    held, total = training_bytes(use, tensors, 0), layers * layer + outside
    assert held.weights == pytest.approx(2 * total / 8, rel=0.01)
    assert held.gradients == pytest.approx(4 * total / 8, rel=0.01)
    assert held.optimizer == pytest.approx(12 * total / 8, rel=0.01)
    expected = (2 * outside, 2 * (outside + 2 * layer))
    assert gathered_bytes(use, tensors) == pytest.approx(expected, rel=0.01)
    waiting = [*unreduced_bytes(use, tensors).values()]
    assert waiting[0] == pytest.approx(4 * outside, rel=0.01)  # at the head
    assert waiting[1] == pytest.approx(4 * (outside + layer), rel=0.01)
    assert waiting[2:-1] == pytest.approx((layers - 1) * [4 * (outside + 2 * layer)], rel=0.01)
    assert waiting[-1] == pytest.approx(waiting[1], rel=0.3) and len(waiting) == layers + 2
    frozen = replace(use, trainable=False)
    evaluated = training_bytes(frozen, stage_tensors(frozen, 0), 0)
    assert (evaluated.weights, evaluated.gradients, evaluated.optimizer) == (held.weights, 0, 0)
