"""The controller's handle on all ranks of a role.

Guarantees:

- rank r runs on device r * `devices_per_rank` of the pool, whatever order Ray starts the processes in;
- every rank gets the same rendezvous address, a port that rank 0 reserved on its own machine;
- `restart` replaces the process of one rank on its own devices, and touches no other;
- `shutdown` returns when the processes, and on this machine all their descendants and scratch folders, are gone.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.errors import RankProcess, RayFailed
from megarl.cluster.failure import wait
from megarl.cluster.guard import kill_marked, parent_of
from megarl.cluster.hosts import on_node
from megarl.cluster.pool import Device, ResourcePool
from megarl.cluster.watch import Watch
from megarl.cluster.worker import ProcessFacts, RankInfo, Worker

# The share of a device that each group takes in Ray's books: up to eight groups on a device. Memory and time
# are shared by agreement between the roles, not by this number.
DEVICE_SHARE = 0.125
_EXIT_SECONDS = 1.0
_KILL_SECONDS = 15.0  # until a node has ended the processes of a rank


class WorkerGroup:
    """`world_size` processes, each with an object of `worker_class`.

    `started` holds one call a rank, which ends when the rank's constructor has; pass them to `wait`. Several
    groups can so start at the same time. Calls are executed in order, after the constructor.
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
        device_order: Sequence[int] | None = None,
        setup_timeout: float = 120.0,
        beside: Sequence["WorkerGroup"] = (),
        watch: Watch | None = None,
    ) -> None:
        """Starts the processes and returns when all have reported; their constructors still run then.

        Args:
            role: names processes, logs and errors.
            worker_class: "package.module:Class", imported in the rank's process only; made as
                `Class(rank_info, **init_kwargs)`.
            log_dir: rank r writes to `<log_dir>/<role>-rank<r>.log`.
            gpu_fraction: share of each device that is booked, so that other groups fit beside this one.
            env: environment of the ranks, over the one that this room sets.
            devices_per_rank: GPUs (or slots) that each process uses, on one machine: an engine with tensor
                parallelism that starts its own ranks takes several.
            device_order: the numbers of the pool's devices in the order in which ranks take them; None: 0, 1, ...
            setup_timeout: seconds until all processes must have reported.
            beside: groups whose deaths are to be noticed while processes of this one come up; it may grow later.
            watch: finds what else is wrong meanwhile, as in `wait`.

        Raises:
            ValueError: the pool is too small, a rank's devices are on two machines, or a bad `worker_class`.
            WorkerDied, WorkerFailed, WaitTimeout: a process did not come up, or one of `beside` died.
            RayFailed: a server of Ray has ended, or is stopped.
        """
        if worker_class.count(":") != 1:
            raise ValueError(f"worker_class must look like 'package.module:Class', found {worker_class!r}")
        self.role = role
        self.world_size = world_size
        self._single_machine = sum(node["Alive"] for node in ray.nodes()) == 1
        self._devices = _devices_of_ranks(role, pool, world_size, devices_per_rank, device_order)
        self._log_dir, self._share, self._env = Path(log_dir).absolute(), gpu_fraction, env or {}
        self._worker, self._setup_timeout = (worker_class, init_kwargs), setup_timeout
        self._beside, self._watch = beside, watch
        self._restarts = [0] * world_size
        self.processes: list[RankProcess] = [self._create(rank) for rank in range(world_size)]
        try:
            self._set_up(range(world_size))
        except RayFailed:  # the processes end with the cluster, of which nothing can be asked any more
            raise
        except Exception:
            self.shutdown()
            raise
        self.started: list[ray.ObjectRef] = [
            self._start(info) for info in self._rank_infos(range(world_size))
        ]

    @property
    def names(self) -> list[str]:
        """Such as "actor rank 0", by rank."""
        return [process.name for process in self.processes]

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, each on its own host."""
        return [process.pid for process in self.processes]

    @property
    def hosts(self) -> list[str]:
        """Addresses of the machines, by rank."""
        return [process.host for process in self.processes]

    @property
    def devices(self) -> list[tuple[Device, ...]]:
        """The devices of each rank's process, in its own order."""
        return list(self._devices)

    def call(self, method: str, *args: Any, num_returns: int = 1, **kwargs: Any) -> list[Any]:
        """Calls a method on every rank with the same arguments.

        Arguments that are `ObjectRef`s themselves (not those inside lists or dicts) arrive as their values,
        mapped from the object store without a copy.

        Returns:
            One ObjectRef a rank; with `num_returns` > 1 a list of that many refs a rank (the method returns a
            tuple): wait for the first and leave the big ones in the object store.
        """
        return self._invoke(method, [args] * self.world_size, kwargs, num_returns)

    def call_each(
        self, method: str, per_rank_args: Sequence[tuple[Any, ...]], num_returns: int = 1
    ) -> list[Any]:
        """As `call`, with a tuple of arguments for each rank."""
        assert len(per_rank_args) == self.world_size, (method, len(per_rank_args), self.world_size)
        return self._invoke(method, per_rank_args, {}, num_returns)

    def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        """As `call`, on one rank alone."""
        (ref,) = self._invoke(method, [args], kwargs, 1, self.processes[rank : rank + 1])
        return ref

    def stream_each(
        self, method: str, per_rank_args: Sequence[tuple[Any, ...]]
    ) -> list[ray.ObjectRefGenerator]:
        """As `call_each` of a generator method: one stream a rank of what it yields; read them by `stream`.

        A rank goes on to its generator's end, whether or not its stream is read to it.
        """
        assert len(per_rank_args) == self.world_size, (method, len(per_rank_args), self.world_size)
        return [
            process.actor.stream.options(
                name=f"{self.role}-rank{process.rank}.{method}", num_returns="streaming"
            ).remote(method, *args)
            for process, args in zip(self.processes, per_rank_args, strict=True)
        ]

    def restart(self, rank: int) -> None:
        """Replace a rank's process, in whatever state it is, by a new one that works as the first one did when it began.

        It has a log of its own, `<role>-rank<r>.restart<n>.log`, and `started[rank]` is its start. For ranks that have no
        process group with the others of theirs, which would know nothing of the new one.

        Raises:
            WorkerDied, WorkerFailed, WaitTimeout: the new process did not come up, or one of another group died.
        """
        old = self.processes[rank]
        if old.pid:  # a stopped process does not listen to Ray
            on_node(old.node_id, _KILL_SECONDS, kill_marked, old.mark, old.pid)
        self._end([old], _EXIT_SECONDS)
        self._restarts[rank] += 1
        self.processes[rank] = self._create(rank)
        self._set_up([rank])
        (info,) = self._rank_infos([rank])
        self.started[rank] = self._start(info)

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
        # Ray has told them to end, and they tell Ray that they do. To kill one before that would be a crash in
        # Ray's eyes, and it would say so on the user's screen at the end of a good run.
        deadline = time.monotonic() + _EXIT_SECONDS
        while any(parent_of(process.pid) is not None for process in here) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in here:
            kill_marked(process.mark, process_group=process.pid)
            shutil.rmtree(process.scratch, ignore_errors=True)

    def _invoke(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        num_returns: int,
        processes: Sequence[RankProcess] | None = None,
    ) -> list[Any]:
        return [
            process.actor.invoke.options(
                name=f"{self.role}-rank{process.rank}.{method}", num_returns=num_returns
            ).remote(method, *args, **kwargs)
            for process, args in zip(processes or self.processes, per_rank_args, strict=True)
        ]

    def _create(self, rank: int) -> RankProcess:
        """The process of a rank, which has yet to be set up."""
        device, number = self._devices[rank][0], self._restarts[rank]
        again = f".restart{number}" if number else ""
        return RankProcess(
            actor=_create_actor(device, self._share),
            role=self.role,
            rank=rank,
            host=device.host,
            node_id=device.node_id,
            log_path=str(self._log_dir / f"{self.role}-rank{rank}{again}.log"),
        )

    def _set_up(self, ranks: Sequence[int]) -> None:
        refs = []
        for rank in ranks:
            process = self.processes[rank]
            gpu_ids = tuple(device.gpu_id for device in self._devices[rank] if device.gpu_id is not None)
            merged = _environment(gpu_ids, self._single_machine) | self._env
            name = f"{self.role}-rank{rank}"
            refs.append(process.actor.setup.remote(name, process.log_path, merged, rank == 0))
        facts: list[ProcessFacts] = wait(
            refs, [*self._beside, self], self._setup_timeout, self._watch, spare=self
        )
        for rank, fact in zip(ranks, facts, strict=True):
            self.processes[rank] = replace(
                self.processes[rank],
                pid=fact.pid,
                host=fact.host,
                node_id=fact.node_id,
                mark=fact.mark,
                scratch=fact.scratch,
            )
            if rank == 0:
                self._port = fact.port

    def _start(self, info: RankInfo) -> ray.ObjectRef:
        actor = self.processes[info.rank].actor
        return actor.start.options(name=f"{self.role}-rank{info.rank}.start").remote(info, *self._worker)

    def _rank_infos(self, ranks: Sequence[int]) -> list[RankInfo]:
        nodes = [process.node_id for process in self.processes]
        return [
            RankInfo(
                rank=rank,
                world_size=self.world_size,
                local_rank=nodes[:rank].count(nodes[rank]),
                master_addr="127.0.0.1" if self._single_machine else self.processes[0].host,
                master_port=self._port,
                role=self.role,
                log_path=self.processes[rank].log_path,
                device_ids=tuple(d.gpu_id for d in self._devices[rank] if d.gpu_id is not None),
                scratch=self.processes[rank].scratch,
            )
            for rank in ranks
        ]


