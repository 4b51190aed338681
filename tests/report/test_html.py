"""Numbers as people read them, and which points of a long curve are kept."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.curves import thinned
from megarl.report.html import duration, figure, percent, size


@pytest.mark.parametrize(
    ("make", "value", "text"),
    [
        (figure, 0, "0"), (figure, 0.25, "0.25"), (figure, 1234.5, "1,234"), (figure, 1e-5, "1.00e-05"), (figure, 25000, "25,000"),
        (figure, math.nan, "nan"), (figure, -0.49211, "-0.4921"), (percent, 0.9633, "96.3%"), (percent, 0.00965, "0.965%"),
        (percent, 0.0, "0%"), (percent, 1.0, "100.0%"), (duration, 48.25, "48.2 s"), (duration, 725, "12 min 5 s"),
        (duration, 12000, "3 h 20 min"), (size, 2104320, "2.007 MiB"), (size, 12, "12 B"), (size, 3 << 41, "6.0 TiB"),
    ],
)  # fmt: skip
def test_figures_are_short(make, value, text):
    assert make(value) == text


@given(st.lists(st.floats(allow_infinity=True, allow_nan=True), max_size=400), st.integers(4, 60))
def test_thinned_points_are_points_with_the_extremes_among_them(values, most):
    kept = thinned(list(enumerate(values)), most)
    assert len(kept) <= most or len(kept) == len(values) <= most
    steps = [step for step, _, _ in kept]
    assert steps == sorted(set(steps)) and all(value is values[step] for step, value, _ in kept)
    if values:
        assert steps[0] == 0 and steps[-1] == len(values) - 1
        finite = [value for value in values if math.isfinite(value)]
        kept_finite = [value for _, value, _ in kept if math.isfinite(value)]
        if finite:
            assert min(kept_finite) == min(finite)
        if len(finite) < len(values):
            assert len(kept_finite) < len(kept)


def test_each_kept_point_has_the_mean_of_those_it_stands_for():
    """Mostly 0 with a peak of 100 in each tenth: halfway between the extremes would be 50."""
    points = [(step, 100.0 if step % 10 == 5 else 0.0) for step in range(1002)]
    kept = thinned(points, 102)
    assert len(kept) == 102 and {value for _, value, _ in kept[1:-1]} == {0.0, 100.0}
    assert [mean for _, _, mean in kept[1:-1]] == pytest.approx([10.0] * 100)
