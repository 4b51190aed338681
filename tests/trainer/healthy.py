"""A configuration, its monitor, and the metrics of a healthy step, for the tests of findings and of the monitor."""

from megarl.config import TrainConfig, load_config, resolve
from megarl.trainer.health.findings import History, find
from megarl.trainer.health.monitor import HealthMonitor
from megarl.trainer.stages.advantages import make_controls

ACTOR = "actor_rollout_ref.actor"
REQUIRED = [
    "data.train_files=train.parquet",
    "data.train_batch_size=16",
    "data.max_prompt_length=24",
    "data.max_response_length=40",
    "actor_rollout_ref.model.path=model",
    f"{ACTOR}.ppo_mini_batch_size=8",
    f"{ACTOR}.ppo_max_token_len_per_gpu=128",
    f"{ACTOR}.optim.lr=1e-6",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
]
KL_LOSS = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.01")
KL_REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.004")


def configuration(*overrides: str) -> TrainConfig:
    return resolve(load_config(TrainConfig, None, [*REQUIRED, *overrides]))


def monitor(*overrides: str) -> HealthMonitor:
    config = configuration(*overrides)
    return HealthMonitor(
        config, make_controls(config.algorithm, config.actor_rollout_ref.actor, num_steps=100)
    )


def finding_kinds(
    overrides: tuple[str, ...], metrics: dict[str, float], history: History | None = None
) -> list[str]:
    config = configuration(*overrides)
    return [
        finding.kind
        for finding in find(
            config,
            make_controls(config.algorithm, config.actor_rollout_ref.actor, 100),
            metrics,
            history or History(),
        )
    ]


HEALTHY = {
    "actor/ppo_kl": 0.02,
    "actor/ratio_mean": 1.0,
    "actor/lr": 1e-6,
    "actor/grad_norm": 3.0,
    "actor/entropy": 0.5,
    "actor/pg_clipfrac": 0.1,
    "health/duplicate_responses": 0.2,
    "health/ngram_repetition": 0.1,
    "critic/score/mean": 0.3,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "response_length/clip_ratio": 0.1,
    "training/rollout_log_prob_diff_mean": 0.01,
    "val/score/mean": 0.4,
}
