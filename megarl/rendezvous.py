"""Where processes meet over TCP: a store that one of them serves, at one address."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore

_BACKLOG = 1024  # processes that come at once


def open_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a group's ranks, which rank 0 serves; for `init_process_group(store=...)`.

    It listens at `host` alone. Torch's own (2.13, also for "tcp://127.0.0.1:...") listens on all interfaces: who reaches it can
    send ranks to a rank of his own, and what ranks tell each other is unpickled.

    Args:
        timeout: to wait for all ranks, and later for what others put there.

    Raises:
        OSError: on rank 0: the port is taken, or the address is not this machine's.
        torch.distributed.DistError: not all ranks came.
    """
    listener = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG).detach()
    return TCPStore(host, port, world_size, rank == 0, timeout, master_listen_fd=listener)
