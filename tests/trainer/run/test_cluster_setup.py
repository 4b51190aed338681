"""The devices that a run may ask for on a single machine, and the process kinds of its fork servers."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cluster.fork_server import interpreter
from megarl.config import EvalConfig, SFTConfig, TrainConfig, load_config, resolve
from megarl.trainer.run import cluster_setup
from megarl.trainer.run.cluster_setup import (
    ENGINE_PROCESSES,
    MODEL_PROCESSES,
    SLOTS_PER_CORE,
    check_devices,
    cluster_setup_of,
    pools_of,
)

RECIPES = Path(__file__).parents[3] / "recipes"
SCHEMAS = {
    "quickstart_ppo": TrainConfig,
    "one_step_off_cpu": TrainConfig,
    "quickstart_sft": SFTConfig,
    "quickstart_eval": EvalConfig,
}
POOLS = ["resource_pools.train.n_gpus_per_node=4", "resource_pools.rollout.n_gpus_per_node=4"]


def config(recipe: str, *overrides: str) -> TrainConfig | SFTConfig | EvalConfig:
    return resolve(load_config(SCHEMAS[recipe], RECIPES / f"{recipe}.yaml", overrides))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine(gpus, cores): make this machine seem to have so many GPUs and cores."""

    def machine(gpus: int, cores: int) -> None:
        monkeypatch.setattr(cluster_setup, "gpus_here", lambda: gpus)
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))

    return machine


@pytest.mark.parametrize("recipe", ["quickstart_ppo", "quickstart_sft", "quickstart_eval"])
def test_processes_that_cannot_all_come_up_are_refused(machine, recipe: str) -> None:
    machine(0, 2)
    assert SLOTS_PER_CORE == 16
    check_devices(config(recipe, "trainer.n_gpus_per_node=32"))
    with pytest.raises(ValueError) as error:
        check_devices(config(recipe, "trainer.n_gpus_per_node=32", "trainer.nnodes=2"))
    assert str(error.value) == (
        "trainer.nnodes x trainer.n_gpus_per_node (or resource_pools) ask for 2 x 32 devices; this machine has no GPU, so that "
        "each is a process, and on its 2 cores at most 32 come up in time; ask for fewer"
    )
    joins = config(recipe, "trainer.n_gpus_per_node=64", "trainer.ray_address=auto")
    check_devices(joins)


def test_gpus_that_this_machine_does_not_have_are_refused(machine) -> None:
    machine(7, 1)
    one, two = config("quickstart_ppo", "trainer.n_gpus_per_node=7"), config("one_step_off_cpu", *POOLS)
    check_devices(one)
    with pytest.raises(ValueError, match=r"ask for 1 x 4 \+ 1 x 4 devices; this machine has 7 GPUs"):
        check_devices(two)
    learns = replace(two, trainer=replace(two.trainer, train_only="dumped"))
    assert list(pools_of(learns)) == ["train"]
    check_devices(learns)


TRAIN = resolve(load_config(TrainConfig, RECIPES / "quickstart_ppo.yaml", []))
SFT = resolve(load_config(SFTConfig, RECIPES / "quickstart_sft.yaml", []))
EVAL = resolve(load_config(EvalConfig, RECIPES / "quickstart_eval.yaml", []))
LIST = "import json, os, sys; print(json.dumps([os.getppid(), sorted(sys.modules)]))"


def test_a_run_has_fork_servers_for_the_processes_that_it_starts():
    for config, kinds in (
        (TRAIN, {MODEL_PROCESSES, ENGINE_PROCESSES}),
        (SFT, {MODEL_PROCESSES}),
        (EVAL, {ENGINE_PROCESSES}),
    ):
        with cluster_setup_of(config) as cluster_setup:
            assert cluster_setup.fork_servers.keys() == kinds
        joins = replace(config, trainer=replace(config.trainer, ray_address="10.0.0.1:6379"))
        with cluster_setup_of(joins) as cluster_setup:
            assert cluster_setup is None
    learns = replace(TRAIN, trainer=replace(TRAIN.trainer, train_only="somewhere"))
    with cluster_setup_of(learns) as cluster_setup:
        assert cluster_setup.fork_servers.keys() == {MODEL_PROCESSES}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules that a process forked from each kind's fork server begins with."""
    script = tmp_path_factory.mktemp("kinds") / "script.py"
    script.write_text(LIST)
    with cluster_setup_of(TRAIN) as cluster_setup:
        # One after the other, and again if need be, since a request to a fork server times out after 30 s.
        return {
            kind: copy_of(cluster_setup.fork_servers[kind], script)
            for kind in (MODEL_PROCESSES, ENGINE_PROCESSES)
        }


def copy_of(fork_server: str, script: Path) -> set[str]:
    command = f"exec {interpreter(fork_server)} {script}"
    for _ in range(6):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        parent, modules = json.loads(done.stdout)
        if parent != os.getpid():
            return set(modules)
    raise AssertionError(
        f"the fork server at {fork_server} has made no copy: its imports take too long, or have failed"
    )


def test_models_and_engines_begin_with_what_takes_long(imported):
    assert {"torch", "megatron.core.models.gpt", "megarl.megatron.build"} <= imported[MODEL_PROCESSES]
    assert {"torch", "sglang.srt.entrypoints.engine", "megarl.rollout.sglang.process"} <= imported[
        ENGINE_PROCESSES
    ]


def test_nothing_is_imported_before_it_may_be(imported):
    for kind, modules in imported.items():
        assert "ray" not in modules, f"{kind}: it would have the settings of no worker"
    assert "megatron.core" not in imported[ENGINE_PROCESSES], (
        "SGLang's schedulers refuse what it makes of pickled tensors"
    )
    assert not any(name.split(".")[0] == "sglang" for name in imported[MODEL_PROCESSES])
