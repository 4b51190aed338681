"""Adam whose states live on the host: they pass through the device bucket by bucket while it updates.

Guarantees:
- Weights and states equal the ordinary step's to the bit: the same optimizer computes, on the device.
- Between steps only the slots for states are on the device, and `drop` frees them. In a step at most three buckets
  are on the device: one arrives, one is updated, one goes back, concurrently on a GPU.
- On the host a rank holds no byte more than its states (and their alignment), page-locked on a GPU.

Megatron-core 0.19.2 has an update on the host too (`HybridDeviceOptimizer`), which is not used. Tried with the distributed
optimizer: of float32 weights it cannot be built ("can't optimize a non-leaf Tensor"); of bfloat16 ones the float32 copies stay on
the device unless the precision-aware optimizer is on; and it sorts by `Tensor.is_cuda`, so that a step on a CPU ends with a
KeyError and none of it could be tested. It also needs four more bytes a weight on the host, for gradients. Each weight crosses
the link with 12 bytes in both directions here, with 4 in one and 2 in the other there, but there the host's processors compute.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from megarl import platform

# Page-locked host memory in one allocation, which a GPU's copies reach at full speed. Torch's own allocations are powers of two, of which up
# to half would be lost, and are locked while the process waits: at one to a few GB/s that is minutes for a rank's weights and states.


class HostRoom:
    """Host memory for tensors that leave a GPU; a thread locks its pages while the process does other things."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._locking: Future[None] | None = None
        if nbytes:
            thread = ThreadPoolExecutor(1, "page-locking")
            self._locking = thread.submit(_lock, self._bytes.data_ptr(), nbytes)
            thread.shutdown(wait=False)
            # The finalizer holds the tensor too: memory must be unlocked before it is freed.
            weakref.finalize(self, _unlock, self._bytes, self._locking).atexit = False

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def take(self) -> torch.Tensor:
        """The bytes, once they are locked.

        Raises:
            RuntimeError: they cannot be locked.
        """
        if self._locking is not None:
            self._locking.result()
        return self._bytes


def host_tensor(numel: int, owner: object) -> torch.Tensor:
    """float32 zeros on the host, page-locked on a GPU as long as `owner` exists.

    Raises:
        RuntimeError: they cannot be locked.
    """
    tensor = torch.zeros(numel, dtype=torch.float32, device="cpu")
    if platform.is_cuda() and numel:
        _lock(tensor.data_ptr(), tensor.nbytes)
        weakref.finalize(owner, _unlock, tensor).atexit = False
    return tensor


def _lock(address: int, nbytes: int) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        raise RuntimeError(
            f"{nbytes / 2**30:.1f} GiB of the host's memory for weights or optimizer states cannot be page-locked (CUDA error "
            f"{code}): does the machine have so much, and may the process lock it?"
        )


def _unlock(tensor: torch.Tensor, locking: Future[None] | None = None) -> None:
    if locking is not None and locking.exception() is not None:
        return
    code = int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()))
    assert not code, f"CUDA error {code}"


SLOTS = 3  # buckets on the device
BUCKET = 8 << 20  # elements, each with up to 12 bytes
# Elements. Torch's kernel for a CPU computes vectors and, at a tensor's end, single elements, which may round otherwise:
# where a weight is cut there must be full vectors.
ALIGNMENT = 64
MOMENTS = ("exp_avg", "exp_avg_sq")

Updated = tuple[torch.nn.Parameter, int, torch.Tensor]
"""A parameter, the first of its elements that is updated here, and the updated tensor: a part of it, or a float32 copy."""


