"""The choice of keys: which keys are chosen, at which positions queries are, and how choices are stored."""

import pytest
import torch

from megarl.megatron.packing import zigzag
from megarl.megatron.sparse import selection
from megarl.megatron.sparse.selection import (
    Run,
    choose,
    choose_keys,
    index_scores,
    pack_bits,
    runs_of,
    unpack_bits,
)
from megarl.sglang_cpu.chosen_keys import _choose


def test_of_equal_scores_the_earlier_keys_are_chosen() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0, 0.0, 9.0]])
    assert choose(scores, 4, 4).tolist() == [
        [True, True, True, True, False, False],  # the last key is after the query
        [True, True, True, False, False, True],
    ]


@pytest.mark.parametrize("distinct", [2, 1000])
def test_engines_on_cpus_choose_the_same(distinct: int) -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randint(-distinct, distinct, (30, 4, 8), generator=generator).float()
    keys = torch.randint(-distinct, distinct, (50, 8), generator=generator).float()
    weights = torch.randint(-2, 3, (30, 4), generator=generator).float()
    later = torch.arange(50) > torch.arange(20, 50)[:, None]
    ours = choose(index_scores(queries, weights, keys), 20, 7)
    theirs = _choose(queries[None], weights[None], keys[None], later[None], 7)[0]
    assert torch.equal(ours, theirs)
    assert (ours.sum(-1) == 7).all() and not (ours & later).any()


def test_choices_as_bits() -> None:
    flags = torch.rand(5, 21, generator=torch.Generator().manual_seed(2)) < 0.5
    bits = pack_bits(flags)
    assert bits.shape == (5, 3) and bits.dtype == torch.uint8
    assert torch.equal(unpack_bits(bits, 21), flags)
    assert torch.equal(unpack_bits(bits, 13), flags[:, :13])


@pytest.mark.parametrize("cp", [1, 2])
def test_runs_are_where_a_rank_has_its_tokens(cp: int) -> None:
    lengths = [8, 4, 12]
    bounds = torch.tensor([0, *lengths]).cumsum(0).numpy()
    for rank in range(cp):
        held = zigzag(bounds, cp)[rank].tolist()
        for rows in (range(len(held)), range(3, 7)):
            found = {}
            for run in runs_of(lengths, cp, rank, rows):
                found |= {run.row + step: run.start + run.position + step for step in range(run.count)}
            assert [found[row] for row in range(len(rows))] == [held[row] for row in rows]


def test_parts_have_few_scores_and_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LIMIT", 4 * 1000)
    parts = list(Run(5, 10, 90, 3).cut(4))
    assert [part.row for part in parts] == [5, *(part.rows.stop for part in parts[:-1])]
    assert parts[-1].rows.stop == 95 and parts[-1].end == 100 and {part.start for part in parts} == {3}
    assert all(part.count == 1 or 4 * part.count * part.end <= 1000 for part in parts)
    assert len(parts) < 30


def test_parts_choose_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    queries, keys = torch.randn(40, 2, 8, generator=generator), torch.randn(40, 8, generator=generator)
    arguments = (queries, torch.rand(40, 2, generator=generator), keys, runs_of([24, 16], 1, 0), 5, 24)
    expected = choose_keys(*arguments)
    monkeypatch.setattr(selection, "LIMIT", 4 * 100)
    assert torch.equal(choose_keys(*arguments), expected)
    chosen = unpack_bits(expected, 24)
    assert not chosen[:5].any() and not chosen[24:29].any()  # these queries attend to all keys before them
    assert (chosen[5:24].sum(-1) == 5).all() and (chosen[29:].sum(-1) == 5).all()
