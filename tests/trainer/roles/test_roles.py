"""Which devices the engines' ranks take, and when models start that share GPUs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config import RolloutConfig, TrainConfig, load_config, resolve, updates_per_step
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig
from megarl.trainer.roles import roles
from megarl.trainer.roles.device_memory import device_memory
from megarl.trainer.roles.model_roles import actor_arguments, critic_spec, say_layers
from megarl.trainer.roles.roles import engine_devices, sync_plan

REPOSITORY = Path(__file__).parents[3]
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


def test_an_actors_learning_rate_decays_over_the_updates_that_it_has() -> None:
    """There are none in the critic's warm-up: with the run's it would end above its minimum."""
    recipe = REPOSITORY / "recipes/gsm8k_cpu_smoke.yaml"
    config = resolve(load_config(TrainConfig, recipe, ["critic.warmup_steps=3"]))
    assert config.critic is not None
    each = updates_per_step(config, config.actor_rollout_ref.actor)
    assert actor_arguments(config, 10)["spec"].num_updates == 7 * each
    assert critic_spec(config, 10).num_updates == 10 * updates_per_step(config, config.critic)


class Started:
    """The processes of a model on some devices; what happens to them is added to `events`."""

    def __init__(self, role: str, devices: list, events: list[tuple[str, str]]) -> None:
        self.role, self.devices, self.events = role, [(device,) for device in devices], events
        self.started = [f"{role} is loaded"]
        events.append((role, "start"))

    def call(self, method: str, parts: list[str]) -> list[None]:
        self.events.append((self.role, f"{method} {','.join(parts)}"))
        return []


@pytest.mark.parametrize("kind", ["shared GPUs", "engines elsewhere", "slots"])
def test_models_that_share_gpus_are_loaded_one_after_the_other(monkeypatch, kind) -> None:
    """All parts of a model are there when it is loaded: an actor and a critic at once would take more than any planned phase."""
    recipe = REPOSITORY / "recipes/llama3_8b_ppo_reward_model.yaml"
    keys = ["trainer.default_local_dir=/run"]
    if kind == "engines elsewhere":  # the models stay where they are
        keys += ["resource_pools={models: {n_gpus_per_node: 4}, engines: {n_gpus_per_node: 4}}"]
        keys += [f"{role}.resource_pool=models" for role in ("actor_rollout_ref.actor", "critic")]
        keys += ["actor_rollout_ref.rollout.resource_pool=engines", "reward_model.resource_pool=models"]
    config = resolve(load_config(TrainConfig, recipe, keys))
    pools = {
        name: SimpleNamespace(use_gpu=kind != "slots", devices=[f"{name} 0", f"{name} 1"])
        for name in config.resource_pools
    }
    events: list[tuple[str, str]] = []
    run = SimpleNamespace(
        pools=pools,
        wait=lambda calls: events.extend(("run", call) for call in calls if isinstance(call, str)),
    )

    def start(name: str, section) -> SimpleNamespace:
        group = Started(name, pools[section.resource_pool].devices, events)
        return SimpleNamespace(group=group, layout=None)

    policy = config.actor_rollout_ref
    monkeypatch.setattr(roles, "start_actor", lambda config, run, steps: start("actor", policy.actor))
    monkeypatch.setattr(
        roles, "start_critic", lambda config, run, actor, steps: start("critic", config.critic)
    )
    actor, critic, judges, left = roles._start_models(config, run, 10)
    assert judges["ref"].group is actor.group
    parts = "weights,gradients,optimizer"
    in_turn = [
        ("actor", "start"),
        ("run", "actor is loaded"),
        ("actor", f"release_memory {parts},reference"),
        ("critic", "start"),
        ("run", "critic is loaded"),  # the reward model starts next
        ("critic", f"release_memory {parts}"),
    ]
    shares = kind == "shared GPUs"
    assert events == (in_turn if shares else [("actor", "start"), ("critic", "start")])
    memory = device_memory(config, run, actor, None, critic, judges, None, left=left)
    assert all(owner.resident != shares for owner in memory.owners)
