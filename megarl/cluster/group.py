"""The controller's handle on all ranks of a role, whose calls may go through relays.

Guarantees:

- rank r runs on device r * `devices_per_rank` of the pool, in whatever order Ray starts the processes;
- every rank gets the same rendezvous address, a port that rank 0 reserved on its own machine;
- `restart` replaces the process of one rank on its own devices, and touches no other;
- a rank may have several processes, its parts, each on a node of its own: the first answers the rank's calls, all are watched,
  and they are replaced together;
- `shutdown` returns when the processes, and on this machine all their descendants and scratch folders, are gone.

A call of Ray takes about half a millisecond of the controller's processor (Ray 2.60, benchmarks/dispatch.py), while all ranks
wait: half a second for a thousand ranks, several times a step. In a `RelayedGroup` the controller calls one relay process for each share
of the ranks, and the relays of all machines call their ranks at the same time. Further guarantees of a `RelayedGroup`:

- exceptions of ranks reach the controller as if it had called them, with the list of ranks that have not answered by then;
- the answers of a share arrive together, when all of its ranks have answered; where one has raised, at most `GRACE_SECONDS` later;
- calls of a rank are executed in the order in which they were made, `call_rank` included;
- a relay that dies or is stopped is reported like a rank.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from megarl.cluster.fork_server import interpreter
from megarl.cluster.guard import kill_marked, parent_of, remove_scratch
from megarl.cluster.hosts import on_node
from megarl.cluster.pool import Device, ResourcePool
from megarl.cluster.ranks import (
    ProcessFacts,
    RankInfo,
    RankProcess,
    RayFailed,
    RelayedErrors,
    rank_error,
    sent,
)
from megarl.cluster.waiting import GRACE_SECONDS, MissingReporter, RelayedAnswer, wait
from megarl.cluster.watch import Watch
from megarl.cluster.worker import Worker, rank_environment

# The share of a device that each group takes in Ray's books: up to eight groups on a device. Memory and time
# are shared by agreement between the roles, not by this number.
DEVICE_SHARE = 0.125
_EXIT_SECONDS = 1.0
_KILL_SECONDS = 15.0  # until a node has ended the processes of a rank
Call = ray.ObjectRef | RelayedAnswer
"""A call of a rank in progress; `wait` returns its result."""
MOST_RANKS = 16  # of a share, all on one machine
RELAY = "megarl.cluster.group:Relay"
_DEVICE_SHARE = 0.01  # in Ray's books


class WorkerGroup:
    """`world_size` ranks of `parts` processes each, mostly one; each process has an object of `worker_class`.

    `started` holds one call a process, which ends when its constructor has; pass them to `wait`. Several
    groups can so start at the same time. Calls are executed in order, after the constructor.

    Attributes:
        processes: rank by rank, and within a rank part by part.
    """

    def __init__(
        self,
        role: str,
        worker_class: str,
        pool: ResourcePool,
        world_size: int,
        init_kwargs: dict[str, Any],
        log_dir: str | Path,
        gpu_fraction: float = DEVICE_SHARE,
        env: dict[str, str] | None = None,
        devices_per_rank: int = 1,
        parts: int = 1,
        device_order: Sequence[int] | None = None,
        setup_timeout: float | None = None,
        watched_groups: Sequence["WorkerGroup"] = (),
        watch: Watch | None = None,
        around: str | None = None,
        fork_server: str | None = None,
    ) -> None:
        """Starts the processes and returns when all have reported; their constructors still run then.

        Args:
            role: names processes, logs and errors.
            worker_class: "package.module:Class", imported in the rank's process only; made as
                `Class(rank_info, **init_kwargs)`.
            log_dir: rank r writes to `<log_dir>/<role>-rank<r>.log`.
            gpu_fraction: share of each device that is booked, so that other groups fit on it, too.
            env: environment of the ranks, over the one that this room sets.
            devices_per_rank: GPUs (or slots) that each rank uses: an engine with tensor parallelism that starts its own
                ranks takes several.
            parts: processes of each rank, which share its devices evenly, in their order; the devices of one process are on one
                machine. They meet at an address of their own (`RankInfo.master_addr`).
            device_order: the numbers of the pool's devices in the order in which ranks take them; None: 0, 1, ...
            setup_timeout: seconds until all processes must have reported; None: `setup_seconds` of the pool.
            watched_groups: groups whose deaths are noticed while processes of this one come up; the sequence may grow later.
            watch: finds hangs during that time, as in `wait`.
            around: "package.module:function", imported in the ranks: called with a method's name it returns a context manager, which
                each call of that method runs in.
            fork_server: the socket of a fork server with the imports of these ranks; ranks with a GPU do not use it.

        Raises:
            ValueError: the pool is too small, a rank's devices are on two machines, or a bad `worker_class`.
            WorkerDied, WorkerFailed, WaitTimeout: a process did not come up, or a process of `watched_groups` died.
            RayFailed: a server of Ray has ended, or is stopped.
        """
        if worker_class.count(":") != 1:
            raise ValueError(f"worker_class must look like 'package.module:Class', found {worker_class!r}")
        self.role = role
        self.world_size = world_size
        self._single_machine = sum(node["Alive"] for node in ray.nodes()) == 1
        self.parts = parts
        self._devices = _devices_of_processes(role, pool, world_size, devices_per_rank, parts, device_order)
        self._log_dir, self._share, self._env = Path(log_dir).absolute(), gpu_fraction, env or {}
        self._worker = (worker_class, init_kwargs, around)
        self._setup_timeout = pool.setup_seconds if setup_timeout is None else setup_timeout
        self._pool, self._watched_groups, self._watch = pool, watched_groups, watch
        self._fork_server = fork_server
        self._restarts = [0] * world_size
        self._ports: dict[int, int] = {}  # by number of the process that reserved it
        self._calls: dict[tuple[Any, ...], Any] = {}  # see `_named`
        # All processes are created before any is awaited, so that they come up at the same time. Constructors start last, when every
        # process has reported and rank 0's port is known.
        numbers = range(world_size * parts)
        self.processes: list[RankProcess] = [self._create(number) for number in numbers]
        try:
            self._set_up(numbers)
        except RayFailed:  # the processes end with the cluster, which answers no calls any more
            raise
        except Exception:
            self.shutdown()
            raise
        self.started: list[ray.ObjectRef] = [self._start(number) for number in numbers]

    @property
    def names(self) -> list[str]:
        """Such as "actor rank 0", by process."""
        return [process.name for process in self.processes]

    @property
    def pids(self) -> list[int]:
        """Process ids, each on its own host."""
        return [process.pid for process in self.processes]

    @property
    def hosts(self) -> list[str]:
        """Addresses of the machines, by process."""
        return [process.host for process in self.processes]

    @property
    def devices(self) -> list[tuple[Device, ...]]:
        """The devices of each process, in its own order."""
        return list(self._devices)

    @property
    def watched(self) -> list[RankProcess]:
        """The processes whose death ends a wait."""
        return list(self.processes)

    def processes_of(self, rank: int) -> list[RankProcess]:
        """The processes of a rank, part by part."""
        return self.processes[rank * self.parts : (rank + 1) * self.parts]

    @property
    def _heads(self) -> list[RankProcess]:
        """The process of each rank that answers its calls."""
        return self.processes[:: self.parts]

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Call]:
        """Calls a method on every rank with the same arguments.

        Arguments that are `ObjectRef`s themselves (not those inside lists or dicts) arrive as their values,
        mapped from the object store without a copy.

        Returns: one call a rank, for `wait`.
        """
        return self._invoke(method, [args] * self.world_size, kwargs)

    def call_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Call]:
        """As `call`, with a tuple of arguments for each rank."""
        assert len(per_rank_args) == self.world_size, (method, len(per_rank_args), self.world_size)
        return self._invoke(method, per_rank_args, {})

    def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Call:
        """As `call`, on one rank alone."""
        (call,) = self._invoke(method, [args], kwargs, self.processes_of(rank)[:1])
        return call

    def call_parts(self, method: str, per_process_args: Sequence[tuple[Any, ...]]) -> list[Call]:
        """As `call_each`, on all processes of all ranks."""
        assert len(per_process_args) == len(self.processes), (method, len(per_process_args))
        return self._invoke(method, per_process_args, {}, self.processes)

    def stream_each(
        self, method: str, per_rank_args: Sequence[tuple[Any, ...]]
    ) -> list[ray.ObjectRefGenerator]:
        """As `call_each` of a generator method: one stream of values for each rank; read them by `stream`.

        A rank goes on to its generator's end, whether or not its stream is read to it.
        """
        assert len(per_rank_args) == self.world_size, (method, len(per_rank_args), self.world_size)
        calls = [self._named(process, method, stream=True) for process in self._heads]
        return [
            call.remote(method, *map(sent, args)) for call, args in zip(calls, per_rank_args, strict=True)
        ]

    def restart(self, rank: int) -> list[ray.ObjectRef]:
        """Replace a rank's process, in whatever state it is, by a new one with the same arguments; all parts of a rank that has several.

        The new process has a log of its own, `<role>-rank<r>.restart<n>.log`. Only for ranks that have no process group with the
        other ranks of their role, which would not know the new process.

        Returns: the start of each new process, as in `started`.

        Raises:
            WorkerDied, WorkerFailed, WaitTimeout: the new process did not come up, or one of another group died.
        """
        old = self.processes_of(rank)
        for process in old:
            if process.pid:  # a stopped process does not listen to Ray
                on_node(process.node_id, _KILL_SECONDS, kill_marked, process.mark, process.pid)
        self._end(old, _EXIT_SECONDS)
        self._restarts[rank] += 1
        numbers = range(rank * self.parts, (rank + 1) * self.parts)
        for number in numbers:
            self.processes[number] = self._create(number)
        self._set_up(numbers)
        for number in numbers:
            self.started[number] = self._start(number)
        return [self.started[number] for number in numbers]

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends all processes with all that they started; may be called again, or after the group has failed.

        On other machines the guards end the descendants and remove the scratch folders, within a second or so.
        """
        self._end(self.processes, timeout)

    def _end(self, processes: Sequence[RankProcess], timeout: float) -> None:
        for process in processes:
            ray.kill(process.actor)
        deadline = time.monotonic() + timeout
        while not all(process.is_dead for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        node = ray.get_runtime_context().get_node_id()
        here = [process for process in processes if process.pid and process.node_id == node]
        # Ray has told the processes to end, and they report to Ray that they do. Ray would take a kill before that report for a crash,
        # and print so on the user's screen at the end of a successful run.
        deadline = time.monotonic() + _EXIT_SECONDS
        while any(parent_of(process.pid) is not None for process in here) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in here:
            kill_marked(process.mark, process_group=process.pid)
            remove_scratch(process.scratch)

    def _invoke(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        processes: Sequence[RankProcess] | None = None,
    ) -> list[Call]:
        calls = [self._named(process, method) for process in processes or self._heads]
        return [call.remote(method, *args, **kwargs) for call, args in zip(calls, per_rank_args, strict=True)]

    def _named(self, process: RankProcess, method: str, stream: bool = False) -> Any:
        """`invoke` (or `stream`) of a process, named after the rank's method. Cached, since a thousand ranks are called at a time."""
        key = (process.actor._actor_id, process.rank, method, stream)
        if key not in self._calls:
            name = f"{self.role}-rank{process.rank}.{method}"
            actor = process.actor
            self._calls[key] = (
                actor.stream.options(name=name, num_returns="streaming")
                if stream
                else actor.invoke.options(name=name)
            )
        return self._calls[key]

    def _create(self, number: int) -> RankProcess:
        """Create a process, which is not set up yet."""
        rank, part = divmod(number, self.parts)
        device, restarts = self._devices[number][0], self._restarts[rank]
        again = f".restart{restarts}" if restarts else ""
        return RankProcess(
            actor=_create_actor(device, self._share, self._fork_server if device.gpu_id is None else None),
            role=self.role,
            rank=rank,
            host=device.host,
            node_id=device.node_id,
            log_path=str(self._log_dir / f"{_title(self.role, rank, part)}{again}.log"),
            part=part,
        )

    def _set_up(self, numbers: Sequence[int]) -> None:
        refs = []
        for number in numbers:
            process = self.processes[number]
            gpu_ids = tuple(device.gpu_id for device in self._devices[number] if device.gpu_id is not None)
            merged = rank_environment(gpu_ids, self._single_machine) | self._env
            name = _title(self.role, process.rank, process.part)
            needs_port = number == self._meeting(number)
            refs.append(process.actor.setup.remote(name, process.log_path, merged, needs_port))
        missing, groups = (
            MissingReporter(self._pool.say, "to come up", len(refs)),
            [*self._watched_groups, self],
        )
        facts: list[ProcessFacts] = wait(refs, groups, self._setup_timeout, self._watch, self, missing)
        for number, fact in zip(numbers, facts, strict=True):
            self.processes[number] = replace(
                self.processes[number],
                pid=fact.pid,
                host=fact.host,
                node_id=fact.node_id,
                mark=fact.mark,
                scratch=fact.scratch,
            )
            if fact.port is not None:
                self._ports[number] = fact.port

    def _meeting(self, number: int) -> int:
        """The process at whose address a process meets others: rank 0 of the group, or the first part of its own rank."""
        return 0 if self.parts == 1 else number - number % self.parts

    def _start(self, number: int) -> ray.ObjectRef:
        process = self.processes[number]
        title = _title(self.role, process.rank, process.part)
        return process.actor.start.options(name=f"{title}.start").remote(self._info(number), *self._worker)

    def _info(self, number: int) -> RankInfo:
        process, meeting = self.processes[number], self._meeting(number)
        nodes = [process.node_id for process in self.processes]
        return RankInfo(
            rank=process.rank,
            world_size=self.world_size,
            local_rank=nodes[:number].count(nodes[number]),
            master_addr="127.0.0.1" if self._single_machine else self.processes[meeting].host,
            master_port=self._ports[meeting],
            role=self.role,
            log_path=process.log_path,
            device_ids=tuple(d.gpu_id for d in self._devices[number] if d.gpu_id is not None),
            scratch=process.scratch,
            part=process.part,
            parts=self.parts,
        )


def _title(role: str, rank: int, part: int) -> str:
    """The name of a process in process lists and of its log."""
    return f"{role}-rank{rank}" + (f".part{part}" if part else "")


def _devices_of_processes(
    role: str,
    pool: ResourcePool,
    world_size: int,
    devices_per_rank: int,
    parts: int,
    order: Sequence[int] | None = None,
) -> list[tuple[Device, ...]]:
    assert devices_per_rank % parts == 0, (devices_per_rank, parts)
    needed = world_size * devices_per_rank
    if needed > len(pool):
        raise ValueError(
            f"{role} needs {world_size} x {devices_per_rank} = {needed} devices, "
            f"resource pool {pool.name!r} has {len(pool)}"
        )
    numbers = range(needed) if order is None else order
    assert len(set(numbers)) == len(numbers) >= needed, order
    devices = [pool.devices[number] for number in numbers]
    each = devices_per_rank // parts
    processes = [tuple(devices[i : i + each]) for i in range(0, needed, each)]
    for number, devices in enumerate(processes):
        if len({device.node_id for device in devices}) > 1:
            raise ValueError(
                f"the {each} devices of {role} rank {number // parts} in resource pool {pool.name!r} are on "
                f"several machines ({', '.join(device.host for device in devices)}); devices a node must be a "
                f"multiple of {each}"
            )
    return processes


def _create_actor(device: Device, share: float, fork_server: str | None) -> Any:
    return (
        ray.remote(Worker)
        .options(
            num_cpus=share,
            num_gpus=share if device.gpu_id is not None else 0,
            scheduling_strategy=device.strategy(),
            max_restarts=0,
            max_task_retries=0,
            runtime_env=None if fork_server is None else {"py_executable": interpreter(fork_server)},
            enable_task_events=False,  # a tenth of a call's cost, for lists of calls that the timeline has, too
        )
        .remote()
    )


class Relay:
    """The worker class of relays."""

    def __init__(self, info: RankInfo) -> None:
        self._actors: dict[int, ActorHandle] = {}
        self._role = ""

    def introduce(self, role: str, actors: dict[int, ActorHandle]) -> None:
        """Learn the actors of ranks, also of restarted ones."""
        self._role, self._actors = role, self._actors | actors

    def pass_on(
        self, method: str, ranks: Sequence[int], args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method on ranks.

        Args:
            args: of each rank, or of all if there is one.

        Returns: the ranks' results, in their order.

        Raises:
            RelayedErrors: a rank raised, or died.
        """
        if len(args) < len(ranks):
            args = list(args) * len(ranks)
        calls = [
            self._actors[rank].invoke.options(name=f"{self._role}-rank{rank}.{method}") for rank in ranks
        ]
        refs = [call.remote(method, *of_rank, **kwargs) for call, of_rank in zip(calls, args, strict=True)]
        return _answers(dict(zip(refs, ranks, strict=True)))


def _answers(pending: dict[ray.ObjectRef, int]) -> list[Any]:
    """Wait for the ranks' answers, in their order; for a short time after the first error, in which its cause may come to light."""
    answers: dict[int, Any] = dict.fromkeys(pending.values())
    errors: dict[int, Exception] = {}
    deadline = None
    while pending and (deadline is None or time.monotonic() < deadline):
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=seconds, fetch_local=False)
        for ref in ready:
            rank = pending.pop(ref)
            try:
                answers[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                errors[rank] = _report_of(error)
                # What has caused this may come to light later than it, elsewhere.
                deadline = deadline or time.monotonic() + GRACE_SECONDS
    if errors:
        raise RelayedErrors(errors, list(pending.values()))
    return list(answers.values())


def _report_of(error: ray.exceptions.RayError) -> Exception:
    """A rank's own report of its failure; Ray's message if the rank reported nothing."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return rank_error(error)
    return ConnectionError(str(error))


class RelayedGroup(WorkerGroup):
    """A group whose calls go through relays: one more process for each `most` ranks of a machine."""

    _relays: WorkerGroup | None = None
    _shares: Sequence[Sequence[int]] = ()
    _watched_relays: Sequence[RankProcess] = ()

    def __init__(self, *arguments: Any, most: int = MOST_RANKS, **options: Any) -> None:
        """As `WorkerGroup`, whose arguments it takes but `parts`, `devices_per_rank` and `device_order`."""
        super().__init__(*arguments, **options)
        try:
            shares = shares_of([process.node_id for process in self.processes], most)
            relays = WorkerGroup(
                f"{self.role}-relay",
                RELAY,
                self._pool,
                len(shares),
                {},
                self._log_dir,
                gpu_fraction=_DEVICE_SHARE,
                device_order=[share[0] for share in shares],  # each on the device of its first rank
                watched_groups=[*self._watched_groups, self],
                watch=self._watch,
            )
            self.relay_by(relays, shares)
        except RayFailed:  # as in `WorkerGroup`
            raise
        except Exception:
            self.shutdown()
            raise

    def relay_by(self, relays: WorkerGroup, shares: Sequence[Sequence[int]]) -> None:
        """Send calls through `relays`, each of which calls the ranks of its share."""
        self._relays, self._shares = relays, shares
        self.started += [*relays.started, *self._introduce(shares)]

    def _introduce(self, shares: Sequence[Sequence[int]]) -> list[Call]:
        """Tell each relay the actors of the given ranks of its share."""
        shares_of_relays = ([self.processes[rank] for rank in share] for share in self._shares)
        relays = zip(self._relays.processes, shares_of_relays, strict=True)
        self._watched_relays = [replace(relay, share=tuple(share)) for relay, share in relays]
        actors = [{rank: self.processes[rank].actor for rank in share} for share in shares]
        return self._relays.call_each("introduce", [(self.role, of_share) for of_share in actors])

    @property
    def watched(self) -> list[RankProcess]:
        return [*self.processes, *self._watched_relays]

    def restart(self, rank: int) -> list[Call]:
        started = super().restart(rank)
        return [*started, *self._introduce([[one for one in share if one == rank] for share in self._shares])]

    def shutdown(self, timeout: float = 10.0) -> None:
        if self._relays is not None:
            self._relays.shutdown(timeout)
        super().shutdown(timeout)

    def _invoke(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        processes: Sequence[RankProcess] | None = None,
    ) -> list[Call]:
        ranks = [process.rank for process in processes or self.processes]
        args = dict(zip(ranks, per_rank_args, strict=True))
        called = [[rank for rank in share if rank in args] for share in self._shares]
        calls: dict[int, Call] = {}
        for relay, share in zip(self._relays.processes, called, strict=True):
            if not share:
                continue
            of_ranks = [args[rank] for rank in share]
            if all(one is of_ranks[0] for one in of_ranks):
                of_ranks = of_ranks[:1]
            # Within lists references are not resolved: the ranks need their values, not the relay.
            ref = self._relays.call_rank(relay.rank, "pass_on", method, share, of_ranks, kwargs)
            calls |= {rank: RelayedAnswer(ref, index) for index, rank in enumerate(share)}
        return [calls[rank] for rank in ranks]


def group_kind(world_size: int, relays_from: int | None) -> type[WorkerGroup]:
    """The class for a group of `world_size` ranks: with relays from `relays_from` ranks on; None: never."""
    return RelayedGroup if relays_from is not None and world_size >= relays_from else WorkerGroup


def shares_of(nodes: Sequence[str], most: int) -> list[list[int]]:
    """The ranks of each relay, given the node of each rank: shares as even as possible, of at most `most` ranks of one node."""
    shares = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        num = math.ceil(len(ranks) / most)
        bounds = [len(ranks) * i // num for i in range(num + 1)]
        shares += [ranks[a:b] for a, b in pairwise(bounds)]
    return shares
