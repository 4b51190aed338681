import io
import itertools
import json
from collections import Counter

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import stream
from megarl.data.files import resolve_files
from megarl.data.loader import BatchLoader, MixtureFeed
from megarl.data.prompts import PromptDataset, PromptReader
from megarl.data.stream import StreamFeed, cut_pieces, read_piece
from tests.data.shared import prompt_row


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """11 rows in two Parquet files of small row groups, 6 JSON lines between them."""
    folder = tmp_path_factory.mktemp("stream")
    pq.write_table(
        pa.Table.from_pylist([prompt_row(truth=f"a{row}") for row in range(8)]),
        folder / "a.parquet",
        row_group_size=5,
    )
    lines = [json.dumps(prompt_row(truth=f"b{row}")) for row in range(6)]
    (folder / "b.jsonl").write_text("\n" + "\n\n".join(lines))  # empty lines are no rows
    pq.write_table(
        pa.Table.from_pylist([prompt_row(truth=f"c{row}") for row in range(3)]), folder / "c.parquet"
    )
    return resolve_files([f"{folder}/a.parquet", f"{folder}/b.jsonl", f"{folder}/c.parquet"])


NAMES = [f"{file}{row}" for file, num in (("a", 8), ("b", 6), ("c", 3)) for row in range(num)]


def make_feed(files, tokenizer, *, piece=2, window=5, shuffle=True, seed=1, **reading):
    reader = PromptReader(tokenizer, max_prompt_length=reading.pop("max_prompt_length", 64), **reading)
    return StreamFeed(cut_pieces(files, piece), reader, shuffle=shuffle, seed=seed, window_rows=window)


def names(batch):
    return batch["ground_truth"].to_pylist()


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 100])
def test_pieces_are_all_rows_in_file_order(files, max_rows):
    pieces = cut_pieces(files, max_rows)
    assert max(piece.num_rows for piece in pieces) <= max_rows
    rows = [row for piece in pieces for row in read_piece(piece, ["reward_model"])]
    assert [row.values["reward_model"]["ground_truth"] for row in rows] == NAMES
    assert [row.uid for row in rows] == [f"{name[0]}:{name[1]}" for name in NAMES]
    assert [row.number for row in rows] == [int(name[1]) for name in NAMES]


@given(st.integers(0, 20), st.integers(1, 7))
@settings(max_examples=20)
def test_the_first_rows_alone(files, max_samples, max_rows):
    pieces = cut_pieces(files, max_rows, max_samples, "x:")
    rows = [row.uid for piece in pieces for row in read_piece(piece, ["reward_model"])]
    assert rows == [f"x:{name[0]}:{name[1]}" for name in NAMES[:max_samples]]


def test_only_the_wanted_part_of_a_row_group_is_kept(files):
    """Row 6 is the second of the second row group of the file."""
    piece = next(piece for piece in cut_pieces(files, 1) if piece.first == 6)
    assert (piece.place, piece.skip, piece.num_rows) == (1, 1, 1)
    assert [row.values["reward_model"]["ground_truth"] for row in read_piece(piece, ["reward_model"])] == [
        "a6"
    ]


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 3), st.booleans())
@settings(max_examples=15)
def test_an_epoch_has_every_row_once(files, tokenizer, piece, window, seed, shuffle):
    feed = make_feed(files, tokenizer, piece=piece, window=window, shuffle=shuffle, seed=seed)
    first, second = [], []
    for rows in (first, second):
        while feed.left:
            rows += names(feed.take(1))
        feed.next_epoch()
    assert sorted(first) == sorted(second) == sorted(NAMES)
    if not shuffle:
        assert first == second == NAMES


def test_the_order_depends_on_seed_and_epoch_alone(files, tokenizer):
    def epochs(batch_size, **keys):
        loader = BatchLoader(make_feed(files, tokenizer, **keys), batch_size)
        return [[name for batch in loader for name in names(batch)] for _ in range(3)]

    assert epochs(1) == epochs(1) == epochs(17)
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1)[0] != epochs(1, seed=2)[0]


def test_without_shuffle_the_table_is_the_same_as_read_at_once(files, tokenizer):
    whole = PromptDataset([file.name for file in files], tokenizer, max_prompt_length=64).table
    assert make_feed(files, tokenizer, shuffle=False).take(17) == whole


@given(
    st.integers(0, 12), st.integers(1, 5), st.integers(1, 4), st.integers(1, 18), st.booleans(), st.booleans()
)
@settings(max_examples=12)
def test_a_resumed_stream_continues_where_it_stopped(
    files, tokenizer, num_done, batch_size, piece, window, shuffle, filtered
):
    """At every position; also where an epoch ends early because rows are left out."""
    keys = {"max_prompt_length": 16, "filter_overlong_prompts": True} if filtered else {}

    def make():
        return BatchLoader(
            make_feed(
                mixed if filtered else files, tokenizer, piece=piece, window=window, shuffle=shuffle, **keys
            ),
            batch_size,
        )

    def batches(loader, num_epochs=3):
        while loader.epoch < num_epochs:
            for batch in loader:
                yield names(batch)

    mixed = long_and_short()
    uninterrupted = list(batches(make()))
    loader = make()
    done = list(itertools.islice(batches(loader), num_done))
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert done + list(batches(resumed)) == uninterrupted


