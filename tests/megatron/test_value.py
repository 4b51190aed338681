"""The value head in every kind of layout, against Hugging Face's model with a scalar `score` head."""

from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.megatron.heads.outputs import value_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import PackedBatch, unpack
from megarl.megatron.parallel import coords
from megarl.megatron.step import forward_only, train_step
from tests.megatron.hf import check_gradients, make_table, optimizer_settings, place_model, save_model

LAYOUTS = {
    "one": ({}, 1),
    "tp2": ({"tp": 2}, 2),
    "tp2-sp": ({"tp": 2, "sp": True}, 2),
    "pp2": ({"pp": 2}, 2),
    "cp2": ({"cp": 2}, 2),
    "tp2-pp2-sp": ({"tp": 2, "pp": 2, "sp": True}, 4),
    "tp2-cp2-sp": ({"tp": 2, "cp": 2, "sp": True}, 4),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("critic")
    return str(folder), save_model(folder, head="value")


def hugging_face(model: PreTrainedModel, table: pa.Table) -> list[Tensor]:
    """Values of each row's response tokens (at the positions that predict them), one sequence at a time."""
    values = []
    for row in table.to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        hidden = model.model(ids).last_hidden_state[0, len(row["prompt_ids"]) - 1 : -1]
        values.append(model.score(hidden)[:, 0])
    return values


def squared_loss(values: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = ((values - batch.fields["advantages"])[batch.mask] ** 2).sum()
    return loss, {"loss": loss}


def _values_and_gradients(
    rank: int, world: int, layout: dict, folder: str, table: pa.Table
) -> tuple[dict[int, np.ndarray], dict, list]:
    from megatron.core import parallel_state

    place = place_model(rank, world, layout, folder, head="value")
    plan = [[0, 1, 2], [3], [4, 5, 6, 7]]
    batches = [place.pack(table, rows, ("advantages",)) for rows in plan]
    values = {}
    for rows, batch, output in zip(
        plan, batches, forward_only(place.chunks, batches, value_head), strict=True
    ):
        assert (output is None) == (coords().pp < place.layout.pp - 1)
        if output is not None:
            assert output.dtype == torch.float32
            group = parallel_state.get_context_parallel_group()
            values.update(zip(rows, unpack(batch, output, group), strict=True))
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    result = train_step(place.chunks, optimizer, scheduler, batches, value_head, squared_loss)
    return values, asdict(result), place.gradients()


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_and_gradients_equal_hugging_face(ranks, saved, name: str) -> None:
    (layout, world), (folder, model), table = LAYOUTS[name], saved, make_table()
    model.zero_grad()
    expected = hugging_face(model, table)
    loss = torch.zeros(())
    for values, row in zip(expected, table.to_pylist(), strict=True):
        loss = (
            loss + ((values - torch.tensor(row["advantages"]))[torch.tensor(row["response_mask"])] ** 2).sum()
        )
    loss.backward()

    results = ranks.run(_values_and_gradients, layout, folder, table, world=world)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    for values, result, _ in results:
        assert sorted(values) in ([], list(range(table.num_rows)))
        for row, found in values.items():
            live = np.array(table["response_mask"][row].as_py())
            np.testing.assert_allclose(found, expected[row].detach().numpy() * live, rtol=1e-5, atol=1e-5)
        assert result["stats"] == {"loss": pytest.approx(loss.item(), rel=1e-5)}
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert any(values for values, _, _ in results)
    check_gradients(model, [gradients for _, _, gradients in results])
