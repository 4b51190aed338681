"""A GPU's memory in addition to planned tensors: each term by its cause."""

from dataclasses import replace

import pytest

from megarl.costs.reserve import CONTEXT, MIB, EngineRank, communicators, reserved
from megarl.layout.grid import ParallelLayout

ENGINE = EngineRank(tp=8, requests=256, vocab_size=152064, latent=False)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelLayout(world=1), 0),
        (ParallelLayout(world=8), 2),  # all ranks, and data parallel ranks
        (ParallelLayout(world=8, tp=2), 3),
        (ParallelLayout(world=8, tp=2, pp=2), 5),  # also the norm's, and one pipeline neighbour's
        (ParallelLayout(world=16, tp=2, pp=4), 6),  # two pipeline neighbours in the middle
        (ParallelLayout(world=8, cp=2), 3),  # all ranks, context, data with context
        (ParallelLayout(world=8, ep=8), 3),  # experts have no replicas
        (ParallelLayout(world=16, ep=8), 4),
    ],
)
def test_communicators_of_a_layout(layout: ParallelLayout, expected: int) -> None:
    assert communicators(layout) == expected


def test_each_process_has_a_context_and_groups_of_its_own() -> None:
    layout = ParallelLayout(world=8, tp=2)
    one, three = reserved([layout], None), reserved([layout] * 3, ENGINE)
    assert one["CUDA contexts: 1"] == CONTEXT and three["CUDA contexts: 4"] == 4 * CONTEXT
    # of two more models, and two of an engine with tensor parallel ranks
    assert three["NCCL communicators: 11"] / 11 == pytest.approx(one["NCCL communicators: 3"] / 3)
    assert one["CUDA graphs"] == one["sampling"] == 0
    assert sum(three.values()) > 6 << 30 > sum(one.values())


def test_an_engine_by_its_requests_and_vocabulary() -> None:
    rows = reserved([], ENGINE)
    assert rows["CUDA graphs"] == (256 * 2 + 58 * 8) * MIB
    assert rows["sampling"] == 32 * 256 * 152064
    sorted_rows = reserved([], replace(ENGINE, leaves_out=True))
    assert sorted_rows == {**rows, "sampling": 44 * 256 * 152064}
    latent = reserved([], EngineRank(tp=1, requests=1024, vocab_size=129280, latent=True))
    assert latent["CUDA graphs"] == (512 * 2 + 1536) * MIB
    assert latent["NCCL communicators: 0"] == 0


def test_an_engine_that_judges_has_logits_in_place_of_graphs_and_a_sampler() -> None:
    rows = reserved([], EngineRank(tp=2, requests=256, vocab_size=1000, latent=False, judges=True))
    assert rows["CUDA graphs"] == rows["sampling"] == 0
    assert rows["logits of judged texts"] == 2048 * 1000 * 4 * 3
    assert reserved([], ENGINE)["logits of judged texts"] == 0


def test_an_engines_groups_have_communicators_of_their_own() -> None:
    """For all ranks, and for the ranks that share attention where these are several but not all."""
    for attention_tp, expected in ((1, 2), (2, 4), (8, 2)):
        engine = EngineRank(8, 64, 129280, latent=True, attention_tp=attention_tp)
        assert f"NCCL communicators: {expected}" in reserved([], engine)


def test_processes_that_exchange_weights_have_a_communicator_for_it() -> None:
    layout = ParallelLayout(world=4, tp=2)
    alone, together = reserved([layout], None), reserved([layout], ENGINE, exchanges=2)
    assert alone["NCCL communicators: 3"] / 3 == pytest.approx(together["NCCL communicators: 7"] / 7)
