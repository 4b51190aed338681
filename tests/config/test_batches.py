import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megarl.config import (
    EvalConfig,
    SFTConfig,
    TrainConfig,
    all_references,
    batch_summary,
    batch_table,
    has_teacher,
    needs_reference,
    reference_in_actor,
    reference_is_actor,
    reference_key,
    references,
    resolve,
    resolve_batches,
    save_batch_plan,
    served_references,
    taught_references,
    teacher_of_sources,
)
from megarl.config.batches import RolePlan, RolloutPlan, UpdatePlan
from tests.config.conftest import batches_of

Train = Callable[..., TrainConfig]
ACTOR = "actor_rollout_ref.actor"


def test_the_arithmetic_of_a_ppo_step(train: Train) -> None:
    plan = batches_of(train("algorithm.use_kl_in_reward=true"))
    assert (plan.devices, plan.prompts_per_step, plan.responses_per_prompt) == (4, 16, 3)
    assert plan.trajectories_per_step == 48
    assert plan.max_tokens_per_trajectory == 64
    # 16 prompts in mini-batches of 8 prompts, twice over; 8 * 3 trajectories each.
    assert plan.actor == RolePlan(pool="global", world=4, tp=2, pp=2, vpp=1, cp=1, dp=1)
    assert plan.actor_update == UpdatePlan(
        mini_batches_per_epoch=2,
        epochs=2,
        updates_per_step=4,
        sequences_per_mini_batch=24,
        sequences_per_dp_rank=24,
        micro_batch_tokens=128,
        micro_batch_sequences=None,
    )
    assert plan.critic == RolePlan(pool="global", world=4, tp=1, pp=2, vpp=1, cp=1, dp=2)
    assert plan.critic_update is not None and plan.critic_update.sequences_per_dp_rank == 12
    assert plan.ref == plan.actor and plan.ref_in_actor and plan.ref_micro_batch_tokens == 128
    assert plan.rollout == RolloutPlan(
        pool="global", engines=2, tp=2, devices=4, trajectories_per_engine=24, max_num_seqs=256
    )


def test_roles_on_pools_of_their_own(grpo: Train) -> None:
    plan = batches_of(
        grpo(
            "trainer={nnodes: 2, n_gpus_per_node: 4}",
            "resource_pools={a: {nnodes: 2, n_gpus_per_node: 2}, e: {n_gpus_per_node: 3}}",
            f"{ACTOR}.resource_pool=a",
            "actor_rollout_ref.rollout.resource_pool=e",
            f"{ACTOR}.megatron={{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, context_parallel_size: 2}}",
        )
    )
    assert plan.devices == 7
    assert plan.actor == RolePlan(pool="a", world=4, tp=1, pp=1, vpp=1, cp=2, dp=2)
    assert plan.critic is None and plan.critic_update is None and plan.ref is None and not plan.ref_in_actor
    assert (plan.rollout.engines, plan.rollout.devices) == (1, 2)  # 3 devices hold one engine of 2


def test_the_arithmetic_of_sft(sft: Callable[..., SFTConfig]) -> None:
    plan = batches_of(sft())
    assert plan.model == RolePlan(pool="global", world=4, tp=2, pp=1, vpp=1, cp=1, dp=2)
    assert plan.update == UpdatePlan(1, 1, 1, 8, 4, 128, None)


def test_the_table_has_a_row_for_each_role(train: Train, sft: Callable[..., SFTConfig]) -> None:
    plan = batches_of(train("algorithm.use_kl_in_reward=true"))
    assert batch_table(plan) == [
        ("", "devices", "layout", "updates x trajectories", "micro-batch"),
        ("actor", "4", "tp2 x pp2 x cp1 x dp1", "2 epochs x 2 x 24 (24 a dp rank)", "max 128 tokens"),
        ("critic", "4", "tp1 x pp2 x cp1 x dp2", "2 epochs x 2 x 24 (12 a dp rank)", "max 128 tokens"),
        ("reference", "4", "tp2 x pp2 x cp1 x dp1", "", "max 128 tokens"),
        ("rollout", "4", "2 engines x tp2", "max 24 an engine", ""),
    ]
    assert batch_summary(plan) == "16 prompts x 3 responses = 48 trajectories of at most 64 tokens"

    chunks = "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2"
    rows = batch_table(batches_of(train("critic.megatron=null", chunks)))
    assert [row[2] for row in rows[1:3]] == ["tp2 x pp2 (vpp2) x cp1 x dp1"] * 2

    experts = "{expert_model_parallel_size: 2, expert_tensor_parallel_size: 2}"
    rows = batch_table(
        batches_of(train(f"critic.megatron={experts}", "actor_rollout_ref.rollout.expert_parallel_size=2"))
    )
    assert [row[2] for row in rows[2:]] == ["tp1 x pp2 x cp1 x dp2 (ep2 etp2)", "2 engines x tp2 (ep2)"]

    plan = batches_of(sft())
    assert len(batch_table(plan)) == 2 and batch_table(plan)[1][3].startswith("1 x 8 (")
    assert batch_summary(plan) == "8 examples of at most 64 tokens"


