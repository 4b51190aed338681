"""Tiers of tests: the processes that a test starts. Each test has one tier, as a marker: `pytest -m unit`, `pytest -m "ranks or engine"`.

    unit        none: a unit test that starts one fails
    processes   others than those below: scripts, reward processes, Ray's servers and actors, shadow ranks
    ranks       gloo ranks, the fixture `ranks`
    engine      SGLang engines
    e2e         whole runs and commands
    chaos       processes that are killed, stopped or lost

`smoke` marks tests of the other tiers that `make test` runs with all unit tests, because they show that the product works.
"""

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

TIERS = UNIT, PROCESSES, RANKS, ENGINE, E2E, CHAOS = ("unit", "processes", "ranks", "engine", "e2e", "chaos")
TESTS = Path(__file__).parent
# The tier of the tests of a folder, a file or a function, by the beginning of its name; the longest beginning counts. Tests without an entry
# are `ranks` where they have that fixture, else `unit`.
BY_NAME: Mapping[str, str] = {
    "api/": E2E,
    "checkpoints/convert/test_convert.py": PROCESSES,
    "checkpoints/convert/test_merge.py::test_memory": PROCESSES,
    "checkpoints/hf/test_adapters.py::test_sglang": ENGINE,
    "checkpoints/test_killed.py": CHAOS,
    "checkpoints/test_store.py::test_a_full_disk": PROCESSES,
    "checkpoints/test_writer_lock.py": PROCESSES,
    "cli/test_main.py": PROCESSES,
    "cluster/": PROCESSES,
    "config/checks/test_rollout.py::test_a_function_of_ones_own": PROCESSES,
    "config/checks/test_rollout.py::test_a_rule_for_all_rows": PROCESSES,
    "config/loading/test_hub.py": PROCESSES,
    "config/loading/test_load.py::test_torch_is_not_imported": PROCESSES,
    "data/test_gsm8k.py": PROCESSES,
    "doctor/test_doctor.py": PROCESSES,
    "examples/test_calculator_agent.py::test_the_policy": E2E,
    "examples/test_nim_agent.py::test_a_run": E2E,
    "faults/": CHAOS,
    "gateway/sandboxes/": PROCESSES,
    "gateway/test_agents.py": PROCESSES,
    "trainer/workers/test_agents.py": PROCESSES,
    "gateway/test_frameworks.py": PROCESSES,
    "gateway/test_serve.py": E2E,
    "gpu_test/": PROCESSES,
    "launch/": PROCESSES,
    "megatron/test_fused_head.py": PROCESSES,
    "models/test_float8_kernels.py": PROCESSES,
    "models/test_weight_files.py::test_it_is_checked_without_torch": PROCESSES,
    "report/test_browser.py": PROCESSES,
    "rewards/processes/": PROCESSES,
    "rewards/rules/test_code_tests.py": PROCESSES,
    "rewards/rules/test_judge.py::test_concurrency_has_a_limit": PROCESSES,
    "rewards/rules/test_math_rules.py": PROCESSES,
    "rewards/sandbox/": PROCESSES,
    "rewards/test_registry.py::test_what_a_worker_imports": PROCESSES,
    "rollout/sglang/": ENGINE,
    "rollout/sglang/test_sampling_kernels.py": PROCESSES,
    "rollout/test_sync_of_adapters.py": ENGINE,
    "rollout/test_streams.py": ENGINE,
    "sglang_cpu/test_fp8.py": ENGINE,
    "sglang_cpu/test_hooks.py": PROCESSES,
    "sglang_cpu/test_lean_decode.py::test_an_engine": ENGINE,
    "shadow/": PROCESSES,
    "test_benchmarks.py": PROCESSES,
    "test_chaos.py": CHAOS,
    "test_dockerfile.py": PROCESSES,
    "test_docs_site.py::test_the_site_builds": PROCESSES,
    "test_makefile.py": PROCESSES,
    "test_peers.py": PROCESSES,
    "test_platform.py": PROCESSES,
    "test_repository.py::test_a_run_is_checked": PROCESSES,
    "test_repository.py::test_controller_loads": PROCESSES,
    "test_repository.py::test_import_is_light": PROCESSES,
    "test_repository.py::test_ranks_load": PROCESSES,
    "test_security.py::test_a_run_on_one_machine": E2E,
    "test_security.py::test_keys_are_nowhere": E2E,
    "test_wheel.py": PROCESSES,
    "trainer/roles/test_engines.py::test_a_run": E2E,
    "trainer/roles/test_weight_sync.py": E2E,
    "trainer/run/test_cluster_setup.py": PROCESSES,
    "trainer/run/test_facts.py::test_the_status_of_a_run": PROCESSES,
    "trainer/run/test_failures.py": PROCESSES,
    "trainer/run/test_verification.py::test_two_machines": PROCESSES,
    "trainer/test_": E2E,
    "util/test_files.py": PROCESSES,
    "util/test_gpus.py": PROCESSES,
    "util/test_memory.py": PROCESSES,
    "util/test_nccl.py": PROCESSES,
    "weight_sync/test_gpu_buckets.py": PROCESSES,
    "weight_sync/test_slice_kernels.py": PROCESSES,
}
SMOKE = (
    "checkpoints/convert/test_convert.py::test_the_command",
    "checkpoints/hf/test_round_trips.py",
    "checkpoints/test_",
    "cli/",
    "config/",
    "data/",
    "doctor/test_doctor.py::test_a_configuration",
    "doctor/test_doctor.py::test_this_machine",
    "faults/test_engine_dies.py",
    "launch/test_kuberay.py",
    "megatron/lora/test_lora.py::test_every_layout",
    "megatron/test_parity.py",
    "models/",
    "rewards/",
    "rollout/sglang/test_engine.py",
    "rollout/test_streams.py",
    "shadow/test_device.py",
    "shadow/test_dry_run.py",
    "shadow/test_page.py",
    "shadow/test_rank.py::test_experts",
    "shadow/test_sglang.py::test_a_dense",
    "shadow/test_tracker.py",
    "shadow/test_values.py",
    "test_docs_site.py",
    "test_repository.py",
    "trainer/run/test_fa",
    "trainer/test_runs.py::test_bytes",
    "trainer/test_runs.py::test_engine",
    "trainer/test_runs.py::test_everything",
    "trainer/test_runs.py::test_the_first_update",
    "trainer/test_runs.py::test_trajectories",
    "trainer/test_tuning_runs.py",
    "weight_sync/",
)
# The functions that start a process. They are patched: an audit hook would be called for everything else, too, down to each `id()`.
STARTS: Sequence[tuple[Any, str]] = (
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp")),
    (subprocess.Popen, "__init__"),
    (BaseProcess, "start"),
)
# The unit test that this process runs, if it runs one: a patched function gets no arguments of ours.
_running: list[str] = []


