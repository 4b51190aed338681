"""The environment of a rank's process."""

from __future__ import annotations

import os

from megarl.util import nccl


def rank_environment(gpu_ids: tuple[str, ...], single_machine: bool) -> dict[str, str]:
    """What every rank needs in its environment before torch is imported."""
    # An empty list hides the GPUs of a machine from ranks that were asked to do without.
    env = {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    # Megatron's overlap of communication and computation relies on one hardware queue.
    env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if gpu_ids:
        # Transformer Engine 2.18 would choose flash-attn-4 where it is installed. SGLang brings another version of it than the one that
        # Transformer Engine was made for (attention/dot_product_attention/utils.py reads this).
        env["NVTE_FLASH_ATTN_V4"] = "0"
    else:
        # One thread a rank: the ranks are more than the cores already.
        env["OMP_NUM_THREADS"] = "1"
    if single_machine:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env | nccl.asked_for(os.environ)
