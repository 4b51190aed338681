import itertools
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema.data import SAMPLERS as NAMES
from megarl.config.schema.data import SamplerConfig
from megarl.data.loader import BatchLoader, TableFeed
from megarl.data.samplers import SAMPLERS, Sampler, epoch_order, make_sampler
from megarl.util.plugins import load_plugins


def make_table(numbers):
    return pa.table(
        {
            "uid": [f"x:{row}" for row in range(len(numbers))],
            "extra_info": [json.dumps({"level": {"of": number}}) for number in numbers],
            "prompt_ids": [[1] * int(abs(number) + 1) for number in numbers],
        }
    )


def order_of(numbers, epoch=0, **keys):
    config = SamplerConfig(name="curriculum", key=keys.pop("key", "extra_info.level.of"), **keys)
    return epoch_order(make_sampler(config, True), make_table(numbers), 1, epoch).tolist()


def test_built_in_names_are_those_of_the_configuration():
    assert set(NAMES) <= set(SAMPLERS.names())


def test_the_name_follows_shuffle_unless_it_is_given():
    assert make_sampler(SamplerConfig(), True).config.name == "random"
    assert make_sampler(SamplerConfig(), False).config.name == "sequential"
    assert make_sampler(SamplerConfig(name="sequential"), True).config.name == "sequential"
    with pytest.raises(ValueError, match=r"data.sampler.name='randon' is unknown; known: curriculum, "):
        make_sampler(SamplerConfig(name="randon"), True)


def test_curriculum_by_hand():
    numbers = [3, 0.5, -1, 2]
    assert order_of(numbers) == [2, 1, 3, 0]
    assert order_of(numbers, descending=True) == [0, 3, 1, 2]
    assert order_of(numbers, key="prompt_length") == [1, 2, 3, 0]  # 1, 2, 3 and 4 tokens


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 10))
@settings(max_examples=30)
def test_curriculum_sorts_the_warm_part_and_shuffles_the_rest(numbers, tenths):
    first, second = (order_of(numbers, epoch, warm_fraction=tenths / 10) for epoch in (0, 1))
    num_sorted = -(-len(numbers) * tenths // 10)
    for order in (first, second):
        assert sorted(order) == list(range(len(numbers)))
        assert [numbers[row] for row in order[:num_sorted]] == sorted(numbers)[:num_sorted]
    if len(numbers) > 30 and tenths <= 5:
        assert first != second


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("extra_info.gone", 1, r"prompt x:0: no 'extra_info.gone': extra_info holds \['level'\]"),
        ("extra_info.level.of", "high", "prompt x:1: it must be a number, found 'high'"),
        ("extra_info.level.of", True, "prompt x:1: it must be a number, found True"),
        ("extra_info.level.of", None, "prompt x:1: it must be a number, found None"),
        ("level", 1, "data.sampler.key='level' is unknown; it is prompt_length or extra_info.<name>"),
    ],
)
def test_rows_without_a_number_are_named(key, value, message):
    table = make_table([1, 1]).set_column(
        1, "extra_info", [['{"level": {"of": 1}}', json.dumps({"level": {"of": value}})]]
    )
    sampler = make_sampler(SamplerConfig(name="curriculum", key=key), True)
    with pytest.raises(ValueError, match=message):
        sampler.order(table, 1, 0)


PLUGIN = '''
import numpy as np
from megarl.data.samplers import Sampler, register_sampler

@register_sampler("test_backwards")
def backwards(table, seed, epoch):
    return np.arange(table.num_rows)[::-1]

@register_sampler("test_broken")
def broken(table, seed, epoch):
    return [0, 0, 1]

@register_sampler("test_worst_first")
class WorstFirst(Sampler):
    """Prompts of the lowest mean score so far come first; unknown ones count as options["unknown"]."""

    def __init__(self, config):
        super().__init__(config)
        self.known = {}

    def order(self, table, seed, epoch):
        unknown = self.config.options["unknown"]
        scores = [self.known.get(uid, unknown) for uid in table["uid"].to_pylist()]
        return np.argsort(scores, kind="stable")

    def update(self, uids, scores):
        for uid in set(uids):
            self.known[uid] = float(np.mean([score for name, score in zip(uids, scores) if name == uid]))

    def state_dict(self):
        return {"known": self.known}

    def load_state_dict(self, state):
        self.known = dict(state["known"])
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("plugin") / "samplers.py"
    path.write_text(PLUGIN)
    load_plugins([str(path)])


def make_loader(name, num_rows=6, batch_size=2, **keys):
    feed = TableFeed(
        make_table(range(num_rows)), make_sampler(SamplerConfig(name=name, **keys), True), seed=0
    )
    return BatchLoader(feed, batch_size)


def uids(batch):
    return [int(uid.removeprefix("x:")) for uid in batch["uid"].to_pylist()]


def test_a_function_of_a_plugin(plugin):
    assert [uids(batch) for batch in make_loader("test_backwards")] == [[5, 4], [3, 2], [1, 0]]
    with pytest.raises(
        ValueError, match=r"data.sampler.name='test_broken': its order of epoch 0 has shape \(3,\)"
    ):
        list(make_loader("test_broken"))


def test_a_sampler_that_learns_moves_only_what_is_to_come(plugin):
    loader = make_loader("test_worst_first", options={"unknown": 0.5})
    batches = iter(loader)
    assert uids(next(batches)) == [0, 1]
    # row 0 has two trajectories; rows 3 and 5 are reported before the epoch reaches them; another data set's row is ignored
    loader.report(["x:0", "x:0", "x:1", "x:3", "x:5", "y:4"], np.array([1.0, 0.0, 1.0, 0.9, 0.1, 0.0]))
    assert uids(next(batches)) == [5, 2]
    assert uids(next(batches)) == [4, 3]
    assert [uids(batch) for batch in loader] == [[5, 0], [2, 4], [3, 1]]  # 0.1, 0.5, 0.5, 0.5, 0.9, 1.0


@given(st.integers(0, 9), st.integers(0, 5))
@settings(max_examples=30)
def test_what_was_learnt_is_resumed(plugin, num_done, seed):
    def stream(loader, num_batches, begin=0):
        batches = itertools.chain.from_iterable(iter(lambda: loader, None))
        for number, batch in enumerate(itertools.islice(batches, num_batches), begin):
            yield uids(batch)
            scores = np.random.default_rng((seed, number)).random(2)
            loader.report(batch["uid"].to_pylist(), scores)

    def make():
        return make_loader("test_worst_first", options={"unknown": 0.5})

    uninterrupted = list(stream(make(), 10))
    loader = make()
    done = list(stream(loader, num_done))
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert done + list(stream(resumed, 10 - num_done, num_done)) == uninterrupted


def test_a_sampler_without_an_order(plugin):
    class Orderless(Sampler):
        pass

    with pytest.raises(TypeError, match=r"abstract.*order"):
        Orderless(SamplerConfig())
