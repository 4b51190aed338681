from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from megarl.algorithms.aggregate import LossCounts
from megarl.data.sessions import num_sessions
from megarl.data.trajectories import (
    Generation,
    build_trajectories,
    expand_prompts,
    ragged,
    replace_column,
    sequence_lengths,
)
from megarl.layout.grid import ParallelLayout
from megarl.trainer.workers.dispatch import (
    MicroBatching,
    Plans,
    first_pass_plan,
    forward_plan,
    merge_columns,
    packing_metrics,
    update_plan,
    with_idle_rows,
)


def batch(lengths: list[int]) -> pa.Table:
    """One trajectory for each length of response; prompts of 3 tokens."""
    prompts = pa.table(
        {
            "uid": [f"p{i}" for i in range(len(lengths))],
            "data_source": ["test"] * len(lengths),
            "ground_truth": ["0"] * len(lengths),
            "extra_info": ["{}"] * len(lengths),
            "prompt_ids": pa.array([[1, 2, 3]] * len(lengths), pa.list_(pa.int32())),
        }
    )
    answers = [Generation(f"p{i}/0", [5] * n, [-0.5] * n, "stop", 1) for i, n in enumerate(lengths)]
    return build_trajectories(expand_prompts(prompts, 1), answers)


def test_every_row_is_planned_once_in_each_epoch_and_counted():
    table = batch([1, 2, 3, 4, 5, 6, 7, 8])
    layout = ParallelLayout(world=4, pp=2)
    cut = MicroBatching(mini_batch_size=4, max_tokens=20, micro_batch_size=None, epochs=2)
    plan, counts = update_plan(table, layout, cut, seed=0)
    assert [sorted(r for share in shares for micro in share for r in micro) for shares in plan] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ] * 2
    assert counts == [LossCounts(10, 4), LossCounts(26, 4)] * 2


def sessions(*paths: int) -> pa.Table:
    """Sessions with these numbers of trajectories, which have 1, 2, 3, ... tokens."""
    table = batch([*range(1, sum(paths) + 1)])
    uids = [f"p{one}/0.{path}" for one, number in enumerate(paths) for path in range(number)]
    return replace_column(table, "uid", pa.array(uids))


