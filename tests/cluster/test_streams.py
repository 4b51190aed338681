"""Streams: what generator methods of ranks yield, as it comes, and how deaths and exceptions end them."""

import gc
import os
import signal
import time

import pyarrow as pa
import pytest
import ray
from ray._private import internal_api

from megarl.cluster import WorkerDied, WorkerFailed, stream, wait


def test_values_come_from_all_ranks_in_the_order_of_each(trio):
    values = list(stream(trio.stream_each("count", [(0,), (3,), (2,)]), [trio]))
    assert sorted((rank, number) for rank, number, _, _ in values) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    for rank in (1, 2):
        numbers = [number for of, number, _, _ in values if of == rank]
        assert numbers == sorted(numbers)
    assert all(main for _, _, main, _ in values)
    assert wait(trio.call("echo"), [trio])[2] == (2, (), {})  # the ranks go on as before


def test_a_value_comes_before_its_generator_ends(trio, tmp_path):
    """Rank 1 is let go only after rank 0's values, and its own first one, were here."""
    go = tmp_path / "go"
    (tmp_path / "gone").touch()
    paths = [str(tmp_path / "gone"), str(go), str(tmp_path / "gone")]
    values = stream(trio.stream_each("wait_for_file", [(path,) for path in paths]), [trio])
    assert sorted(next(values) for _ in range(5)) == [0, 0, 1, 2, 2]
    go.touch()
    assert list(values) == [1]


def test_tables_come_and_go_as_tables(trio):
    """Rows of a table, a large one and none."""
    whole = pa.table({"ids": [[1, 2], [3], [], [4]] * 100_000, "uid": ["a", "b", "c", None] * 100_000})
    parts = [whole.slice(2, 3), whole, whole.slice(0, 0)]
    came = list(stream(trio.stream_each("in_two_parts", [(part,) for part in parts]), [trio]))
    assert sorted(table.num_rows for table in came) == [0, 0, 1, 2, 200_000, 200_000]
    for rank, part in enumerate(parts):
        ours = [table for table in came if rank in table["rank"].to_pylist()[:1]]
        assert pa.concat_tables(ours or [came[0].slice(0, 0)]).drop_columns("rank").equals(part)


def bytes_in_store():
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    return internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used


def test_what_was_dropped_is_freed(trio):
    """10 x 8 MB a rank pass through the object store, which keeps none of it."""
    before = most = bytes_in_store()
    for _, _, _, array in stream(trio.stream_each("count", [(10, 2**20)] * 3), [trio]):
        most, size = max(most, bytes_in_store()), array.nbytes
    assert most >= before + size  # the test's own oracle: they do lie there
    del array
    gc.collect()
    deadline = time.monotonic() + 10
    while bytes_in_store() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert bytes_in_store() <= before


def test_a_killed_rank_ends_a_stream_that_hangs(start_group, tmp_path):
    """The dead process is of another group, and idle."""
    actor, critic = start_group("actor", 1), start_group("critic", 2)
    values = stream(actor.stream_each("wait_for_file", [(str(tmp_path / "never"),)]), [actor, critic])
    assert next(values) == 0
    begin = time.monotonic()
    os.kill(critic.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="critic rank 1"):
        next(values)
    assert time.monotonic() - begin < 5
    with pytest.raises(WorkerDied, match="critic rank 1"):
        next(stream(actor.stream_each("count", [(1,)]), [actor, critic]))


def test_a_killed_rank_ends_its_own_stream(start_group, tmp_path):
    group = start_group("actor", 2)
    values = stream(group.stream_each("wait_for_file", [(str(tmp_path / "never"),)] * 2), [group])
    assert {next(values), next(values)} == {0, 1}
    begin = time.monotonic()
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="actor rank 1") as caught:
        next(values)
    assert time.monotonic() - begin < 5
    assert caught.value.cause.startswith(("killed by SIGKILL", "killed or crashed"))


def test_an_exception_ends_the_stream_although_others_hang(start_group, tmp_path):
    group = start_group("actor", 2)
    values = stream(group.stream_each("count", [(3, 1, 0.0, 1), (1000, 1, 0.1, None)]), [group])
    begin = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        list(values)
    assert time.monotonic() - begin < 5
    assert (caught.value.role, caught.value.rank) == ("actor", 0)
    assert (caught.value.kind, caught.value.message) == ("LocalError", "1 is not 3")
    assert "raise LocalError(number, num)" in caught.value.remote_traceback
    assert "raise LocalError(number, num)" in (tmp_path / "actor-rank0.log").read_text()


def test_streams_of_other_groups_are_refused(start_group):
    actor, critic = start_group("actor", 1), start_group("critic", 1)
    with pytest.raises(AssertionError, match="not on a process of the groups"):
        next(stream(actor.stream_each("count", [(1,)]), [critic]))
