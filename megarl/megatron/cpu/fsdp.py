"""What Megatron-FSDP asks of a CUDA device while it wraps a model, answered on a machine without one."""

import contextlib
from collections.abc import Iterator

import torch

from megarl import platform


@contextlib.contextmanager
def numbered_device() -> Iterator[None]:
    """While this is active, the current CUDA device is number 0 where there is none.

    Megatron-FSDP 0.19.2 writes the device's name by itself (`torch.device(f"cuda:{torch.cuda.current_device()}")`, megatron_fsdp.py:234),
    only to compare it with the one that it was given; the seam's answer, a `torch.device`, makes no name.
    """
    if platform.is_cuda():
        yield
        return
    original = torch.cuda.current_device
    torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.current_device = original