def _devices_of_ranks(
    role: str, pool: ResourcePool, world_size: int, devices_per_rank: int, order: Sequence[int] | None = None
) -> list[tuple]:
    needed = world_size * devices_per_rank
    if needed > len(pool):
        raise ValueError(
            f"{role} needs {world_size} x {devices_per_rank} = {needed} devices, "
            f"resource pool {pool.name!r} has {len(pool)}"
        )
    numbers = range(needed) if order is None else order
    assert len(set(numbers)) == len(numbers) >= needed, order
    devices = [pool.devices[number] for number in numbers]
    ranks = [tuple(devices[i : i + devices_per_rank]) for i in range(0, needed, devices_per_rank)]
    for rank, devices in enumerate(ranks):
        if len({device.node_id for device in devices}) > 1:
            raise ValueError(
                f"the {devices_per_rank} devices of {role} rank {rank} in resource pool {pool.name!r} are on "
                f"several machines ({', '.join(device.host for device in devices)}); devices a node must be a "
                f"multiple of {devices_per_rank}"
            )
    return ranks


def _create_actor(device: Any, share: float) -> Any:
    return (
        ray.remote(Worker)
        .options(
            num_cpus=share,
            num_gpus=share if device.gpu_id is not None else 0,
            scheduling_strategy=device.strategy(),
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()
    )


def _environment(gpu_ids: tuple[str, ...], single_machine: bool) -> dict[str, str]:
    """What every rank needs in its environment before torch is imported."""
    # An empty list hides the GPUs of a machine from ranks that were asked to do without.
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    # Megatron's overlap of communication and computation relies on one hardware queue.
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not gpu_ids:
        # One thread a rank: the ranks are more than the cores already.
        env["OMP_NUM_THREADS"] = "1"
    if single_machine:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
