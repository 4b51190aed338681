"""Packing against token-by-token Python; micro-batches that are packed one ahead equal those packed at once, and each is packed only once."""

import threading
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.routing import ROUTED_EXPERTS, RoutingShape, routing_column
from megarl.megatron.packing import (
    HostBatch,
    MicroBatches,
    PackedBatch,
    Routing,
    arrange_sequences,
    arrange_texts,
    arrange_trajectories,
    unpack,
)
from megarl.megatron.sequences import sequence_ids


@st.composite
def trajectories(draw: st.DrawFn) -> pa.Table:
    token = st.integers(1, 1000)
    number = st.floats(-10, 10, width=32)
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(token, min_size=1, max_size=9))
        response = draw(st.lists(st.tuples(token, st.booleans(), number), max_size=9))
        rows.append(
            {
                "prompt_ids": prompt,
                "response_ids": [item[0] for item in response],
                "response_mask": [item[1] for item in response],
                "advantages": [item[2] for item in response],
            }
        )
    return trajectory_table(rows)


@pytest.mark.parametrize(("cp", "sp"), [(1, False), (2, False), (2, True)])
@given(table=trajectories())
@settings(max_examples=30)
def test_later_tokens_are_of_the_same_sequence(table: pa.Table, cp: int, sp: bool) -> None:
    """Each token of a sequence has the token k + 2 places later, or 0 past the end, which counts if it is in a response and its mask is set."""
    depth, rows = 2, table.to_pylist()
    sizes = {"tp": 2 if sp else 1, "sequence_parallel": sp, "cp": cp}
    parts = [
        arrange_trajectories(table, range(len(rows)), depth=depth, cp_rank=rank, **sizes).on_device()
        for rank in range(cp)
    ]
    found, live = {}, {}
    for part in parts:
        assert part.later is not None
        flags = [torch.zeros(part.num_tokens, dtype=torch.bool) for _ in range(depth)]
        for flag, whole, (ids, places) in zip(flags, part.later.ids, part.later.rows(), strict=True):
            flag[places] = True
            assert torch.equal(ids, whole[places])
        numbers = sequence_ids(part)
        for at in range(part.num_tokens):
            key = (int(numbers[at]), int(part.position_ids[0, at]))
            found[key] = part.later.ids[:, at].tolist()
            live[key] = [bool(flag[at]) for flag in flags]
    for number, row in enumerate(rows):
        ids = row["prompt_ids"] + row["response_ids"]
        counts = [False] * len(row["prompt_ids"]) + row["response_mask"]
        for at in range(len(ids)):
            wanted = [at + 2 + k for k in range(depth)]
            assert found.pop((number, at)) == [ids[place] if place < len(ids) else 0 for place in wanted]
            assert live.pop((number, at)) == [place < len(ids) and counts[place] for place in wanted]
    assert not any(map(any, found.values())) and not any(map(any, live.values()))  # alignment


