"""`megarl doctor`: what is judged of machines, from facts made by hand; and a real look at this one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import TrainConfig
from megarl.config.load import load_config
from megarl.trainer.doctor import examine
from megarl.trainer.doctor_checks import FAILURE, GIB, OK, WARNING, Finding, judge_nodes
from megarl.trainer.doctor_facts import Gpu, NodeFacts
from megarl.trainer.doctor_probe import bus_bandwidth
from tests.disks import small_disk
from tests.trainer.conftest import PPO, megarl, on

VERSIONS = {
    "torch": "2.13.0", "megatron-core": "0.19.2", "sglang": "0.5.21", "ray": "2.60.0", "transformers": "5.12.1",
    "pyarrow": "26.0.0", "transformer-engine": "2.5", "sgl-kernel": "0.3", "torch-memory-saver": "0.0.9",
}  # fmt: skip
NODE = NodeFacts(
    host="a", address="10.0.0.1", python="3.11.9", versions=VERSIONS, gpus=(Gpu("H200", "550", 140 * GIB, 0),) * 8,
    cores=64, memory=1000 * GIB, available=900 * GIB, shared_memory=500 * GIB, disk=2000 * GIB, open_files=1 << 20,
    clock=1000.0, probe=True,
)  # fmt: skip


def bad(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings if finding.level != OK]


def judged(needed: dict[str, int] | None = None, **changes: object) -> list[Finding]:
    """What is told of one node that differs from a good one."""
    return judge_nodes([replace(NODE, **changes)], 8, needed or {})


def test_a_good_node_is_good() -> None:
    assert bad(judged()) == [] and bad(judge_nodes([NODE, replace(NODE, host="b")], 8, {})) == []
    assert {finding.what for finding in judged()} >= {"torch", "GPUs", "memory", "/dev/shm"}


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"versions": {**VERSIONS, "torch": "2.9.0"}}, (WARNING, "torch")),
        ({"versions": {k: v for k, v in VERSIONS.items() if k != "sglang"}}, (FAILURE, "sglang")),
        ({"versions": {k: v for k, v in VERSIONS.items() if k != "sgl-kernel"}}, (WARNING, "sgl-kernel")),
        ({"gpus": NODE.gpus[:7]}, (FAILURE, "GPUs")),
        ({"gpus": (*NODE.gpus[:7], replace(NODE.gpus[0], used=8 * GIB))}, (FAILURE, "GPU 7")),
        ({"open_files": 1024}, (WARNING, "open files")),
        ({"address": None}, (FAILURE, "host name")),
        ({"shared_memory": None}, (WARNING, "/dev/shm")),
        ({"probe": False}, (FAILURE, "run folder")),
    ],
)
def test_what_is_wrong_with_a_node(changes: dict[str, object], expected: tuple[str, str]) -> None:
    assert bad(judged(**changes)) == [expected]
    assert all(finding.advice for finding in judged(**changes) if finding.level != OK)


def test_room_is_judged_by_what_the_job_needs() -> None:
    for key, field, what in (
        ("memory", "available", "memory"), ("shared_memory", "shared_memory", "/dev/shm"),
        ("disk", "disk", "disk of the run folder"),
    ):  # fmt: skip
        assert bad(judged(needed={key: 4 * GIB}, **{field: 5 * GIB})) == []
        (finding,) = [one for one in judged(needed={key: 6 * GIB}, **{field: 5 * GIB}) if one.level != OK]
        assert (finding.level, finding.what) == (FAILURE, what)
        assert (finding.found, finding.advice) == ("5.0 GiB free on a", "the job needs about 6.0 GiB there")


def test_without_gpus_none_are_asked_for() -> None:
    bare = {
        name: version
        for name, version in VERSIONS.items()
        if name not in ("sgl-kernel", "transformer-engine")
    }
    assert bad(judge_nodes([replace(NODE, gpus=(), versions=bare)], None, {})) == []


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"versions": {**VERSIONS, "ray": "2.60.1"}}, [(FAILURE, "ray")]),
        ({"python": "3.12.1"}, [(FAILURE, "Python")]),
        ({"clock": 1010.0}, [(WARNING, "clocks")]),
        ({"clock": 1003.0}, []),
    ],
)
def test_nodes_are_compared(changes: dict[str, object], expected: list[tuple[str, str]]) -> None:
    assert bad(judge_nodes([NODE, replace(NODE, host="b", **changes)], 8, {})) == expected


def test_bus_bandwidth() -> None:
    """As nccl-tests' PERFORMANCE.md: of an all-reduce, bytes / seconds x 2 (n - 1) / n."""
    assert bus_bandwidth(1000, 4, 0.5) == 3000.0


def test_this_machine(task: Path, tmp_path: Path) -> None:
    """A real look, with four ranks that talk to each other; nothing is left behind."""
    result = megarl("doctor", *PPO, *on(task, tmp_path / "new" / "run"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 failures" in result.stdout and "64 prompts, 40 steps" in result.stdout
    assert "4 ranks reach each other, all-reduce at" in result.stdout
    assert "no GPUs" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_cannot_be_is_told_before_anything_starts(task: Path, tmp_path: Path) -> None:
    result = megarl(
        "doctor", *PPO, *on(task, tmp_path / "run"), "actor_rollout_ref.actor.ppo_mini_batch_size=7"
    )
    assert result.returncode == 1 and "1 failures" in result.stdout
    assert "ppo_mini_batch_size" in result.stdout and not (tmp_path / "run").exists()
    unknown = megarl("doctor", *PPO, "trainer.no_such_key=1")
    assert unknown.returncode == 2 and "no_such_key" in unknown.stderr


def test_a_response_that_the_model_cannot_hold_is_told_before_anything_starts(
    task: Path, tmp_path: Path
) -> None:
    recipe, *keys = PPO
    keys += [*on(task, tmp_path / "run"), "data.max_response_length=2000"]
    ok, failure = examine(load_config(TrainConfig, recipe, keys))
    assert (ok.level, failure.level) == (OK, FAILURE) and not (tmp_path / "run").exists()
    assert (
        "data.max_prompt_length=48 + data.max_response_length=2000 = 2048 tokens do not fit" in failure.found
    )
    assert "1024 (max_position_embeddings in its config.json)" in failure.found


def test_a_run_folder_that_cannot_be_written(task: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 512) as disk:
        full = megarl("doctor", *PPO, *on(task, disk / "run"))
        assert full.returncode == 1 and "No space left on device" in full.stdout, full.stdout + full.stderr
        assert list(disk.iterdir()) == []
    (tmp_path / "file").write_text("")
    wrong = megarl("doctor", *PPO, *on(task, tmp_path / "file" / "run"))
    assert wrong.returncode == 1 and "Not a directory" in wrong.stdout, wrong.stdout + wrong.stderr
