"""Device memory of a model that comes and goes: weights and optimizer states move to the host, gradients are dropped.

Memory moves by storages: a storage is emptied and later filled again, so every tensor and view of it stays valid
(Megatron's buffers, the parameters within them, the distributed optimizer's shards). Contents come back bit for bit.
Megatron-core 0.19.2 has functions of that kind. The one for gradients is used here; the others leave the optimizer's
float32 shards as copies of former views of the parameters, and on a CPU lose the parameters.

To use a tensor whose storage is empty ends the process, so callers ask `require` or `assert_resident` first. On a CPU numpy
must never see weights (`tensor.numpy()`): torch then refuses to empty their storages.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from megarl import platform
from megarl.megatron.checkpoint.states import parts_of
from megarl.megatron.fsdp import (
    gathered_bytes,
    gradient_buffers,
    is_sharded,
    local,
    release,
    weight_buffers,
)
from megarl.megatron.host_adam import HostAdam, HostRoom
from megarl.megatron.layer_spec import drop_dummy_gradients
from megarl.megatron.sparse.indexer import indexers_of

# Bytes of a copy: on a CPU little more memory is then taken than is needed while contents are in both places.
CHUNK_BYTES = 64 << 20

Chunks = list[GPTModel] | list[DistributedDataParallel]


@dataclass
class Offloadable:
    """Tensors that are on the device or, all of them, on the host.

    Attributes:
        tensors: lists the ones that exist now (Adam's states are made by its first step).
        excluded: lists others; a tensor that shares a storage with one of these does not move.
        constant: whether contents never change: the host's copies are then not written again.
        keeps: whether the host keeps its memory and its contents while the tensors are on the device: page-locked, on a GPU.
        host: by storage, its contents while it is empty, in chunks.
        room: the memory of these copies, if the host keeps it.
    """

    tensors: Callable[[], Iterable[torch.Tensor]]
    excluded: Callable[[], Iterable[torch.Tensor]] = tuple
    constant: bool = False
    keeps: bool = field(default_factory=platform.is_cuda)
    resident: bool = True
    host: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    room: HostRoom | None = None

    def reserve(self) -> None:
        """Begin to make room on the host for the tensors that exist now, where it is kept; the process does not wait for it.

        Tensors that are on the host already have room, with their contents in it.
        """
        if not self.resident or not self.keeps:
            return
        needed = self.device_bytes()
        if self.room is None or self.room.nbytes != needed:
            self.host, self.room = {}, None  # freed before more is taken
            self.room = HostRoom(needed)

    def offload(self) -> None:
        """Move to the host; the device's memory is free afterwards, for other processes too."""
        assert self.resident
        storages = self._storages()
        if self._make_room(storages) or not self.constant:
            for storage in storages:
                for chunk, copy in zip(_chunks(storage), self.host[storage._cdata], strict=True):
                    copy.copy_(chunk, non_blocking=True)
        torch.cuda.synchronize()
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()
        self.resident = False

    def reload(self) -> None:
        """Move back to the device."""
        assert not self.resident
        for storage in self._storages():
            copies = self.host[storage._cdata]
            storage.resize_(sum(copy.numel() for copy in copies))
            for chunk, copy in zip(_chunks(storage), copies, strict=True):
                chunk.copy_(copy, non_blocking=True)
        torch.cuda.synchronize()
        self.resident = True
        if not self.keeps:
            self.host.clear()

    def require(self) -> None:
        """Assert that the tensors may be used."""
        assert self.resident, "these tensors are on the host: reload them first"

    def device_bytes(self) -> int:
        """The present bytes of the storages on the device."""
        return sum(storage.nbytes() for storage in self._storages())

    def host_bytes(self) -> int:
        return sum(copy.numel() for copies in self.host.values() for copy in copies)

    def _storages(self) -> list[torch.UntypedStorage]:
        """The storages of the tensors on the device, each once."""
        others = {tensor.untyped_storage()._cdata for tensor in self.excluded()}
        found = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in self.tensors()
            if tensor.device.type == platform.device().type
        }
        return [storage for key, storage in found.items() if key not in others]

    def _make_room(self, storages: list[torch.UntypedStorage]) -> bool:
        """Prepare `host` for these storages; False: the copies of the last time fit."""
        sizes = {storage._cdata: [chunk.numel() for chunk in _chunks(storage)] for storage in storages}
        kept = {key: [copy.numel() for copy in copies] for key, copies in self.host.items()}
        if kept == sizes:
            return False
        self.reserve()
        if self.room is None:
            self.host = {
                key: [torch.empty(size, dtype=torch.uint8, device="cpu") for size in parts]
                for key, parts in sizes.items()
            }
        else:
            wholes = self.room.take().split([sum(parts) for parts in sizes.values()])
            self.host = {
                key: list(whole.split(parts))
                for (key, parts), whole in zip(sizes.items(), wholes, strict=True)
            }
        return True


@dataclass
class SharedWeights(Offloadable):
    """The weights of chunks that Megatron-FSDP shares out: a rank's own, and gathered ones while there are any."""

    chunks: Chunks = field(default_factory=list)

    def offload(self) -> None:
        """Free gathered weights, and move the others to the host."""
        release(self.chunks)
        super().offload()

    def device_bytes(self) -> int:
        return super().device_bytes() + sum(map(gathered_bytes, self.chunks))