@pytest.mark.parametrize("num_experts", [8, 300])
@pytest.mark.parametrize(("cp", "sp"), [(1, False), (2, False), (2, True)])
def test_experts_lie_at_their_tokens(num_experts: int, cp: int, sp: bool) -> None:
    """All tokens except each sequence's last have their experts of the given layers, also where context parallel ranks have chunks."""
    shape, generator = RoutingShape(3, 2, num_experts), np.random.default_rng(1)
    lengths, tp = [(3, 4), (1, 1), (2, 6)], 2 if sp else 1
    tokens = [generator.integers(1, 900, sum(length)).tolist() for length in lengths]
    experts = [generator.integers(0, num_experts, (len(ids) - 1, 3, 2)).astype(shape.dtype) for ids in tokens]
    rows = [
        {"prompt_ids": ids[:prompt], "response_ids": ids[prompt:], "response_mask": [True] * response}
        for ids, (prompt, response) in zip(tokens, lengths, strict=True)
    ]
    table = trajectory_table([{**row, "advantages": [0.0] * len(row["response_ids"])} for row in rows])
    table = table.append_column(ROUTED_EXPERTS, routing_column(experts, shape))
    expected = {}  # all tokens are different, so id and position identify a token's experts
    for ids, own in zip(tokens, experts, strict=True):
        expected |= {(token, place): own[place][[2, 0]] for place, token in enumerate(ids[:-1])}
    found = 0
    for cp_rank in range(cp):
        batch = arrange_trajectories(
            table, [0, 1, 2], routing=Routing(shape, (2, 0)), tp=tp, cp=cp, cp_rank=cp_rank, sequence_parallel=sp
        ).on_device()  # fmt: skip
        assert batch.experts.dtype == (torch.uint8 if num_experts == 8 else torch.int16)
        assert batch.packed_seq_params().experts is batch.experts
        for at in range(batch.num_tokens):
            key = (int(batch.input_ids[0, at]), int(batch.position_ids[0, at]))
            assert bool(batch.is_routed[at]) == (key in expected)
            if key in expected:
                assert np.array_equal(batch.experts[at].numpy(), expected[key])
                found += 1
    assert found == len(expected)
    short = table.set_column(4, ROUTED_EXPERTS, routing_column([experts[0][1:], *experts[1:]], shape))
    with pytest.raises(ValueError, match="row 0: 7 tokens have 5 entries of experts, not one less"):
        arrange_trajectories(short, [0, 1, 2], routing=Routing(shape, (0,)))


@pytest.mark.parametrize(("cp", "sp"), [(1, False), (2, False), (2, True)])
def test_kept_tokens_are_those_of_live_positions(cp: int, sp: bool) -> None:
    """Also where context parallel ranks have chunks of a sequence; tokens that were not drawn by the policy have no kept tokens."""
    lengths, tp = [(3, 4), (1, 1), (2, 6)], 2 if sp else 1
    rows, sets, number = [], {}, 100  # all tokens are different
    for prompt, response in lengths:
        ids = list(range(number, number + prompt + response))
        number += len(ids)
        mask = [place % 3 != 1 for place in range(response)]
        rows.append({"prompt_ids": ids[:prompt], "response_ids": ids[prompt:], "response_mask": mask})
        for token, live in zip(ids[prompt:], mask, strict=True):
            sets[token] = [*range(token % 3), token] if live else []
    table = trajectory_table([{**row, "advantages": [0.0] * len(row["response_ids"])} for row in rows])
    own = [[sets[token] for token in row["response_ids"]] for row in rows]
    counts = pa.array([list(map(len, row)) for row in own], pa.list_(pa.int32()))
    flat = pa.array([[token for sets_of in row for token in sets_of] for row in own], pa.list_(pa.int32()))
    table = table.append_column(KEPT_IDS, flat).append_column(KEPT_COUNTS, counts)
    found = {}
    for cp_rank in range(cp):
        how = {"tp": tp, "cp": cp, "cp_rank": cp_rank, "sequence_parallel": sp}
        batch = arrange_trajectories(table, [2, 0, 1], keeps=True, **how).on_device()
        assert batch.kept.counts.tolist() == np.diff(batch.kept.bounds).tolist()
        parts = batch.kept.ids.split(batch.kept.counts.tolist())
        found |= {
            int(label): ids.tolist() for label, ids in zip(batch.labels[batch.live], parts, strict=True)
        }
        assert arrange_trajectories(table, [2, 0, 1], **how).on_device().kept is None
    assert found == {token: own for token, own in sets.items() if own}
    later = pa.array([[token + 1 for token in row] for row in flat.to_pylist()], flat.type)
    moved = table.set_column(4, KEPT_IDS, later)
    with pytest.raises(ValueError, match="3 of 3 live tokens are not among their own, such as token 103"):
        arrange_trajectories(moved, [0], keeps=True)
    with pytest.raises(ValueError, match="have 4 counts for 4 response tokens and 3 tokens for"):
        short = table.set_column(4, KEPT_IDS, pa.array([r[:3] for r in flat.to_pylist()], flat.type))
        arrange_trajectories(short, [0], keeps=True)


