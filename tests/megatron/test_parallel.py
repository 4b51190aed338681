"""Megatron's process groups: ranks' places equal the computed ones, and a process can leave its groups and join others."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from megarl.layout.grid import ParallelLayout, RankCoords, coords_of
from megarl.megatron.parallel import coords, destroy_parallel, init_parallel
from tests.ranks import RankPool


def _coords(rank: int, world: int, sizes: dict[str, Any]) -> RankCoords:
    init_parallel(ParallelLayout(world=world, **sizes), rank, world)
    return coords()


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (4, {"tp": 2, "pp": 2}),
        (4, {"tp": 2, "cp": 2}),
        (4, {"pp": 2, "cp": 2}),
        (4, {"cp": 2}),
        (8, {"tp": 2, "pp": 2}),
        (8, {"pp": 2, "cp": 2}),
        (4, {"ep": 2}),
        (4, {"tp": 2, "ep": 4}),
        (4, {"tp": 2, "cp": 2, "ep": 2}),
        (8, {"tp": 2, "pp": 2, "ep": 2}),
        (8, {"tp": 4, "ep": 2, "etp": 2}),
        (8, {"pp": 2, "cp": 2, "ep": 2, "etp": 2}),
    ],
)
def test_coords_of_agrees_with_megatron(ranks: RankPool, world: int, sizes: dict[str, Any]) -> None:
    layout = ParallelLayout(world=world, **sizes)
    found = ranks.run(_coords, sizes, world=world)
    assert found == [coords_of(layout, rank) for rank in range(world)]
    assert len({(place.tp, place.pp, place.cp, place.dp) for place in found}) == world
    shards = Counter((place.ep, place.etp, place.pp) for place in found)
    assert set(shards.values()) == {layout.expert_dp}
    assert len(shards) == layout.ep * layout.etp * layout.pp


def _one_layout_after_another(rank: int, world: int, folder: str) -> list[tuple]:
    destroy_parallel()  # leave the pool's own process group; the ranks make groups of their own here
    found = []
    layouts = [
        ParallelLayout(world=4, tp=2, pp=2, vpp=2, sp=True),
        ParallelLayout(world=2, cp=2),  # the other ranks are not in it
        ParallelLayout(world=4, pp=4),
    ]
    for index, layout in enumerate(layouts):
        if rank >= layout.world:
            continue
        init_parallel(layout, rank, layout.world, init_method=f"file://{folder}/{index}", timeout_s=60)
        total = torch.ones(1)
        torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        assert coords() == coords_of(layout, rank)
        found.append((total.item(), vpp))
        destroy_parallel()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/end", rank=rank, world_size=world
    )
    return found


def test_a_process_can_leave_a_layout_and_join_another(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_one_layout_after_another, str(tmp_path))
    assert found[0] == [(2, 2), (1, None), (4, None)]
    assert found[3] == [(2, 2), (4, None)]


_LIMIT_S = 10


def _lonely_collective(rank: int, world: int, folder: str) -> tuple[str, float]:
    destroy_parallel()
    # Making the groups has the same time limit, so the ranks begin together; the limit also suits a busy machine.
    (Path(folder) / f"ready-{rank}").touch()
    while not (Path(folder) / f"ready-{1 - rank}").exists():
        time.sleep(0.05)
    layout = ParallelLayout(world=2, tp=2)
    init_parallel(layout, rank, world, init_method=f"file://{folder}/meet", timeout_s=_LIMIT_S)
    done = Path(folder) / "done"
    start = time.monotonic()
    message = ""
    if rank == 0:
        try:
            torch.distributed.all_reduce(
                torch.ones(1), group=parallel_state.get_tensor_model_parallel_group()
            )
        except RuntimeError as error:
            message = str(error)
        done.touch()
    else:  # if this rank left, the connection would break before the timeout
        while not done.exists():
            time.sleep(0.1)
    seconds = time.monotonic() - start
    destroy_parallel()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/end", rank=rank, world_size=world
    )
    return message, seconds


def test_a_collective_that_others_miss_raises_at_the_timeout(ranks: RankPool, tmp_path: Path) -> None:
    message, seconds = ranks.run(_lonely_collective, str(tmp_path), world=2)[0]
    assert "Timed out" in message
    assert _LIMIT_S - 0.1 < seconds < 5 * _LIMIT_S
