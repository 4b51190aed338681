import itertools
import json
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema.data import SamplerConfig
from megarl.data import trajectories
from megarl.data.loader import BatchLoader, MixtureFeed, Shares, TableFeed, TableLoader
from megarl.data.samplers import FunctionSampler, make_sampler


def make_loader(num_rows=10, batch_size=3, shuffle=True, seed=1):
    dataset = SimpleNamespace(table=pa.table({"row": list(range(num_rows))}))
    return TableLoader(dataset, batch_size, shuffle, seed)


def rows(batches):
    return [batch["row"].to_pylist() for batch in batches]


def test_table_order_without_shuffle():
    loader = make_loader(7, 3, shuffle=False)
    assert len(loader) == 2
    assert rows(loader) == [[0, 1, 2], [3, 4, 5]]


def test_shuffle_depends_on_seed_and_epoch_alone():
    first, second = make_loader(batch_size=5), make_loader(batch_size=5)
    epochs = [rows(first) for _ in range(3)]
    assert epochs == [rows(second) for _ in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(10))
    assert epochs[0] != epochs[1]
    assert epochs[0] != rows(make_loader(batch_size=5, seed=2))


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 30), st.booleans())
def test_resumed_loader_continues_where_it_stopped(num_rows, batch_size, num_done, shuffle):
    batch_size = min(batch_size, num_rows)

    def stream(loader, num_epochs=6):
        for epoch in range(loader.epoch, num_epochs):
            for batch in loader:
                yield epoch, batch["row"].to_pylist()

    def make():
        return make_loader(num_rows, batch_size, shuffle, 5)

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


def test_batches_with_more_texts_than_one_chunk_can_have(monkeypatch):
    monkeypatch.setattr(trajectories, "_TEXT_BYTES", 10)  # in place of a gibibyte
    table = pa.table({"text": ["easy", "harder", "hardest", "impossible"], "row": range(4)})
    batch = TableFeed(table, make_sampler(SamplerConfig(), shuffle=False), seed=0).take(4)
    assert batch["text"].num_chunks > 1
    assert batch.to_pydict() == table.to_pydict()


