"""Which device each rank of the engines gets, so that most of its weights are there already.

The choice is limited to placements that processes can have. An engine has consecutive devices of the pool; a node's part of
it is a process with consecutive ranks, which may have any order of that node's devices, and several engines
within a node may share its devices out as they like. So ranks are assigned to the devices of a node, and the parts of an
engine that spans several nodes to its nodes: both are assignment problems, solved exactly.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from megarl.layout.layouts import Layout, RankPlace
from megarl.layout.plan import Plan, make_plan
from megarl.util.memory import collection_paused


@collection_paused()
def place_engines(
    source: Layout,
    target: Layout,
    devices: Sequence[RankPlace],
    ranks_per_engine: int,
    itemsize: Callable[[str], int] = lambda tensor: 1,
) -> tuple[int, ...]:
    """For each target rank the index of its device in `devices`.

    As many bytes as possible lie on the device already (in `source`, by its places), then as many as possible on
    the node; where it makes no difference rank r has device r.

    Args:
        target: all ranks of all engines, engine by engine; its own places do not matter.
        devices: of the pool, each node's next to each other; at least as many as ranks.
    """
    assert len(devices) >= target.num_ranks and target.num_ranks % ranks_per_engine == 0
    overlap = _Overlap(make_plan(source, target, itemsize), devices)
    nodes: dict[str, list[int]] = defaultdict(list)
    for index, place in enumerate(devices):
        nodes[place.node].append(index)
    # Nodes among which parts of an engine may be exchanged.
    groups: dict[object, list[str]] = defaultdict(list)
    for node, indices in nodes.items():
        engines = {index // ranks_per_engine for index in indices if index < target.num_ranks}
        alone = len(engines) == 1 and max(indices) < target.num_ranks
        groups[(engines.pop(), len(indices)) if alone else node].append(node)
    order = [-1] * target.num_ranks
    for group in groups.values():
        parts = [[rank for rank in nodes[node] if rank < target.num_ranks] for node in group]
        solved = [[overlap.best_order(part, nodes[node]) for node in group] for part in parts]
        chosen = assign([[value for value, _ in row] for row in solved])
        for part, row, at in zip(parts, solved, chosen, strict=True):
            for rank, device in zip(part, row[at][1], strict=True):
                order[rank] = device
    return tuple(order)


def bytes_there(plan: Plan, shard: int) -> Counter:
    """Bytes that a target shard needs, by the places and the nodes of the source that hold them; None: in total."""
    there: Counter = Counter()
    for sources, nbytes in plan.bytes_from(shard).items():
        for where in plan.candidates(sources).near:
            there[where] += nbytes
    return there


class _Overlap:
    """Bytes of a target rank's weights that are already on a device, and on its node."""

    def __init__(self, plan: Plan, devices: Sequence[RankPlace]) -> None:
        self._devices, self._shards_of = devices, plan.target.shards_of
        self._bytes = [bytes_there(plan, shard) for shard in range(len(plan.target.shards))]
        held = max(
            (sum(there[None] for there in self._of(rank)) for rank in range(plan.target.num_ranks)), default=0
        )
        # A byte on the device outweighs all bytes that can be on the node, and one of these all ranks that stay in place.
        self._step = plan.target.num_ranks + 1
        self._local_weight = self._step * (held * plan.target.num_ranks + 1)

    def best_order(self, ranks: Sequence[int], devices: Sequence[int]) -> tuple[int, list[int]]:
        """How well the best assignment of `devices` (of one node, at least as many) suits `ranks`, and the device of each rank."""
        values = [[self._value(rank, device) for device in devices] for rank in ranks]
        chosen = assign(values)
        return sum(row[at] for row, at in zip(values, chosen, strict=True)), [devices[at] for at in chosen]

    def _of(self, rank: int) -> list[Counter]:
        return [self._bytes[shard] for shard in self._shards_of[rank]]

    def _value(self, rank: int, device: int) -> int:
        place, shards = self._devices[device], self._of(rank)
        on_device = sum(there[place] for there in shards)
        on_node = sum(there[place.node] for there in shards)
        return on_device * self._local_weight + on_node * self._step + (rank == device)


def assign(values: Sequence[Sequence[int]]) -> list[int]:
    """For each row a column of its own (there are as many or more), such that the sum of their values is greatest.

    The Hungarian method with potentials, by shortest augmenting paths: rows^2 x columns steps (H. W. Kuhn, 1955;
    R. Jonker and A. Volgenant, 1987).
    """
    columns = len(values[0]) if values else 0
    row_potential, column_potential = [0] * len(values), [0] * columns
    row_of: list[int | None] = [None] * columns
    for new in range(len(values)):
        # Dijkstra over the columns, by reduced cost, from the new row to the nearest column that is free.
        cost: dict[int, int] = {}
        before: dict[int, int | None] = {}
        done: list[tuple[int, int]] = []  # columns and the rows that have them
        open_columns = list(range(columns))
        row, distance = new, 0
        last: int | None = None
        while True:
            for column in open_columns:
                reduced = distance - values[row][column] - row_potential[row] - column_potential[column]
                if column not in cost or reduced < cost[column]:
                    cost[column], before[column] = reduced, last
            at = min(open_columns, key=cost.__getitem__)
            distance = cost[at]
            open_columns.remove(at)
            owner = row_of[at]
            if owner is None:
                break
            done.append((at, owner))
            row, last = owner, at
        row_potential[new] += distance
        for column, owner in done:
            row_potential[owner] += distance - cost[column]
            column_potential[column] -= distance - cost[column]
        # Along the path each column passes its row on to the one after it.
        while (previous := before[at]) is not None:
            row_of[at] = row_of[previous]
            at = previous
        row_of[at] = new
    chosen = [0] * len(values)
    for column, assigned in enumerate(row_of):
        if assigned is not None:
            chosen[assigned] = column
    return chosen
