"""Packed micro-batches in every kind of layout, against Hugging Face with one sequence at a time."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from transformers import PreTrainedModel

from megarl.megatron.build import unwrap
from megarl.megatron.heads.outputs import lm_head, value_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import PackedBatch, unpack
from megarl.megatron.parallel import coords
from megarl.megatron.step import forward_only, train_step
from megarl.megatron.transformer_config import has_transformer_engine
from tests.costs.models import build, make_models
from tests.megatron.hf import VOCAB, check_gradients, make_table, optimizer_settings, place_model, save_model
from tests.megatron.parity import batches
from tests.ranks import RankError

TEMPERATURE = 0.8
HEAD = lm_head(vocab_size=VOCAB, temperature=TEMPERATURE, chunk_tokens=16, with_entropy=True)

# Layout, number of ranks. Four layers: two stages of two chunks have one layer each.
LAYOUTS = {
    "one": ({}, 1),
    "tp2": ({"tp": 2}, 2),
    "tp2-sp": ({"tp": 2, "sp": True}, 2),
    "pp2": ({"pp": 2}, 2),
    "cp2": ({"cp": 2}, 2),
    "dp2": ({}, 2),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, 2),
    "tp2-pp2-sp": ({"tp": 2, "pp": 2, "sp": True}, 4),
    "tp2-cp2-sp": ({"tp": 2, "cp": 2, "sp": True}, 4),
    "pp2-vpp2-cp2": ({"pp": 2, "vpp": 2, "cp": 2}, 4),
}
# The rows of each micro-batch of each data parallel rank: the same eight rows in every plan.
PLANS = {
    1: [[[[0, 1, 2, 3, 4, 5], [6, 7]]], [[[7], [2, 4], [0, 6, 1], [3, 5]]]],
    2: [[[[0, 3, 5, 6]], [[1, 2, 4, 7]]], [[[6], [0, 3, 5]], [[2, 1, 4], [7]]]],
}

every_layout = pytest.mark.parametrize("name", LAYOUTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[str, PreTrainedModel]]:
    """Folder and model, by whether embeddings are tied."""
    found = {}
    for tied in (False, True):
        folder: Path = tmp_path_factory.mktemp("model")
        found[tied] = (str(folder), save_model(folder, tied=tied))
    return found


def hugging_face(model: PreTrainedModel, table: pa.Table) -> list[tuple[Tensor, Tensor]]:
    """Log-probability and entropy of each row's response tokens, with a graph, one sequence at a time."""
    outputs = []
    for row in table.to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        first = len(row["prompt_ids"]) - 1
        log_p = (model(ids).logits[0, first:-1] / TEMPERATURE).log_softmax(-1)
        labels = torch.tensor(row["response_ids"])[:, None]
        outputs.append((log_p.gather(1, labels)[:, 0], -(log_p.exp() * log_p).sum(-1)))
    return outputs


def _forward(rank: int, world: int, layout: dict, folder: str, table: pa.Table) -> list | None:
    from megatron.core import parallel_state

    place = place_model(rank, world, layout, folder)
    plan = PLANS[place.layout.dp][1][coords().dp]
    batches = [place.pack(table, rows) for rows in plan]
    outputs = forward_only(place.chunks, batches, HEAD)
    assert len(outputs) == len(batches)
    assert all(chunk.training for chunk in place.chunks)
    if coords().pp < place.layout.pp - 1:
        assert outputs == [None] * len(batches)
        return None
    group = parallel_state.get_context_parallel_group()
    found = []
    for rows, batch, output in zip(plan, batches, outputs, strict=True):
        assert not output.requires_grad
        columns = [unpack(batch, output[:, column], group) for column in range(2)]
        found += zip(rows, *columns, strict=True)
    return found


@every_layout
def test_log_probs_and_entropy_equal_hugging_face(ranks, folders, name: str) -> None:
    (layout, world), (folder, model), table = LAYOUTS[name], folders[False], make_table()
    with torch.no_grad():
        expected = hugging_face(model, table)
    results = [
        found for found in ranks.run(_forward, layout, folder, table, world=world) if found is not None
    ]
    assert {row for found in results for row, _, _ in found} == set(range(table.num_rows))
    for found in results:
        for row, log_probs, entropy in found:
            mask = table["response_mask"][row].values.to_numpy(zero_copy_only=False)
            for values, wanted in zip((log_probs, entropy), expected[row], strict=True):
                np.testing.assert_allclose(values, np.where(mask, wanted.numpy(), 0), rtol=1e-5, atol=1e-5)