def test_batches_of_a_table_with_more_values_than_one_chunk_can_have():
    size = 2**30  # of bits that no memory is needed for, because they are not read
    values = pa.Array.from_buffers(
        pa.bool_(), size + 2, [None, pa.py_buffer(np.zeros(size // 8 + 1, np.uint8))]
    )
    chunk = pa.ListArray.from_arrays(pa.array([0, size, size + 2], pa.int32()), values)
    table = pa.table({"flags": pa.chunked_array([chunk, chunk]), "row": range(4)})
    sampler = FunctionSampler(SamplerConfig(name="short"), lambda table, seed, epoch: np.array([3, 1, 0, 2]))
    batch = TableFeed(table, sampler, seed=0).take(2)
    assert batch.to_pydict() == {"flags": [[False, False]] * 2, "row": [3, 1]}


def test_fewer_rows_than_a_batch():
    with pytest.raises(ValueError, match="dataset has 2 rows, too few for one batch of 3"):
        make_loader(2, 3)
    with pytest.raises(ValueError, match="batch size must be at least 1, found 0"):
        make_loader(2, 0)
    with pytest.raises(ValueError, match="seed must not be negative, found -1"):
        make_loader(seed=-1)


WEIGHTS = st.lists(st.one_of(st.integers(1, 50), st.floats(0.001, 100)), min_size=1, max_size=6)


def make_feed(name, num_rows, shuffle=True, seed=3):
    table = pa.table({"uid": [f"{name}:{row}" for row in range(num_rows)]})
    return TableFeed(table, make_sampler(SamplerConfig(), shuffle), seed)


def make_mixture_loader(sizes, weights, batch_size, shuffle=True):
    feeds = {name: make_feed(name, size, shuffle) for name, size in sizes.items()}
    return BatchLoader(MixtureFeed(feeds, weights, batch_size), batch_size)


def sources(batch):
    return [uid.split(":")[0] for uid in batch["uid"].to_pylist()]


def test_shares_by_hand():
    """A half and two quarters; then two thirds and a third, given as weights 2 and 1."""
    shares = Shares([0.5, 0.25, 0.25])
    drawn = [shares.draw() for _ in range(8)]
    assert [drawn[:4].count(i) for i in range(3)] == [2, 1, 1]
    assert [drawn[4:].count(i) for i in range(3)] == [2, 1, 1]
    shares = Shares([2, 1])
    assert [shares.draw() for _ in range(6)] == [0, 1, 0, 0, 1, 0]


def test_weights_mean_the_decimals_that_are_written():
    assert Shares([0.1, 0.2, 0.7]).weights == [1, 2, 7]
    assert Shares([1e-05, 1]).weights == [1, 100_000]


@given(WEIGHTS, st.integers(1, 200))
@settings(max_examples=40)
def test_every_prefix_has_its_share_to_less_than_one(weights, num_draws):
    """Tijdeman's bound, 1 - 1 / (2n - 2), after every draw."""
    shares, exact = Shares(weights), [Fraction(repr(weight)) for weight in weights]
    n = len(weights)
    bound = 1 - Fraction(1, 2 * n - 2) if n > 1 else 0
    for time in range(1, num_draws + 1):
        shares.draw()
        assert sum(shares.counts) == time
        for weight, count in zip(exact, shares.counts, strict=True):
            assert abs(weight * time / sum(exact) - count) <= bound


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12), st.booleans(), st.data())
@settings(max_examples=25)
def test_batches_have_their_shares_and_no_prompt_twice(weights, batch_size, shuffle, data):
    names = "abcd"[: len(weights)]
    sizes = {name: data.draw(st.integers(batch_size, 3 * batch_size)) for name in names}
    loader = make_mixture_loader(sizes, dict(zip(names, weights, strict=True)), batch_size, shuffle)
    assert len(loader) == sum(sizes.values()) // batch_size
    flat = []
    for _ in range(2):
        for batch in loader:
            uids = batch["uid"].to_pylist()
            assert len(set(uids)) == len(uids) == batch_size
            flat += sources(batch)
    for name, weight in zip(names, weights, strict=True):
        places = np.array(flat) == name
        share = weight / sum(weights)
        for size in (1, batch_size, 2 * batch_size):  # windows that begin anywhere: mini-batches, steps
            windows = np.convolve(places, np.ones(size), "valid")
            assert np.all(np.abs(windows - share * size) < 2)


@given(st.integers(0, 30), st.booleans())
@settings(max_examples=15)
def test_a_resumed_mixture_continues_where_it_stopped(num_done, shuffle):
    sizes, weights = {"a": 7, "b": 5, "c": 11}, {"a": 0.5, "b": 0.2, "c": 0.3}

    def stream(loader, num_epochs=8):
        while loader.epoch < num_epochs:
            for batch in loader:
                yield batch["uid"].to_pylist()

    uninterrupted = list(stream(make_mixture_loader(sizes, weights, 4, shuffle)))
    loader = make_mixture_loader(sizes, weights, 4, shuffle)
    done = list(itertools.islice(stream(loader), num_done))
    resumed = make_mixture_loader(sizes, weights, 4, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert done + list(stream(resumed)) == uninterrupted
    assert len(uninterrupted) == 8 * (23 // 4)


def test_each_data_set_has_epochs_of_its_own():
    """Data sets of 4 and of 12 rows in equal shares: the first has three epochs while the second has one."""
    loader = make_mixture_loader({"a": 4, "b": 12}, {"a": 1, "b": 1}, 4)
    uids = [uid for _ in range(2) for batch in loader for uid in batch["uid"].to_pylist()]
    assert len(uids) == 32
    assert sorted(uids[:24]) == sorted(
        [f"a:{row}" for row in range(4)] * 3 + [f"b:{row}" for row in range(12)]
    )


def test_the_order_of_a_data_set_does_not_depend_on_the_others():
    def uids_of_a(sizes, weights, batch_size):
        uids = [
            uid
            for batch in make_mixture_loader(sizes, weights, batch_size)
            for uid in batch["uid"].to_pylist()
        ]
        return [uid for uid in uids if uid.startswith("a:")][:6]

    first = uids_of_a({"a": 6, "b": 6}, {"a": 1, "b": 1}, 2)
    assert first == uids_of_a({"a": 6, "c": 30}, {"a": 1, "c": 2}, 3)


def test_a_data_set_that_is_too_small_for_its_share():
    with pytest.raises(
        ValueError,
        match=r"data\.mixture\.b has 3 rows, too few: by its weight a batch of 8 prompts may need 4",
    ):
        make_mixture_loader({"a": 20, "b": 3}, {"a": 5, "b": 3}, 8)
    make_mixture_loader({"a": 20, "b": 4}, {"a": 5, "b": 3}, 8)


def test_position_of_another_mixture_is_refused():
    state = make_mixture_loader({"a": 8, "b": 8}, {"a": 1, "b": 1}, 4).state_dict()
    with pytest.raises(ValueError, match=r"saved with weights = \[1, 1\], this run has \[2, 1\]"):
        make_mixture_loader({"a": 8, "b": 8}, {"a": 2, "b": 1}, 4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"saved with data sets = \['a', 'b'\], this run has \['a', 'c'\]"):
        make_mixture_loader({"a": 8, "c": 8}, {"a": 1, "c": 1}, 4).load_state_dict(state)
