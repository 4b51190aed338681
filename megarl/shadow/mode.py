"""The dispatch mode of a shadow run: sees every operation of torch, after fake tensors have given it its shapes.

To be entered above a fake tensor mode:

    with FakeMode(), Shadow() as shadow, shadow.tracker.phase("update"): ...
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from megarl.shadow.collectives import Alike, Log, Peers, describe
from megarl.shadow.tracker import Tracker, line_of_code
from megarl.shadow.values import Choice, choose_evenly, follow, positions, sized_by_values, value_of

aten = torch.ops.aten
_TYPED_PRODUCTS = (aten.addmm.dtype, aten.addmm.dtype_out, aten.mm.dtype, aten.bmm.dtype)
_INDEXING = (aten.index, aten.index_put_, aten.index_put)


class FakeMode(FakeTensorMode):
    """torch's fake tensors, for a device that cannot be initialised."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


class Shadow(TorchDispatchMode):
    """A record of a rank's run: bytes on its device, operations, collectives, values.

    Attributes:
        peers: the source of data that the rank receives.
        flops: floating point operations, by phase and kernel.
        log: the collectives of the rank in their order.
        assumed: unknown values and how often they were needed, in words.
        waits: how often the host waited for the device, by phase and line of code: it read a tensor there, or the shape of a
            result depends on one.
    """

    def __init__(self, peers: Peers | None = None, choose: Choice = choose_evenly) -> None:
        """
        Args:
            peers: None: they send this rank's own data.
            choose: which of several unknown numbers are the largest.
        """
        super().__init__()
        self.peers: Peers = Alike() if peers is None else peers
        self.choose = choose
        self.tracker = Tracker()
        self.flops: dict[str, Counter[str]] = defaultdict(Counter)
        self.log = Log(self.peers)
        self.assumed: Counter[str] = Counter()
        self.waits: dict[str, Counter[str]] = defaultdict(Counter)
        self.num_operations = 0

    def assume(self, what: str) -> None:
        self.assumed[f"{what}, at {line_of_code()}"] += 1

    @property
    def phase(self) -> str:
        return self.tracker.name

    def wait(self) -> None:
        self.waits[self.tracker.name][line_of_code()] += 1

    def count_flops(self, kernel: str, number: float) -> None:
        self.flops[self.tracker.name][kernel] += int(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.num_operations += 1
        # The fake mode's flag, by which torch.tensor makes none on the device, is per thread: autograd's threads compute layers again, too.
        torch._C._set_only_lift_cpu_tensors(True)
        if func in _ANSWERED:
            return _ANSWERED[func](self, *args)
        if func._overloadpacket in _INDEXING and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        ):
            # One number fills a mask without being asked where.
            if func._overloadpacket is aten.index or args[2].numel() > 1:
                self.wait()
            args = (args[0], positions(args[1]), *args[2:])
        found = sized_by_values(func, args, kwargs)
        if found is None:
            found = self._execute(func, args, kwargs)
        elif args[0].is_cuda and kwargs.get("output_size") is None:
            self.wait()
        self._note(found, str(func))
        return found

    def _execute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        space, _, operation = func._schema.name.partition("::")
        if space == "c10d":
            return self._communicate(func, operation, args, kwargs)
        freed = func.is_view and isinstance(args[0], FakeTensor) and not args[0].untyped_storage().nbytes()
        out = func(*args, **kwargs)
        if freed:  # torch's cache of fake results gives the storage of a view the room that it needs
            args[0].untyped_storage().resize_(0)
        count = _COUNTED.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
        if count is not None:
            # torch 2.13's formulas for products would take a type of the output for its shape.
            typed = func in _TYPED_PRODUCTS
            counted = [arg for arg in args if not (typed and isinstance(arg, torch.dtype))]
            self.count_flops(str(func._overloadpacket), count(*counted, **kwargs, out_val=out))
        if func is aten._to_copy.default and args[0].is_cuda and out.device.type == "cpu":
            self.wait()
        follow(func, args, kwargs, out, self.assume, self.choose)
        return out

    def _communicate(self, func: Any, operation: str, args: Any, kwargs: dict[str, Any]) -> Any:
        # torch 2.13 has no shapes for coalesced operations.
        out = None if "coalesced" in operation else func(*args, **kwargs)
        call = describe(operation, args, self.log.reduction)
        self.log.reduction = ""
        number = self.log.add(call, self.phase)
        with unset_fake_temporarily(), torch.no_grad():
            self.peers.exchange(call, args, lambda: self.log.wait(number))
        work = self.log.work(number).boxed()
        return (*out[:-1], work) if isinstance(out, tuple) else work

    def _note(self, out: Any, operation: str) -> None:
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
                self.tracker.note(tensor.untyped_storage(), operation)


def _grouped_flops(a: tuple[int, ...], b: tuple[int, ...], *more: Any, **named: Any) -> int:
    """Of `torch._grouped_mm`: groups share all rows of `a`, or, where both have two dimensions, all that is summed."""
    return 2 * a[0] * a[1] * b[-1]


# Operations for which torch (2.13) has no formula; they get shapes, as torch's formulas do.
_COUNTED = {aten._grouped_mm: shape_wrapper(_grouped_flops)}


def _scalar(shadow: Shadow, tensor: torch.Tensor) -> Any:
    if tensor.is_cuda:
        shadow.wait()
    value = value_of(tensor)
    if value is not None:
        return value.item()
    shadow.assume(f"a {str(tensor.dtype).removeprefix('torch.')} is 1")
    return 1.0 if tensor.is_floating_point() else 1


def _equal(shadow: Shadow, one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_cuda:
        shadow.wait()
    a, b = value_of(one), value_of(other)
    if a is not None and b is not None:
        return bool((a == b).all())
    shadow.assume("tensors of one shape are equal")
    return one.shape == other.shape


# Operations that fake tensors cannot answer.
_ANSWERED = {
    aten._pin_memory.default: lambda shadow, tensor, *rest: tensor.clone(),
    aten.is_pinned.default: lambda shadow, *rest: False,
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
}