def weighted_loss(outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """An arbitrary sum of log-probabilities and entropies, with a weight for each token."""
    log_probs, entropy = outputs[batch.mask].unbind(1)
    loss = (batch.fields["advantages"][batch.mask] * log_probs).sum() - 0.3 * entropy.sum()
    return loss, {"loss": loss, "tokens": batch.mask.sum()}


def _train(
    rank: int, world: int, layout: dict, folder: str, table: pa.Table, plan: int, distributed: bool
) -> tuple[dict, list | None]:
    place = place_model(rank, world, layout, folder, use_distributed_optimizer=distributed)
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    rows_of = PLANS[place.layout.dp][plan][coords().dp]
    batches = [place.pack(table, rows, ("advantages",)) for rows in rows_of]
    result = train_step(place.chunks, optimizer, scheduler, batches, HEAD, weighted_loss)
    # With a distributed optimizer each rank has the reduced gradients of its own part only.
    return asdict(result), None if distributed else place.gradients()


@pytest.mark.parametrize(("tied", "plan"), [(False, 0), (False, 1), (True, 1)])
@every_layout
def test_gradients_equal_hugging_face(ranks, folders, name: str, tied: bool, plan: int) -> None:
    (layout, world), (folder, model), table = LAYOUTS[name], folders[tied], make_table()
    loss, num_tokens = backward(model, table)
    distributed = [False, True] if not tied and plan == 0 else [False]
    for use_distributed_optimizer in distributed:
        results = ranks.run(_train, layout, folder, table, plan, use_distributed_optimizer, world=world)
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
        for result, _ in results:
            assert result == results[0][0]
            assert result["ok"] and result["lr"] == pytest.approx(1e-3)
            assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert result["stats"] == {"loss": pytest.approx(loss, rel=1e-5), "tokens": num_tokens}
        if not use_distributed_optimizer:
            check_gradients(model, [gradients for _, gradients in results])


def backward(model: PreTrainedModel, table: pa.Table) -> tuple[float, int]:
    """Loss of all rows and number of tokens in it; leaves the gradients in the Hugging Face model."""
    model.zero_grad()
    loss, num_tokens = torch.zeros(()), 0
    for (log_probs, entropy), row in zip(hugging_face(model, table), table.to_pylist(), strict=True):
        mask = torch.tensor(row["response_mask"])
        loss = loss + (torch.tensor(row["advantages"]) * log_probs)[mask].sum() - 0.3 * entropy[mask].sum()
        num_tokens += int(mask.sum())
    loss.backward()
    return loss.item(), num_tokens


def _first_ratio(rank: int, world: int, layout: dict, folder: str, table: pa.Table) -> float:
    from megatron.core import parallel_state

    place = place_model(rank, world, layout, folder)
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    rows = list(range(table.num_rows))
    batch = place.pack(table, rows)
    (output,) = forward_only(place.chunks, [batch], HEAD)
    old = unpack(batch, output[:, 0], parallel_state.get_context_parallel_group())
    table = table.append_column("old_log_probs", pa.array(old))

    def loss(outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        difference = (outputs[:, 0] - batch.fields["old_log_probs"])[batch.mask]
        return difference.sum(), {"difference": difference.abs().sum()}

    batch = place.pack(table, rows, ("old_log_probs",))
    return train_step(place.chunks, optimizer, scheduler, [batch], HEAD, loss).stats["difference"]


def test_training_sees_the_log_probs_of_the_forward_pass_bit_for_bit(ranks, folders) -> None:
    layout = {"tp": 2, "cp": 2, "sp": True}
    assert ranks.run(_first_ratio, layout, folders[False][0], make_table(), world=4) == [0.0] * 4


def _unequal(rank: int, world: int, folder: str, table: pa.Table) -> None:
    place = place_model(rank, world, {}, folder)
    forward_only(place.chunks, [place.pack(table, [0])] * (rank + 1), HEAD)


def test_unequal_numbers_of_micro_batches_are_refused_on_every_rank(ranks, folders) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(_unequal, folders[False][0], make_table(), world=2)
    for count in (1, 2):
        assert f"data parallel ranks have from 1 to 2 micro-batches; {count} here" in str(error.value)


def _mlp_rows(
    rank: int, world: int, layout: dict, folder: str, table: pa.Table
) -> tuple[list[int], int, int]:
    """The number of a batch's positions that each layer's MLP computes, the number of all positions, and of live ones."""
    place, rows = place_model(rank, world, layout, folder), []
    layers = unwrap(place.chunks)[-1].decoder.layers
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[0]))
        for layer in layers
    ]
    batch = place.pack(table, [0, 1, 2])
    forward_only(place.chunks, [batch], HEAD)
    for hook in hooks:
        hook.remove()
    return rows, batch.num_tokens, len(batch.live)


@pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine's layers have all positions")
@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"cp": 2}, {"tp": 2}, {"tp": 2, "sp": True}], ids=str)
def test_the_last_mlp_has_live_positions_only(ranks, folders, layout: dict) -> None:
    """With sequence parallelism it computes all positions, in equal parts on the ranks."""
    results = ranks.run(_mlp_rows, layout, folders[False][0], make_table(), world=2 if layout else 1)
    parts = 2 if "sp" in layout else 1
    for rank, (rows, tokens, live) in enumerate(results):
        assert 0 < live < tokens
        last = tokens if "sp" in layout or (rank == 0 and "pp" in layout) else live
        assert rows == [tokens // parts] * (len(rows) - 1) + [last // parts]


def _held_by_dispatchers(
    rank: int, world: int, folder: str, recompute: str, modules: list[str] | None
) -> list[tuple[int, set[str]]]:
    """After all layers' forward passes and at the end of a training step: the number of layers with dispatchers, and the names of the
    tensors with a micro-batch's tokens that dispatchers still hold."""
    built = build(rank, world, folder, {}, head="value", recompute=recompute, modules=modules)
    micro_batches = batches(built.layout, each=2)[:1]
    layers = [module for module in built.chunks[0].modules() if hasattr(module, "token_dispatcher")]
    found = []

    def look() -> None:
        held = {
            name
            for layer in layers
            for name, value in vars(layer.token_dispatcher).items()
            if isinstance(value, Tensor) and value.numel() >= micro_batches[0].num_tokens
        }
        found.append((len(layers), held))

    def loss(outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        look()
        return outputs.sum(), {"loss": outputs.sum()}

    train_step(built.chunks, built.optimizer, built.scheduler, micro_batches, value_head, loss)
    look()
    return found


@pytest.mark.parametrize(
    ("family", "recompute", "modules"),
    [("qwen3_moe", "full", None), ("deepseek_v3", "full", None), ("deepseek_v3", "selective", ["moe"])],
)
def test_no_layer_holds_its_routing_when_its_pass_is_over(
    ranks, tmp_path: Path, family: str, recompute: str, modules: list[str] | None
) -> None:
    """The routing's autograd graph would keep the input of each recomputed layer, and that input's gradient."""
    folder = make_models(tmp_path, [family])[family]
    (found,) = ranks.run(_held_by_dispatchers, folder, recompute, modules, world=1)
    layers = 4 if family == "qwen3_moe" else 3  # DeepSeek's first layer is dense
    assert found == [(layers, set())] * 2


def _rotary_tables(rank: int, world: int, folder: str, table: pa.Table) -> list[int]:
    """How many tables of angles are kept after a pass over micro-batches of different lengths, without gradients and with them."""
    place, found = place_model(rank, world, {}, folder), []
    micro_batches = [place.pack(table, [row]) for row in range(3)]
    assert len({batch.max_seqlen for batch in micro_batches}) > 1
    forward_only(place.chunks, micro_batches, HEAD)
    found.append(RotaryEmbedding.forward.cache_info().currsize)
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    train_step(
        place.chunks,
        optimizer,
        scheduler,
        micro_batches,
        HEAD,
        lambda output, _: (output.sum(), {"loss": output.sum()}),
    )
    return [*found, RotaryEmbedding.forward.cache_info().currsize]


def test_no_table_of_angles_is_kept_when_a_pass_is_over(ranks, folders) -> None:
    """They would be on the device while other roles compute: 64 MiB each with 131,072 tokens and a width of 128."""
    (found,) = ranks.run(_rotary_tables, folders[False][0], make_table(), world=1)
    assert found == [0, 0]