def test_the_table_names_pools_where_there_are_several(grpo: Train) -> None:
    pools = ("resource_pools={a: {n_gpus_per_node: 4}, e: {n_gpus_per_node: 2}}", "trainer.n_gpus_per_node=6")
    roles = (f"{ACTOR}.resource_pool=a", "actor_rollout_ref.rollout.resource_pool=e")
    header, *rows = batch_table(batches_of(grpo(*pools, *roles)))
    assert header[1] == "pool" and [row[:2] for row in rows] == [("actor", "a"), ("rollout", "e")]


def test_the_plan_is_saved_as_json(train: Train, tmp_path: Path) -> None:
    plan = batches_of(train())
    path = save_batch_plan(plan, tmp_path / "run")
    assert path == tmp_path / "run" / "batch_plan.json"
    assert json.loads(path.read_text()) == asdict(plan)


def test_resolve_fills_in_what_follows(train: Train) -> None:
    config = resolve(train("critic.megatron=null", "actor_rollout_ref.actor.clip_ratio_high=0.3"))
    policy, critic = config.actor_rollout_ref, config.critic
    assert critic is not None
    assert policy.model.tokenizer_path == policy.model.path == critic.model.path
    assert policy.actor.megatron.sequence_parallel is True
    assert policy.actor.megatron == critic.megatron == policy.ref.megatron
    assert (policy.actor.clip_ratio_low, policy.actor.clip_ratio_high) == (0.2, 0.3)
    assert (critic.ppo_mini_batch_size, critic.ppo_epochs, critic.ppo_max_token_len_per_gpu) == (8, 2, 128)
    assert policy.ref.log_prob_max_token_len_per_gpu == 128
    assert policy.rollout.num_engines == 2
    assert {policy.actor.resource_pool, policy.ref.resource_pool, critic.resource_pool} == {"global"}
    assert config.trainer.default_local_dir == "outputs/megarl/ppo"
    assert config.trainer.rollout_data_dir == "outputs/megarl/ppo/rollouts"
    assert policy.actor.optim.lr_decay_steps is None and config.trainer.total_training_steps is None


def test_resolve_keeps_what_is_given(train: Train) -> None:
    config = resolve(
        train(
            "critic.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.actor.megatron.sequence_parallel=false",
            "actor_rollout_ref.actor.clip_ratio_low=0.1",
            "actor_rollout_ref.rollout.num_engines=1",
            "trainer.default_local_dir=runs/x",
            "trainer.rollout_data_dir=/data/r",
        )
    )
    assert config.critic is not None
    assert config.critic.ppo_max_token_len_per_gpu is None and config.critic.ppo_micro_batch_size_per_gpu == 3
    assert config.actor_rollout_ref.actor.megatron.sequence_parallel is False
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert config.actor_rollout_ref.rollout.num_engines == 1
    assert (config.trainer.default_local_dir, config.trainer.rollout_data_dir) == ("runs/x", "/data/r")


def test_a_budget_in_trajectories_gives_the_reference_one_in_tokens(train: Train) -> None:
    config = train(f"{ACTOR}.ppo_max_token_len_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3")
    assert resolve(config).actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 3 * 64


def test_resolving_twice_changes_nothing(
    train: Train, grpo: Train, sft: Callable[..., SFTConfig], evaluation: Callable[..., EvalConfig]
) -> None:
    for config in (train(), grpo(), sft(), evaluation()):
        assert resolve(resolve(config)) == resolve(config)


