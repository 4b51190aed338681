"""Where processes meet over TCP: a store that one of them serves, at one address, and how they wait for each other there."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore

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


def wait_for_all(
    store: Store,
    what: str,
    rank: int,
    world_size: int,
    timeout: float,
    say: Callable[[str], object] = print,
    every: float = 60.0,
) -> None:
    """Returns when all ranks have called this for `what`, once: for what takes them very different times.

    A collective would do, but has the timeout of all other ones, and does not know whom it waits for.

    Args:
        timeout: seconds.
        say: is told on rank 0 who is missing, each `every` seconds.

    Raises:
        TimeoutError: names the ranks that have not come.
    """
    keys = [f"{what}/{number}" for number in range(world_size)]
    store.set(keys[rank], "here")
    if store.add(f"{what}/count", 1) == world_size:
        store.set(f"{what}/all", "here")
    begun = time.monotonic()
    while True:
        rest = begun + timeout - time.monotonic()
        try:
            return store.wait([f"{what}/all"], timedelta(seconds=max(0.001, min(every, rest))))
        except DistError:
            if rest <= every:
                break
        if rank == 0:
            say(f"{what}: {_missing(store, keys)}")
    raise TimeoutError(f"{what}: {_missing(store, keys)} within {timeout:g} s")


def _missing(store: Store, keys: list[str]) -> str:
    ranks = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    return f"not yet so on {len(ranks)} of {len(keys)} ranks: {', '.join(ranks)}"
