"""Checks of algorithms: what an estimator, a loss or a controller needs."""

from collections.abc import Iterator

from megarl.config.checks.values import registered_problems
from megarl.config.schema.algorithm import ADV_ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES, AlgorithmConfig
from megarl.config.schema.commands import POLICY, ActorConfig, TrainConfig


def algorithm_problems(config: TrainConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    yield from registered_problems(config, "algorithm.adv_estimator", algorithm.adv_estimator, ADV_ESTIMATORS)
    yield from _loss_problems(config, config.actor_rollout_ref.actor)
    yield from _correction_problems(algorithm)
    yield from _idle_problems(config)
    estimator = f"algorithm.adv_estimator={algorithm.adv_estimator!r}"
    if algorithm.adv_estimator == "gae" and config.critic is None:
        yield (
            f"critic.optim.lr is required: {estimator} trains a critic, but there is no section critic "
            "(grpo needs none)"
        )
    if algorithm.adv_estimator in GROUP_ESTIMATORS and rollout.n < 2:
        yield (
            f"{POLICY}.rollout.n={rollout.n}: {estimator} compares the responses to one prompt and needs at least 2"
        )
    # An estimator of the user's own may have one.
    if (
        algorithm.adv_estimator in ADV_ESTIMATORS
        and algorithm.adv_estimator != "gae"
        and config.critic is not None
    ):
        yield f"critic: {estimator} has no critic; leave the section out (or critic=null)"
    control, trajectories = algorithm.kl_ctrl, config.data.train_batch_size * rollout.n
    # Its factor of one step, 1 - 0.2 * trajectories / horizon, must stay positive.
    if (
        algorithm.use_kl_in_reward
        and control.type == "adaptive"
        and 0.2 * trajectories >= control.horizon > 0
    ):
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon:g} is too short for {trajectories} trajectories a step: the "
            f"coefficient could change sign; it must be over {0.2 * trajectories:g}"
        )
    if control.type == "linear" and control.end_kl_coef is None:
        yield "algorithm.kl_ctrl.end_kl_coef is required: algorithm.kl_ctrl.type='linear' moves the coefficient to it"


def _idle_problems(config: TrainConfig) -> Iterator[str]:
    """Keys that were given where nothing would read them."""
    actor, control = config.actor_rollout_ref.actor, config.algorithm.kl_ctrl
    correction, norm = config.algorithm.rollout_correction, "seq-mean-token-sum-norm"
    key = f"{POLICY}.actor"
    for idle, name, value, needs in (
        (control.type != "linear", "algorithm.kl_ctrl.end_kl_coef", control.end_kl_coef, "type=linear"),
        (control.type != "linear", "algorithm.kl_ctrl.schedule_steps", control.schedule_steps, "type=linear"),
        (not actor.use_kl_loss, f"{key}.kl_loss_end_coef", actor.kl_loss_end_coef, "use_kl_loss=true"),
        (
            actor.kl_loss_end_coef is None,
            f"{key}.kl_loss_schedule_steps",
            actor.kl_loss_schedule_steps,
            "kl_loss_end_coef",
        ),
        (
            actor.loss_agg_mode != norm,
            f"{key}.loss_scale_factor",
            actor.loss_scale_factor,
            f"loss_agg_mode={norm}",
        ),
        *(
            (
                correction.rollout_rs is None,
                f"algorithm.rollout_correction.{name}",
                getattr(correction, name),
                "rollout_rs",
            )
            for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower")
        ),
    ):
        if idle and value is not None:
            yield f"{name}={value:g} needs {needs} beside it; nothing reads it otherwise"


def _loss_problems(config: TrainConfig, actor: ActorConfig) -> Iterator[str]:
    loss, key = actor.policy_loss, f"{POLICY}.actor.policy_loss"
    yield from registered_problems(config, f"{key}.loss_mode", loss.loss_mode, POLICY_LOSSES)
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield f"{key}.clip_cov_lb={loss.clip_cov_lb:g} must be less than {key}.clip_cov_ub={loss.clip_cov_ub:g}"
    # Without it every ratio below 1 - clip_low would be clipped up to a negative one.
    if loss.loss_mode in ("vanilla", "gspo", "clip_cov") and (actor.clip_ratio_low or 0) >= 1:
        yield (
            f"{POLICY}.actor.clip_ratio_low={actor.clip_ratio_low:g}: loss_mode {loss.loss_mode!r} clips the ratio to "
            "1 - this, so it must be less than 1"
        )


def _correction_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    section, key = algorithm.rollout_correction, "algorithm.rollout_correction"
    if section.bypass_mode:
        for name in ("rollout_is", "rollout_rs"):
            if getattr(section, name) is not None:
                yield (
                    f"{key}.{name}={getattr(section, name)!r} with {key}.bypass_mode=true: the old log-probs are then "
                    "the engine's own, and every ratio is 1; leave one of them out"
                )
    upper = section.rollout_rs_threshold or section.rollout_is_threshold
    lower = section.rollout_rs_threshold_lower
    if section.rollout_rs is not None and (1 / upper if lower is None else lower) >= upper:
        yield (
            f"{key}: the largest ratio that stays (rollout_rs_threshold, or rollout_is_threshold) is {upper:g}, which "
            f"must be greater than the smallest, {1 / upper if lower is None else lower:g}"
        )
