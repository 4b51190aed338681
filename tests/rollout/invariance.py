"""Whether engines on this machine's CPU compute the same bits for a row in any batch; tests that need it skip elsewhere."""

import shutil

import pytest

from megarl.sglang_cpu.batch_invariant import obstacle

OBSTACLE = obstacle()
needs_compiler = pytest.mark.skipif(
    None in (shutil.which("c++"), shutil.which("ninja")),
    reason="SGLang compiles its tree of n-grams by c++ and ninja",
)
needs_invariance = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