def trajectory_table(rows: list[dict]) -> pa.Table:
    kinds = {
        "prompt_ids": pa.int32(),
        "response_ids": pa.int32(),
        "response_mask": pa.bool_(),
        "advantages": pa.float32(),
    }
    return pa.Table.from_pylist(rows, pa.schema([(name, pa.list_(kind)) for name, kind in kinds.items()]))


def local_positions(aligned: int, cp: int, rank: int) -> list[int]:
    """Transformer Engine's sharding of one sequence: chunk `rank`, then its mirror image."""
    if cp == 1:
        return list(range(aligned))
    chunk = aligned // (2 * cp)
    mirror = 2 * cp - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(mirror * chunk, (mirror + 1) * chunk)]


@settings(max_examples=60)
@given(trajectories(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_every_packed_token_is_the_right_one(table: pa.Table, cp: int, tp: int, sp: bool) -> None:
    rows = list(reversed(range(table.num_rows)))
    for rank in range(cp):
        batch = arrange_trajectories(
            table, rows, ["advantages"], tp=tp, cp=cp, cp_rank=rank, sequence_parallel=sp
        ).on_device()
        bounds = batch.cu_seqlens.tolist()
        at = 0
        for index, row in enumerate(rows):
            prompt, response, mask, advantages = (
                table[name][row].as_py()
                for name in ("prompt_ids", "response_ids", "response_mask", "advantages")
            )
            ids = prompt + response
            assert batch.lengths[index] == len(ids)
            for position in local_positions(bounds[index + 1] - bounds[index], cp, rank):
                assert batch.position_ids[0, at] == position
                assert batch.input_ids[0, at] == (ids[position] if position < len(ids) else 0)
                assert batch.labels[at] == (ids[position + 1] if position + 1 < len(ids) else 0)
                token = position - (len(prompt) - 1)
                predicts = 0 <= token < len(response)
                assert batch.mask[at] == (mask[token] if predicts else False)
                assert batch.fields["advantages"][at] == (advantages[token] if predicts else 0)
                at += 1
        assert at == batch.num_tokens
        assert batch.live.tolist() == [at for at, counts in enumerate(batch.mask.tolist()) if counts]


@settings(max_examples=60)
@given(
    trajectories(),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([1, 16, 128]),
)
def test_padding_is_alignment_only(table: pa.Table, cp: int, tp: int, sp: bool, multiple: int) -> None:
    how = {"tp": tp, "cp": cp, "sequence_parallel": sp, "multiple": multiple}
    batch = arrange_trajectories(table, range(table.num_rows), **how).on_device()
    unit, own = 2 * cp if cp > 1 else 1, (tp if sp else 1) * multiple
    tail = np.lcm(2 * cp, own * cp) if cp > 1 else own
    assert (np.diff(batch.cu_seqlens.numpy()) % unit == 0).all()
    assert batch.num_tokens % own == 0
    assert batch.num_padding < unit * table.num_rows + tail
    assert (batch.input_ids.shape[1], len(batch.mask)) == (batch.num_tokens, batch.num_tokens)
    assert int(batch.mask.sum()) <= sum(map(sum, table["response_mask"].to_pylist()))
    if unit == own == 1:
        assert batch.num_padding == 0


@settings(max_examples=60)
@given(trajectories(), st.sampled_from([1, 2, 4]), st.booleans())
def test_unpack_inverts_pack(table: pa.Table, tp: int, sp: bool) -> None:
    batch = arrange_trajectories(
        table, range(table.num_rows), ["advantages"], tp=tp, sequence_parallel=sp
    ).on_device()
    back = unpack(batch, batch.fields["advantages"])
    assert [list(values) for values in back] == table["advantages"].to_pylist()
    assert [list(values) for values in unpack(batch, batch.labels)] == table["response_ids"].to_pylist()


def _unpack_over_cp(rank: int, world: int, table: pa.Table, rows: list[int]) -> list[list]:
    import torch.distributed as dist

    batch = arrange_trajectories(table, rows, ["advantages"], cp=world, cp_rank=rank).on_device()
    columns = (batch.fields["advantages"], batch.labels)
    return [[list(v) for v in unpack(batch, column, dist.group.WORLD)] for column in columns]


@pytest.mark.parametrize("world", [2, 4])
def test_unpack_gathers_over_context_parallel_ranks(ranks, world: int) -> None:
    generator = np.random.default_rng(world)
    rows = []
    for prompt, response in [(1, 1), (7, 20), (3, 0), (30, 2), (5, 5)]:
        rows.append(
            {
                "prompt_ids": generator.integers(1, 99, prompt),
                "response_ids": generator.integers(1, 99, response),
                "response_mask": [True] * response,
                "advantages": generator.normal(size=response).astype(np.float32),
            }
        )
    table = trajectory_table(rows)
    order = [4, 2, 0, 1, 3]
    expected = [[table[name][row].as_py() for row in order] for name in ("advantages", "response_ids")]
    assert ranks.run(_unpack_over_cp, table, order, world=world) == [expected] * world


def test_sequences_predict_their_next_token() -> None:
    table = pa.table(
        {
            "input_ids": pa.array([[5, 6, 7, 8], [9], [3, 4]], pa.list_(pa.int32())),
            "loss_mask": pa.array([[True, False, True, True], [True], [False, True]]),
        }
    )
    batch = arrange_sequences(table, [0, 1, 2]).on_device()
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4]]
    assert batch.labels.tolist() == [6, 7, 8, 0, 0, 4, 0]
    assert batch.mask.tolist() == [False, True, True, False, False, True, False]
    assert [list(values) for values in unpack(batch, batch.labels)] == [[6, 7, 8], [], [4]]


