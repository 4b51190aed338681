"""Which tests belong to which tier."""

import multiprocessing
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tiers import (
    BY_NAME,
    CHAOS,
    E2E,
    ENGINE,
    PROCESSES,
    RANKS,
    SMOKE,
    TESTS,
    TIERS,
    UNIT,
    has_unit_tests,
    tier_of,
)


def test_a_unit_test_starts_no_process() -> None:
    with pytest.raises(
        RuntimeError, match=r"test_a_unit_test_starts_no_process.* enter its tier in tests/tiers\.py"
    ):
        subprocess.run(["true"], check=True)
    for start in (os.fork, os.forkpty):
        with pytest.raises(RuntimeError, match="enter its tier"):
            start()
    for spawn in (os.posix_spawn, os.posix_spawnp):
        with pytest.raises(RuntimeError, match="enter its tier"):
            spawn("/bin/true", ["true"], {})
    with pytest.raises(RuntimeError, match="enter its tier"):
        multiprocessing.get_context("spawn").Process(target=print).start()


def test_the_longest_beginning_counts() -> None:
    assert tier_of("layout/test_plan.py::test_deterministic", []) == UNIT
    assert tier_of("megatron/test_step.py::test_anything", ["ranks", "tmp_path"]) == RANKS
    assert tier_of("checkpoints/hf/test_adapters.py::test_sglang_serves_what_was_written", []) == ENGINE
    assert tier_of("checkpoints/hf/test_adapters.py::test_anything", ["ranks"]) == RANKS
    assert tier_of("trainer/test_runs.py::test_anything", ["ranks"]) == E2E
    assert tier_of("trainer/run/test_failures.py::test_anything", []) == PROCESSES
    assert tier_of("faults/test_ray_dies.py::test_anything", []) == CHAOS


def test_each_beginning_is_that_of_a_test() -> None:
    names = set()
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(TESTS).as_posix()
        names |= {
            f"{file}::{name}" for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
        }
    unused = [entry for entry in (*BY_NAME, *SMOKE) if not any(name.startswith(entry) for name in names)]
    assert unused == [] and set(BY_NAME.values()) <= set(TIERS)


def test_every_test_has_one_tier(request: pytest.FixtureRequest) -> None:
    ours = [item for item in request.session.items if item.path.is_relative_to(Path(__file__).parent)]
    assert ours and all(len([tier for tier in TIERS if item.get_closest_marker(tier)]) == 1 for item in ours)
    assert {item.path for item in ours if item.get_closest_marker(UNIT)} <= set(
        filter(has_unit_tests, TESTS.rglob("*.py"))
    )


def test_files_without_unit_tests_are_known() -> None:
    """`-m unit` does not collect these files."""
    assert not has_unit_tests(TESTS / "faults/test_engine_dies.py")
    assert not has_unit_tests(TESTS / "cli/test_main.py")
    assert has_unit_tests(TESTS / "checkpoints/test_store.py")  # some of its tests start processes
    assert has_unit_tests(TESTS / "layout/test_plan.py") and has_unit_tests(TESTS / "conftest.py")
