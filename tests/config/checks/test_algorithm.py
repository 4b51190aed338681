"""What estimators, losses, controllers and corrections need, and what of them is derived."""

from collections.abc import Callable

import pytest

from megarl.config import TrainConfig, check_config, is_single_update, needs_old_log_probs, resolve
from megarl.config.schema.algorithm import ADV_ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES
from tests.config.conftest import lines_of

Train = Callable[..., TrainConfig]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss"
CORRECTION = "algorithm.rollout_correction"


def problems(config: TrainConfig) -> list[str]:
    return lines_of(lambda: check_config(config))


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_every_estimator_with_what_it_needs(train: Train, estimator: str) -> None:
    critic = [] if estimator == "gae" else ["critic=null"]
    samples = 2 if estimator in GROUP_ESTIMATORS else 1
    sizes = [f"{ROLLOUT}.n={samples}", f"{ACTOR}.ppo_mini_batch_size=8"]
    check_config(train(f"algorithm.adv_estimator={estimator}", *sizes, *critic))


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_and_what_it_is_a_mean_of(grpo: Train, loss: str) -> None:
    config = grpo(f"{LOSS}.loss_mode={loss}")
    check_config(config)
    mode = resolve(config).actor_rollout_ref.actor.loss_agg_mode
    assert mode == ("seq-mean-token-mean" if loss in ("gspo", "gmpo", "sapo") else "token-mean")
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
    config = grpo(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=16")
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
            "algorithm.adv_estimator='rlo' is unknown; megarl has gae, gpg, grpo, grpo_passk, opo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, remax, rloo; did you mean rloo?",
        ),
        (
            [f"{LOSS}.loss_mode=gsp"],
            f"{LOSS}.loss_mode='gsp' is unknown; megarl has vanilla, gspo, gmpo, cispo, sapo, clip_cov, kl_cov, gpg; "
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


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("algorithm.kl_ctrl.end_kl_coef=0.1", "type=linear"),
        ("algorithm.kl_ctrl.schedule_steps=4", "type=linear"),
        (f"{ACTOR}.kl_loss_end_coef=0.1", "use_kl_loss=true"),
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
