"""The numbers that fake tensors are known to have: integers and masks that follow from known ones, so that shapes which depend on
them (splits of an all-to-all, tokens of an expert, lengths of sequences) are the same as on a real rank.

A known tensor's value is a real tensor on the CPU, kept with the fake one. Floats of any size have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

LARGEST = 1 << 24  # elements: larger tensors have no values
LARGEST_CONSTANT = 4096  # elements of floats that a factory fills, or leaves empty
_VALUE = "_megarl_value"
_LIKE = frozenset(  # their values do not depend on their inputs' values
    {
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    }
)
_SIZED_BY_VALUES = frozenset(
    {
        *("nonzero", "_unique2", "unique_dim", "unique_consecutive"),
        *("masked_select", "bincount", "repeat_interleave"),
    }
)
_READERS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "__array__")

Assume = Callable[[str], None]
"""Told, in words, of a value that was assumed because it is not known."""

Choice = Callable[[int, int, int], torch.Tensor]
"""The choice of the largest among unknown numbers, such as experts by their scores: [rows, chosen] of (rows, chosen, count)."""


@dataclass(frozen=True)
class Coming:
    """A value that a peer sends: looked at when it is needed, so that a rank waits for its peer no earlier than it has to.

    Attributes:
        look: the value; None: the peer does not know it either.
    """

    look: Callable[[], torch.Tensor | None]


def value_of(tensor: Any) -> Any:
    """The known value of a fake tensor, None where it has none; anything else is its own value."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = tensor.__dict__.get(_VALUE)
    if isinstance(value, Coming):
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            value = tensor.__dict__[_VALUE] = value.look()
    # `tensor.data = other` leaves the former tensor's value behind.
    fits = value is not None and value.shape == tensor.shape and value.dtype == tensor.dtype
    return value if fits else None


def give(tensor: torch.Tensor, value: torch.Tensor | Coming) -> None:
    """Let a fake tensor have a value."""
    tensor.__dict__[_VALUE] = value


def forget(tensor: torch.Tensor) -> None:
    """A fake tensor, and with it the tensor that it is a view of, is overwritten by an unknown value."""
    tensor.__dict__.pop(_VALUE, None)
    if tensor._base is not None:
        tensor._base.__dict__.pop(_VALUE, None)


def choose_evenly(rows: int, chosen: int, count: int) -> torch.Tensor:
    """Each is chosen equally often."""
    return (torch.arange(rows)[:, None] * chosen + torch.arange(chosen)[None]) % count


def choose_unevenly(seed: int) -> Choice:
    """Few are chosen by most rows, others by none; the same rows choose the same, as when a forward pass is computed again."""

    def choose(rows: int, chosen: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rows)
        liked = -2 * torch.randperm(count, generator=generator).double().add(1).log()
        noise = -torch.empty(rows, count).exponential_(generator=generator).log()
        return (liked + noise).topk(chosen, -1).indices

    return choose


def follow(
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    assume: Assume,
    choose: Choice = choose_evenly,
) -> None:
    """Work out the values of an operation's outputs, where all that it needs is known; an output that is overwritten loses its own."""
    name = _name(function)
    flat, spec = tree_flatten((args, kwargs))
    inputs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
    if not outputs:
        return
    # `set_` gives a tensor a storage, whose contents are not known.
    unknown = name == "set_" or (name not in _LIKE and any(value_of(tensor) is None for tensor in inputs))
    large = any(tensor.numel() > LARGEST for tensor in outputs)
    # New weights, optimizer states and buffers: their values decide nothing, and would take as much memory as on the device.
    large_constant = outputs[0].numel() > LARGEST_CONSTANT and (
        outputs[0].requires_grad or (outputs[0].is_floating_point() and (not inputs or "empty" in name))
    )
    if unknown or large or large_constant:
        if name == "topk" and outputs[1].numel() <= LARGEST:
            _choose(outputs[1], args[0].shape[-1], assume, choose)
        elif function._schema.is_mutable:
            for tensor in inputs:
                if any(tensor is output for output in outputs):
                    forget(tensor)
        return
    with unset_fake_temporarily(), torch.no_grad():
        real_args, real_kwargs = tree_unflatten([_real(leaf) for leaf in flat], spec)
        if real_kwargs.get("pin_memory"):
            real_kwargs = {**real_kwargs, "pin_memory": False}
        if "empty" in name:  # not uninitialised memory
            values: Any = torch.ones(outputs[0].shape, dtype=outputs[0].dtype, device="cpu")
        else:
            try:
                values = function(*real_args, **real_kwargs)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                # An operator of CUDA's alone, say: its outputs are unknown, and readers of them get an assumption.
                assume(f"no values of {function}: {type(error).__name__}")
                return
    found = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    for tensor, value in zip(outputs, found, strict=False):
        if tensor.shape == value.shape:
            give(tensor, value)


