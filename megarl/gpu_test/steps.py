"""The steps in the order in which they run, and their needs: cards, drivers and packages, looked up without importing them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.problems import did_you_mean
from megarl.doctor.nodes import Gpu, node_facts
from megarl.util.packages import KNOWN, installed

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "triton", "apex", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Machine:
    """A machine as the steps see it.

    Attributes:
        gpus: the ones that this process may use.
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
    """The cards that CUDA shows to a process whose CUDA_VISIBLE_DEVICES is `named`.

    A UUID may be any card's, so then only their number is right, and steps ask for no more.
    """
    if named is None:
        return tuple(gpus)
    names = [name for name in named.split(",") if name.strip() and name.strip() != "-1"]
    numbers = [int(name) for name in names if name.strip().isdigit()]
    if len(numbers) == len(names):
        return tuple(gpus[number] for number in numbers if number < len(gpus))
    return tuple(gpus[: len(names)])


SECONDS = 480.0  # a step's limit
ENGINE = ("sglang", "sglang-kernel", "torch-memory-saver")


@dataclass(frozen=True)
class Step:
    """A part of the test that can be asked for alone.

    Attributes:
        function: "module:name" of a function that takes a folder of its own and yields checks.
        gpus: that it needs at least.
        packages: that must be installed.
        engine: whether it starts SGLang, which then has to be one that megarl knows.
        checkout: whether it needs the repository's folders outside the package.
    """

    name: str
    what: str
    function: str
    gpus: int = 1
    packages: tuple[str, ...] = ()
    engine: bool = False
    checkout: bool = False


STEPS = (
    Step(
        "installed",
        "versions, driver, cards; whether Transformer Engine and SGLang's kernels can be imported",
        "megarl.gpu_test.installed:run",
    ),
    Step(
        "tests",
        "the tests that are marked gpu",
        "megarl.gpu_test.marked:run",
        packages=("pytest", "pytest-timeout", "pytest-xdist"),
        checkout=True,
    ),
    Step("kernels", "kernels beside the same in torch, forward and backward", "megarl.gpu_test.kernels:run"),
    Step(
        "engine",
        "an engine alone: it answers, releases its memory and takes it back, beside what CUDA says is free",
        "megarl.gpu_test.engine:run",
        packages=ENGINE,
        engine=True,
    ),
    Step(
        "sync",
        "a weight sync to another process on the same GPU, by CUDA IPC",
        "megarl.gpu_test.sync:run",
    ),
    Step(
        "single",
        "the single-GPU recipe: tokens/s by phase, MFU and peak memory, beside published ones",
        "megarl.gpu_test.single:run",
        checkout=True,
    ),
    Step(
        "trainer",
        "a trainer alone at the lengths of published rows",
        "megarl.gpu_test.single:run_trainer",
        checkout=True,
    ),
    Step(
        "plan",
        "the plan's seconds of training phases, beside this GPU's",
        "megarl.gpu_test.marked:run_plan",
        packages=("pytest", "pytest-timeout", "pytest-xdist"),
        checkout=True,
    ),
    Step(
        "shadow",
        "ranks with groups that carry nothing: their memory by phase, beside a shadow run's",
        "megarl.gpu_test.shadow:run",
    ),
    Step(
        "nccl",
        "training on two GPUs whose weights reach engines over NCCL",
        "megarl.gpu_test.several:run_pairs",
        gpus=2,
        packages=ENGINE,
        engine=True,
    ),
    Step(
        "killed",
        "the same, and an engine is killed: the run goes on",
        "megarl.gpu_test.several:run_killed",
        gpus=2,
        packages=ENGINE,
        engine=True,
    ),
)


def chosen(names: str | None, steps: Sequence[Step] = STEPS) -> list[Step]:
    """The steps of a list such as "engine,sync", in their usual order; None: all.

    Raises:
        ValueError: there is no step of a name.
    """
    if names is None:
        return list(steps)
    known = [step.name for step in steps]
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ValueError(f"--steps: no step {name!r}{hint}")
    if not asked:
        raise ValueError(f"--steps names no step; there are {', '.join(known)}")
    return [step for step in steps if step.name in asked]


def obstacle(step: Step, machine: Machine) -> str | None:
    """Why a step cannot run here; None: it can."""
    if not machine.gpus:
        return "no GPU: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides it"
    if "torch" not in machine.versions:
        return "torch is not installed"
    if machine.cuda is None:
        return f"torch {machine.versions['torch']} is built without CUDA"
    if len(machine.gpus) < step.gpus:
        return f"needs {step.gpus} GPUs, here is {len(machine.gpus)}"
    if step.engine and machine.trains_only:
        known = " or ".join(f"{version}*" for version in KNOWN["torch"])
        return (
            f"training only: SGLang {KNOWN['sglang'][0]} needs torch {known}, not {machine.versions['torch']}"
        )
    missing = [name for name in step.packages if name not in machine.versions]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if step.checkout and machine.checkout is None:
        return "needs megarl's repository (tests, benchmarks); what is installed is the package alone"
    return None