def tier_of(name: str, fixtures: Iterable[str]) -> str:
    """The tier of the test `name`, such as "layout/test_plan.py::test_deterministic", which uses the fixtures of these names."""
    found = max((beginning for beginning in BY_NAME if name.startswith(beginning)), key=len, default=None)
    if found is not None:
        return BY_NAME[found]
    return RANKS if "ranks" in fixtures else UNIT


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m unit` leaves out files that have no unit tests: to collect one takes as long as some tests."""
    if config.getoption("markexpr") != UNIT or collection_path.suffix != ".py":
        return None
    return True if not has_unit_tests(collection_path) else None


def has_unit_tests(file: Path) -> bool:
    """Whether a file may have unit tests."""
    name = _file(file)
    if name is None or not file.name.startswith("test_"):
        return True
    return tier_of(name, ()) == UNIT or any(
        tier == UNIT for beginning, tier in BY_NAME.items() if beginning.startswith(name)
    )


@cache
def _file(path: Path) -> str | None:
    """The file's name as in BY_NAME; None: a file that a test has written."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (file := _file(item.path)) is not None:
            name = f"{file}::{item.name}"
            tier = tier_of(name, getattr(item, "fixturenames", ()))
            if tier == UNIT and item.get_closest_marker("gpu"):
                tier = PROCESSES  # ranks on a GPU have processes of their own
            item.add_marker(tier)
            if tier != UNIT and name.startswith(SMOKE):
                item.add_marker("smoke")


def pytest_configure() -> None:
    for owner, name in STARTS:
        setattr(owner, name, _refusing(getattr(owner, name)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker(UNIT):
        _running.append(item.nodeid)
    try:
        return (yield)
    finally:
        _running.clear()


def _refusing(start: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `start` that no unit test may call."""

    @wraps(start)
    def start_if_allowed(*arguments: Any, **named: Any) -> Any:
        if _running:
            raise RuntimeError(
                f"{_running[0]} starts a process ({start.__qualname__}): enter its tier in tests/tiers.py"
            )
        return start(*arguments, **named)

    return start_if_allowed
