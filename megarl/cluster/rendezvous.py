"""Where the ranks of a group meet, over TCP."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from megarl.util.rendezvous import open_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from megarl.cluster.ranks import RankInfo


def meet(info: RankInfo, timeout_s: float) -> TCPStore:
    """The store of a group's ranks at the group's address; see `open_store`.

    Args:
        timeout_s: seconds to wait for all ranks, and later for what others put there.
    """
    return open_store(
        info.master_addr, info.master_port, info.rank, info.world_size, timedelta(seconds=timeout_s)
    )
