"""Where the devices of an engine are."""

from collections.abc import Callable

from megarl.config import EvalConfig, TrainConfig, check_config, resolve
from tests.config.conftest import problems

Train = Callable[..., TrainConfig]
ROLLOUT = "actor_rollout_ref.rollout"


def test_an_engine_has_equally_many_devices_on_each_of_its_nodes(
    train: Train, evaluation: Callable[..., EvalConfig]
) -> None:
    two = ("trainer.nnodes=2", f"{ROLLOUT}.tensor_model_parallel_size=8")
    check_config(train(*two))
    check_config(train(f"{ROLLOUT}.nodes_per_engine=2"))  # of one machine
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
