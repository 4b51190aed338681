"""Each guarantee that megarl/data/trajectories.py opens with, under its name."""

import dataclasses
import gc
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data import trajectories as tr
from megarl.data.files import write_parquet
from megarl.data.trajectories import Blocks, gather_lists


def make_prompts(num):
    return pa.table(
        {
            "uid": [f"train:{row}" for row in range(num)],
            "data_source": ["megarl/arithmetic"] * num,
            "ground_truth": [str(row) for row in range(num)],
            "extra_info": ["{}"] * num,
            "prompt_ids": [list(range(row + 1)) for row in range(num)],
        },
        schema=tr.PROMPT_SCHEMA,
    )


def make_generation(uid, length, **changes):
    values = {
        "uid": uid,
        "response_ids": np.arange(100, 100 + length),
        "log_probs": -np.arange(1, length + 1, dtype=np.float32),
        "finish_reason": "stop",
        "weight_version": 3,
        "environment_score": 0.5,  # NaN, which stands for no score, equals nothing
    }
    return tr.Generation(**{**values, **changes})


def make_trajectories(lengths=(3, 1, 2, 4), n=2):
    requests = tr.expand_prompts(make_prompts(len(lengths) // n), n)
    generations = [
        make_generation(uid, length) for uid, length in zip(requests["uid"].to_pylist(), lengths, strict=True)
    ]
    return tr.build_trajectories(requests, generations)


def test_expand_prompts_repeats_neighbours():
    requests = tr.expand_prompts(make_prompts(2), 3)
    assert requests.schema == tr.REQUEST_SCHEMA
    assert requests["uid"].to_pylist() == [f"train:{row}/{k}" for row in (0, 1) for k in (0, 1, 2)]
    assert requests["prompt_uid"].to_pylist() == ["train:0"] * 3 + ["train:1"] * 3
    assert requests["prompt_ids"].to_pylist() == [[0]] * 3 + [[0, 1]] * 3


@given(st.permutations(list(range(6))))
def test_rows_keep_the_order_of_the_requests(order):
    requests = tr.expand_prompts(make_prompts(3), 2)
    uids = requests["uid"].to_pylist()
    table = tr.build_trajectories(requests, [make_generation(uids[row], row + 1) for row in order])
    assert table.schema == tr.TRAJECTORY_SCHEMA
    assert table["uid"].to_pylist() == uids
    assert tr.list_lengths(table, "response_ids").tolist() == [1, 2, 3, 4, 5, 6]
    assert table["response_ids"].to_pylist()[2] == [100, 101, 102]
    assert table["rollout_log_probs"].to_pylist()[1] == [-1.0, -2.0]
    assert table["response_mask"].to_pylist()[3] == [True] * 4
    assert table["ground_truth"].to_pylist() == ["0", "0", "1", "1", "2", "2"]
    assert table["weight_version"].to_pylist() == [3] * 6
    assert tr.sequence_lengths(table).tolist() == [2, 3, 5, 6, 8, 9]


def test_every_request_has_exactly_one_generation():
    requests = tr.expand_prompts(make_prompts(1), 2)
    first, second = (make_generation(uid, 2) for uid in requests["uid"].to_pylist())
    with pytest.raises(ValueError, match=r"2 requests got 1 generations: no answer to \['train:0/1'\]"):
        tr.build_trajectories(requests, [first])
    with pytest.raises(ValueError, match="two generations for request train:0/0"):
        tr.build_trajectories(requests, [first, second, first])
    with pytest.raises(ValueError, match=r"no request for \['other'\]"):
        tr.build_trajectories(requests, [first, second, make_generation("other", 2)])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"log_probs": [-1.0]}, "rollout_log_probs has another length than response_ids"),
        ({"response_ids": [], "log_probs": []}, "response_ids is empty"),
        ({"finish_reason": "abort"}, "finish_reason is none of stop, length"),
    ],
)
def test_bad_generations_are_named(changes, message):
    requests = tr.expand_prompts(make_prompts(1), 2)
    generations = [make_generation("train:0/0", 2), make_generation("train:0/1", 2, **changes)]
    with pytest.raises(ValueError, match=rf"trajectory train:0/1: {message} \(1 of 2 trajectories\)"):
        tr.build_trajectories(requests, generations)


