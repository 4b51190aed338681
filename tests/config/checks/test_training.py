"""Requirements of trained models: estimators, losses, controllers, corrections, float16, the exact KL, adapters, trackers, health."""

import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from megarl.config import (
    DPOConfig,
    SFTConfig,
    TrainConfig,
    check_config,
    check_decays,
    full_kl_in_loss,
    full_kl_in_reward,
    is_single_update,
    load_config,
    needs_old_log_probs,
    needs_ref_log_probs,
    resolve,
)
from megarl.config.checks import training as checks
from megarl.config.schema.algorithm import ADV_ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES
from tests.config.conftest import lines_of, problems

Train = Callable[..., TrainConfig]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"

# Further keys that an estimator needs.
NEEDED = {
    "gdpo": ["algorithm.reward_weights={score: 1.0}"],
    "gigpo": [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"],
}


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_every_estimator_with_what_it_needs(train: Train, estimator: str) -> None:
    critic = [] if estimator == "gae" else ["critic=null"]
    samples = 2 if estimator in GROUP_ESTIMATORS else 1
    sizes = [f"{ROLLOUT}.n={samples}", f"{ACTOR}.ppo_mini_batch_size=8"]
    weights = NEEDED.get(estimator, [])
    check_config(train(f"algorithm.adv_estimator={estimator}", *sizes, *critic, *weights))


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_and_what_it_is_a_mean_of(grpo: Train, loss: str) -> None:
    config = grpo(f"{LOSS}.loss_mode={loss}")
    check_config(config)
    mode = resolve(config).actor_rollout_ref.actor.loss_agg_mode
    own = {"topr": "seq-mean-token-sum", **dict.fromkeys(("gspo", "gmpo", "sapo"), "seq-mean-token-mean")}
    assert mode == own.get(loss, "token-mean")
    given = resolve(grpo(f"{LOSS}.loss_mode={loss}", f"{ACTOR}.loss_agg_mode=token-sum"))
    assert given.actor_rollout_ref.actor.loss_agg_mode == "token-sum"
    assert resolve(given) == given


def test_sums_are_divided_by_the_longest_response(grpo: Train) -> None:
    config = grpo(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")
    assert resolve(config).actor_rollout_ref.actor.loss_scale_factor == config.data.max_response_length
    own = grpo(f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor=7")
    assert resolve(own).actor_rollout_ref.actor.loss_scale_factor == 7


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_estimators_that_compare_need_two_responses(grpo: Train, estimator: str) -> None:
    weights = NEEDED.get(estimator, [])
    sizes = [f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=16"]
    config = grpo(f"algorithm.adv_estimator={estimator}", *sizes, *weights)
    assert problems(config) == [
        f"{ROLLOUT}.n=1: algorithm.adv_estimator='{estimator}' compares the responses to one prompt and needs at least 2"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.adv_estimator=remax"],
            "critic: algorithm.adv_estimator='remax' has no critic; leave the section out (or critic=null)",
        ),
        (
            ["algorithm.adv_estimator=rlo", "critic=null"],
            "algorithm.adv_estimator='rlo' is unknown; megarl has gae, gdpo, gigpo, gpg, grpo, grpo_passk, maxrl, opo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, remax, rloo, spiral; did you mean rloo?",
        ),
        (
            [f"{LOSS}.loss_mode=gsp"],
            f"{LOSS}.loss_mode='gsp' is unknown; megarl has vanilla, gspo, gmpo, cispo, sapo, clip_cov, kl_cov, gpg, topr, dppo_tv, dppo_kl; "
            "did you mean gspo?",
        ),
        (
            [f"{LOSS}.clip_cov_lb=5"],
            f"{LOSS}.clip_cov_lb=5 must be less than {LOSS}.clip_cov_ub=5",
        ),
        (
            [f"{ACTOR}.clip_ratio_low=1.5"],
            f"{ACTOR}.clip_ratio_low=1.5: loss_mode 'vanilla' clips the ratio to 1 - this, so it must be less than 1",
        ),
        (
            ["algorithm.kl_ctrl.type=linear"],
            "algorithm.kl_ctrl.end_kl_coef is required: algorithm.kl_ctrl.type='linear' moves the coefficient to it",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            f"{CORRECTION}.rollout_is='token' with {CORRECTION}.bypass_mode=true: the old log-probs are then the "
            "engine's own, and every ratio is 1; leave one of them out",
        ),
        (
            [f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold=1"],
            f"{CORRECTION}: the largest ratio that stays (rollout_rs_threshold, or rollout_is_threshold) is 1, which "
            "must be greater than the smallest, 1",
        ),
        (
            [f"{CORRECTION}.rollout_rs=sequence", f"{CORRECTION}.rollout_rs_threshold_lower=3"],
            f"{CORRECTION}: the largest ratio that stays (rollout_rs_threshold, or rollout_is_threshold) is 2, which "
            "must be greater than the smallest, 3",
        ),
    ],
)
def test_what_does_not_fit(train: Train, overrides: list[str], problem: str) -> None:
    assert problems(train(*overrides)) == [problem]


def test_a_second_moment_has_one_bound(grpo: Train) -> None:
    moment = f"{CORRECTION}.rollout_rs=second_moment"
    check_config(grpo(moment, f"{CORRECTION}.rollout_rs_threshold=0.04"))
    assert problems(grpo(moment, f"{CORRECTION}.rollout_rs_threshold_lower=0.5")) == [
        f"{CORRECTION}.rollout_rs_threshold_lower=0.5 needs rollout_rs=token, sequence or geometric beside it; nothing reads it otherwise"
    ]


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("algorithm.kl_ctrl.end_kl_coef=0.1", "type=linear"),
        ("algorithm.kl_ctrl.schedule_steps=4", "type=linear"),
        (f"{ACTOR}.kl_loss_end_coef=0.1", "use_kl_loss=true"),
        (f"{ACTOR}.kl_loss_beta=0.5", "use_kl_loss=true and kl_loss_type=full or top_k"),
        (f"{ACTOR}.kl_loss_top_k=8", "use_kl_loss=true and kl_loss_type=top_k"),
        (f"{ACTOR}.kl_loss_schedule_steps=4", "kl_loss_end_coef"),
        (f"{ACTOR}.loss_scale_factor=8", "loss_agg_mode=seq-mean-token-sum-norm"),
        (f"{CORRECTION}.rollout_rs_threshold=3", "rollout_rs"),
        (f"{CORRECTION}.rollout_rs_threshold_lower=0", "rollout_rs"),
    ],
)
def test_keys_that_nothing_would_read(grpo: Train, override: str, needs: str) -> None:
    assert problems(grpo(override)) == [f"{override} needs {needs} beside it; nothing reads it otherwise"]


def test_settings_that_only_look_odd_pass(grpo: Train) -> None:
    check_config(grpo(f"{LOSS}.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10"))
    check_config(grpo("algorithm.kl_ctrl={type: linear, kl_coef: 0.01, end_kl_coef: 0.1}"))
    check_config(
        grpo(f"{CORRECTION}={{rollout_is: sequence, rollout_rs: geometric, rollout_rs_threshold: 1.001}}")
    )


def test_with_plugins_a_name_may_be_the_users(grpo: Train, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    names = ["algorithm.adv_estimator=mine", f"{LOSS}.loss_mode=my_loss"]
    assert len(problems(grpo(*names))) == 2
    check_config(grpo(*names, f"plugins=[{file}]"))


def test_the_engines_log_probs_stand_for_the_old_ones_only_if_asked_for(grpo: Train) -> None:
    assert needs_old_log_probs(grpo())
    assert not needs_old_log_probs(grpo(f"{CORRECTION}.bypass_mode=true"))


def test_a_step_of_one_update_needs_no_old_log_probs(grpo: Train) -> None:
    one = [
        f"actor_rollout_ref.actor.ppo_mini_batch_size={grpo().data.train_batch_size}", "actor_rollout_ref.actor.ppo_epochs=1",
        "algorithm.use_kl_in_reward=false",
    ]  # fmt: skip
    assert not is_single_update(resolve(grpo(*one[1:]))) and is_single_update(resolve(grpo(*one)))
    assert not needs_old_log_probs(resolve(grpo(*one)))
    for other in (
        "actor_rollout_ref.actor.ppo_epochs=2", f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=true",
        f"{CORRECTION}={{rollout_rs: geometric, rollout_rs_threshold: 1.001}}", "algorithm.use_kl_in_reward=true",
        f"{LOSS}.loss_mode=kl_cov",
    ):  # fmt: skip
        assert not is_single_update(resolve(grpo(*one, other))), other


KL_IN_LOSS = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full")
KL_IN_REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full")


def test_float16_takes_the_loss_scaling_keys(train: Train, sft: Callable[..., SFTConfig]) -> None:
    keys = (
        "optim.initial_loss_scale=1024",
        "optim.hysteresis=1",
        "optim.loss_scale_window=50",
        "optim.min_loss_scale=2",
    )
    check_config(train(f"{ACTOR}.megatron.dtype=float16", *(f"{ACTOR}.{key}" for key in keys)))
    check_config(sft("megatron.dtype=float16", *keys))


def test_optimizer_states_are_on_the_host_or_on_the_devices(
    train: Train, sft: Callable[..., SFTConfig]
) -> None:
    on_host, stays = "optim.optimizer_cpu_offload=true", "megatron.optimizer_offload=false"
    check_config(train(f"{ACTOR}.{on_host}", f"critic.{on_host}", f"{ACTOR}.megatron.optimizer_offload=true"))
    check_config(sft(on_host))
    assert problems(train(f"critic.{on_host}", f"critic.{stays}", f"{ACTOR}.{stays}")) == [
        f"critic.{on_host} has the optimizer's states on the host, critic.{stays} on the devices: leave out one of them"
    ]


def test_muon_and_what_it_does_not_go_with(
    train: Train, sft: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    muon = "optim.optimizer=muon"
    check_config(train(f"{ACTOR}.{muon}", f"critic.{muon}", "critic.optim.muon.tp_mode=distributed"))
    check_config(sft(muon, "megatron.use_distributed_optimizer=false"))
    (alone,) = problems(sft("optim.muon.momentum=0.9"))
    assert alone.startswith("optim.muon has momentum, but optim.optimizer=adam: give muon")
    found = problems(
        train(
            f"{ACTOR}.{muon}",
            f"{ACTOR}.megatron.dtype=float16",
            f"critic.{muon}",
            "critic.optim.optimizer_cpu_offload=true",
            "critic.model.lora.rank=4",
        )
    )
    texts = [
        f"{ACTOR}.optim.optimizer=muon goes without {ACTOR}.megatron.dtype=float16",
        "critic.optim.optimizer=muon goes without critic.optim.optimizer_cpu_offload=true",
        "critic.optim.optimizer=muon goes without critic.model.lora.rank=4",
    ]
    assert len(found) == 3 and all(line.startswith(text) for line, text in zip(found, texts, strict=True))
    (shared,) = problems(sft(muon, "megatron.fsdp=optim_grads"))
    assert "goes without megatron.fsdp=optim_grads" in shared
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "emerging_optimizers" else 1)
    (missing,) = problems(sft(muon))
    assert "emerging-optimizers, which is not installed" in missing


def test_a_decay_needs_steps_after_the_warm_up(
    train: Train, grpo: Train, sft: Callable[..., SFTConfig]
) -> None:
    """The steps of a decay are the optimizer's: two of the critic and two of the actor in each step of the run."""
    policy, once = "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor.ppo_epochs=1"
    actor = f"{policy}.lr_decay_style=linear", f"{policy}.lr_warmup_steps=6", once
    check_decays(resolve(grpo(*actor)), 4)
    with pytest.raises(ValueError, match=rf"{policy}.lr_warmup_steps=6 must be less than the run's 6 optimi"):
        check_decays(resolve(grpo(*actor)), 3)
    check_decays(resolve(grpo(*actor, f"{policy}.lr_decay_steps=9")), 3)
    check_decays(resolve(grpo(*actor[1:])), 3)
    critic = "critic.optim.lr_decay_style=cosine", "critic.optim.lr_warmup_steps=6", once
    check_decays(resolve(train(*critic)), 4)
    with pytest.raises(ValueError, match=r"critic.optim.lr_warmup_steps=6 must be less than the run's 6 opt"):
        check_decays(resolve(train(*critic)), 3)
    # The actor has no steps while the critic alone is trained.
    warm = *actor, "critic.warmup_steps=2"
    check_decays(resolve(train(*warm)), 6)
    with pytest.raises(ValueError, match=rf"{policy}.lr_warmup_steps=6 must be less than the run's 6 optimi"):
        check_decays(resolve(train(*warm)), 5)
    with pytest.raises(ValueError, match=r"^optim.lr_warmup_steps=6 must be less than the run's 6 optimizer"):
        check_decays(resolve(sft("optim.lr_decay_style=linear", "optim.lr_warmup_steps=6")), 6)


def test_loss_scaling_without_float16(train: Train, sft: Callable[..., SFTConfig]) -> None:
    assert problems(
        train(
            f"{ACTOR}.optim.initial_loss_scale=1024",
            "critic.megatron.dtype=bfloat16",
            "critic.optim.hysteresis=1",
        )
    ) == [
        f"{ACTOR}.optim.initial_loss_scale=1024 is for {ACTOR}.megatron.dtype=float16, which is null: losses are not "
        "scaled; leave it out",
        "critic.optim.hysteresis=1 is for critic.megatron.dtype=float16, which is bfloat16: losses are not scaled; leave "
        "it out",
    ]
    assert problems(sft("optim.min_loss_scale=2")) == [
        "optim.min_loss_scale=2 is for megatron.dtype=float16, which is null: losses are not scaled; leave it out"
    ]
    assert problems(
        sft("megatron.dtype=float16", "optim.min_loss_scale=4096", "optim.initial_loss_scale=16")
    ) == ["optim.min_loss_scale=4096 is greater than optim.initial_loss_scale=16"]


def test_the_exact_kl_needs_the_reference_beside_the_actor(train: Train) -> None:
    check_config(train(*KL_IN_LOSS, *KL_IN_REWARD))
    apart = "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4"
    found = problems(train(*KL_IN_LOSS, *KL_IN_REWARD, apart))
    assert [line.partition(" ")[0] for line in found] == [
        f"{ACTOR}.kl_loss_type='full'",
        "algorithm.kl_penalty='full'",
    ]
    assert "policy and reference must be in the same processes" in found[0]
    # A reference that is not used may be in any pool.
    check_config(train(f"{ACTOR}.kl_loss_type=full", "algorithm.kl_penalty=full", apart))


def test_named_rewards_and_their_weights(train: Train, grpo: Train) -> None:
    gdpo, weights = "algorithm.adv_estimator=gdpo", "algorithm.reward_weights={score: 1.0, format: 0.5}"
    check_config(grpo(gdpo, weights))
    (found,) = problems(grpo(gdpo))
    assert found.startswith("algorithm.reward_weights is required")
    (found,) = problems(grpo(weights))
    assert found.startswith("algorithm.reward_weights needs algorithm.adv_estimator=gdpo")
    (found,) = problems(grpo(gdpo, "algorithm.reward_weights={score: much}"))
    assert found == "algorithm.reward_weights.score='much' is no number"
    (found,) = problems(grpo(gdpo, weights, "algorithm.use_kl_in_reward=true"))
    assert found.startswith("algorithm.use_kl_in_reward=true: algorithm.adv_estimator='gdpo'")


def test_a_teacher_or_something_else_is_learnt_from(grpo: Train, folder: Path) -> None:
    teacher, alone = f"actor_rollout_ref.ref.model.path={folder}/teacher", f"{ACTOR}.pg_loss_coef=0"
    shutil.copytree(folder / "model", folder / "teacher")
    (found,) = problems(grpo(teacher))
    assert found.startswith("actor_rollout_ref.ref.model.path: nothing compares the policy with a reference")
    (found,) = problems(grpo(alone))
    assert found.startswith(f"{ACTOR}.pg_loss_coef=0: the policy would learn from nothing")
    check_config(grpo(teacher, alone, f"{ACTOR}.use_kl_loss=true"))


def test_a_reference_judges_after_its_own_prompt_by_sampled_tokens_alone(grpo: Train) -> None:
    told, used = "data.ref_prompt_key=told", f"{ACTOR}.use_kl_loss=true"
    check_config(grpo(told, used, f"{ACTOR}.kl_loss_type=k2"))
    for keys in ((), (used, f"{ACTOR}.kl_loss_type=full")):
        (found,) = problems(grpo(told, *keys))
        assert found.startswith("data.ref_prompt_key=told: the reference judges")


def test_each_row_has_one_of_several_teachers(grpo: Train, folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "taught")
    key, used = "actor_rollout_ref.teachers", f"{ACTOR}.use_kl_loss=true"
    math = f"{key}.math.model.path={folder}/taught"
    check_config(grpo(math, f"{key}.talk={{}}", used, "data.teacher_key=domain"))
    refused = {
        f"{key}: nothing compares the policy with a teacher": (math,),
        f"{ACTOR}.kl_loss_type=full compares whole": (math, used, f"{ACTOR}.kl_loss_type=full"),
        f"{key} is empty": (f"{key}={{}}", used),
        f"{key}.talk.sources: 'math' is a source of math, too": (math, f"{key}.talk.sources=[math]", used),
        f"{key}.math.sources is empty": (math, f"{key}.math.sources=[]", used),
        f"{key}: the name 'open math' is part": (f"{key}={{open math: {{}}}}", used),
        "actor_rollout_ref.ref.model.path: with": (math, used, f"actor_rollout_ref.ref.model.path={folder}/taught"),
        "data.teacher_key=domain needs": ("data.teacher_key=domain",),
        f"{key}.math.model.path: nowhere is no folder": (f"{key}.math.model.path=nowhere", used),
        f"{key}.math.resource_pool='far' is unknown": (math, f"{key}.math.resource_pool=far", used),
    }  # fmt: skip
    for problem, keys in refused.items():
        found = problems(grpo(*keys))
        assert len(found) == 1 and found[0].startswith(problem), found


def test_a_teacher_that_engines_serve_has_devices_of_its_own(grpo: Train, folder: Path) -> None:
    """A served teacher takes none of Megatron's keys, and it scores only sampled tokens or the most likely tokens."""
    shutil.copytree(folder / "model", folder / "served")
    ref, teachers, used = "actor_rollout_ref.ref", "actor_rollout_ref.teachers", f"{ACTOR}.use_kl_loss=true"
    pools = (
        "resource_pools={global: {n_gpus_per_node: 4}, far: {n_gpus_per_node: 2}}",
        "trainer.n_gpus_per_node=6",
    )
    path, engine, far = f"{ref}.model.path={folder}/served", f"{ref}.engine={{}}", f"{ref}.resource_pool=far"
    right = (path, engine, far, *pools)
    check_config(grpo(*right, used, f"{ACTOR}.kl_loss_type=top_k", "data.ref_prompt_key=told"))
    check_config(
        grpo(*right, "algorithm.use_kl_in_reward=true", f"{ref}.engine.tensor_model_parallel_size=2")
    )
    one = f"{teachers}.a={{engine: {{}}, resource_pool: far}}"
    check_config(grpo(one, f"{teachers}.b={{}}", *pools, used))
    refused = {
        f"{ref}.engine: the engines of a teacher stay on devices": (path, engine, used),
        f"{ref}.resource_pool='global' is also that of {ACTOR}, {ROLLOUT}": (path, engine, f"{ref}.resource_pool=global", used),
        f"{teachers}.b.resource_pool='far' is also that of {teachers}.a": (one, one.replace(".a=", ".b="), *pools, used),
        f"{ref}.megatron is of Megatron models": (*right, used, f"{ref}.megatron={{}}"),
        f"{ref}.log_prob_max_token_len_per_gpu is of Megatron": (*right, used, f"{ref}.log_prob_max_token_len_per_gpu=9999"),
        f"{ACTOR}.kl_loss_type=full compares whole": (*right, used, f"{ACTOR}.kl_loss_type=full"),
        "algorithm.kl_penalty=full compares whole": (*right, "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"),
        f"{ref}.engine.tensor_model_parallel_size=3 is more": (*right, used, f"{ref}.engine.tensor_model_parallel_size=3"),
        f"{ref}.engine.max_total_tokens=9 is less": (*right, used, f"{ref}.engine.max_total_tokens=9"),
        f"{ref}.engine.engine_kwargs": (*right, used, f"{ref}.engine.engine_kwargs={{tp_size: 2}}"),
        f"{ref}.engine: with {teachers}": (one, engine, *pools, used),
    }  # fmt: skip
    for problem, keys in refused.items():
        found = problems(grpo(*keys))
        assert any(line.startswith(problem) for line in found), (problem, found)
        assert len(found) <= 2, found
    with pytest.raises(ValueError, match=r"strategy=sglang: give the section engine beside it"):
        grpo(path, used, f"{ref}.strategy=sglang")
    both = problems(grpo(*right))
    assert [line.partition(":")[0] for line in both] == [f"{ref}.model.path", f"{ref}.engine"]


def test_given_responses_go_with_divergences_of_distributions(grpo: Train) -> None:
    given, used = "data.given_response_key=told", f"{ACTOR}.use_kl_loss=true"
    exact = (given, used, f"{ACTOR}.kl_loss_type=full")
    for keys in (exact, (given, used, f"{ACTOR}.kl_loss_type=top_k"), (*exact, "data.on_policy_share=0")):
        check_config(grpo(*keys))
    refused = {
        "a given response is learnt from by": (given, used, f"{ACTOR}.kl_loss_type=k2"),
        "a given response is learnt from by the divergence": (given,),
        "goes with trainer.mode=sync and": (*exact, "trainer.mode=partial_rollouts"),
        "algorithm.filter_groups.enable=true drops": (*exact, "algorithm.filter_groups.enable=true"),
        "no engine has chosen experts": (*exact, f"{ACTOR}.router_replay=rollout"),
    }
    for problem, keys in refused.items():
        (found,) = problems(grpo(*keys))
        assert found.startswith(given) and problem in found
    plays = (f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator")
    (found,) = problems(grpo(*exact, *plays))
    assert "has one turn" in found
    (found,) = problems(grpo("data.on_policy_share=0.3"))
    assert (
        found
        == "data.on_policy_share=0.3 needs data.given_response_key beside it; nothing reads it otherwise"
    )


def test_a_critic_cannot_learn_from_given_responses(train: Train) -> None:
    keys = (*KL_IN_LOSS, "data.given_response_key=told")
    (found,) = problems(train(*keys))
    assert "no reward that a critic could learn" in found


def test_the_exact_kl_in_the_reward_needs_a_forward_pass(train: Train) -> None:
    (found,) = problems(train(*KL_IN_REWARD, "algorithm.rollout_correction.bypass_mode=true"))
    assert found.startswith("algorithm.kl_penalty='full' needs the policy's forward pass")
    check_config(train(*KL_IN_LOSS, "algorithm.rollout_correction.bypass_mode=true"))


@pytest.mark.parametrize(
    ("overrides", "in_loss", "in_reward", "log_probs"),
    [
        ((), False, False, False),
        (KL_IN_LOSS, True, False, False),
        (KL_IN_REWARD, False, True, False),
        ((*KL_IN_REWARD, f"{ACTOR}.use_kl_loss=true"), False, True, False),
        ((*KL_IN_LOSS, "algorithm.use_kl_in_reward=true"), True, False, True),
        ((f"{ACTOR}.use_kl_loss=true",), False, False, True),
    ],
)
def test_where_reference_log_probs_come_from(
    train: Train, overrides: tuple[str, ...], in_loss: bool, in_reward: bool, log_probs: bool
) -> None:
    config = resolve(train(*overrides))
    assert (full_kl_in_loss(config), full_kl_in_reward(config)) == (in_loss, in_reward)
    assert needs_ref_log_probs(config) == log_probs


def test_trackers_that_are_not_installed(
    train: Train, sft: Callable[..., SFTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    loggers = "trainer.logger=[console, file, wandb, swanlab]"
    for config in (train(loggers), sft(loggers)):
        assert problems(config) == [
            "trainer.logger has wandb, which is not installed: pip install wandb (or leave it out)",
            "trainer.logger has swanlab, which is not installed: pip install 'swanlab>=0.10' (or leave it out)",
        ]
    monkeypatch.setattr(checks, "find_spec", lambda name: ModuleSpec(name, None))
    check_config(train(loggers))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["health.ppo_kl_low=0.1"], "health.ppo_kl_low=0.1 must be less than health.ppo_kl_high=0.05"),
        (
            ["health.early_stop=[stagnation]", "trainer.test_freq=-1"],
            "health.early_stop has stagnation, which is seen by validations: set trainer.test_freq (and data.val_files "
            "or data.val_sets)",
        ),
        (
            ["health.enable=false", "health.auto_action=true"],
            "health.early_stop and health.auto_action need health.enable=true",
        ),
    ],
)
def test_health_that_fits(train: Train, overrides: list[str], problem: str) -> None:
    assert problems(train(*overrides)) == [problem]


def test_unknown_findings_are_refused(train: Train) -> None:
    (found,) = problems(train("health.early_stop=[entropi]"))
    assert found.startswith("health.early_stop='entropi' is unknown; megarl has ppo_kl_high,")
    assert found.endswith("did you mean entropy?")


def test_bounds_may_be_null(train: Train) -> None:
    names: list[Any] = [
        "ppo_kl_high",
        "ppo_kl_low",
        "grad_norm",
        "entropy_min",
        "entropy_ratio",
        "stagnation",
    ]
    check_config(train(*(f"health.{name}=null" for name in names)))


ACTOR_LORA, CRITIC_LORA = "actor_rollout_ref.model.lora", "critic.model.lora"
# The critic of the fixture has a layout of its own.
SHARED = (
    f"{ACTOR_LORA}.rank=8", f"{CRITIC_LORA}.rank=4", "critic.model.share_base=true",
    "critic.megatron.tensor_model_parallel_size=2",
)  # fmt: skip


def test_what_fits_is_accepted(train: Train) -> None:
    check_config(train(*SHARED, f"{ACTOR_LORA}.alpha=16", f"{ACTOR_LORA}.target_modules=[q_proj,v_proj]"))
    check_config(train(*SHARED, f"{CRITIC_LORA}.dropout=0.1", "critic.megatron.optimizer_offload=true"))
    check_config(train("critic.model.share_base=false", f"{CRITIC_LORA}.rank=4", "critic.model.path=null"))
    check_config(resolve(train(*SHARED, f"{ACTOR_LORA}.base_dtype=float8", f"{ACTOR_LORA}.base_block=64")))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((f"{ACTOR_LORA}.alpha=16",), f"{ACTOR_LORA} has alpha, but no adapters: give {ACTOR_LORA}.rank"),
        (
            (f"{CRITIC_LORA}.use_dora=true", f"{CRITIC_LORA}.dropout=0.1"),
            f"{CRITIC_LORA} has dropout, use_dora, but no",
        ),
        (
            (f"{ACTOR_LORA}.rank=8", f"{ACTOR_LORA}.dropout=0.1"),
            f"{ACTOR_LORA}.dropout=0.1: the policy that is trained",
        ),
        (
            (f"{ACTOR_LORA}.rank=8", f"{ACTOR_LORA}.target_modules=[]"),
            "target_modules is empty; leave it out for all-lin",
        ),
        ((f"{ACTOR_LORA}.rank=8", f"{ACTOR_LORA}.adapter_path=/nowhere"), "it has no adapter_config.json"),
        (
            (f"{ACTOR_LORA}.rank=8", f"{ACTOR_LORA}.base_block=64"),
            f"but {ACTOR_LORA}.base_dtype is null: give float8",
        ),
        ((*SHARED, f"{CRITIC_LORA}.base_dtype=float8"), f"it is {ACTOR_LORA}'s; leave it out"),
        ((*SHARED, f"{CRITIC_LORA}.rank=0"), "share_base=true needs critic.model.lora.rank"),
        ((*SHARED, f"{ACTOR_LORA}.rank=0"), "share_base=true needs actor_rollout_ref.model.lora.rank"),
        (
            (*SHARED[:3],),
            "critic.megatron has tensor_model_parallel_size=1 (the actor's: 2), sequence_parallel=",
        ),
        (
            (*SHARED, "critic.model.enable_gradient_checkpointing=true"),
            "critic.megatron has recompute_granularity=full (the actor's: None): the model",
        ),
        (
            (
                *SHARED,
                "resource_pools.a.n_gpus_per_node=4",
                "resource_pools.b.n_gpus_per_node=4",
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.actor.resource_pool=a",
                "critic.resource_pool=b",
            ),
            "critic.resource_pool='b' is not the actor's ('a')",
        ),
    ],
)
def test_what_cannot_be_is_refused(train: Train, overrides: tuple[str, ...], words: str) -> None:
    lines = [line for line in problems(train(*overrides)) if "lora" in line or "share" in line]
    assert len(lines) == 1 and words in lines[0], lines


