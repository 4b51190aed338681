"""Trajectories that share their prompt's tokens, against Hugging Face with one complete trajectory at a time."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from megarl.layout.grid import ParallelLayout
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import unpack
from megarl.megatron.parallel import coords
from megarl.megatron.shared_prompts import check_model
from megarl.megatron.step import forward_only, train_step
from tests.megatron.hf import VOCAB, check_gradients, optimizer_settings, place_model, save_model
from tests.megatron.test_step import HEAD, backward, hugging_face, weighted_loss

# Lengths of a prompt and of its responses: equal responses, a prompt of one token, one with a single response, one that is repeated later.
GROUPS = [(6, (5, 5, 5)), (6, (5, 5, 5)), (9, (1, 8, 8, 3)), (1, (4, 4)), (4, (7,)), (6, (2, 3))]
LAYOUTS = {
    "one": ({}, 1),
    "tp2": ({"tp": 2}, 2),
    "tp2-sp": ({"tp": 2, "sp": True}, 2),
    "pp2": ({"pp": 2}, 2),
    "dp2": ({}, 2),
}
ROWS = {1: [[[*range(15)]]], 2: [[[*range(6), 13, 14], [12]], [[*range(6, 10)], [10, 11]]]}


def table_of_groups() -> pa.Table:
    generator, rows = np.random.default_rng(5), []
    for prompt, responses in GROUPS:
        ids = generator.integers(1, VOCAB, prompt).astype(np.int32)
        for response in responses:
            rows.append(
                {
                    "prompt_ids": ids,
                    "response_ids": generator.integers(1, VOCAB, response).astype(np.int32),
                    "response_mask": generator.random(response) < 0.8,
                    "advantages": generator.normal(size=response).astype(np.float32),
                }
            )
    return pa.Table.from_pylist(rows)


def _train(rank: int, world: int, layout: dict, folder: str, table: pa.Table) -> tuple:
    place = place_model(rank, world, layout, folder)
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    rows_of = ROWS[place.layout.dp][coords().dp]
    batches = [place.pack(table, rows, ("advantages",), share_prompts=True) for rows in rows_of]
    outputs = forward_only(place.chunks, batches, HEAD)
    found = [
        (rows, unpack(batch, output[:, 0]))
        for rows, batch, output in zip(rows_of, batches, outputs, strict=True)
        if output is not None
    ]
    result = train_step(place.chunks, optimizer, scheduler, batches, HEAD, weighted_loss)
    return asdict(result), place.gradients(), found, sum(batch.num_tokens for batch in batches)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, object]:
    folder: Path = tmp_path_factory.mktemp("model")
    return str(folder), save_model(folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_gradients_are_those_of_whole_trajectories(ranks, model, name: str) -> None:
    (layout, world), (folder, hugging), table = LAYOUTS[name], model, table_of_groups()
    expected = [log_probs.detach().numpy() for log_probs, _ in hugging_face(hugging, table)]
    loss, num_tokens = backward(hugging, table)
    results = ranks.run(_train, layout, folder, table, world=world)
    seen = []
    for result, _, found, _ in results:
        assert result["stats"] == {"loss": pytest.approx(loss, rel=1e-5), "tokens": num_tokens}
        for rows, log_probs in found:
            seen += rows
            for row, values in zip(rows, log_probs, strict=True):
                mask = table["response_mask"][row].values.to_numpy(zero_copy_only=False)
                np.testing.assert_allclose(values, np.where(mask, expected[row], 0), rtol=1e-5, atol=1e-5)
    assert set(seen) == set(range(table.num_rows))
    check_gradients(hugging, [gradients for _, gradients, _, _ in results])
    whole = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in table.to_pylist())
    if name == "one":
        assert results[0][3] == whole - 2 * 5 - 2 * 5 - 3 * 8 - 0 - 0 - 5


def test_a_model_that_would_compute_something_else_is_refused() -> None:
    plain = SimpleNamespace(num_moe_experts=None, mtp_num_layers=None)
    check_model("a.key", plain, ParallelLayout(world=2, tp=2), 0.0)
    for config, layout, dropout, words in (
        (plain, {"cp": 2}, 0.0, "context parallelism"),
        (SimpleNamespace(num_moe_experts=4, mtp_num_layers=None), {}, 0.0, "a mixture of experts"),
        (
            SimpleNamespace(num_moe_experts=None, mtp_num_layers=1),
            {},
            0.1,
            "multi-token prediction and dropout",
        ),
    ):
        with pytest.raises(ValueError, match=f"a.key=true: prompts cannot be shared with {words}"):
            check_model("a.key", config, ParallelLayout(world=2, **layout), dropout)
