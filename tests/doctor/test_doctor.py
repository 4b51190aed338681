"""`megarl doctor`: findings about machines, from facts made by hand, and a real examination of this machine."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cli.main import main
from megarl.config import TrainConfig
from megarl.config.loading import load_config
from megarl.doctor.doctor import examine
from megarl.doctor.nodes import FAILURE, GIB, OK, WARNING, Finding, NodeFacts, check_nodes
from megarl.doctor.probe import bus_bandwidth
from megarl.util.gpus import Gpu
from megarl.util.packages import PURPOSES, requirements
from tests.disks import small_disk
from tests.fixtures.runs import PPO, megarl, on

VERSIONS = {
    "torch": "2.13.0", "megatron-core": "0.19.2", "sglang": "0.5.21", "ray": "2.60.0", "transformers": "5.12.1",
    "pyarrow": "26.0.0", "transformer-engine": "2.5", "sglang-kernel": "0.4.7", "torch-memory-saver": "0.0.9",
    "fla-core": "0.6.0",
}  # fmt: skip
NODE = NodeFacts(
    host="a", address="10.0.0.1", python="3.11.9", versions=VERSIONS, missing=(), cuda="13.0",
    gpus=(Gpu("H200", "580.65.06", 140 * GIB, 0),) * 8, cores=64, memory=1000 * GIB, available=900 * GIB, shared_memory=500 * GIB, disk=2000 * GIB, open_files=1 << 20,
    clock=1000.0, probe=True,
)  # fmt: skip


def bad(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in findings if finding.level != OK]


def judged(needed: dict[str, int] | None = None, **changes: object) -> list[Finding]:
    """The findings about one node that differs from a good one."""
    return check_nodes([replace(NODE, **changes)], [8], needed or {})


def test_a_good_node_is_good() -> None:
    assert bad(judged()) == [] and bad(check_nodes([NODE, replace(NODE, host="b")], [8, 8], {})) == []
    assert {finding.what for finding in judged()} >= {"torch", "GPUs", "memory", "/dev/shm"}


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"versions": {**VERSIONS, "torch": "2.9.0"}}, (WARNING, "torch")),
        ({"versions": {**VERSIONS, "torch": "2.11.0"}}, (WARNING, "torch")),  # SGLang asks for 2.13.0
        ({"missing": ("fastapi", "sglang")}, (FAILURE, "what these import")),
        ({"cuda": None}, (FAILURE, "CUDA")),
        ({"gpus": (*NODE.gpus[:7], replace(NODE.gpus[0], driver="575.57.08"))}, (WARNING, "GPU driver")),
        ({"versions": {k: v for k, v in VERSIONS.items() if k != "sglang"}}, (FAILURE, "sglang")),
        (
            {"versions": {k: v for k, v in VERSIONS.items() if k != "sglang-kernel"}},
            (WARNING, "sglang-kernel"),
        ),
        ({"gpus": NODE.gpus[:7]}, (FAILURE, "GPUs")),
        ({"gpus": (*NODE.gpus[:7], replace(NODE.gpus[0], used=8 * GIB))}, (FAILURE, "GPU 7")),
        ({"open_files": 1024}, (WARNING, "open files")),
        ({"address": None}, (FAILURE, "host name")),
        ({"shared_memory": None}, (WARNING, "/dev/shm")),
        ({"probe": False}, (FAILURE, "run folder")),
    ],
)
def test_findings_about_a_node(changes: dict[str, object], expected: tuple[str, str]) -> None:
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


@pytest.mark.parametrize(
    ("cuda", "driver", "found"),
    [("13.0", "580.65.06", []), ("13.0", "570.1", ["GPU driver"]), ("12.9", "570.1", []), ("12.9", "520.61", ["GPU driver"])],
)  # fmt: skip
def test_drivers_are_judged_by_the_cuda_that_torch_is_built_for(
    cuda: str, driver: str, found: list[str]
) -> None:
    """NVIDIA's release notes of CUDA 13: 12.x runs on driver 525 and newer, 13.x on 580."""
    gpus = (replace(NODE.gpus[0], driver=driver),) * 8
    assert [finding.what for finding in judged(cuda=cuda, gpus=gpus) if finding.level != OK] == found


