"""Experts of tokens as a column: in tables, after reordering, in Parquet, and values that do not fit."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.data import trajectories as tr
from megarl.data.routing import ROUTED_EXPERTS, RoutingShape, routing_column, routings
from tests.data.test_trajectories import make_generation, make_prompts

FEW, MANY = RoutingShape(3, 2, 256), RoutingShape(3, 2, 257)


def draw(shape: RoutingShape, num_tokens: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    found = generator.integers(0, shape.num_experts, (num_tokens, shape.layers, shape.top_k))
    found.flat[-1:] = shape.num_experts - 1
    return found.astype(shape.dtype)


def made(shape: RoutingShape, lengths: tuple[int, ...] = (3, 1, 2, 4)) -> tuple[pa.Table, list[np.ndarray]]:
    """Trajectories whose prompts have 1, 1, 2 and 2 tokens, and the experts of their tokens."""
    requests = tr.expand_prompts(make_prompts(len(lengths) // 2), 2)
    sizes = [
        len(ids) + length - 1 for ids, length in zip(requests["prompt_ids"].to_pylist(), lengths, strict=True)
    ]
    experts = [draw(shape, size, seed) for seed, size in enumerate(sizes)]
    generations = [
        make_generation(uid, length, routed_experts=own)
        for uid, length, own in zip(requests["uid"].to_pylist(), lengths, experts, strict=True)
    ]
    return tr.build_trajectories(requests, generations, shape), experts


def read(table: pa.Table, shape: RoutingShape, rows: list[int], layers: tuple[int, ...] = (0, 1, 2)) -> list:
    flat, counts = routings(table, rows, shape, layers)
    return np.split(flat, np.cumsum(counts)[:-1])


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize(("shape", "width"), [(FEW, 6), (MANY, 12)])
def test_a_byte_an_expert_where_numbers_fit_else_two(shape: RoutingShape, width: int) -> None:
    table, experts = made(shape)
    assert table.schema.field(ROUTED_EXPERTS).type == pa.list_(pa.binary(width))
    assert same(read(table, shape, [0, 1, 2, 3]), experts)
    assert same(read(table, shape, [2, 0], (2, 0)), [experts[2][:, [2, 0]], experts[0][:, [2, 0]]])


def test_through_other_orders_several_chunks_and_parquet(tmp_path: Path) -> None:
    table, experts = made(FEW)
    blocks, order = tr.Blocks(), [3, 0, 2]
    chunks = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    for source in (table, chunks):
        for memory in (None, blocks):
            taken = tr.take(source, order, memory)
            assert taken.schema == table.schema
            assert same(read(taken, FEW, [0, 1, 2]), [experts[row] for row in order])
    again = tr.read_trajectories(tr.write_trajectories(chunks, tmp_path / "step.parquet"))
    assert again.schema.field(ROUTED_EXPERTS).type == table.schema.field(ROUTED_EXPERTS).type
    assert same(read(again, FEW, [0, 1, 2, 3]), experts)


def test_large_columns_use_memory_again() -> None:
    """Columns above the least size of a block are copied into blocks, which are used again."""
    shape, blocks = RoutingShape(61, 8, 256), tr.Blocks()
    experts = [draw(shape, 3000, seed) for seed in range(4)]
    column = pa.chunked_array([routing_column(experts, shape)])
    for order in ([3, 1, 0, 2], [0, 2, 3, 1]):
        taken = tr.take(pa.table({ROUTED_EXPERTS: column}), order, blocks)
        assert same(read(taken, shape, [0, 1, 2, 3], tuple(range(61))), [experts[row] for row in order])
        assert len(blocks._free) == 0
        del taken
    assert len(blocks._free) == 1


def test_a_trajectory_that_never_began_has_any_different_experts() -> None:
    requests = tr.expand_prompts(make_prompts(1), 2)
    uids = requests["uid"].to_pylist()
    generations = [
        make_generation(uids[0], 2, routed_experts=draw(FEW, 2, 0)),
        make_generation(uids[1], 1, response_mask=[False]),
    ]
    table = tr.build_trajectories(requests, generations, FEW)
    (found,) = read(table, FEW, [1])
    assert found.shape == (1, 3, 2) and (found[..., 0] != found[..., 1]).all()


def test_what_does_not_fit_is_named() -> None:
    table, experts = made(FEW)
    with pytest.raises(ValueError, match=r"no column 'routed_experts', which .*router_replay=rollout needs"):
        read(table.drop_columns([ROUTED_EXPERTS]), FEW, [0])
    with pytest.raises(
        ValueError, match=r"binary\[6\]; the model, with 4 layers of 256 experts, has 8 bytes"
    ):
        read(table, RoutingShape(4, 2, 256), [0])
    with pytest.raises(ValueError, match="names expert 255 of a model with 8 experts"):
        read(table, RoutingShape(3, 2, 8), [0])
    shorter = routing_column([experts[0][1:], *experts[1:]], FEW)
    wrong = tr.replace_column(table, ROUTED_EXPERTS, shorter)
    with pytest.raises(
        ValueError, match=r"train:0/0: routed_experts has no entry for each token but the last"
    ):
        tr.validate_trajectories(wrong)
