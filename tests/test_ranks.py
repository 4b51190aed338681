"""The pool of ranks itself: results in order, errors named, hangs ended, and life after both."""

import os

import pytest
import torch

from tests.ranks import RankError, RankPool


def _sum(rank: int, world: int, start: int) -> int:
    total = torch.tensor(start + rank)
    torch.distributed.all_reduce(total)
    return total.item() * 10 + rank


def _raise_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("wrong shape on purpose")
    torch.distributed.barrier()


def _hang(rank: int, world: int) -> None:
    if rank == 0:
        torch.distributed.recv(torch.zeros(1), src=1)


def _die(rank: int, world: int) -> None:
    if rank == 2:
        os._exit(3)
    torch.distributed.barrier()


def test_results_come_in_rank_order_for_any_world(ranks: RankPool) -> None:
    assert ranks.run(_sum, 5, world=2) == [110, 111]
    assert ranks.run(_sum, 5, world=4) == [260, 261, 262, 263]


def test_an_exception_names_its_rank_and_the_pool_lives_on(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2: Traceback[\s\S]*wrong shape on purpose") as caught:
        ranks.run(_raise_on_one, world=2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert ranks.run(_sum, 0, world=2) == [10, 11]


def test_a_hang_ends_at_the_timeout_with_the_stack(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2: no answer[\s\S]*_hang"):
        ranks.run(_hang, world=2, timeout=6)
    assert ranks.run(_sum, 0, world=2) == [10, 11]


def test_a_dead_process_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 2 of 4: the process died"):
        ranks.run(_die, world=4)