def test_log_probs_that_are_not_finite_are_kept_for_those_who_ask(tmp_path):
    requests = tr.expand_prompts(make_prompts(1), 2)
    generations = [make_generation(uid, 2) for uid in requests["uid"].to_pylist()]
    generations[1] = dataclasses.replace(generations[1], log_probs=[-1.0, float("nan")])
    table = tr.build_trajectories(requests, generations)
    message = r"train:0/1: rollout_log_probs has values that are not finite \(1 of 2 trajectories\)"
    with pytest.raises(ValueError, match=message):
        tr.write_trajectories(table, tmp_path / "a.parquet")
    path = write_parquet(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=message):
        tr.read_trajectories(path)
    assert np.isnan(tr.ragged(tr.read_trajectories(path, finite=False), "rollout_log_probs")[0]).sum() == 1


def test_all_response_aligned_lists_have_the_length_of_the_response():
    table = make_trajectories()
    flat, offsets = tr.ragged(table, "rollout_log_probs")
    table = tr.append_column(table, "values", (flat * 2, offsets))
    table = tr.append_column(table, "score", np.array([1, 0, 1, 0]))
    assert table.schema.field("values").type == pa.list_(pa.float32())
    assert table.schema.field("score").type == pa.float32()
    assert table["values"].to_pylist()[2] == [-2.0, -4.0]
    assert tr.response_columns(table) == ["response_ids", "response_mask", "rollout_log_probs", "values"]
    tr.validate_trajectories(table)
    with pytest.raises(AssertionError, match="returns is not aligned"):
        tr.append_column(table, "returns", (np.zeros(10), np.array([0, 1, 2, 3, 10])))
    with pytest.raises(AssertionError, match="score is there already"):
        tr.append_column(table, "score", np.zeros(4))
    misaligned = table.set_column(
        table.column_names.index("values"), "values", table["values"].take([1, 0, 2, 3])
    )
    with pytest.raises(ValueError, match=r"trajectory train:0/0: values has another length .*\(2 of 4"):
        tr.validate_trajectories(misaligned)


def test_ragged_gives_views():
    table = make_trajectories()
    flat, offsets = tr.ragged(table, "response_ids")
    array = table["response_ids"].chunk(0)
    assert flat.ctypes.data == array.values.buffers()[1].address
    assert flat.dtype == np.int32 and not flat.flags.writeable
    assert offsets.dtype == np.int64 and offsets.tolist() == [0, 3, 4, 6, 10]
    again = tr.from_ragged(flat, offsets)
    assert again.values.buffers()[1].address == flat.ctypes.data
    mask, _ = tr.ragged(table, "response_mask")
    assert mask.dtype == np.bool_ and mask.all() and len(mask) == 10


def test_ragged_of_slices_and_chunks():
    table = make_trajectories()
    whole = table["response_ids"].to_pylist()
    for part in (table.slice(1, 2), table.slice(4), pa.concat_tables([table.slice(2), table.slice(0, 2)])):
        flat, offsets = tr.ragged(part, "response_ids")
        rows = [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)]
        assert rows == part["response_ids"].to_pylist()
        assert offsets[0] == 0 and len(rows) == part.num_rows
    assert table["response_ids"].to_pylist() == whole
    flat, offsets = tr.ragged(tr.TRAJECTORY_SCHEMA.empty_table(), "rollout_log_probs")
    assert flat.dtype == np.float32 and flat.size == 0 and offsets.tolist() == [0]


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=5), max_size=8))
def test_lists_round_trip(lists):
    flat, offsets = tr.from_lists(lists, np.float32)
    assert flat.dtype == np.float32
    table = pa.table({"x": tr.from_ragged(flat, offsets)})
    assert table["x"].to_pylist() == lists
    flat_again, offsets_again = tr.ragged(table, "x")
    np.testing.assert_array_equal(flat_again, flat)
    np.testing.assert_array_equal(offsets_again, offsets)


def test_take():
    table = make_trajectories()
    taken = tr.take(table, [2, 0, 2])
    assert taken["uid"].to_pylist() == ["train:1/0", "train:0/0", "train:1/0"]
    assert taken["response_ids"].num_chunks == 1
    with pytest.raises(IndexError):
        tr.take(table, [4])


