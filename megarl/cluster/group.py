"""The controller's handle on all ranks of a role.

Guarantees:

- rank r runs on device r * `devices_per_rank` of the pool, in whatever order Ray starts the processes;
- every rank gets the same rendezvous address, a port that rank 0 reserved on its own machine;
- `restart` replaces the process of one rank on its own devices, and touches no other;
- a rank may have several processes, its parts, each on a node of its own: the first answers the rank's calls, all are watched,
  and they are replaced together;
- `shutdown` returns when the processes, and on this machine all their descendants and scratch folders, are gone.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.fork_server import interpreter
from megarl.cluster.guard import kill_marked, parent_of, remove_scratch
from megarl.cluster.hosts import living_nodes, on_node
from megarl.cluster.pool import Device, ResourcePool
from megarl.cluster.ranks import ProcessFacts, RankInfo, RankProcess, RayFailed
from megarl.cluster.waiting import MissingReporter, RelayedAnswer, wait
from megarl.cluster.watch import Watch
from megarl.cluster.worker import Worker, rank_environment

# The share of a device that each group takes in Ray's books: up to eight groups on a device. Memory and time
# are shared by agreement between the roles, not by this number.
DEVICE_SHARE = 0.125
_END_SECONDS = 10.0  # until Ray has ended all processes of a group
_EXIT_SECONDS = 1.0  # until a process of this machine has exited
_KILL_SECONDS = 15.0  # until a node has ended the processes of a rank
Call = ray.ObjectRef | RelayedAnswer
"""A call of a rank in progress; `wait` returns its result."""


class WorkerGroup:
    """`world_size` ranks of `parts` processes each, mostly one; each process has an object of `worker_class`.

    `started` holds one call a process, which ends when its constructor has; pass them to `wait`. So several
    groups can start at the same time. Calls are executed in order, after the constructor.

    Attributes:
        processes: rank by rank, and within a rank part by part.
        devices: the devices of each process, in the order in which it numbers them.
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
        watched_groups: Sequence["WorkerGroup"] = (),
        watch: Watch | None = None,
        around: str | None = None,
        fork_server: str | None = None,
        spared_groups: Sequence["WorkerGroup"] = (),
    ) -> None:
        """Starts the processes and returns when all have reported; their constructors still run then.

        Args:
            role: names processes, logs and errors.
            worker_class: "package.module:Class", imported in the rank's process only; made as
                `Class(rank_info, **init_kwargs)`.
            log_dir: rank r writes to `<log_dir>/<role>-rank<r>.log`.
            gpu_fraction: share of each device that is booked, so that other groups fit on it, too.
            env: environment variables of the ranks, which override the ones that this room sets.
            devices_per_rank: GPUs (or slots) that each rank uses: an engine with tensor parallelism that starts its own
                ranks takes several.
            parts: processes of each rank, which share its devices evenly, in their order; the devices of one process are on one
                machine. They meet at an address of their own (`RankInfo.master_addr`).
            device_order: the numbers of the pool's devices in the order in which ranks take them; None: 0, 1, ...
            watched_groups: groups whose deaths are noticed while processes of this one come up; the sequence may grow later.
            watch: finds hangs during that time, as in `wait`.
            around: "package.module:function", imported in the ranks: called with a method's name it returns a context manager, which
                each call of that method runs in.
            fork_server: the socket of a fork server with the imports of these ranks; ranks with a GPU do not use it.
            spared_groups: the ones of `watched_groups` whose dead processes do not matter during the start; the sequence may grow later.

        Raises:
            ValueError: the pool is too small, a rank's devices are on two machines, or a bad `worker_class`.
            WorkerDied, WorkerFailed, WaitTimeout: a process did not come up within `setup_seconds` of the pool, or a process of
                `watched_groups` died.
            RayFailed: a server of Ray has ended, or is stopped.
        """
        if worker_class.count(":") != 1:
            raise ValueError(f"worker_class must look like 'package.module:Class', found {worker_class!r}")
        self.role = role
        self.world_size = world_size
        self._single_machine = len(living_nodes()) == 1
        self.parts = parts
        self.devices = _devices_of_processes(role, pool, world_size, devices_per_rank, parts, device_order)
        self._log_dir, self._share, self._env = Path(log_dir).absolute(), gpu_fraction, env or {}
        self._worker = (worker_class, init_kwargs, around)
        self._pool, self._watched_groups, self._watch = pool, watched_groups, watch
        self._fork_server, self._spared_groups = fork_server, spared_groups
        self._restarts = [0] * world_size
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
    def pids(self) -> list[int]:
        """Process ids, each on its own host."""
        return [process.pid for process in self.processes]

    @property
    def hosts(self) -> list[str]:
        """Addresses of the machines, by process."""
        return [process.host for process in self.processes]

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

        Arguments that are `ObjectRef`s themselves (not inside lists or dicts) arrive as their values,
        mapped from the object store without a copy.

        Returns: one call a rank, for `wait`.
        """
        return self._invoke(method, [args] * self.world_size, kwargs)

    def call_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> list[Call]:
        """As `call`, with a tuple of arguments for each rank."""
        return self._invoke(method, per_rank_args, {})

    def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Call:
        """As `call`, on one rank alone."""
        (call,) = self._invoke(method, [args], kwargs, self.processes_of(rank)[:1])
        return call

    def call_parts(self, method: str, per_process_args: Sequence[tuple[Any, ...]]) -> list[Call]:
        """As `call_each`, on all processes of all ranks."""
        return self._invoke(method, per_process_args, {}, self.processes)

    def restart(self, rank: int) -> list[ray.ObjectRef]:
        """Replace a rank's process, in whatever state it is, by a new one with the same arguments; all parts of a rank that has several.

        The new process has a log of its own, `<role>-rank<r>.restart<n>.log`. Only for ranks that have no process group with the
        other ranks of their role, which would not know the new process.

        Returns: the start of each new process, as in `started`.

        Raises:
            WorkerDied, WorkerFailed, WaitTimeout: the new process did not come up, or one of another group died.
        """
        self.end(rank)
        self._restarts[rank] += 1
        numbers = range(rank * self.parts, (rank + 1) * self.parts)
        for number in numbers:
            self.processes[number] = self._create(number)
        self._set_up(numbers)
        for number in numbers:
            self.started[number] = self._start(number)
        return [self.started[number] for number in numbers]

    def end(self, rank: int) -> None:
        """End a rank's processes, in whatever state they are."""
        old = self.processes_of(rank)
        for process in old:
            if process.pid:  # a stopped process does not listen to Ray
                on_node(process.node_id, _KILL_SECONDS, kill_marked, process.mark, process.pid)
        self._end(old, _EXIT_SECONDS)

    def shutdown(self) -> None:
        """Ends all processes and their descendants; may be called again, or after the group has failed.

        On other machines the guards end the descendants and remove the scratch folders, within a second or so.
        """
        self._end(self.processes, _END_SECONDS)

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
        processes = processes or self._heads
        assert len(per_rank_args) == len(processes), (method, len(per_rank_args), len(processes))
        calls = [self._named(process, method) for process in processes]
        return [call.remote(method, *args, **kwargs) for call, args in zip(calls, per_rank_args, strict=True)]

    def _named(self, process: RankProcess, method: str) -> Any:
        """`invoke` of a process, named after the rank's method. Cached, since a thousand ranks are called at a time."""
        key = (process.actor._actor_id, process.rank, method)
        if key not in self._calls:
            name = f"{self.role}-rank{process.rank}.{method}"
            self._calls[key] = process.actor.invoke.options(name=name)
        return self._calls[key]

    def _create(self, number: int) -> RankProcess:
        """Create a process, which is not set up yet."""
        rank, part = divmod(number, self.parts)
        device, restarts = self.devices[number][0], self._restarts[rank]
        on_gpu = device.gpu_id is not None
        forked = self._fork_server is not None and not on_gpu
        actor = (
            ray.remote(Worker)
            .options(
                num_cpus=self._share,
                num_gpus=self._share if on_gpu else 0,
                scheduling_strategy=device.strategy(),
                max_restarts=0,
                max_task_retries=0,
                runtime_env={"py_executable": interpreter(self._fork_server)} if forked else None,
                enable_task_events=False,  # a tenth of a call's cost, for lists of calls that the timeline has, too
            )
            .remote()
        )
        process = RankProcess(actor, self.role, rank, device.host, device.node_id, log_path="", part=part)
        again = f".restart{restarts}" if restarts else ""
        return replace(process, log_path=str(self._log_dir / f"{process.title}{again}.log"))

    def _set_up(self, numbers: Sequence[int]) -> None:
        refs = []
        for number in numbers:
            process, env = self.processes[number], rank_environment(self._gpus(number), self._single_machine)
            needs_port = number == self._meeting(number)
            refs.append(
                process.actor.setup.remote(process.title, process.log_path, env | self._env, needs_port)
            )
        missing = MissingReporter(self._pool.say, len(refs))
        groups, spares = [*self._watched_groups, self], [*self._spared_groups, self]
        facts: list[ProcessFacts] = wait(refs, groups, self._pool.setup_seconds, self._watch, spares, missing)
        for number, fact in zip(numbers, facts, strict=True):
            self.processes[number] = replace(self.processes[number], **vars(fact))

    def _gpus(self, number: int) -> tuple[str, ...]:
        return tuple(device.gpu_id for device in self.devices[number] if device.gpu_id is not None)

    def _meeting(self, number: int) -> int:
        """The process at whose address a process meets others: rank 0 of the group, or the first part of its own rank."""
        return 0 if self.parts == 1 else number - number % self.parts

    def _start(self, number: int) -> ray.ObjectRef:
        process, meeting = self.processes[number], self.processes[self._meeting(number)]
        assert meeting.port is not None
        nodes = [process.node_id for process in self.processes]
        info = RankInfo(
            rank=process.rank,
            world_size=self.world_size,
            local_rank=nodes[:number].count(nodes[number]),
            master_addr="127.0.0.1" if self._single_machine else meeting.host,
            master_port=meeting.port,
            role=self.role,
            log_path=process.log_path,
            device_ids=self._gpus(number),
            scratch=process.scratch,
            part=process.part,
            parts=self.parts,
        )
        return process.actor.start.options(name=f"{process.title}.start").remote(info, *self._worker)


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
