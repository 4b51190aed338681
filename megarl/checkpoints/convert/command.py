"""`megarl convert`: its options and its output."""

import argparse
import re

from rich.console import Console

from megarl.checkpoints.convert.compare import compare
from megarl.checkpoints.convert.run import convert

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def run(options: argparse.Namespace) -> None:
    """Convert, or compare.

    Raises:
        ValueError: a mistake in the options or in a checkpoint.
        OSError: the disk is full or not writable.
        RuntimeError: compared checkpoints differ.
    """
    console = Console()
    if options.verify:
        compared = compare(
            options.source, options.target, companions=options.hf, adapter=options.merge, console=console
        )
        compared.print(console)
        if not compared.equal:
            raise RuntimeError(f"{options.source} and {options.target} differ")
        return
    done = convert(
        options.source,
        options.target,
        to=options.to,
        dtype=options.dtype,
        shard_bytes=parse_size(options.shard_size),
        mtp=options.mtp == "keep",
        companions=options.hf,
        adapter=options.merge,
        console=console,
    )
    console.print(
        f"{options.target}: {done.num_tensors} tensors, {done.num_bytes / 1e9:.3g} GB in {done.num_files} files"
    )
    if done.left_out:
        console.print(f"left out: {', '.join(done.left_out)}")


def parse_size(text: str) -> int:
    """The bytes of a size such as "4GiB", "500 MB" or "1000000".

    Raises:
        ValueError: `text` is no size.
    """
    match = re.fullmatch(r"([\d.]+) ?([KMGT]?i?B?)", text.strip())
    if not match or match[2] not in _UNITS or match[1].count(".") > 1:
        raise ValueError(f"--shard-size must be a size such as 4GiB or 500MB, found {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
