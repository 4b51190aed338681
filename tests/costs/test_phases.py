"""Which engines and parts of models leave a run's devices, according to its configuration."""

import pytest

from megarl.config import TrainConfig, load_config, resolve
from megarl.costs.phases import frees_engines, leaves, trained_parts
from tests.fixtures.runs import PPO, REPOSITORY

FREE = "actor_rollout_ref.rollout.free_cache_engine"
APART = (
    "resource_pools={global: {n_gpus_per_node: 4}, serve: {n_gpus_per_node: 2}}", "trainer.n_gpus_per_node=6",
    "actor_rollout_ref.rollout.resource_pool=serve",
)  # fmt: skip
JUDGED = (*APART, "reward_model.enable=true", "reward_model.model.path=m", "reward_model.resource_pool=serve")


def config_of(*overrides: str) -> TrainConfig:
    recipe, *short = PPO
    return resolve(load_config(TrainConfig, REPOSITORY / recipe, [*short, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "gpus", "freed"),
    [
        ((), ("global",), True),
        ((), (), False),  # no GPUs
        ((f"{FREE}=false",), ("global",), False),
        ((f"{FREE}=true",), (), True),
        (APART, ("global", "serve"), False),
        (JUDGED, ("global", "serve"), True),  # for the reward model, which is only evaluated
        (JUDGED, ("global",), False),
    ],
)
def test_engines_are_freed_where_models_use_their_gpus(
    overrides: tuple[str, ...], gpus: tuple[str, ...], freed: bool
) -> None:
    assert frees_engines(config_of(*overrides), gpus) == freed


def test_models_leave_gpus_that_they_share_with_engines_unless_told() -> None:
    config = config_of("actor_rollout_ref.actor.megatron.grad_offload=false")
    switches = trained_parts(config.actor_rollout_ref.actor.megatron)
    assert {part for part, switch in switches.items() if leaves(config, switch, "global", ("global",))} == {
        "weights",
        "adapters",
        "optimizer",
    }
    assert not any(leaves(config, switch, "global", ()) for switch in switches.values())
    assert leaves(config, True, "global", ())
    assert not leaves(config_of(*APART), None, "global", ("global", "serve"))
