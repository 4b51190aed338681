"""Megatron for real: process groups, model building, packed forward/backward, optimizer, checkpoint.

Promises: a model, a layout and a batch give the same loss and gradients for every (TP, PP, VPP, CP, EP, ETP, DP),
on gloo and on NCCL. Importing this room installs the CPU/GPU seam before megatron-core is imported.

Must not know: RL (advantages, rewards, rollouts), Ray, SGLang.
"""

from megarl import platform

platform.install()
