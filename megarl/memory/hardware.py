"""GPUs by their makers' figures, and what part of these a job is assumed to reach.

Rates are peaks: FLOP/s of dense matrices (without the factor of two for sparse ones), bytes a second, of a link those of one
GPU in each direction (half of what is advertised for NVLink and PCIe). Sources:

- H100: NVIDIA H100 Tensor Core GPU data sheet (SXM), DGX H100 user guide (a ConnectX-7 of 400 Gb/s for each GPU).
- H200: NVIDIA H200 Tensor Core GPU data sheet (SXM), DGX H200 user guide.
- H20: NVIDIA has no public data sheet; figures as the press gave them in November 2023 (148 TFLOP/s in bfloat16, 96 GB at
  4.0 TB/s, NVLink of 900 GB/s), the network as that of other Hopper servers.
- A100: NVIDIA A100 80GB data sheet (SXM), DGX A100 user guide (a ConnectX-6 of 200 Gb/s for each GPU). It has no float8.
- B200: NVIDIA DGX B200 data sheet (of eight: 72 PFLOP/s sparse in float8, 1,440 GB, 64 TB/s, NVLink of 14.4 TB/s, ConnectX-7 of
  400 Gb/s); bfloat16 is half of float8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from megarl.config.problems import did_you_mean

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Hardware:
    """A GPU in a node.

    Attributes:
        memory_gib: as sold less 1, which drivers keep.
        bf16, fp8: FLOP/s of dense matrices; fp8 None: it has none.
        hbm: bytes a second of its memory, read or written.
        nvlink, nic, host: bytes a second in each direction to the GPUs of its node, to other nodes, to its host's memory.
    """

    name: str
    memory_gib: float
    bf16: float
    fp8: float | None
    hbm: float
    nvlink: float
    nic: float
    host: float


TABLE = {
    gpu.name: gpu
    for gpu in (
        Hardware("H100", 79, 989 * TERA, 1979 * TERA, 3.35 * TERA, 450 * GIGA, 50 * GIGA, 64 * GIGA),
        Hardware("H200", 140, 989 * TERA, 1979 * TERA, 4.8 * TERA, 450 * GIGA, 50 * GIGA, 64 * GIGA),
        Hardware("H20", 95, 148 * TERA, 296 * TERA, 4.0 * TERA, 450 * GIGA, 50 * GIGA, 64 * GIGA),
        Hardware("A100", 79, 312 * TERA, None, 2.039 * TERA, 300 * GIGA, 25 * GIGA, 32 * GIGA),
        Hardware("B200", 179, 2250 * TERA, 4500 * TERA, 8.0 * TERA, 900 * GIGA, 50 * GIGA, 64 * GIGA),
    )
}


@dataclass(frozen=True)
class Assumptions:
    """Guesses, none measured: parts of the peaks above that are reached, and how long texts are.

    Attributes:
        matmul: of bf16, by dense layers of forward and backward passes with all that is between them.
        experts: of bf16, by routed experts. attention: of bf16, by scores and what is made of them.
        decode: of bf16 or fp8, by generated tokens. prefill: likewise, by prompts.
        hbm, nvlink, nic, host: of each.
        latency: seconds of a collective beside its bytes, in decoding. step: seconds of an engine's step beside all else.
        launch: least seconds of a layer's forward pass, whose kernels are launched one by one.
        prompt, response: mean tokens, as part of data.max_prompt_length and data.max_response_length.
    """

    matmul: float = 0.5
    experts: float = 0.35
    attention: float = 0.4
    decode: float = 0.4
    prefill: float = 0.5
    hbm: float = 0.7
    nvlink: float = 0.7
    nic: float = 0.8
    host: float = 0.7
    latency: float = 1e-5
    step: float = 1e-3
    launch: float = 1e-4
    prompt: float = 0.5
    response: float = 0.5


SECONDS = ("latency", "step", "launch")  # the others are parts of a whole


def find_hardware(name: str) -> Hardware:
    """The GPU of this name.

    Raises:
        ValueError: there is none in the table.
    """
    if name.upper() not in TABLE:
        raise ValueError(
            f"--hardware {name} is not in the table{did_you_mean(name, TABLE)}; it has {', '.join(TABLE)}"
        )
    return TABLE[name.upper()]


def read_assumptions(texts: Sequence[str]) -> Assumptions:
    """ "name=value" over the defaults.

    Raises:
        ValueError: an unknown name, no number, or one that cannot be.
    """
    names, found = [field.name for field in fields(Assumptions)], Assumptions()
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names:
            raise ValueError(
                f"--assume {text}: {name!r} is unknown{did_you_mean(name, names)}; there are {', '.join(names)}"
            )
        try:
            number = float(value)
        except ValueError:
            raise ValueError(
                f"--assume {text}: {value!r} is not a number, such as {name}={getattr(found, name)}"
            ) from None
        least = "at least 0" if name in SECONDS else "over 0 and at most 1"
        if not (number >= 0 if name in SECONDS else 0 < number <= 1):
            raise ValueError(f"--assume {text}: it must be {least}")
        found = replace(found, **{name: number})
    return found