@pytest.mark.parametrize("name", ["target_modules", "exclude_modules"])
def test_one_name_is_a_list_of_one(train: Train, name: str) -> None:
    """A run may also resume from a run whose configuration has the other form."""
    one, listed = (
        train(f"{ACTOR_LORA}.rank=8", f"{ACTOR_LORA}.{name}={text}") for text in ("o_proj", "[o_proj]")
    )
    check_config(one)
    assert one == listed and getattr(one.actor_rollout_ref.model.lora, name) == ("o_proj",)


def test_another_model_has_another_base(train: Train, folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text("{}")
    (line,) = problems(train(*SHARED, f"critic.model.path={folder}/other"))
    assert f"critic.model.path='{folder}/other' is not actor_rollout_ref.model.path='{folder}/model'" in line


def test_fine_tuning_may_have_dropout(sft: Callable[..., SFTConfig]) -> None:
    check_config(sft("model.lora.rank=4", "model.lora.dropout=0.1"))
    (line,) = problems(sft("model.lora.dropout=0.1"))
    assert line.startswith("model.lora has dropout, but no adapters")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor_rollout_ref.model.lora_alpha=16", f"use {ACTOR_LORA}.alpha"),
        ("critic.model.target_modules=[q_proj]", f"use {CRITIC_LORA}.target_modules"),
        ("actor_rollout_ref.model.lora_adapter_path=x", f"use {ACTOR_LORA}.adapter_path"),
        ("actor_rollout_ref.model.lora.merge=true", "use actor_rollout_ref.rollout.lora_sync"),
        ("actor_rollout_ref.model.lora.type=canonical_lora", "leave it out"),
        (
            "actor_rollout_ref.model.lora.lora_A_init_method=xavier",
            f"the keys of LoRA are those of {ACTOR_LORA[:-5]}",
        ),
        ("reward_model.model.lora_rank=8", "the reward model is not trained"),
    ],
)
def test_keys_of_others_are_answered_with_ours(train: Train, key: str, words: str) -> None:
    (line,) = lines_of(lambda: train(key))
    assert words in line


