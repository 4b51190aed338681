"""What decides which steps can run here: cards, drivers and packages, looked up without importing any of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.doctor.nodes import Gpu, node_facts
from megarl.util.packages import KNOWN, installed

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "triton", "apex", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Machine:
    """A machine as the steps see it.

    Attributes:
        gpus: those that this process may use.
        versions: of installed packages, by name.
        cuda: the version that torch is built for; None: a build without CUDA, or no torch.
        checkout: the folder with `tests` and `benchmarks`; None: megarl is installed without them.
    """

    gpus: tuple[Gpu, ...]
    versions: dict[str, str]
    cuda: str | None
    python: str
    host_memory: int
    cores: int
    checkout: Path | None

    @property
    def trains_only(self) -> bool:
        """Whether torch is one that no SGLang which megarl knows runs on, so that engines are left out."""
        return not self.versions.get("torch", "").startswith(KNOWN["torch"])


def machine_here() -> Machine:
    facts = node_facts(".", "")
    others = {name: found for name in TOOLS if (found := installed(name)) is not None}
    there = all((CHECKOUT / name).is_dir() for name in ("tests", "benchmarks"))
    return Machine(
        gpus=visible(facts.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")),
        versions=facts.versions | others,
        cuda=facts.cuda,
        python=facts.python,
        host_memory=facts.memory,
        cores=facts.cores,
        checkout=CHECKOUT if there else None,
    )


def visible(gpus: Sequence[Gpu], named: str | None) -> tuple[Gpu, ...]:
    """Of all cards those that CUDA shows to a process whose CUDA_VISIBLE_DEVICES is `named`.

    A UUID may be any card's, so then only their number is right, which is what steps ask for.
    """
    if named is None:
        return tuple(gpus)
    names = [name for name in named.split(",") if name.strip() and name.strip() != "-1"]
    numbers = [int(name) for name in names if name.strip().isdigit()]
    if len(numbers) == len(names):
        return tuple(gpus[number] for number in numbers if number < len(gpus))
    return tuple(gpus[: len(names)])
