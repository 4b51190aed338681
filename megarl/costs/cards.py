"""Peaks of cards by the name that their driver gives them: what a measured rate is a part of.

Cards of one generation are sold with different clocks and powers, so a name counts as a whole: "NVIDIA H100 PCIe" reaches three
quarters of an "NVIDIA H100 80GB HBM3". FLOP/s of dense matrices in bfloat16; where a maker gives them with sparsity, the half. Sources:

- NVIDIA H100 Tensor Core GPU data sheet (SXM 1,979 with sparsity; NVL 1,671) and NVIDIA H100 PCIe product brief PB-11133 (1,513).
- NVIDIA H200 Tensor Core GPU data sheet (SXM 1,979 with sparsity; NVL 1,671).
- NVIDIA H800 has the H100's matrices; its links and float64 are less. H20: see `megarl.costs.hardware`.
- NVIDIA A100 80GB data sheet (312, SXM and PCIe), which the A800 shares; A40 and L40S data sheets (149.7; 362.05 without sparsity).
- NVIDIA DGX B200 data sheet, as in `megarl.costs.hardware`.
"""


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


def peak_bf16(name: str) -> float | None:
    """Of the card that its driver calls `name`; None: it is not in the table."""
    return BF16.get(name)
