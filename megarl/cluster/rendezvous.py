"""Where the ranks of a group meet, over TCP."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore

if TYPE_CHECKING:
    from megarl.cluster.worker import RankInfo

_BACKLOG = 1024  # ranks that come at once


def meet(info: RankInfo, timeout_s: float) -> TCPStore:
    """The store of a group's ranks, which rank 0 serves; for `init_process_group(store=...)`.

    It listens at the group's address alone. Torch's own (2.13, also for "tcp://127.0.0.1:...") listens on all interfaces: who
    reaches it can send ranks to a rank of his own, and what ranks tell each other is unpickled.

    Args:
        timeout_s: seconds to wait for all ranks, and later for what others put there.

    Raises:
        OSError: on rank 0: the port is taken, or the address is not this machine's.
        torch.distributed.DistError: not all ranks came.
    """
    host, port, listener = info.master_addr, info.master_port, None
    if info.rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG).detach()
    return TCPStore(
        host, port, info.world_size, info.rank == 0, timedelta(seconds=timeout_s), master_listen_fd=listener
    )
