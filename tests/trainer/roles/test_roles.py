"""Which devices the engines' ranks take."""

from types import SimpleNamespace

from megarl.config import RolloutConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.trainer.roles.model_roles import say_layers
from megarl.trainer.roles.roles import engine_devices, sync_plan

MODEL = ModelConfig(
    family="llama",
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    head_dim=8,
    ffn_hidden_size=128,
    vocab_size=512,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    dtype="float32",
    hf={},
)


class Pool(SimpleNamespace):
    """A pool on one node, of GPUs (`gpus`) or of process slots."""

    def __init__(self, count: int, gpus: bool, name: str = "pool") -> None:
        placement = SimpleNamespace(id=name.encode())
        devices = [
            SimpleNamespace(node_id="node", gpu_id=str(n) if gpus else None, placement=placement, bundle=n)
            for n in range(count)
        ]
        super().__init__(devices=devices, use_gpu=gpus)


def link_bytes(actor: Pool, engines: Pool, order: tuple[int, ...]) -> dict[str, int]:
    rollout = RolloutConfig(tensor_model_parallel_size=2, num_engines=2)
    return sync_plan(rollout, MODEL, ParallelLayout(4, tp=4), actor, engines, order).plan.account().by_link


def test_engine_ranks_take_devices_that_hold_their_weights() -> None:
    rollout = RolloutConfig(tensor_model_parallel_size=2, num_engines=2)
    for gpus in (True, False):
        pool = Pool(4, gpus)
        order = engine_devices(rollout, MODEL, ParallelLayout(4, tp=4), pool, pool)
        # Rank 0 of each engine serves the weights that devices 0 and 1 hold.
        assert {order[0], order[2]} == {0, 1} and {order[1], order[3]} == {2, 3}
        assert link_bytes(pool, pool, order)["local"] > link_bytes(pool, pool, (0, 1, 2, 3))["local"]


def test_slots_of_two_pools_are_different_devices() -> None:
    actor, engines = Pool(4, False, "actor"), Pool(4, False, "engines")
    rollout = RolloutConfig(tensor_model_parallel_size=2, num_engines=2)
    order = engine_devices(rollout, MODEL, ParallelLayout(4, tp=4), actor, engines)
    assert order == (0, 1, 2, 3)
    assert link_bytes(actor, engines, order)["local"] == 0


def test_on_gpus_the_layers_that_models_are_made_of_are_said() -> None:
    said: list[str] = []
    run = SimpleNamespace(wait=lambda calls: [f"answer to {call}" for call in calls], say=said.append)
    group = SimpleNamespace(call_rank=lambda rank, method: f"{method} of rank {rank}")
    say_layers(run, group, SimpleNamespace(use_gpu=True))
    say_layers(run, group, SimpleNamespace(use_gpu=False))
    assert said == ["layers: answer to layers_used of rank 0"]
