"""NCCL's environment in every process that has a GPU: the one place that sets it, for trainers and engines alike.

Two ends of a communicator that exchange buffers on one node have to make them in the same way, or the first exchange
hangs or crashes. By default NCCL makes them with the driver's virtual memory. SGLang changes that default in its own processes
(`_set_envs_and_config` in sglang/srt/entrypoints/engine.py, 0.5.21), which would leave trainer processes different. So megarl sets
SGLang's values in both, and keeps values that are set already, as SGLang does.

Variables of the job's own environment (where the run is started) are set in all ranks, variables of a node's environment in
the ranks of that node. `disagreement` finds differences between two ends.
"""

from collections.abc import Mapping, MutableMapping

# Buffers by plain cudaMalloc, as SGLang has them; without virtual memory there is no NVLS (multicast over NVLink) either.
DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def asked_for(environment: Mapping[str, str]) -> dict[str, str]:
    """The NCCL settings that the environment of a job makes itself."""
    return {name: environment[name] for name in DEFAULTS if name in environment}


def complete(environment: MutableMapping[str, str]) -> None:
    """Set the variables that are missing, before NCCL is loaded."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's settings in a process; "unset" for missing variables."""
    return {name: environment.get(name, "unset") for name in DEFAULTS}


def disagreement(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The settings in which two ends of a communicator differ, as a message; empty if they agree."""
    names = [name for name in here if here[name] != there[name]]
    return ", ".join(f"{name} is {there[name]} there and {here[name]} here" for name in names)