def test_where_the_reference_lives(train: Train) -> None:
    assert not needs_reference(train())
    for override in (f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"):
        assert needs_reference(train(override))
    assert reference_in_actor(resolve(train()))
    same = "{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}"
    assert reference_in_actor(resolve(train(f"actor_rollout_ref.ref.megatron={same}")))
    assert not reference_in_actor(resolve(train("actor_rollout_ref.ref.megatron={}")))
    pools = "resource_pools={global: {n_gpus_per_node: 4}, r: {n_gpus_per_node: 4}}"
    assert not reference_in_actor(resolve(train(pools, "actor_rollout_ref.ref.resource_pool=r")))


def test_a_teacher_is_a_model_of_its_own(train: Train) -> None:
    adapted, teacher = "actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.ref.model.path=other"
    plain = resolve(train())
    assert not has_teacher(plain) and not reference_is_actor(plain)
    assert plain.actor_rollout_ref.ref.model.path == plain.actor_rollout_ref.model.path
    assert reference_is_actor(resolve(train(adapted)))
    taught = resolve(train(adapted, teacher))
    assert has_teacher(taught) and reference_in_actor(taught) and not reference_is_actor(taught)


def test_several_teachers_are_roles_of_their_own(train: Train) -> None:
    kl, same = "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.teachers.same={}"
    math = "actor_rollout_ref.teachers.math={model: {path: other}, sources: [gsm8k, math500], megatron: {}}"
    assert references(resolve(train(same, math))) == {}
    config = resolve(train(kl, same, math))
    assert list(references(config)) == ["teacher_same", "teacher_math"]
    assert [reference_key(role) for role in references(config)] == [
        "actor_rollout_ref.teachers.same",
        "actor_rollout_ref.teachers.math",
    ]
    assert list(taught_references(config)) == ["teacher_math"]
    assert not reference_in_actor(config) and not reference_is_actor(config)
    assert teacher_of_sources(config) == {"same": "same", "gsm8k": "math", "math500": "math"}
    plan = resolve_batches(config)
    assert plan.ref is None and plan.teachers["same"].tp == plan.actor.tp == 2
    assert plan.teachers["math"].tp == 1 and plan.teachers["math"].dp == plan.teachers["math"].world
    assert [row[0] for row in batch_table(plan)][3:5] == ["teacher same", "teacher math"]
    assert resolve(config) == config


def test_a_teacher_may_be_engines_on_a_pool_of_their_own(train: Train) -> None:
    kl, pools = (
        "actor_rollout_ref.actor.use_kl_loss=true",
        "resource_pools={global: {n_gpus_per_node: 4}, far: {n_gpus_per_node: 3}}",
    )
    served = "actor_rollout_ref.teachers.math={model: {path: other}, resource_pool: far, engine: {tensor_model_parallel_size: 2}}"
    config = resolve(train(kl, pools, served, "actor_rollout_ref.teachers.same={}"))
    assert list(all_references(config)) == ["teacher_math", "teacher_same"]
    assert list(references(config)) == ["teacher_same"] and list(taught_references(config)) == [
        "teacher_math"
    ]
    engines = served_references(config)["teacher_math"]
    assert (engines.num_engines, engines.nodes_per_engine, engines.resource_pool) == (1, 1, "far")
    assert engines.tensor_model_parallel_size == 2 and engines.gpu_memory_utilization == 0.8
    assert config.actor_rollout_ref.teachers["math"].megatron is None
    plan = resolve_batches(config)
    assert list(plan.teachers) == ["same"] and plan.judging_engines["teacher_math"].devices == 2
    assert ("teacher math", "far", "2", "1 engine x tp2", "", "") in batch_table(plan)
    assert resolve(config) == config
    alone = resolve(train(kl, pools, "actor_rollout_ref.ref={resource_pool: far, engine: {}}"))
    assert served_references(alone)["ref"].num_engines == 3 and not references(alone)
    assert not reference_in_actor(alone) and resolve_batches(alone).ref is None


def test_evaluation_uses_all_devices(evaluation: Callable[..., EvalConfig]) -> None:
    config = resolve(evaluation())
    assert config.rollout.num_engines == 2
    assert config.model.tokenizer_path == config.model.path
