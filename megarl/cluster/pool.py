"""Devices reserved for a run: GPUs, or process slots on a machine without.

Guarantees:

- devices are ordered node by node (by address), and within a node by GPU number as an integer: rank r of every
  group is on device r, so groups that share a pool agree on who shares a device;
- the devices of one node of the pool are on one machine.
"""

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.hosts import living_nodes

_MESSAGE_AFTER = 3.0  # seconds of waiting for the devices after which a message says so


@dataclass(frozen=True)
class Device:
    """One device: `gpu_id` as CUDA_VISIBLE_DEVICES names it, None for a process slot without a GPU."""

    host: str
    node_id: str
    gpu_id: str | None
    placement: PlacementGroup
    bundle: int

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Where an actor is scheduled that shall use this device."""
        return PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=self.bundle)


class ResourcePool:
    """`nnodes` x `devices_per_node` devices, held until `close` or the end of the controller.

    Each node is a placement group of its own (STRICT_PACK), each device a bundle of it: a bundle holds one
    certain GPU, which a bundle of several GPUs would not when several groups take fractions of it.
    """

    def __init__(
        self,
        name: str,
        nnodes: int,
        devices_per_node: int,
        *,
        use_gpu: bool | None = None,
        timeout: float = 60.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Reserves the devices.

        Args:
            use_gpu: None: GPUs if the cluster has any, else process slots.
            timeout: seconds to wait until the cluster can give them.
            say: gets a message, once, when the pool waits for devices, and later messages about processes that have not come up.

        Raises:
            ValueError: a size below 1, or the cluster cannot give the devices; lists the cluster's devices by node.
        """
        if nnodes < 1 or devices_per_node < 1:
            raise ValueError(
                f"resource pool {name!r} needs at least 1 node and 1 device a node, "
                f"found {nnodes} x {devices_per_node}"
            )
        self.name, self.nnodes, self.devices_per_node, self.say = name, nnodes, devices_per_node, say
        self.use_gpu = ray.cluster_resources().get("GPU", 0) > 0 if use_gpu is None else use_gpu
        self._placements = self._reserve(timeout)
        self.devices = sort_devices(self._find_devices())

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def setup_seconds(self) -> float:
        """Time limit for processes on all nodes to come up: they read one Python installation, often from one file server."""
        return 120.0 + 20.0 * (self.nnodes - 1)

    def close(self) -> None:
        """Gives the devices back; actors that are still on them are killed."""
        for placement in self._placements:
            remove_placement_group(placement)

    def _reserve(self, timeout: float) -> list[PlacementGroup]:
        bundle = {"GPU": 1, "CPU": 1} if self.use_gpu else {"CPU": 1}
        # One node of the pool per machine, also where machines are larger: for this Ray offers no more than a hint.
        machines = sorted(
            (node for node in living_nodes() if _fits(node["Resources"], bundle, self.devices_per_node)),
            key=lambda node: (_address_order(node["NodeManagerAddress"]), node["NodeID"]),
        )
        placements = [
            placement_group(
                [dict(bundle) for _ in range(self.devices_per_node)],
                strategy="STRICT_PACK",
                name=f"{self.name}-{i}",
                _soft_target_node_id=machines[i % len(machines)]["NodeID"] if machines else None,
            )
            for i in range(self.nnodes)
        ]
        # A short wait without a message, then a long one with a message, then an error that gives everything back.
        begun = time.monotonic()

        def are_reserved(seconds: float) -> bool:
            """Whether the devices are given within `seconds` of the beginning."""
            # wait(), not ready(), which starts a worker process in each bundle.
            return all(
                placement.wait(max(0.1, begun + seconds - time.monotonic())) for placement in placements
            )

        if are_reserved(min(_MESSAGE_AFTER, timeout)):
            return placements
        if timeout > _MESSAGE_AFTER:
            self.say(f"{self._lacking()}. Waiting for them, {timeout:g} s at most.")
        if are_reserved(timeout):
            return placements
        message = (
            f"{self._lacking()}, and could not give them within {timeout:g} s. Ask for less "
            "(trainer.nnodes, trainer.n_gpus_per_node, resource_pools), or wait for another run to end."
        )
        for placement in placements:
            remove_placement_group(placement)
        raise ValueError(message)

    def _lacking(self) -> str:
        kind, devices = ("GPU", "GPUs") if self.use_gpu else ("CPU", "process slots (Ray CPUs)")
        free = ray.available_resources().get(kind, 0)
        has = ", ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get(kind, 0):g}" for node in living_nodes()
        )
        return (
            f"resource pool {self.name!r} asks for {self.nnodes} node(s) with {self.devices_per_node} {devices} each; the cluster "
            f"has by node: {has}; now free: {free:g}"
        )

    def _find_devices(self) -> list[Device]:
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        tables = [placement_group_table(placement)["bundles_to_node_id"] for placement in self._placements]
        devices = []
        for bundle in range(len(tables[0])):
            # Only a process inside a bundle can tell which GPU it holds. One bundle of each node at a time: so
            # one process a node serves all of them, where Ray would start one (0.5 s of a core) for each.
            gpu_ids: list[str | None] = [None] * len(tables)
            if self.use_gpu:
                gpu_ids = ray.get([_visible_gpu(placement, bundle) for placement in self._placements])
            for placement, table, gpu_id in zip(self._placements, tables, gpu_ids, strict=True):
                devices.append(Device(hosts[table[bundle]], table[bundle], gpu_id, placement, bundle))
        return sorted(devices, key=lambda device: self._placements.index(device.placement))


def sort_devices(devices: list[Device]) -> tuple[Device, ...]:
    """Devices in rank order: by address, machine and GPU number ("2" before "10"), else as they came."""

    def order(device: Device) -> tuple:
        name = device.gpu_id or "0"
        # GPUs can also be named by UUID: UUIDs come after the numbered ones.
        number = (0, int(name), "") if name.isdigit() else (1, 0, name)
        return _address_order(device.host), device.node_id, number

    return tuple(sorted(devices, key=order))


def _visible_gpu(placement: PlacementGroup, bundle: int) -> ray.ObjectRef:
    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
    return _first_gpu.options(scheduling_strategy=strategy).remote()


# max_calls=0: by default Ray ends a process after its first task with a GPU.
@ray.remote(num_cpus=0, num_gpus=0.01, max_retries=0, max_calls=0)
def _first_gpu() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _fits(resources: dict[str, float], bundle: dict[str, float], count: int) -> bool:
    return all(resources.get(kind, 0) >= amount * count for kind, amount in bundle.items())


def _address_order(host: str) -> tuple[int, int]:
    address = ipaddress.ip_address(host)
    return address.version, int(address)
