"""The steps in the order in which they run, and their needs: cards, drivers and packages, looked up without importing them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.problems import did_you_mean
from megarl.doctor.nodes import node_facts
from megarl.util.gpus import Gpu
from megarl.util.packages import KNOWN, installed

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "triton", "apex", "nvidia-nccl-cu13", "deep_ep")


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
        """Whether no SGLang that megarl knows runs on this torch, so that engines are left out."""
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

    A UUID may be any card's, so then only the number of cards is right, and steps need no more.
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
PYTEST = ("pytest", "pytest-timeout", "pytest-xdist")


@dataclass(frozen=True)
class Step:
    """A part of the test that can be asked for alone.

    Attributes:
        function: "module:name" of a function that takes a folder of its own and yields checks.
        gpus: that it needs at least.
        packages: that must be installed.
        checkout: whether it needs the repository's folders outside the package.
    """

    name: str
    what: str
    function: str
    gpus: int = 1
    packages: tuple[str, ...] = ()
    checkout: bool = False

    @property
    def engine(self) -> bool:
        """Whether it starts SGLang, which then has to be one that megarl knows."""
        return "sglang" in self.packages


def _step(name: str, what: str, function: str, **needs: Any) -> Step:
    return Step(name, what, f"{__package__}.{function}", **needs)


STEPS = (
    _step("installed", "versions, driver, cards; whether Transformer Engine and SGLang's kernels can be imported", "installed:run"),
    _step("tests", "the tests that are marked gpu", "checkout:run_tests", packages=PYTEST, checkout=True),
    _step("kernels", "kernels compared with the same in torch, forward and backward", "kernels:run"),
    _step(
        "engine", "an engine alone: it answers, releases its memory and takes it back, compared with what CUDA says is free",
        "engine:run", packages=ENGINE,
    ),
    _step("sync", "a weight sync to another process on the same GPU, by CUDA IPC", "sync:run"),
    _step(
        "single", "the single-GPU recipe: tokens/s by phase, MFU and peak memory, compared with published ones",
        "checkout:run_single", checkout=True,
    ),
    _step("trainer", "a trainer alone at the lengths of published rows", "checkout:run_trainer", checkout=True),
    _step(
        "plan", "the plan's seconds of training phases, compared with this GPU's", "checkout:run_plan",
        packages=PYTEST, checkout=True,
    ),
    _step(
        "shadow", "ranks with groups that carry nothing: their memory by phase, compared with a shadow run's", "shadow:run"
    ),
    _step(
        "options", "short runs of a mixture of experts: parts computed again, replayed routing, an engine's cache in float8 and its experts",
        "options:run_options", packages=ENGINE,
    ),
    _step(
        "engines", "short runs whose engines cut prompts, draft tokens by n-grams and by the model's own layer, sample by top-p, compute in float8",
        "options:run_engines", packages=ENGINE,
    ),
    _step(
        "families", "short runs of gated delta nets, attention with sinks, latent attention: engines and trainers compute the same",
        "options:run_families", packages=ENGINE,
    ),
    _step(
        "layouts", "short runs on two GPUs: Megatron-FSDP, without overlaps, a pipeline's layout", "options:run_layouts", gpus=2,
        packages=ENGINE,
    ),
    _step(
        "experts", "short runs on two GPUs that share experts, with data parallel attention too", "options:run_experts", gpus=2,
        packages=ENGINE,
    ),
    _step(
        "deepep", "a short run on two GPUs whose tokens reach experts by DeepEP", "options:run_deepep", gpus=2,
        packages=(*ENGINE, "deep_ep"),
    ),
    _step(
        "nccl", "training on two GPUs whose weights reach engines over NCCL", "several:run_pairs", gpus=2, packages=ENGINE
    ),
    _step("killed", "the same, and an engine is killed: the run goes on", "several:run_killed", gpus=2, packages=ENGINE),
)  # fmt: skip


def chosen(names: str | None) -> list[Step]:
    """The steps of a list such as "engine,sync", in their usual order; None: all.

    Raises:
        ValueError: there is no step of a name.
    """
    if names is None:
        return list(STEPS)
    known = [step.name for step in STEPS]
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ValueError(f"--steps: no step {name!r}{hint}")
    if not asked:
        raise ValueError(f"--steps names no step; there are {', '.join(known)}")
    return [step for step in STEPS if step.name in asked]


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
