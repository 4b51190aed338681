"""NCCL's environment in every process that has a GPU: the one place that sets it, for trainers and engines alike.

Two ends of a communicator that hand each other buffers on one node have to make them in the same way, or the first exchange
hangs or crashes. NCCL makes them by the driver's virtual memory unless told otherwise; SGLang tells its processes otherwise
where nothing is set (`_set_envs_and_config` in sglang/srt/entrypoints/engine.py, 0.5.21), a trainer's process would not be
told. So both are, as SGLang does it, and what is set already stays: SGLang leaves it alone, too.

What the job's own environment sets (where the run is started) is in all ranks; what a node's environment sets is in
the ranks of that node. `disagreement` finds two ends that differ.
"""

from collections.abc import Mapping, MutableMapping

# Buffers by plain cudaMalloc, as SGLang has them; without virtual memory there is no NVLS (multicast over NVLink) either.
DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def asked_for(environment: Mapping[str, str]) -> dict[str, str]:
    """What the environment of a job says itself."""
    return {name: environment[name] for name in DEFAULTS if name in environment}


def complete(environment: MutableMapping[str, str]) -> None:
    """Set what is not set, before anything loads NCCL."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What NCCL finds in a process: "unset" stands for what is not there."""
    return {name: environment.get(name, "unset") for name in DEFAULTS}


def disagreement(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Names what two ends of a communicator find differently; empty if they agree."""
    names = [name for name in here if here[name] != there[name]]
    return ", ".join(f"{name} is {there[name]} there and {here[name]} here" for name in names)
