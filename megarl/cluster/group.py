"""The controller's handle on all ranks of a role.

Guarantees:

- rank r runs on device r * `devices_per_rank` of the pool, whatever order Ray starts the processes in;
- every rank gets the same rendezvous address, a port that rank 0 reserved on its own machine;
- `shutdown` returns when the processes, and on this machine all their descendants and scratch folders, are gone.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.failure import RankProcess, is_dead, wait
from megarl.cluster.guard import kill_marked, parent_of
from megarl.cluster.pool import Device, ResourcePool
from megarl.cluster.worker import ProcessFacts, RankInfo, Worker

# The share of a device that each group takes in Ray's books: up to eight groups on a device. Memory and time
# are shared by agreement between the roles, not by this number.
DEVICE_SHARE = 0.125
_EXIT_SECONDS = 1.0


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

        Raises:
            ValueError: the pool is too small, a rank's devices are on two machines, or a bad `worker_class`.
            WorkerDied, WorkerFailed, WaitTimeout: a process did not come up.
        """
        if worker_class.count(":") != 1:
            raise ValueError(f"worker_class must look like 'package.module:Class', found {worker_class!r}")
        self.role = role
        self.world_size = world_size
        self._single_machine = sum(node["Alive"] for node in ray.nodes()) == 1
        self._devices = _devices_of_ranks(role, pool, world_size, devices_per_rank, device_order)
        log_dir = Path(log_dir).absolute()
        self.processes: list[RankProcess] = [
            RankProcess(
                actor=_create_actor(devices[0], gpu_fraction),
                role=role,
                rank=rank,
                host=devices[0].host,
                node_id=devices[0].node_id,
                log_path=str(log_dir / f"{role}-rank{rank}.log"),
            )
            for rank, devices in enumerate(self._devices)
        ]
        try:
            facts = self._set_up(env or {}, setup_timeout)
        except Exception:
            self.shutdown()
            raise
        infos = self._rank_infos(facts)
        self.started: list[ray.ObjectRef] = [
            process.actor.start.options(name=f"{role}-rank{process.rank}.start").remote(
                info, worker_class, init_kwargs
            )
            for process, info in zip(self.processes, infos, strict=True)
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

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends all processes with all that they started; may be called again, or after the group has failed.

        On other machines the guards end the descendants and remove the scratch folders, within a second or so.
        """
        for process in self.processes:
            ray.kill(process.actor)
        deadline = time.monotonic() + timeout
        while not all(is_dead(process) for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        node = ray.get_runtime_context().get_node_id()
        here = [process for process in self.processes if process.pid and process.node_id == node]
        # Ray has told them to end, and they tell Ray that they do. To kill one before that would be a crash in
        # Ray's eyes, and it would say so on the user's screen at the end of a good run.
        deadline = time.monotonic() + _EXIT_SECONDS
        while any(parent_of(process.pid) is not None for process in here) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in here:
            kill_marked(process.mark, process_group=process.pid)
            shutil.rmtree(process.scratch, ignore_errors=True)

    def _invoke(
        self, method: str, per_rank_args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any], num_returns: int
    ) -> list[Any]:
        return [
            process.actor.invoke.options(
                name=f"{self.role}-rank{process.rank}.{method}", num_returns=num_returns
            ).remote(method, *args, **kwargs)
            for process, args in zip(self.processes, per_rank_args, strict=True)
        ]

    def _set_up(self, env: dict[str, str], timeout: float) -> list[ProcessFacts]:
        refs = []
        for process, devices in zip(self.processes, self._devices, strict=True):
            gpu_ids = tuple(device.gpu_id for device in devices if device.gpu_id is not None)
            merged = _environment(gpu_ids, self._single_machine) | env
            name = f"{self.role}-rank{process.rank}"
            refs.append(process.actor.setup.remote(name, process.log_path, merged, process.rank == 0))
        facts: list[ProcessFacts] = wait(refs, [self], timeout)
        self.processes = [
            replace(
                process,
                pid=fact.pid,
                host=fact.host,
                node_id=fact.node_id,
                mark=fact.mark,
                scratch=fact.scratch,
            )
            for process, fact in zip(self.processes, facts, strict=True)
        ]
        return facts

    def _rank_infos(self, facts: list[ProcessFacts]) -> list[RankInfo]:
        nodes = [fact.node_id for fact in facts]
        return [
            RankInfo(
                rank=rank,
                world_size=self.world_size,
                local_rank=nodes[:rank].count(nodes[rank]),
                master_addr="127.0.0.1" if self._single_machine else facts[0].host,
                master_port=facts[0].port,
                role=self.role,
                log_path=process.log_path,
                device_ids=tuple(d.gpu_id for d in self._devices[rank] if d.gpu_id is not None),
                scratch=facts[rank].scratch,
            )
            for rank, process in enumerate(self.processes)
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