def test_texts_have_one_number_at_their_last_token() -> None:
    table = pa.table({"input_ids": pa.array([[5, 6, 7, 8], [9], [3, 4]], pa.list_(pa.int32()))})
    batch = arrange_texts(table, [0, 1, 2], tp=4, sequence_parallel=True).on_device()
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 0]]  # the last token is alignment
    assert batch.mask.tolist() == [False, False, False, True, True, False, True, False]
    assert batch.live.tolist() == [3, 4, 6]
    assert [list(values) for values in unpack(batch, batch.input_ids[0])] == [[8], [9], [4]]
    with pytest.raises(ValueError, match="row 1 has an empty input_ids"):
        arrange_texts(pa.table({"input_ids": pa.array([[1], []], pa.list_(pa.int32()))}), [0, 1]).on_device()
    positions = pa.array([[0, 2, 2], [0], [1]], pa.list_(pa.int32()))
    batch = arrange_texts(table.append_column("positions", positions), [2, 0, 1]).on_device()
    assert batch.live.tolist() == [1, 2, 4, 6]
    assert [list(values) for values in unpack(batch, batch.input_ids[0])] == [[4], [5, 6, 7], [9]]


def test_packing_reads_chunked_and_sliced_tables() -> None:
    first = trajectory_table([{"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [True, False]}])
    second = trajectory_table(
        [
            {"prompt_ids": [9], "response_ids": [9], "response_mask": [False]},
            {"prompt_ids": [4, 5], "response_ids": [6], "response_mask": [True]},
        ]
    ).slice(1)
    batch = arrange_trajectories(pa.concat_tables([first, second]), [1, 0]).on_device()
    assert batch.input_ids.tolist() == [[4, 5, 6, 1, 2, 3]]
    assert batch.mask.tolist() == [False, True, False, True, False, False]


def test_packed_seq_params_hold_aligned_bounds() -> None:
    row = {"prompt_ids": [1, 2], "response_ids": [3], "response_mask": [True]}
    params = arrange_trajectories(trajectory_table([row] * 2), [0, 1], cp=2).on_device().packed_seq_params()
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv_padded.tolist() == [0, 4, 8]
    assert params.max_seqlen_q == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_mask": [True]}, "row 0: column 'response_mask' has 1 values for 2 response tokens"),
        ({"prompt_ids": []}, "row 0 has an empty prompt_ids"),
        ({"response_ids": None}, "column 'response_ids' has nulls"),
        ({"response_ids": [2, None]}, "column 'response_ids' has nulls"),
    ],
)
def test_bad_rows_are_named(change: dict, message: str) -> None:
    row = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [True, True]}
    with pytest.raises(ValueError, match=message):
        arrange_trajectories(trajectory_table([{**row, **change}]), [0]).on_device()