@pytest.mark.parametrize("paths", [(1, 1, 1, 2), (3, 1, 1, 1), (2, 2, 2, 3), (5, 1, 1, 1), (1, 2, 1, 9)])
@pytest.mark.parametrize("layout", [ParallelLayout(world=2), ParallelLayout(world=4, pp=2, vpp=2)])
@pytest.mark.parametrize("rows_each", [None, 1])
def test_any_number_of_trajectories_of_sessions_can_be_planned(paths, layout, rows_each):
    """The number of sessions determines the number of mini-batches, and idle rows have no live tokens."""
    table = sessions(*paths)
    filled = with_idle_rows(table, [layout, ParallelLayout(world=1)])
    names = ["uid", "response_ids", "response_mask"]
    assert filled.slice(0, table.num_rows).select(names) == table.select(names)
    assert num_sessions(filled) == len(paths)
    assert not any(mask for row in filled["response_mask"].to_pylist()[table.num_rows :] for mask in row)
    # The longest trajectory fills a micro-batch.
    longest = int(max(sequence_lengths(table))) if rows_each is None else None
    size = 2 if layout.dp * (layout.pp if layout.vpp else 1) <= 2 else len(paths)
    cut = MicroBatching(mini_batch_size=size, max_tokens=longest, micro_batch_size=rows_each, epochs=2)
    plan, counts = update_plan(filled, layout, cut, seed=0)
    assert len(plan) == 2 * len(paths) // size
    for epoch in (plan[: len(plan) // 2], plan[len(plan) // 2 :]):
        rows = sorted(row for shares in epoch for share in shares for micro in share for row in micro)
        assert rows == list(range(filled.num_rows))
    assert sum(one.trajectories for one in counts) == 2 * table.num_rows
    assert with_idle_rows(table, [ParallelLayout(world=1)]) is table


def test_old_log_probs_are_computed_in_the_micro_batches_of_the_first_epoch():
    table = batch([1, 2, 3, 4, 5, 6, 7, 8])
    cut = MicroBatching(mini_batch_size=4, max_tokens=20, micro_batch_size=None, epochs=2, shuffle=True)
    plan, _ = update_plan(table, ParallelLayout(world=2), cut, seed=7)
    first = first_pass_plan(plan, epochs=2)
    for dp in range(2):
        assert first[dp] == [micro for shares in plan[:2] for micro in shares[dp]]
    assert sorted(r for share in first for micro in share for r in micro) == list(range(8))


def test_plans_are_made_once_and_are_those_of_their_own_arguments():
    table, layout = batch([3, 1, 4, 1, 5, 9, 2, 6]), ParallelLayout(world=2)
    plain = MicroBatching(mini_batch_size=4, max_tokens=20, micro_batch_size=None)
    asked = [
        (of, cut, seed)
        for of in (table, batch([9, 2, 6, 5, 3, 5, 8, 9]))
        for cut in (plain, replace(plain, shuffle=True), replace(plain, max_tokens=40))
        for seed in (1, 2)
    ]
    plans = Plans()
    for of, cut, seed in asked:
        plan, counts = update_plan(of, layout, cut, seed, plans)
        assert (plan, counts) == update_plan(of, layout, cut, seed)
        assert update_plan(of, layout, cut, seed, plans)[0] is plan
        shares = forward_plan(of, layout, cut, plans)
        assert shares == forward_plan(of, layout, cut)
        assert forward_plan(of, layout, replace(cut, epochs=3), plans) is shares
    assert (
        len(plans.made) == 6
    )  # for the last table: forward plans of 2 budgets, update plans of 2 budgets and of 2 shuffle seeds


def test_interleaved_pipelines_get_multiples_of_their_stages():
    table = batch([4] * 6)
    cut = MicroBatching(mini_batch_size=6, max_tokens=100, micro_batch_size=None)
    (share,) = forward_plan(table, ParallelLayout(world=2, pp=2, vpp=2), cut)
    assert len(share) == 2


def test_plans_level_attention_and_say_how_even_they_are():
    table = batch([97] + [7] * 10)  # 100 and 10 tokens with their prompts
    layout = ParallelLayout(world=8, tp=2, cp=2, sp=True)
    cut = MicroBatching(mini_batch_size=11, max_tokens=200, micro_batch_size=None, pair_share=1.0)
    plan, _ = update_plan(table, layout, cut, seed=0)
    alone = [share for share in plan[0] if share == [[0]]]  # the long one costs 5,150, the others 65 each
    assert len(alone) == 1
    metrics = packing_metrics("actor", plan, table, layout, cut)
    assert metrics["perf/actor/num_micro"] == 1
    assert metrics["perf/actor/rank_imbalance"] == pytest.approx(5150 / ((5150 + 650) / 2) - 1)
    # Sequences are padded to multiples of 4 tokens: 10 become 12.
    assert metrics["perf/actor/padding"] == pytest.approx(1 - 200 / (100 + 10 * 12))
    plain = MicroBatching(mini_batch_size=11, max_tokens=200, micro_batch_size=None)
    plan, _ = update_plan(table, ParallelLayout(world=2), plain, seed=0)
    metrics = packing_metrics("actor", plan, table, ParallelLayout(world=2), plain)
    assert (metrics["perf/actor/padding"], metrics["perf/actor/rank_imbalance"]) == (0, 0)


def test_results_come_back_in_the_order_of_the_table():
    table = batch([2, 1, 3])
    results = [
        None,
        ([2, 0], {"values": (np.array([20, 21, 22, 0, 1], np.float32), np.array([0, 3, 5]))}),
        ([1], {"values": (np.array([10], np.float32), np.array([0, 1]))}),
    ]
    merged = merge_columns(table, results)
    assert ragged(merged, "values")[0].tolist() == [0, 1, 10, 20, 21, 22]


def test_a_row_that_nobody_computed_is_noticed():
    part = ([0], {"values": (np.array([1.0], np.float32), np.array([0, 1]))})
    with pytest.raises(AssertionError, match="each row is computed"):
        merge_columns(batch([1, 1]), [part])
