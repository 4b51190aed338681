"""The links between the devices of a job, measured before it runs: every rank in one group, as the models' ranks will be."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from megarl import platform
from megarl.cluster.ranks import RankInfo, meet


class ProbeWorker:
    """One rank."""

    def __init__(self, info: RankInfo, timeout: float) -> None:
        """`timeout`: seconds that ranks wait for each other."""
        self.info = info
        if platform.is_cuda():
            torch.cuda.set_device(0)
        torch.distributed.init_process_group(
            platform.backend(),
            store=meet(info, timeout),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=timeout),
        )

    def all_reduce(self, num_bytes: int, rounds: int) -> float:
        """Seconds of the fastest of some all-reduces of all ranks.

        Raises:
            RuntimeError: the sum is wrong.
        """
        world = self.info.world_size
        best = float("inf")
        for _ in range(rounds + 1):  # the first one makes connections
            values = torch.full((num_bytes // 4,), self.info.rank + 1.0, device=platform.device())
            torch.distributed.barrier()
            begun = time.perf_counter()
            torch.distributed.all_reduce(values)
            if platform.is_cuda():
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begun)
            expected = world * (world + 1) / 2
            if not bool((values == expected).all()):
                raise RuntimeError(
                    f"all-reduce over {world} ranks gave {values[0].item()}, expected {expected}"
                )
        return best


def bus_bandwidth(num_bytes: int, world: int, seconds: float) -> float:
    """Bytes a second over a rank's link, as nccl-tests count: 2 (n - 1) / n times the bytes of the tensor."""
    return 2 * (world - 1) / world * num_bytes / seconds
