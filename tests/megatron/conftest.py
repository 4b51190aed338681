"""Megatron's tests import megatron-core by name, which needs the CPU/GPU seam before it."""

import megarl.megatron  # noqa: F401
