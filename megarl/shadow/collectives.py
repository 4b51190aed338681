"""The collectives of shadow ranks: a backend without traffic, a log of each rank's calls, and whether the logs of several ranks agree.

Ranks that disagree hang or fail on real GPUs: one waits for a collective that another never joins, or joins with other sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.shadow.values import give, value_of

BOTH_SIDES = ("send", "recv_")


class Collective(NamedTuple):
    """A call of a rank.

    Attributes:
        operation: c10d's name, such as "allreduce_".
        group: the global ranks of the group, in its order.
        peer: of a send or receive; None: all ranks take part.
        sizes: (elements, dtype) of each tensor.
        bytes: of the larger side.
    """

    operation: str
    group: tuple[int, ...]
    peer: int | None
    sizes: tuple[tuple[int, str], ...]
    bytes: int


def join(rank: int, world_size: int) -> None:
    """Be rank `rank` of a world of which no other rank is there."""
    import torch.distributed._tools.fake_collectives  # noqa: F401  (shapes of c10d's operators)

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def leave_no_other_backend() -> None:
    """Have all groups of this process without traffic, Megatron's gloo groups too, and objects of peers be this rank's own."""
    new_group = dist.new_group

    def without_traffic(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **rest: Any
    ):
        return new_group(ranks, timeout, "fake", **rest)

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def broadcast_object_list(
        object_list: list[Any], src: Any = None, group: Any = None, **rest: Any
    ) -> None:
        return None  # what another rank would send is unknown: this rank's own stays

    dist.new_group = without_traffic
    dist.all_gather_object = all_gather_object
    dist.broadcast_object_list = broadcast_object_list


def describe(operation: str, args: Sequence[Any]) -> Collective:
    """What a call of one of c10d's operators is."""
    leaves = torch.utils._pytree.tree_leaves(args)
    boxed = next(
        (
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        ),
        None,
    )
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)) if boxed is not None else []
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = tuple((tensor.numel(), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors)
    moved = [tensor.numel() * tensor.element_size() for tensor in tensors]
    gathers = operation in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
    peer = ranks[args[2]] if operation in BOTH_SIDES else None
    return Collective(operation, tuple(ranks), peer, sizes, max(moved, default=0) if gathers else sum(moved))


def pass_on(operation: str, args: Sequence[Any], group_size: int, received: Sequence[int]) -> None:
    """Give what a collective returns its values: peers are taken to send what this rank sends.

    Args:
        received: what a pipeline stage is told of the shape that comes: the integers of a receive.
    """
    if operation == "_allgather_base_":
        output, mine = args[0], value_of(args[1])
        if mine is not None:
            give(
                output,
                mine.reshape(1, *mine.shape).expand(group_size, *mine.shape).reshape(output.shape).clone(),
            )
    elif operation == "allgather_":
        for outputs, source in zip(args[0], args[1], strict=True):
            mine = value_of(source)
            for output in outputs if mine is not None else ():
                give(output, mine.clone().reshape(output.shape))
    elif operation == "alltoall_base_":
        output, mine = args[0], value_of(args[1])
        if mine is not None and mine.shape == output.shape:
            give(output, mine.clone())
    elif operation == "recv_":
        for tensor in args[0]:
            if not tensor.is_floating_point() and tensor.numel() == len(received):
                give(tensor, torch.tensor(received, dtype=tensor.dtype).reshape(tensor.shape))


def disagreements(logs: Mapping[int, Sequence[Collective]]) -> tuple[int, list[str]]:
    """Where the logs of ranks do not fit together.

    In every group that ranks share they must make the same calls in the same order, with the same sizes; what one rank sends
    another must receive, in the same order.

    Returns:
        How many pairs of sequences were compared, and a sentence for each that differs, with the first difference.
    """
    compared, found = 0, []
    shared: dict[tuple[int, ...], dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, log in logs.items():
        for call in log:
            if call.peer is None:
                shared[call.group][rank].append(call)
    for group in shared:
        first, *others = [rank for rank in group if rank in logs]
        for other in others:
            compared += 1
            difference = _first_difference(shared[group][first], shared[group][other])
            if difference is not None:
                found.append(f"ranks {first} and {other} differ in their group {_ranks(group)}: {difference}")
    for source in logs:
        for target in logs:
            sent = [call for call in logs[source] if call.operation == "send" and call.peer == target]
            received = [call for call in logs[target] if call.operation == "recv_" and call.peer == source]
            if sent or received:
                compared += 1
                difference = _first_difference(sent, received)
                if difference is not None:
                    found.append(
                        f"what rank {source} sends rank {target} is not what that receives: {difference}"
                    )
    return compared, found


def _first_difference(one: Sequence[Collective], other: Sequence[Collective]) -> str | None:
    """In words; None: there is none. A send is compared with a receive by its sizes alone."""
    for number, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        same = a.sizes == b.sizes and (a.operation == b.operation or a.peer is not None)
        if not same:
            return f"call {number} is {_call(a)} and {_call(b)}"
    if len(one) != len(other):
        longer = one if len(one) > len(other) else other
        at = min(len(one), len(other))
        return f"{len(one)} and {len(other)} calls; the first that has no counterpart is {_call(longer[at])}"
    return None


def _call(call: Collective) -> str:
    sizes = ", ".join(f"{count:,} x {dtype}" for count, dtype in call.sizes)
    return f"{call.operation.strip('_')} of {sizes}"


def _ranks(group: Sequence[int]) -> str:
    return str(list(group)) if len(group) <= 8 else f"of {len(group)} ranks from {group[0]} on"