class Slots:
    """Device memory for a few buckets, and the two streams in addition to the computing one."""

    def __init__(self, rows: int, bucket: int) -> None:
        self.rows, self.bucket = rows, bucket
        self.tensors: list[torch.Tensor] = []
        self.fetching, self.storing = torch.cuda.Stream(), torch.cuda.Stream()

    def take(self) -> list[torch.Tensor]:
        """The slots, each [rows, elements of a bucket]: the moments, then (if there are such) float32 copies."""
        if not self.tensors:
            shape, device = (self.rows, self.bucket), platform.device()
            self.tensors = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(SLOTS)]
        return self.tensors

    def drop(self) -> None:
        """Free the device memory; the next step takes it again."""
        self.tensors = []

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class _HostWeight:
    """Elements of a parameter, from `start` on, whose states lie from `at` on in the host's tensors.

    Attributes:
        main: the tensor that Megatron updates; a copy has only its shape and gradient, its values are on the host.
        copied: whether it is a float32 copy.
        group: index of the parameter group.
    """

    parameter: torch.nn.Parameter
    start: int
    main: torch.Tensor
    copied: bool
    group: int
    at: int

    @property
    def stop(self) -> int:
        return self.at + self.main.numel()


@dataclass(frozen=True)
class _Piece:
    """The part of `held` that is in a bucket: `count` elements from `first` on, which lie from `at` on in the bucket."""

    held: _HostWeight
    first: int
    at: int
    count: int

    def of(self, tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Its elements in a tensor that has the elements of `held` from `start` on."""
        return tensor.detach().view(-1)[start + self.first : start + self.first + self.count]


class HostAdam:
    """Takes the place of `inner` in Megatron's optimizer; `inner` still computes.

    Attributes:
        param_groups: the ones of `inner`; `step` counts updates.
    """

    def __init__(self, inner: torch.optim.Optimizer, updated: Sequence[Updated], slots: Slots) -> None:
        """
        Args:
            inner: Adam in the interface of Transformer Engine's and apex's FusedAdam, without states.
            updated: the tensors that it updates.

        Raises:
            RuntimeError: the host's memory cannot be page-locked.
        """
        assert not inner.state and slots.bucket % ALIGNMENT == 0
        self.inner, self.slots, self.param_groups = inner, slots, inner.param_groups
        # Copies first, so that their row begins at 0.
        groups = {
            id(main): index for index, group in enumerate(self.param_groups) for main in group["params"]
        }
        at, held = 0, []
        for copied in (True, False):
            for parameter, start, main in updated:
                if (main.dtype != parameter.dtype) == copied:
                    held.append(_HostWeight(parameter, start, main, copied, groups[id(main)], at))
                    at = -(-held[-1].stop // ALIGNMENT) * ALIGNMENT
            if copied:
                num_copied = at
        self.held, self.filled = tuple(held), False
        self.moments = tuple(host_tensor(at, self) for _ in MOMENTS)
        self.copies = host_tensor(num_copied, self)
        self.buckets = _split_into_buckets(self.held, slots.bucket)
        self.read_weights()
        for entry in self.held:
            if entry.copied:
                entry.main.data = _shape_of(entry.main)

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Adam's states on the host, each flat, by the tensor that Megatron updates."""
        return {entry.main: self._state(entry) for entry in self.held}

    def fragments(self) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor, dict[str, torch.Tensor]]]:
        """Parameter, first element, updated tensor (of copies the host's), Adam's states (none before a step)."""
        for entry in self.held:
            main = self.copies[entry.at : entry.stop] if entry.copied else entry.main
            yield entry.parameter, entry.start, main, self._state(entry)

    def host_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.moments, self.copies))

    def set_filled(self, filled: bool) -> None:
        """Declare that there are states, zeros to be filled, or none, as before the first step."""
        self.filled = filled
        for tensor in self.moments:
            tensor.zero_()

    def read_weights(self) -> None:
        """Take the float32 copies from the parameters."""
        for entry in self.held:
            if entry.copied:
                own = entry.parameter.detach().view(-1)[entry.start : entry.start + entry.main.numel()]
                self.copies[entry.at : entry.stop].copy_(own)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Megatron's own drops gradients before."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient, and the parameters from their copies.

        Buckets are fetched one ahead. The host waits at the end, when all states are back.
        """
        assert closure is None
        if not self.buckets:
            return
        tensors, fetching, storing = self.slots.take(), self.slots.fetching, self.slots.storing
        # The slots' memory may still be in use, and states may just have been loaded.
        fetching.wait_stream(torch.cuda.current_stream())
        stored: list[Any] = [None] * len(self.buckets)
        counts: dict[int, int] = {}
        fetched = self._fetch(0, tensors, stored)
        for index, pieces in enumerate(self.buckets):
            here, slot = fetched, tensors[index % SLOTS]
            if index + 1 < len(self.buckets):
                fetched = self._fetch(index + 1, tensors, stored)
            torch.cuda.current_stream().wait_event(here)
            counts |= self._update(pieces, slot)
            storing.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(storing):
                for row, values in self._rows(index):
                    values.copy_(slot[row, : values.numel()], non_blocking=True)
                stored[index] = storing.record_event()
        storing.synchronize()
        for group, count in counts.items():
            self.param_groups[group]["step"] = count
        self.filled = True

    def _fetch(self, index: int, tensors: list[torch.Tensor], stored: list[Any]) -> Any:
        """Bring a bucket into its slot, when the former contents are stored; returns the event."""
        fetching, slot = self.slots.fetching, tensors[index % SLOTS]
        with torch.cuda.stream(fetching):
            if index >= SLOTS:
                fetching.wait_event(stored[index - SLOTS])
            for row, values in self._rows(index):
                slot[row, : values.numel()].copy_(values, non_blocking=True)
            return fetching.record_event()

    def _rows(self, index: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Row of a slot, and the host's tensor for it."""
        first = index * self.slots.bucket
        for row, tensor in enumerate((*self.moments, self.copies)):
            if first < tensor.numel():
                yield row, tensor[first : first + self.slots.bucket]

    def _update(self, pieces: Sequence[_Piece], slot: torch.Tensor) -> dict[int, int]:
        """Have `inner` update a bucket that is on the device. Returns: by group, how many updates there were."""
        found: dict[int, list[torch.Tensor]] = defaultdict(list)
        states: dict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for piece in pieces:
            held = piece.held
            if held.main.grad is None:
                continue
            rows = slot[:, piece.at : piece.at + piece.count]
            values = rows[len(MOMENTS)] if held.copied else piece.of(held.main)
            values.grad = piece.of(held.main.grad)
            found[held.group].append(values)
            states[values] = dict(zip(MOMENTS, rows, strict=False))
            if held.copied:
                copies.append((piece.of(held.parameter, held.start), values))
        groups = {index: {**self.param_groups[index], "params": values} for index, values in found.items()}
        if not groups:
            return {}
        self.inner.param_groups, self.inner.state = list(groups.values()), states
        self.inner.step()
        self.inner.param_groups, self.inner.state = self.param_groups, defaultdict(dict)
        for weights, values in copies:
            weights.copy_(values)
        return {index: int(group["step"]) for index, group in groups.items()}

    def _state(self, entry: _HostWeight) -> dict[str, torch.Tensor]:
        if not self.filled:
            return {}
        own = slice(entry.at, entry.stop)
        return {kind: tensor[own] for kind, tensor in zip(MOMENTS, self.moments, strict=True)}


def _split_into_buckets(held: Sequence[_HostWeight], bucket: int) -> list[list[_Piece]]:
    """The buckets: the parts of each weight in them."""
    buckets: list[list[_Piece]] = [[] for _ in range(-(-held[-1].stop // bucket) if held else 0)]
    for entry in held:
        for index in range(entry.at // bucket, -(-entry.stop // bucket)):
            begin, end = max(entry.at, index * bucket), min(entry.stop, (index + 1) * bucket)
            buckets[index].append(_Piece(entry, begin - entry.at, begin - index * bucket, end - begin))
    return buckets


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its shape without values, for callers that need shape, type and device of a copy that is on the host.

    It reads as not a number and cannot be written.
    """
    return torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
