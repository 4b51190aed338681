"""GPUs by their makers' figures, the part of them that a job is assumed to reach, and how far plans were off.

Rates are peaks: FLOP/s of dense matrices (without the factor of two for sparse ones), bytes a second; a link's rate is that of one
GPU in each direction (half of the advertised rate for NVLink and PCIe). Sources:

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

    def products(self, float8: bool) -> float:
        """FLOP/s of products in float8, or in bfloat16.

        Raises:
            ValueError: it has none in float8.
        """
        if not float8:
            return self.bf16
        if self.fp8 is None:
            raise ValueError(
                f"--hardware {self.name} has no products in float8, which megatron.fp8 asks for; set that to null"
            )
        return self.fp8


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
    """Parts of the peaks above that are reached, and costs independent of size. None was measured here; all are the same for
    every model and layout. Where a public measurement is named, the value is the measured one or close to it; `phase` was chosen with the PPO of
    Qwen2.5-0.5B among the public runs in view, `peer` with the weight syncs among them (docs/planning.md), the others are guesses:

    - matmul: dense matrices of forward and backward passes alone, of bf16. experts: grouped ones with full tiles. attention: scores and
      their products with values: FlashAttention-3 has 430 to 620 TFLOP/s with causal masks of 512 to 16,384 tokens (pytorch/benchmark 2391).
    - float8: products of blocks in float8 in forward and backward passes, as part of fp8, times `matmul` or `experts`: 1.5 times as fast as in bf16.
      NVIDIA has 1.75 times for large products on Hopper and at least 1.25 times for most others (developer.nvidia.com, "Boosting Matrix
      Multiplication Speed and Flexibility with NVIDIA cuBLAS 12.9", 2025-05).
    - decode, prefill: generated tokens and prompts, of bf16 or fp8.
    - hbm: the memory's bandwidth, of weights and activations (0.78 to 0.92 of an H100's in profiles and copies); cache: of a paged
      cache in decoding (0.42 to 0.57 in a profile of a 70B model, mikamirai.com 2026-03); sparse: of experts' weights in decoding
      (Qwen3.6-35B-A3B with vLLM 0.19 on one H100: 16 texts make 718 tokens/s, each step reads some 40% of 70 GB: 0.38 with all else).
    - nvlink, nic, host: of each link. NCCL's all-reduce has 0.77 of NVLink (nccl-collectives-bench), 46 to 48 of 50 GB/s on NDR
      (NVIDIA/nccl-tests 290); all-to-all has less.
    - latency: seconds of a collective within a node in addition to its bytes; hop: seconds that each doubling of the nodes adds in each direction
      (NCCL takes 54 to 64 us for 48 KB between 4 nodes, b12x 295).
    - kernel: seconds of a small kernel within a CUDA graph, with the gap to the next; dispatch: of one that Python launches
      (Llama-3.1-8B on an H100 takes 8.4 ms a token without graphs, 5.1 with: 18 us for each of some 450 kernels; cloudai.pt).
    - step: seconds of the scheduler in an engine's step. phase: of the controller, of workers that meet and of memory that is freed,
      for each role in each phase.
    - peer: seconds in which a rank of an engine gets its part from one rank of the trainer, in addition to the bytes: rounds, buffers, loading.
    - prompt, response: mean tokens, as part of data.max_prompt_length and data.max_response_length.
    """

    matmul: float = 0.65
    experts: float = 0.5
    attention: float = 0.55
    float8: float = 0.75
    decode: float = 0.4
    prefill: float = 0.5
    hbm: float = 0.8
    cache: float = 0.55
    sparse: float = 0.45
    nvlink: float = 0.7
    nic: float = 0.8
    host: float = 0.7
    latency: float = 1e-5
    hop: float = 1.5e-5
    kernel: float = 3e-6
    dispatch: float = 1.8e-5
    step: float = 2e-3
    phase: float = 1.0
    peer: float = 0.025
    prompt: float = 0.5
    response: float = 0.5


SECONDS = ("latency", "hop", "kernel", "dispatch", "step", "phase", "peer")  # the others are fractions


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


# The cards of BF16 that TABLE's rows describe in everything, by the driver's names.
_DRIVERS = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA B200": "B200",
}


def hardware_of_card(name: str) -> Hardware | None:
    """The GPU that its driver calls `name`; None: its links and memory are not in the table."""
    return TABLE[_DRIVERS[name]] if name in _DRIVERS else None


def read_assumptions(texts: Sequence[str]) -> Assumptions:
    """The assumptions of texts "name=value", over the defaults.

    Raises:
        ValueError: an unknown name, a value that is no number, or a number out of range.
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


# Peaks of cards by the name that their driver gives them, for the utilisation of measured runs. Cards of one generation are sold with
# different clocks and powers, so the full name counts: "NVIDIA H100 PCIe" reaches three quarters of an "NVIDIA H100 80GB HBM3". FLOP/s
# of dense matrices in bfloat16; half the figure where a maker gives it with sparsity. Sources:
#
# - NVIDIA H100 Tensor Core GPU data sheet (SXM 1,979 with sparsity; NVL 1,671) and NVIDIA H100 PCIe product brief PB-11133 (1,513).
# - NVIDIA H200 Tensor Core GPU data sheet (SXM 1,979 with sparsity; NVL 1,671).
# - NVIDIA H800 has the H100's matrices; its links and float64 are slower. H20: see above.
# - NVIDIA A100 80GB data sheet (312, SXM and PCIe), which the A800 shares; A40 and L40S data sheets (149.7; 362.05 without sparsity).
# - NVIDIA DGX B200 data sheet, as above.

BF16 = {
    "NVIDIA H100 80GB HBM3": 989 * TERA,
    "NVIDIA H100 PCIe": 756.5 * TERA,
    "NVIDIA H100 NVL": 835.5 * TERA,
    "NVIDIA H800": 989 * TERA,
    "NVIDIA H200": 989 * TERA,
    "NVIDIA H200 NVL": 835.5 * TERA,
    "NVIDIA H20": 148 * TERA,
    "NVIDIA A100-SXM4-40GB": 312 * TERA,
    "NVIDIA A100-SXM4-80GB": 312 * TERA,
    "NVIDIA A100-PCIE-40GB": 312 * TERA,
    "NVIDIA A100 80GB PCIe": 312 * TERA,
    "NVIDIA A800-SXM4-80GB": 312 * TERA,
    "NVIDIA A40": 149.7 * TERA,
    "NVIDIA L40S": 362.05 * TERA,
    "NVIDIA B200": 2250 * TERA,
}


# Measured over planned seconds of published runs: the accuracy of a planned number of seconds.

LOW, HIGH = 0.86, 1.46
"""Eight of ten public runs took LOW to HIGH times as long as planned (`benchmarks/published.py`, all of its rows; a test holds them)."""


def likely(seconds: float) -> tuple[float, float]:
    """The range of seconds in which eight of ten runs with this plan would end."""
    return seconds * LOW, seconds * HIGH
