import itertools
import json
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.loader import TableLoader


def make_loader(num_rows=10, batch_size=3, shuffle=True, seed=1, drop_last=True):
    dataset = SimpleNamespace(table=pa.table({"row": list(range(num_rows))}))
    return TableLoader(dataset, batch_size, shuffle, seed, drop_last)


def rows(batches):
    return [batch["row"].to_pylist() for batch in batches]


def test_table_order_without_shuffle():
    loader = make_loader(7, 3, shuffle=False)
    assert len(loader) == 2
    assert rows(loader) == [[0, 1, 2], [3, 4, 5]]
    loader = make_loader(7, 3, shuffle=False, drop_last=False)
    assert len(loader) == 3
    assert rows(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_shuffle_depends_on_seed_and_epoch_alone():
    first, second = make_loader(drop_last=False), make_loader(drop_last=False)
    epochs = [rows(first) for _ in range(3)]
    assert epochs == [rows(second) for _ in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(10))
    assert epochs[0] != epochs[1]
    assert epochs[0] != rows(make_loader(seed=2, drop_last=False))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 30), st.booleans(), st.booleans())
@settings(deadline=None)
def test_resumed_loader_continues_where_it_stopped(num_rows, batch_size, num_done, shuffle, drop_last):
    batch_size = min(batch_size, num_rows)

    def stream(loader, num_epochs=6):
        for epoch in range(loader.epoch, num_epochs):
            for batch in loader:
                yield epoch, batch["row"].to_pylist()

    def make():
        return make_loader(num_rows, batch_size, shuffle, 5, drop_last)

    uninterrupted = list(stream(make()))
    loader = make()
    done = list(itertools.islice(stream(loader), num_done))
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert done + list(stream(resumed)) == uninterrupted


def test_position_of_other_data_is_refused():
    state = make_loader(num_rows=10).state_dict()
    with pytest.raises(ValueError, match="saved with num_rows = 10, this run has 11"):
        make_loader(num_rows=11).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with seed = 1, this run has 2"):
        make_loader(seed=2).load_state_dict(state)


def test_fewer_rows_than_a_batch():
    with pytest.raises(ValueError, match="dataset has 2 rows, too few for one batch of 3"):
        make_loader(2, 3)
    assert rows(make_loader(2, 3, shuffle=False, drop_last=False)) == [[0, 1]]
    with pytest.raises(ValueError, match="batch size must be at least 1, found 0"):
        make_loader(2, 0)
    with pytest.raises(ValueError, match="seed must not be negative, found -1"):
        make_loader(seed=-1)