def test_a_mixture_may_draw_nothing_of_a_stream(files, tokenizer):
    """Of ten prompts one is of stream b: one of the two batches has none of b, and all prompts of a come in their order."""
    feeds = {
        name: make_feed([file], tokenizer, shuffle=False) for name, file in zip("ab", files, strict=False)
    }
    loader = BatchLoader(MixtureFeed(feeds, {"a": 9, "b": 1}, 4), 4)
    batches = [names(batch) for batch in itertools.islice(loader, 2)]
    assert any(all(name[0] == "a" for name in batch) for batch in batches)
    of_a = [name for batch in batches for name in batch if name[0] == "a"]
    assert len(of_a) >= 7 and of_a == NAMES[: len(of_a)]


def long_and_short():
    """20 prompts in memory, every third of which has over 16 tokens."""
    rows = [prompt_row("Tom has 3 pens. " * (9 if row % 3 == 0 else 1), truth=str(row)) for row in range(20)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=4)
    fsspec.filesystem("memory").pipe("/long_and_short.parquet", buffer.getvalue())
    return resolve_files("memory://long_and_short.parquet")


def test_rows_that_are_left_out_end_an_epoch_early(tokenizer):
    """13 of 20 prompts are short enough: an epoch has two batches of five instead of four."""
    feed = make_feed(long_and_short(), tokenizer, max_prompt_length=16, filter_overlong_prompts=True)
    loader = BatchLoader(feed, 5)
    assert len(loader) == 4
    for _ in range(2):
        batches = [names(batch) for batch in loader]
        assert [len(batch) for batch in batches] == [5, 5]
        assert all(int(name) % 3 for batch in batches for name in batch)
    assert loader.epoch == 2


def test_an_epoch_without_a_batch_is_an_error(tokenizer):
    feed = make_feed(long_and_short(), tokenizer, max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(ValueError, match="of the 20 rows of an epoch fewer than one batch of 5 are left"):
        list(BatchLoader(feed, 5))


def test_no_more_than_a_window_and_a_piece_is_read_ahead(files, tokenizer, monkeypatch):
    """Rows that were read before are not read again: resuming reads one window."""
    read = []

    def counting(piece, columns):
        rows = read_piece(piece, columns)
        read.append(len(rows))
        return rows

    monkeypatch.setattr(stream, "read_piece", counting)
    feed = make_feed(files, tokenizer, piece=2, window=5)
    assert read == []  # no row is read before it is needed
    for taken in range(1, 18):
        feed.take(1)
        assert sum(read) <= taken + 5 + 2 - 1
    assert sum(read) == 17
    state, read[:] = feed.state_dict() | {"read": 16}, []
    resumed = make_feed(files, tokenizer, piece=2, window=5)
    resumed.load_state_dict(state)
    assert 1 <= sum(read) <= 6


def test_window_mixes_rows_of_several_pieces(files, tokenizer):
    feed = make_feed(files, tokenizer, piece=1, window=100)
    first = [names(feed.take(1))[0] for _ in range(17)]
    assert Counter(name[0] for name in first[:8]) != Counter({"a": 8})
    assert first != NAMES


def test_a_wrong_row_is_named_when_it_is_met(tmp_path, tokenizer):
    rows = [prompt_row(truth=str(row)) for row in range(4)]
    rows[2]["data_source"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    feed = make_feed(resolve_files(f"{tmp_path}/x.parquet"), tokenizer, shuffle=False)
    assert names(feed.take(2)) == ["0", "1"]
    with pytest.raises(ValueError, match=r"x\.parquet row 2: 'data_source' must be a string, found None"):
        feed.take(2)


def test_a_line_that_is_no_json_is_named(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_text(json.dumps(prompt_row()) + "\n\n{\n")
    feed = make_feed(resolve_files(f"{tmp_path}/x.jsonl"), tokenizer, shuffle=False, piece=1, window=1)
    feed.take(1)
    with pytest.raises(ValueError, match=r"x\.jsonl row 1: not valid JSON"):
        feed.take(1)


def test_prompts_that_a_run_cannot_use_are_refused_before_they_are_handed_out(files, tokenizer):
    def refuse(table):
        raise ValueError(f"no rule for {set(table['data_source'].to_pylist())}")

    reader = PromptReader(tokenizer, max_prompt_length=64)
    feed = StreamFeed(cut_pieces(files, 9), reader, shuffle=True, seed=0, window_rows=9, check=refuse)
    with pytest.raises(ValueError, match=r"no rule for \{'megarl/arithmetic'\}"):
        next(iter(BatchLoader(feed, 2)))


def test_position_of_other_data_is_refused(files, tokenizer):
    state = make_feed(files, tokenizer).state_dict()
    with pytest.raises(ValueError, match="saved with window_rows = 5, this run has 6"):
        make_feed(files, tokenizer, window=6).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with num_rows = 17, this run has 14"):
        make_feed(files[:2], tokenizer).load_state_dict(state)


def test_files_without_rows(tmp_path, tokenizer):
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="the data files have no rows"):
        make_feed(resolve_files(f"{tmp_path}/x.jsonl"), tokenizer)
