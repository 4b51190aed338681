"""Megatron's tests import megatron-core directly, and the CPU/GPU seam has to be installed before that."""

import megarl.megatron  # noqa: F401
