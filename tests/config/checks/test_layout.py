"""Which devices and nodes the ranks of an engine are on."""

from collections.abc import Callable

import pytest

from megarl.config import EvalConfig, TrainConfig, check_config, resolve
from tests.config.conftest import problems

Train = Callable[..., TrainConfig]
ROLLOUT = "actor_rollout_ref.rollout"


def test_an_engine_has_equally_many_devices_on_each_of_its_nodes(
    train: Train, evaluation: Callable[..., EvalConfig]
) -> None:
    two = ("trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=8")
    check_config(train(*two))
    check_config(train(f"{ROLLOUT}.nodes_per_engine=2"))  # both on one machine
    check_config(
        evaluation("trainer={nnodes: 2, n_gpus_per_node: 1}", "rollout.tensor_model_parallel_size=2")
    )
    size = f"{ROLLOUT}.tensor_model_parallel_size"
    assert problems(train(*two, f"{ROLLOUT}.nodes_per_engine=1")) == [
        f"{size}=8 is 8 devices on each of {ROLLOUT}.nodes_per_engine=1, more than trainer.n_gpus_per_node=4; it needs 2 nodes "
        "or more"
    ]
    assert problems(train(*two, f"{ROLLOUT}.nodes_per_engine=3")) == [
        f"{size}=8 does not divide by {ROLLOUT}.nodes_per_engine=3: an engine has equally many devices on each of its nodes"
    ]
    (line,) = problems(train("trainer.nnodes=2", f"{size}=6"))
    assert line == (
        f"{size}=6 over {ROLLOUT}.nodes_per_engine=2, 3 devices of an engine on a node, does not divide "
        f"trainer.n_gpus_per_node=4, and one of {ROLLOUT}.num_engines=1 engines would have some of them on another node"
    )
    odd = (
        "trainer.nnodes=3",
        "resource_pools={global: {n_gpus_per_node: 4}, odd: {nnodes: 2, n_gpus_per_node: 3}}",
        f"{ROLLOUT}.resource_pool=odd",
    )
    assert problems(train(*odd)) == [
        f"{size}=2, 2 devices of an engine on a node, does not divide resource_pools.odd.n_gpus_per_node=3, and one of "
        f"{ROLLOUT}.num_engines=3 engines would have some of them on another node"
    ]
    check_config(train(*odd, f"{ROLLOUT}.num_engines=1"))


def test_nodes_per_engine_follows_from_the_pool(train: Train) -> None:
    for changes, nodes, engines in (
        (["trainer.nnodes=1"], 1, 2),
        (["trainer.nnodes=4", f"{ROLLOUT}.tensor_model_parallel_size=8"], 2, 2),
        (["trainer.nnodes=4", f"{ROLLOUT}.tensor_model_parallel_size=16"], 4, 1),
        ([f"{ROLLOUT}.nodes_per_engine=2"], 2, 2),
    ):
        rollout = resolve(train(*changes)).actor_rollout_ref.rollout
        assert (rollout.nodes_per_engine, rollout.num_engines) == (nodes, engines)


CRITIC = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-5")


def test_fsdp_of_a_critic_next_to_an_actor_in_stages(train: Train) -> None:
    """The layout of the articles, written with megarl's keys."""
    actor = (
        "actor_rollout_ref.actor.megatron={tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}",
    )
    alone = "tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1"
    config = train(*CRITIC, *actor, f"critic.megatron={{fsdp: optim_grads_params, {alone}}}")
    check_config(config)
    critic = resolve(config).critic
    assert critic is not None and critic.megatron is not None
    assert critic.megatron.fsdp == "optim_grads_params" and critic.megatron.pipeline_model_parallel_size == 1


def test_what_fsdp_cannot_be_with_is_refused(train: Train) -> None:
    megatron, one = "critic.megatron", "critic.megatron.pipeline_model_parallel_size=1"
    for changes, words in (
        ([f"{megatron}.pipeline_model_parallel_size=2"], "mesh of all ranks without pipeline stages"),
        ([f"{megatron}.use_distributed_optimizer=false"], "use_distributed_optimizer=false does not"),
        ([f"{megatron}.dtype=float16"], "use bfloat16"),
        (["critic.model.lora.rank=8"], "critic.model.lora.rank=8: adapters are small"),
        (["critic.optim.optimizer_cpu_offload=true"], "critic.megatron.optimizer_offload=true"),
    ):
        (line,) = problems(train(*CRITIC, one, f"{megatron}.fsdp=optim_grads", *changes))
        assert line.startswith(f"{megatron}.fsdp=optim_grads ") and words in line
    with pytest.raises(ValueError, match="that is use_distributed_optimizer=true"):
        train("actor_rollout_ref.actor.megatron.fsdp=optim")
    full = (
        "actor_rollout_ref.actor.megatron.fsdp=optim_grads_params",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    one = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1"
    (line,) = problems(train(*full, one, "actor_rollout_ref.actor.kl_loss_type=full"))
    assert "frees the reference's head" in line and "fsdp=optim_grads" in line
    for key in ("router_replay=trainer", "expert_bias_update_rate=0.001", "router_z_loss_coef=0.001"):
        (line,) = problems(train(full[0], one, f"actor_rollout_ref.actor.{key}"))
        assert "has not been tried" in line and key in line