def test_missing_packages_come_with_their_purpose_and_a_command() -> None:
    bare = {name: version for name, version in VERSIONS.items() if name not in ("megatron-core", "sglang")}
    node = replace(
        NODE, gpus=(), cuda=None, versions=bare, missing=("megatron-core", "sglang", "fastapi", "orjson")
    )
    found = [finding for finding in check_nodes([node], [None], {}) if finding.level != OK]
    assert [(finding.level, finding.what, finding.found) for finding in found] == [
        (FAILURE, "megatron-core", "not installed on a: models in their parallel layouts"),
        (FAILURE, "sglang", "not installed on a: rollouts, evaluation"),
        (FAILURE, "what these import", "not installed on a: fastapi, orjson"),
    ]  # fmt: skip
    (command,) = {finding.command for finding in found}
    assert command.endswith(f"-m pip install --no-deps --ignore-requires-python -r {requirements('cpu')}")


def test_without_a_recipe_it_looks_at_this_machine(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in PURPOSES) and "0 failures" in said


def test_without_gpus_none_are_asked_for() -> None:
    bare = {
        name: version
        for name, version in VERSIONS.items()
        if name not in ("sglang-kernel", "transformer-engine", "fla-core")
    }
    assert bad(check_nodes([replace(NODE, gpus=(), versions=bare)], [None], {})) == []


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
    assert bad(check_nodes([NODE, replace(NODE, host="b", **changes)], [8, 8], {})) == expected


