"""Which devices a run may ask for on a machine that is all it has."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import EvalConfig, SFTConfig, TrainConfig, load_config, resolve
from megarl.trainer.run import devices
from megarl.trainer.run.devices import SLOTS_PER_CORE, check_devices, pools_of

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
    """machine(gpus, cores): what this one seems to have."""

    def machine(gpus: int, cores: int) -> None:
        monkeypatch.setattr(devices, "gpus_here", lambda: gpus)
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
