"""The collectives of a shadow rank: a backend without traffic, and a log of the rank's calls.

`agree.py` says whether the logs of several ranks fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.shadow.tracker import line_of_code
from megarl.shadow.values import forget, give, value_of

SEND, RECEIVE = "send", "recv_"
_NAMES = {"_allgather_base_": "all_gather", "allgather_": "all_gather of a list", "allreduce_": "all_reduce",
          "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter of a list",
          "alltoall_base_": "all_to_all", "broadcast_": "broadcast", "recv_": "receive"}  # fmt: skip


class Collective(NamedTuple):
    """A call of a rank.

    Attributes:
        operation: c10d's name, such as "allreduce_", or that of a function of torch.distributed that moves objects.
        group: the global ranks of the group, in its order.
        peer: of a send or receive; None: all ranks take part.
        sizes: (elements, dtype) of each tensor.
        bytes: of the larger side.
        communicator: the group's name: groups of the same ranks have communicators of their own.
        sends, expects: elements for and from each rank of the group, where they may differ (an all-to-all, a gather or reduce-scatter of a list).
        detail: further facts that must be the same on all ranks, such as the rank that a broadcast comes from.
        batch: a number that sends and receives of one `batch_isend_irecv` share.
        until: the rank waited for it before its call of this number (the log's length: at its end); None: it never did.
        phase, line: where the call was made.
    """

    operation: str
    group: tuple[int, ...]
    peer: int | None = None
    sizes: tuple[tuple[int, str], ...] = ()
    bytes: int = 0
    communicator: str = ""
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    detail: str = ""
    batch: int | None = None
    until: int | None = None
    phase: str = ""
    line: str = ""

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Collective:
        """The call from its list in a report."""
        found = cls(*(tuple(field) if isinstance(field, list) else field for field in fields))
        return found._replace(sizes=tuple((count, dtype) for count, dtype in found.sizes))

    @property
    def name(self) -> str:
        """As torch.distributed calls it."""
        return _NAMES.get(self.operation, self.operation.strip("_"))


class Peers(Protocol):
    """The source of the data that a rank receives."""

    def exchange(self, call: Collective, args: Sequence[Any], wait: Callable[[], None]) -> None:
        """Give the results of a call of c10d their values.

        Args:
            wait: to be called before the rank reads data of its peers.
        """

    def gather_objects(self, call: Collective, own: Any, wait: Callable[[], None]) -> list[Any]:
        """The object of each rank of the group."""

    def broadcast_objects(
        self, call: Collective, own: list[Any], source: int, wait: Callable[[], None]
    ) -> list[Any]:
        """The object of the global rank `source`."""


class Log:
    """A rank's calls in their order, and its waits.

    Attributes:
        reduction: of the all_reduce that is being called: c10d does not show it to dispatch modes.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.reduction = ""
        self._calls: list[Collective] = []
        self._until: dict[int, int] = {}
        self._running: set[int] = set()  # not waited for yet
        self._works: list[_Work] = []  # kept: c10d would forget their Python side
        self._batches = 0
        self._in_batch = False

    def __len__(self) -> int:
        return len(self._calls)

    def calls(self) -> list[Collective]:
        return [call._replace(until=self._until.get(number)) for number, call in enumerate(self._calls)]

    def add(self, call: Collective, phase: str) -> int:
        """The number of a call that is made now."""
        batch = self._batches if self._in_batch else None
        self._calls.append(call._replace(phase=phase, line=line_of_code(), batch=batch))
        self._running.add(len(self._calls) - 1)
        return len(self._calls) - 1

    def work(self, number: int) -> _Work:
        """The work object that c10d returns of a call."""
        work = _Work()
        work.log, work.number = self, number
        self._works.append(work)
        return work

    def wait(self, number: int) -> None:
        """The rank waits for a call before it goes on."""
        self._until.setdefault(number, len(self._calls))
        self._running.discard(number)

    def wait_for_all(self) -> None:
        for number in list(self._running):
            self.wait(number)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Sends and receives that are launched as one."""
        self._batches, self._in_batch = self._batches + 1, True
        try:
            yield
        finally:
            self._in_batch = False


class _Work(FakeWork):
    log: Log
    number: int

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.log.wait(self.number)
        return True


def join(rank: int, world_size: int) -> None:
    """Be rank `rank` of a world without its other ranks."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  (shapes of c10d's operators)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


class Rank(Protocol):
    """The part of a running shadow that this module needs."""

    log: Log

    @property
    def phase(self) -> str: ...


def leave_no_other_backend(current: Callable[[], Rank | None]) -> None:
    """Make all groups of this process without traffic, Megatron's gloo groups too, and log calls that c10d's operators do not show:
    groups that are made, objects, batches, reductions, and the host's waits for everything that was launched.

    Args:
        current: the shadow that runs now; None: none does.
    """
    new_group, all_reduce, batch = dist.new_group, dist.all_reduce, dist.batch_isend_irecv
    wait_for_device = torch.cuda.synchronize

    def without_traffic(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **rest: Any
    ) -> Any:
        rank = current()
        if (
            rank is not None
            and not isinstance(rank.log.peers, Alike)
            and not rest.get("use_local_synchronization")
        ):
            # All ranks take part, in the same order, by which communicators are numbered.
            note("new_group", None, f"of ranks {'all' if ranks is None else ranks_text(ranks)}")
        return new_group(ranks, timeout, "fake", **rest)

    def note(operation: str, group: Any, detail: str = "") -> tuple[Collective, Callable[[], None], Peers]:
        rank = current()
        assert rank is not None, "a shadow is running"
        group = dist.group.WORLD if group is None else group
        call = Collective(
            operation,
            tuple(dist.get_process_group_ranks(group)),
            communicator=group.group_name,
            detail=detail,
        )
        number, log = rank.log.add(call, rank.phase), rank.log
        log.wait(number)
        return call, lambda: log.wait(number), log.peers

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        call, wait, peers = note("all_gather_object", group)
        object_list[:] = peers.gather_objects(call, obj, wait)

    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        source = src if group_src is None else dist.get_global_rank(group, group_src)
        source = 0 if source is None else source
        call, wait, peers = note("broadcast_object_list", group, f"from rank {source}")
        object_list[:] = peers.broadcast_objects(call, object_list, source, wait)

    def reduced(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        rank = current()
        if rank is not None:
            rank.log.reduction = str(op).rpartition(".")[2]
        return all_reduce(tensor, op, group, async_op)

    def batched(operations: list[Any]) -> Any:
        rank = current()
        assert rank is not None, "a shadow is running"
        with rank.log.batch():
            return batch(operations)

    def synchronize(device: Any = None) -> None:
        rank = current()
        if rank is not None:
            rank.log.wait_for_all()
        wait_for_device(device)

    dist.new_group = without_traffic
    dist.all_gather_object = all_gather_object
    dist.broadcast_object_list = broadcast_object_list
    dist.all_reduce = reduced
    dist.batch_isend_irecv = batched
    torch.cuda.synchronize = synchronize


def describe(operation: str, args: Sequence[Any], reduction: str = "") -> Collective:
    """The description of a call of one of c10d's operators."""
    leaves = torch.utils._pytree.tree_leaves(args)
    boxed = next(
        (
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        ),
        None,
    )
    group = None if boxed is None else dist.ProcessGroup.unbox(boxed)
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    moved = [tensor.numel() * tensor.element_size() for tensor in tensors]
    gathers = operation in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
    sends, expects = _shares(operation, args, len(ranks))
    detail = reduction if operation == "allreduce_" else ""
    if operation == "broadcast_":
        detail = f"from rank {ranks[args[2]]}"
    return Collective(
        operation,
        ranks,
        ranks[args[2]] if operation in (SEND, RECEIVE) else None,
        tuple((tensor.numel(), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors),
        max(moved, default=0) if gathers else sum(moved),
        group.group_name if group is not None else "",
        sends,
        expects,
        detail,
    )


def _shares(operation: str, args: Sequence[Any], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements for and from each rank of a group, where they may differ between them."""
    if operation == "alltoall_base_":
        output, source, _, received, sent = args[:5]
        return _splits(source, sent, size), _splits(output, received, size)
    if operation == "allgather_":
        return (args[1][0].numel(),) * size, tuple(tensor.numel() for tensor in args[0][0])
    if operation == "reduce_scatter_":
        return tuple(tensor.numel() for tensor in args[1][0]), (args[0][0].numel(),) * size
    return (), ()


def _splits(tensor: torch.Tensor, rows: Sequence[int], size: int) -> tuple[int, ...]:
    if not rows:
        return (tensor.numel() // size,) * size
    width = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return tuple(int(count) * width for count in rows)


class Alike:
    """Peers that send what this rank sends.

    Attributes:
        received: the shape that a pipeline stage is told by the one before it.
    """

    def __init__(self) -> None:
        self.received: tuple[int, ...] = ()

    def exchange(self, call: Collective, args: Sequence[Any], wait: Callable[[], None]) -> None:
        if call.operation == "_allgather_base_":
            output, mine = args[0], value_of(args[1])
            forget(output)
            if mine is not None:
                size = len(call.group)
                give(
                    output,
                    mine.reshape(1, *mine.shape).expand(size, *mine.shape).reshape(output.shape).clone(),
                )
        elif call.operation == "allgather_":
            for outputs, source in zip(args[0], args[1], strict=True):
                mine = value_of(source)
                for output in outputs:
                    forget(output)
                    if mine is not None:
                        give(output, mine.clone().reshape(output.shape))
        elif call.operation == "alltoall_base_":
            output, mine = args[0], value_of(args[1])
            forget(output)
            if mine is not None and mine.shape == output.shape:
                give(output, mine.clone())
        elif call.operation == RECEIVE:
            for tensor in args[0]:
                if not tensor.is_floating_point() and tensor.numel() == len(self.received):
                    give(tensor, torch.tensor(self.received, dtype=tensor.dtype).reshape(tensor.shape))

    def gather_objects(self, call: Collective, own: Any, wait: Callable[[], None]) -> list[Any]:
        return [own] * len(call.group)

    def broadcast_objects(
        self, call: Collective, own: list[Any], source: int, wait: Callable[[], None]
    ) -> list[Any]:
        return own  # data of other ranks is unknown


def ranks_text(group: Sequence[int]) -> str:
    return str(list(group)) if len(group) <= 16 else f"of {len(group)} ranks from {group[0]} on"
