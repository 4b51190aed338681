"""What is judged of a job's machines before it runs: facts in, findings out; nothing is started here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.rollout.sglang_start import KNOWN_VERSIONS
from megarl.trainer.doctor_facts import SHARED_MEMORY, NodeFacts

GIB = 1 << 30
OK, WARNING, FAILURE = "ok", "warning", "failure"
# Tried together (requirements/). Of SGLang the engine refuses any other itself.
KNOWN: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.", "2.11."),
    "megatron-core": ("0.19.2",),
    "sglang": KNOWN_VERSIONS,
    "ray": ("2.60.",),
}
REQUIRED = ("torch", "megatron-core", "sglang", "ray", "transformers", "pyarrow")
GPU_PACKAGES = ("transformer-engine", "sgl-kernel", "torch-memory-saver")
OPEN_FILES = 4096  # Ray's raylet and object store hold hundreds of sockets for each process of a node
CLOCK_SECONDS = 5.0
BUSY_GPU = 0.05


@dataclass(frozen=True)
class Finding:
    """One line of what `megarl doctor` says.

    Attributes:
        level: OK, WARNING (it may run, but worse) or FAILURE (it will not).
        what: what was looked at.
        found: what it is.
        advice: what to do; empty where all is well.
    """

    level: str
    what: str
    found: str
    advice: str = ""


def judge_nodes(
    nodes: Sequence[NodeFacts], gpus_per_node: int | None, needed: dict[str, int]
) -> list[Finding]:
    """All that can be told of the machines of a cluster.

    Args:
        gpus_per_node: that the job takes of each; None: it runs without GPUs.
        needed: bytes of "memory", "shared_memory" and "disk" that a node should have free at least.
    """
    found = list(_between(nodes))
    for node in nodes:
        found += _packages(node, gpus_per_node is not None)
        found += _gpus(node, gpus_per_node)
        found += _room(node, needed)
        found += _system(node)
    return found


def _between(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """What must be the same on all nodes."""
    first = nodes[0]
    for name in sorted({name for node in nodes for name in node.versions}):
        versions = {node.host: node.versions.get(name, "none") for node in nodes}
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{host} {version}" for host, version in versions.items())
            yield Finding(FAILURE, name, listed, "install the same version on all nodes")
    pythons = {node.host: node.python for node in nodes}
    if len(set(pythons.values())) > 1:
        yield Finding(FAILURE, "Python", str(pythons), "Ray needs the same version on all nodes")
    for node in nodes[1:]:
        if abs(node.clock - first.clock) > CLOCK_SECONDS:
            yield Finding(
                WARNING,
                "clocks",
                f"{node.host} is {node.clock - first.clock:+.0f} s from {first.host}",
                "synchronise them (NTP): logs and the order of failures are compared by time",
            )
    for node in nodes:
        if not node.probe:
            yield Finding(
                FAILURE,
                "run folder",
                f"{node.host} does not see what {first.host} wrote there",
                "put trainer.default_local_dir on a file system that all nodes share: every rank writes its part of a "
                "checkpoint there",
            )


def _packages(node: NodeFacts, on_gpus: bool) -> Iterator[Finding]:
    for name in REQUIRED:
        version = node.versions.get(name)
        if version is None:
            yield Finding(
                FAILURE, name, f"not installed on {node.host}", "pip install -r requirements/runtime.txt"
            )
        elif name in KNOWN and not version.startswith(KNOWN[name]):
            known = " or ".join(KNOWN[name])
            yield Finding(WARNING, name, f"{version} on {node.host}", f"megarl was tried with {known}")
        else:
            yield Finding(OK, name, f"{version} on {node.host}")
    if on_gpus:
        for name in GPU_PACKAGES:
            if name not in node.versions:
                yield Finding(
                    WARNING,
                    name,
                    f"not installed on {node.host}",
                    "see the Dockerfile; without it GPUs are slower",
                )


def _gpus(node: NodeFacts, wanted: int | None) -> Iterator[Finding]:
    if wanted is None:
        yield Finding(OK, "devices", f"processes on {node.cores} cores of {node.host}, no GPUs")
        return
    listed = f"{len(node.gpus)} on {node.host}" + (
        f", {node.gpus[0].name}, driver {node.gpus[0].driver}" if node.gpus else ""
    )
    if len(node.gpus) < wanted:
        yield Finding(FAILURE, "GPUs", listed, f"the job takes {wanted} of each node")
        return
    yield Finding(OK, "GPUs", listed)
    for number, gpu in enumerate(node.gpus[:wanted]):
        if gpu.used > BUSY_GPU * gpu.memory:
            yield Finding(
                FAILURE,
                f"GPU {number}",
                f"{gpu.used / GIB:.1f} of {gpu.memory / GIB:.0f} GiB in use on {node.host}",
                "end what runs there (nvidia-smi)",
            )


def _room(node: NodeFacts, needed: dict[str, int]) -> Iterator[Finding]:
    for name, what, free in (
        ("memory", "memory", node.available),
        ("shared_memory", SHARED_MEMORY, node.shared_memory),
        ("disk", "disk of the run folder", node.disk),
    ):
        if free is None:
            yield Finding(WARNING, what, f"not there on {node.host}", "weights then go through /tmp, a disk")
            continue
        least = needed.get(name, 0)
        found = f"{free / GIB:.1f} GiB free on {node.host}"
        if free < least:
            yield Finding(FAILURE, what, found, f"the job needs about {least / GIB:.1f} GiB there")
        else:
            yield Finding(OK, what, found)


def _system(node: NodeFacts) -> Iterator[Finding]:
    if node.open_files < OPEN_FILES:
        yield Finding(
            WARNING, "open files", f"{node.open_files} on {node.host}", f"ulimit -n {OPEN_FILES} or more"
        )
    if node.address is None:
        yield Finding(
            FAILURE,
            "host name",
            f"{node.host} does not resolve to an address on itself",
            "add it to /etc/hosts or DNS",
        )
