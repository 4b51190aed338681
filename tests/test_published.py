"""The planner's figures next to those of public runs (benchmarks/published.py): how near they are, and that the page says the same."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from megarl.costs.hardware import HIGH, LOW

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def published() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("published")


@pytest.fixture(scope="module")
def found(published: ModuleType) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return published.compare_all([*published.ROWS, *published.HELD_OUT])


def test_four_of_five_runs_are_within_half_as_much_again_and_none_beyond_twice(
    published: ModuleType, found: list
) -> None:
    """This holds for the rows that the terms were made with, and for the rows that were held out."""
    seen = [each for each in found if each.row in published.ROWS]
    held_out = [each for each in found if each.row in published.HELD_OUT]
    assert len(seen) >= 20 and len(held_out) >= 12 and len(seen) + len(held_out) == len(found)
    for rows in (seen, held_out):
        assert published.share(rows, 1.5) >= 0.8
        assert published.share(rows, 2.0) == 1.0
    slower = [replace(each, planned=each.planned / 3) for each in seen]
    assert published.share(slower, 1.5) < 0.2


def test_the_page_has_the_table_that_is_computed(published: ModuleType, found: list) -> None:
    assert published.markdown(found) in (ROOT / "docs/planning.md").read_text()


def test_the_range_that_is_printed_is_that_of_the_rows(published: ModuleType, found: list) -> None:
    assert published.spread_of(found) == (LOW, HIGH)
    inside = sum(LOW <= each.ratio <= HIGH for each in found)
    assert 0.75 <= inside / len(found) <= 0.85


def test_what_a_framework_does_otherwise_takes_longer(published: ModuleType) -> None:
    """Launches from Python, unsharded tensors gathered, memory that is not page-locked, rows that are not levelled, kernels that are not fused: each
    of these by itself, added to a run without them."""
    (row,) = (each for each in published.ROWS if each.name == "verl 30B-A3B, 8 H20")
    plain = replace(row, eager=False, gathers=False, pageable=False, balanced=True)
    plain = replace(plain, measures="step", keys=(*plain.keys, "trainer.nnodes=2"))
    with published.models() as folders:
        base = published.compare(plain, folders).parts
        for name, value, phase in (
            ("eager", True, "generate"),
            ("gathers", True, "sync"),
            ("pageable", True, "generate"),
            ("balanced", False, "update"),
            ("fused", False, "update"),
        ):
            parts = published.compare(replace(plain, **{name: value}), folders).parts
            assert parts[phase] > base[phase], name
        gathered = published.compare(replace(plain, gathers=True), folders).parts["sync"]
        singly = published.compare(replace(plain, gathers=True, singly=True), folders).parts["sync"]
        tensors = 48 * (128 * 3 + 9) + 3
        assert singly - gathered == pytest.approx(published.LISTED * 48 * tensors)


def test_it_is_printed_for_people_and_for_programs(
    published: ModuleType, found: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(published, "compare_all", lambda rows: found)
    published.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert [row["ratio"] for row in report["rows"]] == [each.ratio for each in found]
    assert {row["held_out"] for row in report["rows"]} == {True, False}
    assert report["spread"] == [LOW, HIGH] and report["not_expressed"]
    published.main([])
    out = capsys.readouterr().out
    assert out.count("not expressed: ") == len(published.NOT_EXPRESSED)
    for words in ("Seen while the terms were made: ", "Held out: "):
        assert words in out


def test_parameters_are_listed_in_proportion_to_layers(published: ModuleType) -> None:
    """The time has the order of the measured one; another machine, or a busy machine, takes another time."""
    few, many = (published.listing_seconds(layers, 20) for layers in (10, 100))
    assert 3 < many / few < 30
    assert published.LISTED / 10 < many / 100 < published.LISTED * 10