def test_keys_of_verls_own_lora_section_are_read_as_typed(train: Train) -> None:
    found = train(
        f"+{ACTOR_LORA}.rank=16", f"{ACTOR_LORA}.alpha=32", f"{ACTOR_LORA}.exclude_modules=[o_proj]"
    )
    lora = found.actor_rollout_ref.model.lora
    assert (lora.rank, lora.alpha, lora.exclude_modules) == (16, 32.0, ("o_proj",))


def test_keys_of_other_preference_losses(examples: list[str]) -> None:
    def dpo(*keys: str) -> DPOConfig:
        return load_config(DPOConfig, None, [*examples, *keys])

    check_config(dpo("dpo.label_smoothing=0.1"))
    check_config(dpo("dpo.loss_type=simpo", "dpo.gamma=0.5"))
    check_config(dpo("dpo.loss_type=kto", "dpo.desirable_weight=1.5", "dpo.undesirable_weight=0.5"))
    (line,) = problems(dpo("dpo.undesirable_weight=0.5"))
    assert line == "dpo.undesirable_weight=0.5 is of dpo.loss_type=kto; leave it out"
    for kind in ("ipo", "orpo", "simpo", "kto"):
        (line,) = problems(dpo(f"dpo.loss_type={kind}", "dpo.label_smoothing=0.1"))
        assert line == "dpo.label_smoothing=0.1 is of dpo.loss_type=sigmoid; leave it out"
    (line,) = problems(dpo("dpo.gamma=0.5"))
    assert line == "dpo.gamma=0.5 is of dpo.loss_type=simpo; leave it out"


def test_baselines_are_of_an_estimator_that_has_some(grpo: Train) -> None:
    check_config(
        grpo(
            "algorithm.adv_estimator=spiral", "algorithm.baseline_decay=0.9", "actor_rollout_ref.rollout.n=1"
        )
    )
    (line,) = problems(grpo("algorithm.baseline_decay=0.9"))
    assert (
        line
        == "algorithm.baseline_decay=0.9 needs adv_estimator=spiral beside it; nothing reads it otherwise"
    )


def test_turns_are_compared_where_there_are_several(grpo: Train) -> None:
    (line,) = problems(grpo("algorithm.adv_estimator=gigpo"))
    assert line == (
        "algorithm.adv_estimator='gigpo' compares turns with an environment and needs actor_rollout_ref.rollout.multi_turn.enable=true; with "
        "one turn it would be grpo: use that"
    )
    check_config(
        grpo("algorithm.adv_estimator=gigpo", *NEEDED["gigpo"], "algorithm.step_advantage_weight=0.5")
    )
    (line,) = problems(grpo("algorithm.step_advantage_weight=0.5"))
    assert (
        line
        == "algorithm.step_advantage_weight=0.5 needs adv_estimator=gigpo beside it; nothing reads it otherwise"
    )