def examined_on(
    found: dict[str, NodeFacts], devices: Sequence[str], monkeypatch: pytest.MonkeyPatch, *keys: str
) -> list[Finding]:
    """The findings of a job that joins a cluster of machines with these facts, by name; the first one is the controller's.

    Args:
        devices: the machine of each device of the job.
    """
    pool = SimpleNamespace(use_gpu=True, devices=[SimpleNamespace(node_id=node) for node in devices])
    run = SimpleNamespace(pools={}, log_dir=Path())
    context = SimpleNamespace(get_node_id=lambda: next(iter(found)))
    clock = count(1000.0, 4.0)  # each machine takes 4 s to answer, and all clocks are the same
    now = next(clock)

    def answer(node: str, *_: object) -> NodeFacts:
        nonlocal now
        now = next(clock)
        return replace(found[node], host=node, clock=now + found[node].clock - NODE.clock)

    where = "megarl.doctor.doctor"
    monkeypatch.setattr(f"{where}._inputs", lambda config: iter(()))
    monkeypatch.setattr(f"{where}.open_engine_run", lambda *_: nullcontext(run))
    monkeypatch.setattr(f"{where}.open_pools", lambda run, pools: run.pools.update(pool=pool))
    monkeypatch.setattr(f"{where}.ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(f"{where}.on_node", answer)
    monkeypatch.setattr(f"{where}._bandwidth", lambda run, name: Finding(OK, "devices", name))
    config = load_config(TrainConfig, PPO[0], [*PPO[1:], "trainer.ray_address=10.0.0.1:6379", *keys])
    with monkeypatch.context() as patched:
        patched.setattr("time.time", lambda: now)
        return examine(config)


def test_a_cluster_whose_controller_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the head's pod of KubeRay; its machines answer one after the other."""
    folder = f"trainer.default_local_dir={tmp_path}/run"
    head = replace(NODE, gpus=(), available=GIB, shared_memory=GIB >> 4)
    found = {"head": head} | dict.fromkeys("abc", NODE)
    assert bad(examined_on(found, "aaaabbbbcccc", monkeypatch, folder)) == []
    found |= {"b": replace(NODE, gpus=NODE.gpus[:3]), "c": replace(NODE, clock=NODE.clock + 6)}
    assert bad(examined_on(found, "aaaabbbbcccc", monkeypatch, folder)) == [
        (WARNING, "clocks"),
        (FAILURE, "GPUs"),
    ]


def test_a_model_of_the_hub(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that its checkpoints need is known from the folder in the Hub's cache."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(task / "model"))
    keys = [*on(task, tmp_path / "run"), "actor_rollout_ref.model.path=owner/name", "trainer.save_freq=1"]
    assert bad(examined_on({"a": NODE}, "aaaa", monkeypatch, *keys)) == []
    full = {"a": replace(NODE, disk=GIB)}
    assert bad(examined_on(full, "aaaa", monkeypatch, *keys)) == [(FAILURE, "disk of the run folder")]


def test_checkpoints_of_adapters_need_room_for_adapters_alone(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model itself they have nothing, unless trainer.save_hf exports it with them."""
    keys = [*on(task, tmp_path / "run"), "trainer.save_freq=1", "algorithm.adv_estimator=grpo", "critic=null"]
    adapters, found = "actor_rollout_ref.model.lora.rank=1", {"a": replace(NODE, disk=GIB + (1 << 18))}
    lacking = [(FAILURE, "disk of the run folder")]
    assert bad(examined_on(found, "aaaa", monkeypatch, *keys)) == lacking
    assert bad(examined_on(found, "aaaa", monkeypatch, *keys, adapters)) == []
    assert bad(examined_on(found, "aaaa", monkeypatch, *keys, adapters, "trainer.save_hf=true")) == lacking


def test_bus_bandwidth() -> None:
    """nccl-tests' PERFORMANCE.md: for an all-reduce it is bytes / seconds x 2 (n - 1) / n."""
    assert bus_bandwidth(1000, 4, 0.5) == 3000.0


def test_this_machine(task: Path, tmp_path: Path) -> None:
    """A real examination, with four ranks that talk to each other; nothing is left behind."""
    result = megarl("doctor", *PPO, *on(task, tmp_path / "new" / "run"))
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("failure")]
    assert set(failed) <= {"memory"}, result.stdout + result.stderr  # other programs may have taken it
    assert result.returncode == len(failed), result.stdout + result.stderr
    assert f"{len(failed)} failures" in result.stdout and "64 prompts, 40 steps" in result.stdout
    assert "4 ranks reach each other, all-reduce at" in result.stdout
    assert "no GPUs" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """doctor(arguments...): runs a command that ends before it starts anything, in this process; returns its exit code and output."""
    monkeypatch.setenv("COLUMNS", "200")

    def doctor(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["doctor", *map(str, arguments)]), *capsys.readouterr()

    return doctor


def test_a_configuration_that_cannot_be_is_told_before_anything_starts(
    task: Path, tmp_path: Path, doctor: Callable[..., tuple[int, str, str]]
) -> None:
    wrong = "actor_rollout_ref.actor.ppo_mini_batch_size=7"
    code, told, _ = doctor(*PPO, *on(task, tmp_path / "run"), wrong)
    assert code == 1 and "1 failures" in told
    assert "ppo_mini_batch_size" in told and not (tmp_path / "run").exists()
    code, _, error = doctor(*PPO, "trainer.no_such_key=1")
    assert code == 2 and "no_such_key" in error


def test_a_response_that_the_model_cannot_hold_is_told_before_anything_starts(
    task: Path, tmp_path: Path
) -> None:
    recipe, *keys = PPO
    keys += [*on(task, tmp_path / "run"), "data.max_response_length=2000"]
    (failure,) = examine(load_config(TrainConfig, recipe, keys))
    assert failure.level == FAILURE and not (tmp_path / "run").exists()
    assert (
        "data.max_prompt_length=48 + data.max_response_length=2000 = 2048 tokens do not fit" in failure.found
    )
    assert "1024 (max_position_embeddings in its config.json)" in failure.found


def test_a_run_folder_that_cannot_be_written(
    task: Path, tmp_path: Path, doctor: Callable[..., tuple[int, str, str]]
) -> None:
    with small_disk(tmp_path / "disk", 512) as disk:
        code, told, _ = doctor(*PPO, *on(task, disk / "run"))
        assert code == 1 and "No space left on device" in told
        assert list(disk.iterdir()) == []
    (tmp_path / "file").write_text("")
    code, told, _ = doctor(*PPO, *on(task, tmp_path / "file" / "run"))
    assert code == 1 and "Not a directory" in told
