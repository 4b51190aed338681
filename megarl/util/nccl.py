"""NCCL's environment in every process that has a GPU: the one place that sets it, for trainers and engines alike.

Two ends of a communicator that exchange buffers on one node have to make them in the same way, or the first exchange
hangs or crashes. By default NCCL makes them with the driver's virtual memory. SGLang changes that default in its own processes
(`_set_envs_and_config` in sglang/srt/entrypoints/engine.py, 0.5.21), which would leave trainer processes different. So megarl sets
SGLang's values in both, and keeps values that are set already, as SGLang does.

The ends also have to have equally many channels: each rank counts its own, and connects and sends on these (NCCL's src/graph/connect.cc,
`ncclTopoPostset`, and paths.cc). SGLang sets the number in the processes of a deterministic engine of several ranks, which sums need in the same
order (0.5.21, arg_groups/attention_hook.py). In a trainer it would slow all collectives, so that is left to the job.

Variables of the job's own environment (where the run is started) are set in all ranks, variables of a node's environment in
the ranks of that node. `disagreement` finds differences between two ends.
"""

from collections.abc import Mapping, MutableMapping

# Buffers by plain cudaMalloc, as SGLang has them; without virtual memory there is no NVLS (multicast over NVLink) either.
DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# Settings in which the ranks of a communicator have to agree.
NAMES = (*DEFAULTS, "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")


def asked_for(environment: Mapping[str, str]) -> dict[str, str]:
    """The NCCL settings that the environment of a job makes itself."""
    return {name: environment[name] for name in NAMES if name in environment}


def complete(environment: MutableMapping[str, str]) -> None:
    """Set the variables that are missing, before NCCL is loaded."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's settings in a process; "unset" for missing variables."""
    return {name: environment.get(name, "unset") for name in NAMES}


def disagreement(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The settings in which two ends of a communicator differ, as a message; empty if they agree."""
    names = [name for name in here if here[name] != there[name]]
    return ", ".join(f"{name} is {there[name]} there and {here[name]} here" for name in names)
