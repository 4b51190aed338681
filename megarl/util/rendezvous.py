"""Rendezvous of processes over TCP: a store that one of them serves at one address, and how they wait for each other there."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore

_BACKLOG = 1024  # processes that come at once


def open_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store of a group's ranks, which rank 0 serves; for `init_process_group(store=...)`.

    It listens at `host` alone. Torch's own store (2.13, also for "tcp://127.0.0.1:...") listens on all interfaces: anybody who reaches
    it can direct ranks to a process of their own, and ranks unpickle the messages of others.

    Args:
        timeout: time to wait for all ranks, and later for values that others set.

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
    """Return when all ranks have called this for `what`; for work that takes ranks very different times, once per store.

    A collective would do the same, but has the timeout of all other collectives, and cannot name the ranks that are missing.

    Args:
        timeout: seconds.
        say: gets a message on rank 0 with the missing ranks, each `every` seconds.

    Raises:
        TimeoutError: names the ranks that are missing.
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
