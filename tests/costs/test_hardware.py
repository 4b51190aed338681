"""A card's peak is its own, not another card's of the same generation."""

import pytest

from megarl.costs.hardware import BF16, TABLE


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B200", "B200"),
    ],
)
def test_the_cards_that_are_planned_with_have_the_planners_peaks(name: str, kind: str) -> None:
    assert BF16[name] == TABLE[kind].bf16


def test_a_name_counts_as_a_whole() -> None:
    assert BF16["NVIDIA H100 PCIe"] < 0.8 * BF16["NVIDIA H100 80GB HBM3"]
    assert "NVIDIA H100" not in BF16 and "NVIDIA H100 80GB HBM3 MIG 1g.10gb" not in BF16