@pytest.mark.parametrize(
    "kind",
    ["int32", "int64", "float32", "double", "bool", "string", "with nulls", "in chunks", "element", "large"],
)
def test_take_is_arrows(kind, tmp_path):
    """Lists of every type: those whose values are copied row by row, and those that are left to Arrow."""
    lists = [[1, 0], [], [3, 4, 5], [6], [0]]
    types = {"string": pa.string(), "with nulls": pa.int32(), "in chunks": pa.int32(), "large": pa.int32()}
    value = types.get(kind) or (pa.int32() if kind == "element" else pa.type_for_alias(kind))
    if kind == "string":
        lists = [[str(number) for number in numbers] for numbers in lists]
    if kind == "with nulls":
        lists[2] = [3, None, 5]
    typed = (
        pa.large_list(value)
        if kind == "large"
        else pa.list_(pa.field("element" if kind == "element" else "item", value))
    )
    column = pa.array([[bool(x) for x in row] for row in lists] if kind == "bool" else lists, typed)
    table = pa.table({"uid": list("abcde"), "lists": column, "step": range(5)})
    if kind == "in chunks":
        table = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    for rows in ([4, 0, 2, 2, 1], [], [3]):
        for source, shift in ((table, 0), (table.slice(1), -1)):
            chosen = [row for row in rows if row + shift >= 0]
            taken = tr.take(source, [row + shift for row in chosen])
            assert taken.schema.equals(table.schema, check_metadata=True)
            assert taken.equals(table.take(pa.array(chosen, pa.int64())))
            assert all(column.num_chunks <= 1 for column in taken.columns)
            taken.validate(full=True)


def test_parquet_round_trip(tmp_path):
    table = tr.append_column(make_trajectories(), "score", np.array([1, 0, 1, 0]))
    path = tr.write_trajectories(table, tmp_path / "rollouts" / "step_1.parquet")
    again = tr.read_trajectories(path)
    assert again.equals(table)
    assert again.schema == table.schema
    assert [entry.name for entry in path.parent.iterdir()] == ["step_1.parquet"]


def test_reading_what_is_no_trajectory_table(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.parquet does not exist"):
        tr.read_trajectories(tmp_path / "gone.parquet")
    text = tmp_path / "text.parquet"
    text.write_text("no parquet")
    with pytest.raises(ValueError, match=r"text\.parquet is not a valid Parquet file"):
        tr.read_trajectories(text)
    other = tmp_path / "other.parquet"
    tr.write_parquet(make_trajectories().drop_columns(["weight_version"]), other)
    with pytest.raises(ValueError, match=r"other\.parquet holds no valid .*'weight_version' is missing"):
        tr.read_trajectories(other)


def test_wrong_types_are_named():
    table = make_trajectories()
    wrong = table.set_column(6, "response_ids", table["response_ids"].cast(pa.list_(pa.int64())))
    with pytest.raises(ValueError, match=r"'response_ids' has type list<.*int64>, expected list<.*int32>"):
        tr.validate_trajectories(wrong)
    twice = pa.concat_tables([table, table.slice(1, 1)])
    with pytest.raises(ValueError, match="trajectory train:0/1 occurs more than once"):
        tr.validate_trajectories(twice)


def test_what_an_environment_took_part_in():
    """Masks, the prompt with the environment's additions, its score and its notes; rows without an environment are unchanged."""
    requests = tr.expand_prompts(make_prompts(2), 1)
    played = make_generation(
        "train:1/0",
        4,
        response_mask=[True, False, False, True],
        num_turns=2,
        environment_score=None,
        environment_notes='{"numbers": {"calls": 1.0}, "error": null}',
        prompt_ids=[7, 8, 9],
    )
    table = tr.build_trajectories(requests, [played, make_generation("train:0/0", 2)])
    assert table["prompt_ids"].to_pylist() == [[0], [7, 8, 9]]
    assert table["response_mask"].to_pylist() == [[True, True], [True, False, False, True]]
    assert table["num_turns"].to_pylist() == [1, 2]
    assert table["environment_score"][0].as_py() == 0.5 and np.isnan(table["environment_score"][1].as_py())
    assert tr.environment_notes(table) == [
        tr.EnvironmentNotes({}, None),
        tr.EnvironmentNotes({"calls": 1.0}, None),
    ]
    assert tr.environment_notes(table.drop_columns(["environment_notes"]))[1].numbers == {}
    with pytest.raises(ValueError, match="train:1/0: response_mask has another length"):
        short = dataclasses.replace(played, response_mask=[True])
        tr.build_trajectories(requests, [short, make_generation("train:0/0", 2)])


MANY = 3 << 18  # float32 values of 3 MiB: large enough for a block


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_block_is_given_out_again_only_when_nothing_is_left_of_it():
    blocks = Blocks()
    first = blocks.empty(MANY, np.float32)
    at = address(first)
    column = pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), pa.array(first[:]))
    first[:] = 1
    view = first.reshape(2, -1)[1, 5:]
    del first
    for held in ("column", "view"):
        second = blocks.empty(MANY, np.float32)
        assert address(second) != at, held
        second[:] = 2
        if held == "column":
            assert np.all(column.values.to_numpy() == 1)
            column = None
        else:
            assert np.all(view == 1)
            view = None
        gc.collect()
    assert at in {
        address(array) for array in [blocks.empty(MANY - 7, np.int32), blocks.empty(MANY, np.int32)]
    }


