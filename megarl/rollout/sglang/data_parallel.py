"""Data parallel attention: the groups of an engine's TP ranks that compute the attention of requests of their own.

In SGLang (0.5.21) another process starts the schedulers then, polls for requests without a pause, listens at fixed TCP ports, spreads
the samples of a prompt over the groups, and does not notice a scheduler that is killed. Here the engine's owner starts them, as without groups.

- The scheduler of TP rank 0 receives everything, and all ranks get it by one broadcast over the TP group, in which the others wait. Each
  rank keeps the requests of its own group; calls go to all ranks, after the same requests on each.
- The first rank of each group sends its answers to the owner itself: through a socket file, and from other nodes over TCP.
- The owner chooses the group of a request (`RequestGroups`).

Guarantees, each asserted by a test:

- the samples of a prompt, and the turns of a trajectory, are answered by one group while its cache has them;
- the loss of any rank, of any group, ends the engine;
- responses are those of an engine without groups.

This module imports SGLang in functions alone.
"""

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from socket import AF_INET6, getaddrinfo
from typing import Any

import zmq

_NOBODY = "inproc://nobody"  # an address from which nothing comes
_WAIT_SECONDS = 0.05


class RequestGroups:
    """The group that answers a request.

    The samples of a prompt go to one group, where one computes it and the others find it in the cache; so do the turns of a trajectory. The
    first of them chooses the group with the fewest requests.
    """

    def __init__(self, num_groups: int) -> None:
        self._loads = [0] * num_groups
        self._of: dict[str | tuple[int, ...], int] = {}

    @contextmanager
    def joined(self, uid: str, prompt_ids: Sequence[int]) -> Iterator[int | None]:
        """The group of a request that is answered within the block; None: there is only one group."""
        if len(self._loads) == 1:
            yield None
            return
        group = self._choose(uid, tuple(prompt_ids))
        self._loads[group] += 1
        try:
            yield group
        finally:
            self._loads[group] -= 1

    def forget(self) -> None:
        """Forget which group answered what, since the caches are empty: later requests go to the group with the fewest."""
        self._of = {}

    def _choose(self, uid: str, prompt: tuple[int, ...]) -> int:
        trajectory, later_turn, _ = uid.partition("#")
        group = self._of.get(trajectory if later_turn else prompt)
        if group is None:
            group = self._loads.index(min(self._loads))
        self._of[trajectory] = self._of[prompt] = group
        return group


def local_ports(server_args: Any) -> Any:
    """SGLang's addresses of an engine, which are socket files, as without groups."""
    from sglang.srt.server_args import PortArgs

    def file() -> str:
        return f"ipc://{tempfile.NamedTemporaryFile(delete=False).name}"

    return PortArgs(
        tokenizer_ipc_name=file(),
        scheduler_input_ipc_name=file(),
        detokenizer_ipc_name=file(),
        nccl_port=server_args.nccl_port or 0,  # ranks meet at `SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE`
        rpc_ipc_name=file(),
        metrics_ipc_name=file(),
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
        load_collector_ipc_name=file(),
        instance_id=uuid.uuid4().hex[:12],
    )


@contextmanager
def without_controller() -> Iterator[None]:
    """SGLang starts one scheduler a TP rank within the block."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(dp_size=1):
        yield


@contextmanager
def in_group(server_args: Any, port_args: Any, tp_rank: int) -> Iterator[tuple[Any, int]]:
    """A TP rank's addresses and the number of its group."""
    from sglang.srt.runtime_context import get_parallel

    if tp_rank > 0:  # else the requests would be shared out among the groups' first ranks
        port_args = replace(port_args, scheduler_input_ipc_name=_NOBODY, rpc_ipc_name=_NOBODY)
    with get_parallel().override(dp_size=server_args.dp_size):  # it is 1 in a copy (fork) of the owner
        yield port_args, tp_rank // (server_args.tp_size // server_args.dp_size)


def answers_file(port_args: Any) -> Path:
    """Where the first node's owner says at which TCP address it takes answers of other nodes."""
    return Path(f"{port_args.tokenizer_ipc_name.removeprefix('ipc://')}.answers")


def listen_for_answers(server_args: Any, port_args: Any, owners: zmq.Socket) -> None:
    """Let the owner's socket take answers of other nodes' ranks, too, at the address at which all ranks meet and a free port."""
    name, _, _ = server_args.dist_init_addr.rpartition(":")
    family, _, _, _, (host, *_) = getaddrinfo(name.strip("[]"), None)[0]
    if family == AF_INET6:
        owners.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    owners.bind(f"tcp://{host}:*")
    path = answers_file(port_args)
    written = path.with_suffix(".new")
    written.write_bytes(owners.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0"))
    written.rename(path)


def find_owner(scheduler: Any, port_args: Any) -> None:
    """Before a scheduler opens its sockets: set the address at which the owner takes answers, on other nodes than the first."""
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.nnodes == 1:
        return
    found: list[str | None] = [None]
    if parallel.tp_rank == 0:
        path = answers_file(port_args)
        while not path.exists():  # this process ends with the owner
            time.sleep(_WAIT_SECONDS)
        found = [path.read_text()]
    dist.broadcast_object_list(found, parallel.tp_group.ranks[0], parallel.tp_group.cpu_group)
    if parallel.node_rank > 0:
        port_args.tokenizer_ipc_name = found[0]


def share_requests(
    original: Callable[..., Any], receiver: Any, received: list | None, local: list | None = None
) -> list:
    """In place of SGLang's own, which gives a group the requests that its first rank has received: all ranks
    get rank 0's, and drop the requests of other groups."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils import broadcast_pyobj

    assert not local, "a rank would abort requests of its own accord"
    group, own = receiver.tp_group, get_parallel().attn_dp_rank
    shared = broadcast_pyobj(received or [], group.rank, receiver.tp_cpu_group, src=group.ranks[0])
    return [
        request
        for request in shared
        if not isinstance(request, TokenizedGenerateReqInput) or request.routed_dp_rank == own
    ]


def sleeps_with_rank_0(result: Any, scheduler: Any) -> Any:
    """After SGLang's own, by which the first rank of each group sleeps while it idles: here rank 0 alone sleeps, and the others wait for it."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank > 0:
        scheduler.idle_sleeper = None
    return result


async def flush_caches(manager: Any) -> list[Any]:
    """Flush the caches; returns the answers of all groups. SGLang's own function returns the first group's alone.

    Args:
        manager: SGLang's TokenizerManager.
    """
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    manager.auto_create_handle_loop()
    return await manager.flush_cache_communicator(FlushCacheReqInput(timeout_s=None))
