"""Plans are made without the collector, which goes on after them as it was."""

import gc
from collections.abc import Callable

import pytest

from megarl.layout import Box, Layout, Piece, Plan, RankPlace, make_plan
from megarl.layout.placement import place_engines
from megarl.util.gc_pause import collection_paused

RANKS, TENSORS = 4, 1000
PLACES = tuple(RankPlace("node", str(rank)) for rank in range(RANKS))


def rows(name: str) -> Layout:
    def pieces(rank: int) -> list[Piece]:
        box, local = Box((rank * 2, 0), (2, 3)), Box((0, 0), (2, 3))
        return [Piece(f"tensor{number}", box, f"local{number}", local) for number in range(TENSORS)]

    return Layout.by_rank(name, RANKS, pieces, PLACES)


@pytest.mark.parametrize("on", [True, False])
def test_it_goes_on_as_it_was(on: bool) -> None:
    was_on = gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        with collection_paused(), collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(ValueError, match="refused"), collection_paused():
            raise ValueError("refused")
        assert gc.isenabled() is on
    finally:
        gc.enable() if was_on else gc.disable()


@pytest.mark.parametrize(
    "work",
    [
        lambda plan: plan.copies,
        lambda plan: plan.copies_to(1),
        lambda plan: plan.copies_from(1),
        lambda plan: plan.account(),
        lambda plan: plan.buckets(1 << 20),
        lambda plan: place_engines(plan.source, plan.target, PLACES, RANKS),
    ],
    ids=["copies", "copies_to", "copies_from", "account", "buckets", "place_engines"],
)
def test_no_collection_in_a_plan(work: Callable[[Plan], object]) -> None:
    """Each of these makes thousands of tuples; the collector looks at every few hundred new ones (Python 3.11: 700).

    It does so once when it is on again.
    """
    plan, began = make_plan(rows("source"), rows("target")), []
    assert gc.isenabled()
    gc.collect()
    gc.callbacks.append(lambda phase, _: began.append(phase) if phase == "start" else None)
    try:
        work(plan)
        meanwhile = len(began)
        kept = [(number,) for number in range(10_000)]
    finally:
        gc.callbacks.pop()
    assert meanwhile <= 1 and len(kept) == 10_000
    assert len(began) >= meanwhile + 3, "it works, and is seen"
