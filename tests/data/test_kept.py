"""Kept tokens as a column: in tables, after reordering, in Parquet, and values that do not fit."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megarl.data import trajectories as tr
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS, KeptTokens
from tests.data.test_trajectories import make_generation, make_prompts

SETS = [[[100], [101, 5], [102, 7, 9]], [[4, 100]], None, [[100], [101], [1, 2, 102], [103]]]


def kept(sets: list[list[int]]) -> KeptTokens:
    return KeptTokens(
        np.array([token for own in sets for token in own], np.int32), np.array(list(map(len, sets)), np.int32)
    )


def made() -> pa.Table:
    """Four trajectories; one of them, with two tokens, was not drawn and has no kept tokens."""
    requests = tr.expand_prompts(make_prompts(2), 2)
    generations = [
        make_generation(uid, 2) if own is None else make_generation(uid, len(own), kept=kept(own))
        for uid, own in zip(requests["uid"].to_pylist(), SETS, strict=True)
    ]
    return tr.build_trajectories(requests, generations, keeps=True)


def test_through_other_orders_and_parquet(tmp_path: Path) -> None:
    taken = tr.take(made(), [3, 2, 0], tr.Blocks())
    tr.write_trajectories(taken, tmp_path / "some.parquet")
    for table in (taken, tr.read_trajectories(tmp_path / "some.parquet")):
        assert table[KEPT_IDS].type == table[KEPT_COUNTS].type == pa.list_(pa.int32())
        assert table[KEPT_COUNTS].to_pylist() == [[1, 1, 3, 1], [0, 0], [1, 2, 3]]
        assert table[KEPT_IDS].to_pylist() == [
            [token for own in SETS[row] or [] for token in own] for row in (3, 2, 0)
        ]
        assert KEPT_COUNTS in tr.response_columns(table) and KEPT_IDS not in tr.response_columns(table)


def test_counts_are_those_of_the_tokens() -> None:
    table = made()
    wrong = table.set_column(table.column_names.index(KEPT_IDS), KEPT_IDS, table[KEPT_IDS].take([1, 0, 2, 3]))
    with pytest.raises(
        ValueError, match=r"kept_ids has another number of tokens than kept_counts says \(2 of"
    ):
        tr.validate_trajectories(wrong)


def test_parts_are_joined_and_cut() -> None:
    joined = KeptTokens.joined([kept(SETS[0]), KeptTokens.none(2), kept(SETS[1])])
    assert joined.ids.dtype == joined.counts.dtype == np.int32
    assert joined.counts.tolist() == [1, 2, 3, 0, 0, 2] and joined.ids.tolist() == [
        100,
        101,
        5,
        102,
        7,
        9,
        4,
        100,
    ]
    first = joined.first(2)
    assert first.counts.tolist() == [1, 2] and first.ids.tolist() == [100, 101, 5]
