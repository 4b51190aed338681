"""A kernel makes weights from blocks in float8; they equal torch's."""

import json
import os
import subprocess
import sys

import pytest

from megarl.shadow import device


@pytest.mark.skipif(
    not (device.PACKAGES / "triton").is_dir(), reason="Triton is not installed for shadow runs"
)
def test_interpreted_the_kernel_writes_what_torch_does() -> None:
    """Every type of a model, tiles and blocks cut by the weight's edges, blocks of no power of two; one weight, and several at once."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.models.interpreted_float8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 24 and all(found.values()), [case for case, same in found.items() if not same]
