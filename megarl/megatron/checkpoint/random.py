"""A rank's random numbers: saved and continued exactly, or begun anew where another layout has other streams."""

import random
import zlib
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megarl import platform
from megarl.megatron.lora import dropout


def random_states() -> dict[str, Any]:
    """Of torch on the host and the device, of Megatron's streams and the adapters', of Python and of numpy: tensors and
    plain types, which load without unpickling anything else."""
    kind, keys, at, has_gauss, gauss = np.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "streams": get_cuda_rng_tracker().get_states(),
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), at, has_gauss, gauss),
    }
    if platform.is_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Continue with states that `random_states` gave; streams that were begun since go on as they are."""
    torch.set_rng_state(states["torch"])
    if platform.is_cuda():
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states(tracker.get_states() | states["streams"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


def restart_random_states(seed: int, step: int) -> None:
    """Begin all streams anew, with numbers that `seed` and the number of steps name."""
    seed = zlib.crc32(f"{seed} {step}".encode())
    begun = get_cuda_rng_tracker().get_states()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    if dropout.OWN in begun:
        dropout.start_streams(seed)