def sized_by_values(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The output of an operation whose shape depends on known values; None: another operation, or they are unknown."""
    name = _name(function)
    if name not in _SIZED_BY_VALUES:
        return None
    deciding = value_of(args[1] if name == "masked_select" else args[0])
    if deciding is None:
        return None
    if name == "masked_select" and value_of(args[0]) is None:
        with unset_fake_temporarily():
            count = int(torch.broadcast_to(deciding, args[0].shape).sum())
        return args[0].new_empty((count,))
    with unset_fake_temporarily(), torch.no_grad():
        values = function(*(value_of(arg) for arg in args), **kwargs)
    return known(values, args[0].device) if isinstance(values, torch.Tensor) else None


def positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices in which masks are replaced by the positions that they choose, whose number fake tensors have to know."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            found.append(index)
            continue
        mask = value_of(index)
        assert mask is not None, "a mask without values chooses an unknown number of elements"
        with unset_fake_temporarily():
            chosen = mask.nonzero(as_tuple=True)
        found += [known(where, index.device) for where in chosen]
    return found


def known(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on `device` that has a value. To be called under a fake tensor mode."""
    tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    give(tensor, value)
    return tensor


def read_values(assume: Callable[[], Assume | None], waited: Callable[[], None]) -> None:
    """Let Python read fake tensors (`tolist`, `item`, truth, ...): known ones as they are, others as ones, which is told.

    Args:
        assume: returns the function that is to be told now; None: there is none.
        waited: called when a tensor of the device is read: the host would wait for it.
    """
    for name in _READERS:
        setattr(torch.Tensor, name, _reader(name, getattr(torch.Tensor, name), assume, waited))


def _reader(
    name: str, read: Callable[..., Any], assume: Callable[[], Assume | None], waited: Callable[[], None]
) -> Callable[..., Any]:
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return read(self, *args, **kwargs)
        value = value_of(self)
        if self.is_cuda:
            waited()
        tell = assume()
        if value is None and tell is not None:
            tell(f"{name} of {str(self.dtype).removeprefix('torch.')} {tuple(self.shape)} is 1")
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch():
            value = (
                torch.ones(self.shape, dtype=self.dtype, device="cpu") if value is None else value.detach()
            )
            return read(value, *args, **kwargs)

    return call


def _choose(indices: torch.Tensor, count: int, assume: Assume, choose: Choice) -> None:
    how = "equally often" if choose is choose_evenly else "unevenly"
    assume(f"topk of {count} chooses each {how}")
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        chosen = indices.shape[-1]
        give(indices, choose(indices.numel() // chosen, chosen, count).reshape(indices.shape))


def _real(leaf: Any) -> Any:
    """An argument of an operation that is executed on the CPU."""
    if isinstance(leaf, FakeTensor):
        value = value_of(leaf)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if value is None else value
    if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.startswith("cuda")):
        return torch.device("cpu")
    return None if isinstance(leaf, torch.Generator) else leaf


def _name(function: Any) -> str:
    return function._schema.name.partition("::")[2]
