"""Checks of algorithms: what an estimator, a loss or a controller needs."""

from collections.abc import Iterator, Sequence

from megarl.config.algorithm_sections import ADV_ESTIMATORS
from megarl.config.problems import did_you_mean
from megarl.config.schema import EvalConfig, TrainConfig

_POLICY = "actor_rollout_ref"


def algorithm_problems(config: TrainConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    yield from registered_problems(config, "algorithm.adv_estimator", algorithm.adv_estimator, ADV_ESTIMATORS)
    if algorithm.adv_estimator == "gae" and config.critic is None:
        yield (
            "critic.optim.lr is required: algorithm.adv_estimator='gae' trains a critic, but there is no section critic "
            "(grpo needs none)"
        )
    if algorithm.adv_estimator == "grpo":
        if rollout.n < 2:
            yield (
                f"{_POLICY}.rollout.n={rollout.n}: algorithm.adv_estimator='grpo' compares the responses to one "
                "prompt and needs at least 2"
            )
        if config.critic is not None:
            yield "critic: algorithm.adv_estimator='grpo' has no critic; leave the section out (or critic=null)"
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


def registered_problems(
    config: TrainConfig | EvalConfig, key: str, name: str, built_in: Sequence[str]
) -> Iterator[str]:
    """A name that a plugin may add to: with `plugins` it is looked up once they are imported."""
    if name not in built_in and not config.plugins:
        yield f"{key}={name!r} is unknown; megarl has {', '.join(built_in)}{did_you_mean(name, built_in)}"
