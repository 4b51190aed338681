"""float16, the exact KL, trackers and health: what the configuration must have for them."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from megarl.config import (
    SFTConfig,
    TrainConfig,
    check_config,
    full_kl_in_loss,
    full_kl_in_reward,
    needs_ref_log_probs,
    resolve,
)
from megarl.config.checks import numerics as check_numerics
from tests.config.conftest import lines_of

Train = Callable[..., TrainConfig]
ACTOR = "actor_rollout_ref.actor"
LOSS = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full")
REWARD = ("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full")


def problems(config: TrainConfig | SFTConfig) -> list[str]:
    return lines_of(lambda: check_config(config))


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
    check_config(train(*LOSS, *REWARD))
    apart = "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4"
    found = problems(train(*LOSS, *REWARD, apart))
    assert [line.partition(" ")[0] for line in found] == [
        f"{ACTOR}.kl_loss_type='full'",
        "algorithm.kl_penalty='full'",
    ]
    assert "policy and reference must be in the same processes" in found[0]
    # What is not used may be anywhere.
    check_config(train(f"{ACTOR}.kl_loss_type=full", "algorithm.kl_penalty=full", apart))


def test_the_exact_kl_in_the_reward_needs_a_forward_pass(train: Train) -> None:
    (found,) = problems(train(*REWARD, "algorithm.rollout_correction.bypass_mode=true"))
    assert found.startswith("algorithm.kl_penalty='full' needs the policy's forward pass")
    check_config(train(*LOSS, "algorithm.rollout_correction.bypass_mode=true"))


@pytest.mark.parametrize(
    ("overrides", "in_loss", "in_reward", "log_probs"),
    [
        ((), False, False, False),
        (LOSS, True, False, False),
        (REWARD, False, True, False),
        ((*REWARD, f"{ACTOR}.use_kl_loss=true"), False, True, False),
        ((*LOSS, "algorithm.use_kl_in_reward=true"), True, False, True),
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
    monkeypatch.setattr(check_numerics, "find_spec", lambda name: None)
    loggers = "trainer.logger=[console, file, wandb, swanlab]"
    for config in (train(loggers), sft(loggers)):
        assert problems(config) == [
            "trainer.logger has wandb, which is not installed: pip install wandb (or leave it out)",
            "trainer.logger has swanlab, which is not installed: pip install 'swanlab>=0.10' (or leave it out)",
        ]
    monkeypatch.setattr(check_numerics, "find_spec", lambda name: ModuleSpec(name, None))
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