@dataclass
class Gradients:
    """The gradient buffers of chunks that are trained: dropped, and restored as zeros, with which every step begins."""

    chunks: list[DistributedDataParallel]
    resident: bool = True
    sizes: dict[int, int] = field(default_factory=dict)  # of storages that Megatron-FSDP made

    def offload(self) -> None:
        """Free them."""
        assert self.resident
        drop_dummy_gradients()
        for chunk in self.chunks:
            if not is_sharded(chunk):
                chunk.offload_grad_buffers()
        for storage in self._shared():
            self.sizes[storage._cdata] = storage.nbytes()
            storage.resize_(0)
        torch.cuda.empty_cache()
        self.resident = False

    def reload(self) -> None:
        """Allocate them, as zeros."""
        assert not self.resident
        for chunk in self.chunks:
            if not is_sharded(chunk):
                chunk.restore_grad_buffers()
        for storage in self._shared():
            storage.resize_(self.sizes[storage._cdata])
            for part in _chunks(storage):
                part.zero_()
        self.resident = True

    def require(self) -> None:
        """Assert that they may be used."""
        assert self.resident, "the gradient buffers are released: reload them first"

    def device_bytes(self) -> int:
        """The present bytes of the buffers on the device."""
        plain = (chunk for chunk in self.chunks if not is_sharded(chunk))
        buffers = [buffer for chunk in plain for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        shared = sum(storage.nbytes() for storage in self._shared())
        return shared + sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    def host_bytes(self) -> int:
        return 0

    def _shared(self) -> Iterable[torch.UntypedStorage]:
        """The storages of gradients that Megatron-FSDP keeps, each once."""
        tensors = (tensor for chunk in self.chunks if is_sharded(chunk) for tensor in gradient_buffers(chunk))
        storages = (tensor.untyped_storage() for tensor in tensors)
        return {storage._cdata: storage for storage in storages}.values()


@dataclass
class HostStates:
    """Optimizer states that are on the host in any case: only the slots that they pass through are on the device."""

    adams: list[HostAdam]
    resident: bool = True

    def offload(self) -> None:
        """Free the slots."""
        assert self.resident
        for adam in self.adams:
            adam.slots.drop()
        torch.cuda.empty_cache()
        self.resident = False

    def reload(self) -> None:
        """The next step takes them."""
        assert not self.resident
        self.resident = True

    def require(self) -> None:
        """Assert that a step may take the slots."""
        assert self.resident, "the optimizer's slots are released: reload them first"

    def device_bytes(self) -> int:
        """The present bytes of the slots on the device."""
        return sum({id(adam.slots): adam.slots.nbytes for adam in self.adams}.values())

    def host_bytes(self) -> int:
        return sum(adam.host_bytes() for adam in self.adams)


def weights_of(chunks: Chunks, *, constant: bool = False) -> Offloadable:
    """The parameters of a model, trained or not, and its indexers; other buffers (rope frequencies, the routers' biases) stay.

    Args:
        constant: whether nothing ever changes them once they are loaded.
    """
    if any(map(is_sharded, chunks)):
        return SharedWeights(lambda: _parameters(chunks), constant=constant, chunks=chunks)
    return Offloadable(lambda: _parameters(chunks), constant=constant)


def frozen_of(chunks: Chunks, trained: Sequence[torch.Tensor]) -> Offloadable:
    """The parameters of a model that are not trained (neither adapters nor value head); nothing changes them once they are loaded."""
    return Offloadable(lambda: _parameters(chunks), excluded=lambda: trained, constant=True)


def gradients_of(chunks: list[DistributedDataParallel]) -> Gradients:
    return Gradients(chunks)


def optimizer_of(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> Offloadable | HostStates:
    """Adam's states and the float32 copies of the parameters, if there are any; shards that are views of the
    parameters count as weights."""
    adams = [part.optimizer for part in parts_of(optimizer) if isinstance(part.optimizer, HostAdam)]
    if adams:
        return HostStates(adams)
    return Offloadable(lambda: _optimizer_tensors(optimizer), excluded=lambda: _parameters(chunks))


def assert_resident(chunks: Chunks) -> None:
    """Assert that the model's weights are on the device."""
    for parameter in _parameters(chunks):
        assert parameter.numel() == 0 or parameter.untyped_storage().nbytes() > 0, (
            "the weights are on the host"
        )
        return  # they move together


def _parameters(chunks: Chunks) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        if is_sharded(chunk):
            yield from weight_buffers(chunk)
        else:
            yield from chunk.parameters()
            yield from indexers_of(chunk)


def _optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[torch.Tensor]:
    for part in parts_of(optimizer):
        for group in part.optimizer.param_groups:
            yield from map(local, group["params"])
        for state in part.optimizer.state.values():
            yield from (local(value) for value in state.values() if isinstance(value, torch.Tensor))


def _chunks(storage: torch.UntypedStorage) -> Iterable[torch.Tensor]:
    """The bytes of a storage, as uint8 views of at most CHUNK_BYTES."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.split(CHUNK_BYTES) if whole.numel() else ()
