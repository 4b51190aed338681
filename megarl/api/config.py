"""`make_trainer_config`: a configuration from a few Python arguments."""

from __future__ import annotations

import json
import os
from typing import Any

from megarl.config import TrainConfig
from megarl.config.loading import load_config
from megarl.config.problems import did_you_mean, key_advice

_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_ESTIMATORS = {"ppo": "gae"}  # other algorithms are called as their estimator
_GROUP_SIZE = 8  # responses a prompt where they are compared
_MICRO_BATCH_SIZE = 4
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def make_trainer_config(
    algo: str = "ppo",
    *,
    devices: int = 1,
    rollouts_per_device: int = 64,
    rollouts_per_prompt: int | None = None,
    actor_micro_batch_size: int | None = None,
    critic_micro_batch_size: int | None = None,
    actor_lr: float = 1e-6,
    critic_lr: float | None = None,
    clip_eps: float | None = None,
    vf_coef: float | None = None,
    kl_coef: float = 0.0,
    mixed_precision: str | None = None,
    max_prompt_length: int = 512,
    max_response_length: int = 512,
    total_training_steps: int = 1000,
    **keys: Any,
) -> TrainConfig:
    """The configuration of a `Trainer`.

    Args:
        algo: ppo (GAE with a critic), or the name of an estimator: grpo, rloo, remax, ...
        devices: of this machine: GPUs, or processes where there are none.
        rollouts_per_device: trajectories of a step for each device; over all devices they divide into prompts.
        rollouts_per_prompt: None: 1 for ppo and remax, else 8.
        actor_micro_batch_size, critic_micro_batch_size: trajectories at a time on a device; None: 4 (unless `keys` give a
            size in tokens), and the actor's.
        actor_lr, critic_lr: learning rates; critic_lr None: 1e-5.
        clip_eps: the probability ratio is clipped to 1 -+ this; None: the key's default, 0.2.
        vf_coef: factor of the critic's loss (`critic.vf_coef`); None: the key's default, 1.
        kl_coef: over 0: the KL to the first policy is taken off the reward, times this.
        mixed_precision: bf16, fp16 (with loss scaling) or fp32; None: bf16 on GPUs, fp32 on CPUs.
        total_training_steps: updates, over which schedules (of learning rates, of coefficients) go.
        keys: any other key of the configuration, as `**{"trainer.seed": 7}`; it wins over the arguments above.

    Raises:
        ValueError: unknown keys, values of a wrong type, trajectories that do not divide into prompts.
    """
    _refuse_aliases(keys)
    estimator = _ESTIMATORS.get(algo, algo)
    if rollouts_per_prompt is None:
        rollouts_per_prompt = 1 if estimator in ("gae", "remax") else _GROUP_SIZE
    if actor_micro_batch_size is None and f"{_ACTOR}.ppo_max_token_len_per_gpu" not in keys:
        actor_micro_batch_size = _MICRO_BATCH_SIZE
    values = {
        "trainer.n_gpus_per_node": devices,
        "trainer.total_training_steps": total_training_steps,
        "trainer.experiment_name": algo,
        "algorithm.adv_estimator": estimator,
        "data.max_prompt_length": max_prompt_length,
        "data.max_response_length": max_response_length,
        "actor_rollout_ref.model.path": "",  # the Trainer's argument actor_model
        f"{_ROLLOUT}.n": rollouts_per_prompt,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": actor_micro_batch_size,
        f"{_ACTOR}.optim.lr": actor_lr,
        f"{_ACTOR}.clip_ratio": clip_eps,
        **_critic(algo, estimator, critic_lr, vf_coef, critic_micro_batch_size),
        **_precision(mixed_precision),
    }
    if kl_coef > 0:
        values |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": kl_coef}
    values = {key: value for key, value in values.items() if value is not None} | keys
    values = _batch(values, rollouts_per_device) | values
    return load_config(TrainConfig, None, [f"{key}={_yaml(value)}" for key, value in values.items()])


def _yaml(value: Any) -> str:
    """A value as YAML: as JSON, but with one escape for each character, where that has two for some; paths are texts."""
    text = json.dumps(value, ensure_ascii=False, default=os.fspath)
    return "".join(sign if sign.isascii() else f"\\U{ord(sign):08x}" for sign in text)


def _refuse_aliases(keys: dict[str, Any]) -> None:
    """ValueError for arguments that other trainers' functions of this name have."""
    for name in keys:
        if "." not in name and key_advice(name) is not None:
            raise ValueError(f"make_trainer_config({name}=...): {key_advice(name)}")


def _batch(values: dict[str, Any], rollouts_per_device: int) -> dict[str, Any]:
    """A step's prompts, all in one mini-batch."""
    prompts = values.get("data.train_batch_size")
    if prompts is None:
        n = values[f"{_ROLLOUT}.n"]
        devices = values["trainer.n_gpus_per_node"] * values.get("trainer.nnodes", 1)
        prompts, rest = divmod(rollouts_per_device * devices, n)
        if rest or not prompts:
            raise ValueError(
                f"rollouts_per_device={rollouts_per_device} gives {rollouts_per_device * devices} trajectories a step, "
                f"which do not divide into prompts of {n} (rollouts_per_prompt)"
            )
    return {"data.train_batch_size": prompts, f"{_ACTOR}.ppo_mini_batch_size": prompts}


def _critic(
    algo: str, estimator: str, lr: float | None, vf_coef: float | None, micro_batch_size: int | None
) -> dict[str, Any]:
    if estimator == "gae":
        return {
            "critic.optim.lr": 1e-5 if lr is None else lr,
            "critic.vf_coef": vf_coef,
            "critic.ppo_micro_batch_size_per_gpu": micro_batch_size,
        }
    given = {"critic_lr": lr, "vf_coef": vf_coef, "critic_micro_batch_size": micro_batch_size}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value}: algo={algo!r} has no critic; leave it out")
    return {}


def _precision(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    if name not in _PRECISIONS:
        hint = did_you_mean(name, _PRECISIONS)
        raise ValueError(f"mixed_precision={name!r}: it must be {', '.join(_PRECISIONS)} or None{hint}")
    return {f"{_ACTOR}.megatron.dtype": _PRECISIONS[name], f"{_ROLLOUT}.dtype": _PRECISIONS[name]}
