"""Two checkpoints, of either kind, or two folders of adapters, tensor by tensor: names, shapes, types, values."""

from dataclasses import dataclass

import torch
from rich.console import Console

from megarl.checkpoints.convert.adapters import MergedSource
from megarl.checkpoints.convert.run import progress
from megarl.checkpoints.convert.sources import open_source
from megarl.checkpoints.convert.targets import HFTarget, Moves
from megarl.checkpoints.hf.peft import PeftReader, is_adapter

GROUP_BYTES = 256 << 20  # of tensors that are compared at a time; a larger one is alone
_SLICE = 1 << 22  # elements whose difference is computed at a time


@dataclass(frozen=True)
class Difference:
    """How a tensor differs. `max_abs`: the largest difference of an element; None where shapes differ."""

    tensor: str
    a: str
    b: str
    max_abs: float | None


@dataclass(frozen=True)
class Comparison:
    """`num_equal` tensors are equal bit for bit; the others differ, or one checkpoint alone has them. `not_compared`: further
    contents of a checkpoint, in words."""

    num_equal: int
    different: tuple[Difference, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    not_compared: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.different or self.only_in_a or self.only_in_b)

    def print(self, console: Console, limit: int = 20) -> None:
        """Print the first `limit` rows of a table of the differences, and a sentence."""
        rows = [(d.tensor, d.a, d.b, "" if d.max_abs is None else f"{d.max_abs:.3g}") for d in self.different]
        rows += [(name, "present", "missing", "") for name in self.only_in_a]
        rows += [(name, "missing", "present", "") for name in self.only_in_b]
        if rows:
            shown = [("tensor", "first", "second", "max abs difference"), *rows[:limit]]
            widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
            for row in shown:  # names are long: a line that runs on is better than a name that is cut
                line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                console.print(line.rstrip(), soft_wrap=True, markup=False, highlight=False)
        if len(rows) > limit:
            console.print(f"... and {len(rows) - limit} more")
        found = "all" if self.equal else f"{len(rows)} differ or are in one checkpoint only;"
        console.print(f"{found} {self.num_equal} tensors are equal bit for bit")
        for what in self.not_compared:
            console.print(f"not compared: {what}", markup=False, highlight=False)


def compare(
    a: str,
    b: str,
    *,
    companions: str | None = None,
    adapter: str | None = None,
    console: Console | None = None,
) -> Comparison:
    """Compare two checkpoints by their Hugging Face tensors, or two folders of adapters.

    Args:
        companions: the Hugging Face folder to take the config from, for a Megatron checkpoint that has none.
        adapter: folder of adapters in PEFT's format that is merged into the first before it is compared.
        console: where progress is shown.

    Raises:
        ValueError: one of them is no checkpoint, or does not fit its own config; one is a folder of adapters, the other a checkpoint.
    """
    if is_adapter(a) and is_adapter(b) and adapter is None:
        return compare_adapters(a, b)
    moves = [_as_hf(a, companions, adapter), _as_hf(b, companions)]
    items = [{item.local: item for item in each.target.items} for each in moves]
    shared = [name for name in items[0] if name in items[1]]
    different, num_equal = [], 0
    with progress(console, sum(moves[0].nbytes(items[0][name]) for name in shared), "comparing") as advance:
        for group in moves[0].files(GROUP_BYTES):
            names = [item.local for item in group if item.local in items[1]]
            tensors = [
                each.assemble([named[name] for name in names])
                for each, named in zip(moves, items, strict=True)
            ]
            for name in names:
                found = _difference(
                    name, *(each[named[name]] for each, named in zip(tensors, items, strict=True))
                )
                num_equal += found is None
                different += [found] if found else []
                advance(moves[0].nbytes(items[0][name]))
            del tensors  # before the next ones are made
    return Comparison(
        num_equal,
        tuple(different),
        tuple(name for name in items[0] if name not in items[1]),
        tuple(name for name in items[1] if name not in items[0]),
        tuple(f"{each.source.ignored} of {each.source.path}" for each in moves if each.source.ignored),
    )


def compare_adapters(a: str, b: str) -> Comparison:
    """Compare two folders of adapters in PEFT's format: factors of the outputs, and tensor by tensor.

    Raises:
        ValueError: one of them is no such folder, is incomplete, or asks for something that is not supported.
    """
    with PeftReader(a) as first, PeftReader(b) as second:
        different = []
        for fact in ("scaling", "use_dora"):
            values = [getattr(reader.facts, fact) for reader in (first, second)]
            if values[0] != values[1]:
                different.append(Difference(fact, str(values[0]), str(values[1]), None))
        different += _scalings(first, second)
        shared = sorted(first.names & second.names)
        tensors = [_difference(name, first.read(name), second.read(name)) for name in shared]
        return Comparison(
            tensors.count(None),
            (*different, *filter(None, tensors)),
            tuple(sorted(first.names - second.names)),
            tuple(sorted(second.names - first.names)),
        )


def _scalings(first: PeftReader, second: PeftReader) -> list[Difference]:
    """Differences of the factors of single adapters' outputs, but for the one between the folders' default factors."""
    a, b = first.scalings(), second.scalings()
    every = (first.facts.scaling, second.facts.scaling)
    return [
        Difference(f"{name} (scaling)", str(a[name]), str(b[name]), None)
        for name in a.keys() & b.keys()
        if a[name] != b[name] and (a[name], b[name]) != every
    ]


def _as_hf(path: str, companions: str | None, adapter: str | None = None) -> Moves:
    source = open_source(path, companions)
    if adapter is not None:
        source = MergedSource(source, adapter)
    source.check()
    return Moves(source, HFTarget(source.config, source.head, source.mtp), None)


def _difference(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    if a.shape != b.shape:
        return Difference(name, str(tuple(a.shape)), str(tuple(b.shape)), None)
    types = [str(tensor.dtype).removeprefix("torch.") for tensor in (a, b)]
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    parts = zip(a.flatten().split(_SLICE), b.flatten().split(_SLICE), strict=True)
    return Difference(
        name, types[0], types[1], max((x.double() - y.double()).abs().max().item() for x, y in parts)
    )
