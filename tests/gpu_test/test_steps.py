"""Which steps run on which machine, and why others do not."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from megarl.gpu_test.steps import STEPS, Machine, chosen, obstacle, visible
from megarl.util.gpus import Gpu

CARD = Gpu("NVIDIA H100 80GB HBM3", "580.95.05", 80 << 30, 0)
VERSIONS = {
    "torch": "2.13.0", "sglang": "0.5.21", "sglang-kernel": "0.4.7", "torch-memory-saver": "0.0.10",
    "pytest": "9.2.0", "pytest-timeout": "2.4.0", "pytest-xdist": "3.8.0", "deep_ep": "1.2.1",
}  # fmt: skip
TWO = Machine((CARD, CARD), VERSIONS, "13.0", "3.12.3", 1 << 40, 16, Path("."))


def obstacles(machine: Machine) -> dict[str, str]:
    return {step.name: reason for step in STEPS if (reason := obstacle(step, machine)) is not None}


def test_a_whole_machine_runs_all_steps() -> None:
    assert obstacles(TWO) == {}


def test_one_gpu_leaves_out_what_needs_two() -> None:
    assert obstacles(replace(TWO, gpus=(CARD,))) == dict.fromkeys(
        ("layouts", "experts", "deepep", "nccl", "killed"), "needs 2 GPUs, here is 1"
    )


def test_a_machine_without_a_gpu_or_with_a_torch_without_cuda_runs_none() -> None:
    assert set(obstacles(replace(TWO, gpus=()))) == {step.name for step in STEPS}
    found = obstacles(replace(TWO, cuda=None))
    assert set(found.values()) == {"torch 2.13.0 is built without CUDA"}


def test_an_older_torch_trains_only() -> None:
    """The SGLang that runs on it lacks functions that megarl calls."""
    older = replace(TWO, versions=VERSIONS | {"torch": "2.11.0", "sglang": "0.5.16"})
    found = obstacles(older)
    assert set(found) == {
        "engine",
        "options",
        "engines",
        "families",
        "layouts",
        "experts",
        "deepep",
        "nccl",
        "killed",
    }
    assert found["engine"] == "training only: SGLang 0.5.21 needs torch 2.13.*, not 2.11.0"
    assert older.trains_only and not TWO.trains_only


def test_what_is_not_installed_is_named() -> None:
    versions = {
        name: version for name, version in VERSIONS.items() if name not in ("sglang-kernel", "pytest")
    }
    found = obstacles(replace(TWO, versions=versions))
    assert found["engine"] == "not installed: sglang-kernel" and found["tests"] == "not installed: pytest"


def test_the_package_alone_has_no_tests_and_no_benchmarks() -> None:
    assert set(obstacles(replace(TWO, checkout=None))) == {step.name for step in STEPS if step.checkout}


def test_steps_are_chosen_by_name_in_their_own_order() -> None:
    assert [step.name for step in chosen("sync, installed")] == ["installed", "sync"]
    assert chosen(None) == list(STEPS)
    with pytest.raises(ValueError, match="no step 'engin'; did you mean engine"):
        chosen("engin")
    with pytest.raises(ValueError, match="names no step"):
        chosen(",")


def test_cards_that_cuda_hides_do_not_count() -> None:
    other = replace(CARD, name="NVIDIA A100-SXM4-80GB")
    assert visible((CARD, other), None) == (CARD, other)
    assert visible((CARD, other), "1") == (other,)
    assert visible((CARD, other), "") == visible((CARD, other), "-1") == ()
    assert len(visible((CARD, other), "GPU-3f2c")) == 1


def test_each_step_is_a_function_that_is_there() -> None:
    for step in STEPS:
        module, _, name = step.function.partition(":")
        assert callable(getattr(import_module(module), name))


def test_the_page_has_the_steps_in_their_order() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "gpu.md").read_text()
    assert re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE) == [step.name for step in STEPS]