def test_blocks_that_are_too_small_are_given_up():
    blocks = Blocks()
    blocks.empty(MANY, np.float32)
    large = blocks.empty(4 * MANY, np.float32)
    assert len(large) == 4 * MANY
    assert not blocks._free


@pytest.mark.parametrize("value", [pa.int32(), pa.float32(), pa.bool_()])
def test_gathered_rows_are_those_of_arrows_own_take(value):
    random = np.random.default_rng(0)
    rows = [random.integers(0, 2, size).tolist() for size in random.integers(0, 9, 40)]
    whole = pa.array([[bool(x) for x in row] for row in rows] if pa.types.is_boolean(value) else rows,
                     pa.list_(value))  # fmt: skip
    chunks = [whole.slice(3, 10), whole.slice(13, 0), whole.slice(13, 20), whole.slice(33)]
    for chosen in (np.arange(37), random.permutation(37), random.integers(0, 37, 90), np.empty(0, np.int64)):
        for blocks in (None, Blocks()):
            found = gather_lists(chunks, chosen, blocks)
            found.validate(full=True)
            assert found.equals(whole.slice(3).take(pa.array(chosen)))
    for row in (-1, 37):
        with pytest.raises(IndexError, match="of a table of 37"):
            gather_lists(chunks, np.array([row]), None)


def test_texts_of_which_one_chunk_cannot_have_all():
    size = 2**30  # of texts that no memory is needed for, because they are not read

    def chunk(text):
        data = np.zeros(size + len(text), np.uint8)
        data[size:] = list(text)
        offsets = np.array([0, size, len(data)], np.int32)
        return pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(data))

    table = pa.table({"text": pa.chunked_array([chunk(b"one"), chunk(b"three")]), "row": range(4)})
    taken = tr.take(table, [3, 1, 3])
    assert taken["text"].to_pylist() == ["three", "one", "three"]
    assert taken["row"].to_pylist() == [3, 1, 3]


def test_texts_that_become_several_chunks(monkeypatch):
    monkeypatch.setattr(tr, "_TEXT_BYTES", 100)
    texts = [str(row) * row for row in range(40)]
    column = pa.chunked_array([texts[:13], [], texts[13:]])
    chosen = np.random.default_rng(0).integers(0, 40, 90)
    for rows in (np.arange(40), chosen, np.empty(0, np.int64)):
        found = tr.take(pa.table({"text": column}), rows)["text"]
        found.validate(full=True)
        assert found.to_pylist() == [texts[row] for row in rows]
        assert all(chunk.nbytes < 100 + 2 * 40 + 4 * 91 for chunk in found.chunks)
    assert tr.take(pa.table({"text": column}), chosen)["text"].num_chunks > 10
    assert tr.take(pa.table({"text": column}), [1, 2])["text"].num_chunks > 0