def test_missing_column_is_named() -> None:
    row = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [True, True]}
    with pytest.raises(ValueError, match="column 'values' is missing; the table has prompt_ids"):
        arrange_trajectories(trajectory_table([row]), [0], ["values"]).on_device()


def _table(rows: int) -> pa.Table:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 30, (rows, 2))
    columns = {
        "prompt_ids": [random.integers(0, 99, prompt) for prompt, _ in lengths],
        "response_ids": [random.integers(0, 99, response) for _, response in lengths],
        "response_mask": [random.integers(0, 2, response).astype(bool) for _, response in lengths],
        "advantages": [random.normal(size=response).astype(np.float32) for _, response in lengths],
    }
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def assert_equal(found: PackedBatch, wanted: PackedBatch) -> None:
    for field in fields(PackedBatch):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        values = (one.items(), other.items()) if isinstance(one, dict) else ([("", one)], [("", other)])
        for (name, a), (same, b) in zip(*values, strict=True):
            assert name == same
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a, b), field.name
            else:
                np.testing.assert_array_equal(a, b)


def test_each_is_the_one_that_is_packed_by_itself() -> None:
    table, rows = _table(6), [[4, 0], [1], [2, 3, 5]]
    ahead = MicroBatches(
        lambda micro=micro: arrange_trajectories(table, micro, ["advantages"]) for micro in rows
    )
    assert len(ahead) == 3
    seen = list(ahead)
    for found, micro in zip(seen, rows, strict=True):
        assert_equal(found, arrange_trajectories(table, micro, ["advantages"]).on_device())
    # A second pass over the micro-batches, as a second chunk of a pipeline stage makes it, and access from the end.
    assert all(again is first for again, first in zip(ahead, seen, strict=True)) and ahead[-1] is seen[-1]
    with pytest.raises(IndexError):
        ahead[3]


def test_one_is_laid_out_ahead_in_a_thread_and_no_more() -> None:
    table, begun, threads = _table(4), [threading.Event() for _ in range(4)], []

    def arrange(number: int) -> HostBatch:
        begun[number].set()
        threads.append(threading.current_thread())
        return arrange_trajectories(table, [number])

    ahead = MicroBatches((lambda number=number: arrange(number)) for number in range(4))
    assert not begun[0].is_set()
    assert ahead[0].lengths.size == 1
    assert begun[1].wait(60)  # packed while the first micro-batch is computed
    assert not begun[2].is_set()
    assert len(list(ahead)) == 4 and all(event.is_set() for event in begun)
    assert threads[0] is threading.current_thread() and len(threads) == 4
    assert len(set(threads[1:])) == 1 and threads[1] is not threads[0]


def test_what_is_wrong_with_one_is_raised_when_it_is_asked_for() -> None:
    table = _table(2)
    ahead = MicroBatches(
        [lambda: arrange_trajectories(table, [0]), lambda: arrange_trajectories(table, [1], ["values"])]
    )
    assert ahead[0].lengths.size == 1
    with pytest.raises(ValueError, match="column 'values' is missing"):
        ahead[1]


def test_all_tensors_of_a_micro_batch_are_in_one_buffer() -> None:
    """So that one copy moves them to a GPU."""
    batch = arrange_trajectories(_table(3), [0, 1, 2], ["advantages"]).on_device()
    tensors = [batch.input_ids, batch.position_ids, batch.labels, batch.mask, batch.live, batch.cu_seqlens]
    storages = {tensor.untyped_storage().data_ptr() for tensor in [*tensors, *batch.fields.values()]}
    assert len(storages) == 1
    assert torch.equal(batch.cu_seqlens.positions, batch.position_ids[0])
    assert batch.packed_seq_params().lengths == batch.cu_seqlens.diff().tolist()
