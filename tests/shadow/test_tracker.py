"""The memory that the tracker counts at the peak of a phase."""

import torch

from megarl.data.routing import RoutingShape
from megarl.shadow.batches import draw_experts
from megarl.shadow.tracker import Tracker

MIB = 1 << 20


def test_a_peak_is_told_to_a_fiftieth_of_what_its_phase_took_whatever_was_there_before() -> None:
    """Storages of the meta device have sizes but no memory."""
    tracker, held = Tracker(), []

    def make(size: int, operation: str) -> None:
        held.append(torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage())
        tracker.note(held[-1], operation)

    with tracker.phase("build"):
        make(100_000 * MIB, "weights")
    with tracker.phase("update") as update:
        for _ in range(10):
            make(10 * MIB, "activations")
    made = {maker.operation: size for maker, size in update.at_peak.items() if maker.phase == "update"}
    assert made == {"activations": 100 * MIB}


def test_replayed_experts_have_equally_many_of_any_tokens_in_a_row() -> None:
    """As the plan assumes; this also holds within a sequence parallel rank's part."""
    shape = RoutingShape(layers=3, top_k=8, num_experts=256)
    routed = draw_experts(shape, 16_384)
    assert (routed.shape, routed.dtype) == ((16_384, 3, 8), shape.dtype)
    assert all(len(set(token)) == 8 for token in routed[:100, 1].tolist())
    for begin in range(0, 16_384, 2_048):
        part = routed[begin : begin + 2_048]
        of_ranks = [[(part[:, layer] // 32 == rank).sum() for rank in range(8)] for layer in range(3)]
        assert max(map(max, of_ranks)) < 1.02 * 2_048, of_ranks
