"""Step `shadow`: the arithmetic of its comparison, and that the shadow's numbers that come with megarl are up to date."""

import pytest

from megarl.gpu_test.shadow import (
    CASES,
    GIB,
    MIB,
    Case,
    Row,
    compare_case,
    kept,
    read_known,
    rows,
    shadow_case,
)
from megarl.shadow import device

REPORT = {
    "role": "actor", "rank": 0, "transformer_engine": True, "released": 33 * MIB, "num_operations": 7,
    "parts": {"weights": GIB, "optimizer": 6 * GIB},
    "phases": {"update": {"peak": 4 * GIB, "left": 0, "largest": []}}, "versions": {"torch": "2.13.0"},
}  # fmt: skip


def test_a_part_is_the_same_and_a_phase_may_take_workspaces() -> None:
    assert Row("part weights", GIB, GIB).ok and not Row("part weights", GIB, GIB + 200 * MIB).ok
    assert (
        Row("peak of update", GIB, GIB + 200 * MIB).ok and not Row("peak of update", GIB, GIB + 400 * MIB).ok
    )
    assert not Row("peak of update", GIB, GIB - 100 * MIB).ok
    text = Row("peak of update", 2 * GIB, 2 * GIB + GIB // 10).text()
    assert text == "2.100 GiB on the GPU, 2.000 GiB in the shadow: +5.0%"


def test_every_part_and_phase_of_either_is_compared() -> None:
    found = {**REPORT, "parts": {"weights": GIB, "gradients": GIB}, "phases": {"evaluate": {"peak": MIB}}}
    compared = {row.name: (row.shadow, row.found) for row in rows(REPORT, found)}
    assert compared == {
        "part gradients": (0, GIB), "part optimizer": (6 * GIB, 0), "part weights": (GIB, GIB),
        "peak of evaluate": (0, MIB), "peak of update": (4 * GIB, 0), "after release": (33 * MIB, 33 * MIB),
    }  # fmt: skip
    checks = {check.name: check for check in compare_case(Case("r", "actor", 0), REPORT, found)}
    assert checks["r, actor 0: part weights"].ok and not checks["r, actor 0: part optimizer"].ok
    assert "r, actor 0: layers" not in checks
    other = compare_case(Case("r", "actor", 0), REPORT, {**REPORT, "transformer_engine": False})
    assert [check.name for check in other if check.ok is False] == ["r, actor 0: layers"]


def test_what_comes_with_megarl_is_enough_to_compare() -> None:
    told = kept(REPORT)
    assert all(row.ok and row.shadow == row.found for row in rows(told, REPORT))
    known = read_known()
    assert known.keys() <= {case.name for case in CASES}
    for case in (case for case in CASES if case.name in known):
        told = known[case.name]
        assert (told["role"], told["rank"]) == (case.role, case.rank)
        assert told["parts"]["weights"] > 0 and told["transformer_engine"] and told["versions"]["torch"]
        assert told["phases"]["update"]["peak"] > told["phases"]["evaluate"]["peak"] > 0


def test_a_rank_without_a_shadow_is_recorded() -> None:
    (check,) = compare_case(Case("r", "actor", 0), None, REPORT)
    assert check.ok is None and check.figures == kept(REPORT)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number].name)
def test_it_is_what_a_shadow_says_today(number: int) -> None:
    """`python -m megarl.gpu_test.shadow` writes the numbers anew."""
    problem = device.missing()
    if problem is not None:
        pytest.skip(problem)
    told = read_known().get(CASES[number].name)
    if told is None:
        pytest.skip("no numbers of this case came with megarl")
    today = kept(shadow_case(CASES[number]))
    for row in rows(told, today):
        assert row.found == pytest.approx(row.shadow, rel=0.01, abs=MIB), row
