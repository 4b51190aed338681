"""A GPU that is not there: the CUDA branch of one rank of any job, executed on a machine without a GPU.

torch's CPU build is given a CUDA device by name (`device.cpp`); tensors on it are torch's fake tensors, which have shapes, types and
lifetimes but no numbers. Above them `mode.Shadow` keeps the values of integers that follow from known ones, so that split sizes,
expert counts and masks are the same as on a real rank, and counts bytes, operations and collectives. Transformer Engine's own Python code
runs over stand-ins for the kernels of its extension.

A shadow run proves: the Python of the CUDA branch runs to its end; the bytes of tensors by owner and phase; which collectives
ranks join, in which order and with which sizes. It does not prove: a kernel's numbers, NCCL, the allocator's fragments, the memory of
CUDA's context and of libraries' own workspaces.

A shadow run is a process of its own (`process.py`): the device is loaded before torch, and cannot be taken out again.
"""
