"""Findings in metrics: hand-computed thresholds and advice, collapses with random noise, and no findings in the demo.

`demo_metrics.jsonl` has the metrics that the health checks read, from a run of `recipes/quickstart_ppo.yaml` as in `make demo`.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema.run import FINDINGS
from megarl.trainer.health.findings import RULES, Finding, History, beyond_noise, find
from megarl.trainer.run.logger import read_metrics
from megarl.trainer.stages.advantages import make_controls
from tests.trainer.healthy import ACTOR, HEALTHY, KL_LOSS, KL_REWARD, configuration, finding_kinds, monitor


def flat(**other: Any) -> History:
    """The history of a run whose scores do not rise."""
    scores = [0.3, 0.5] * 5
    return History(0.6, first_scores=scores, last_scores=scores, num_scores=20, equal=1, **other)


def test_a_healthy_step_has_no_findings() -> None:
    assert finding_kinds(KL_LOSS, HEALTHY, flat(best_score=0.4, best_step=3)) == []
    assert finding_kinds(KL_LOSS, {}) == []
    assert finding_kinds(KL_LOSS, dict.fromkeys(HEALTHY, math.nan)) == []


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("ppo_kl_high", {"actor/ppo_kl": 0.051}),
        ("ppo_kl_low", {"actor/ppo_kl": -0.004, "actor/ratio_mean": 1.004009}),
        ("grad_norm", {"actor/grad_norm": 101.0}),
        ("entropy", {"actor/entropy": 0.009}),
        ("entropy", {"actor/entropy": 0.05}),  # less than a tenth of the first step's 0.6
        ("clip_fraction", {"actor/pg_clipfrac": 0.41}),
        ("duplicate_responses", {"health/duplicate_responses": 0.91}),
        ("ngram_repetition", {"health/ngram_repetition": 0.51}),
        ("equal_rewards", {"critic/score/max": 0.0}),
        ("long_responses", {"response_length/clip_ratio": 0.51}),
        ("mismatch", {"training/rollout_log_prob_diff_mean": 0.11}),
    ],
)
def test_each_threshold(kind: str, changed: dict[str, float]) -> None:
    history = flat()
    assert finding_kinds(KL_LOSS, {**HEALTHY, **changed}, history) == [kind]
    off = f"health.{kind}=null"
    switches = {
        "entropy": ("health.entropy_min=null", "health.entropy_ratio=null"),
        "equal_rewards": ("health.equal_rewards=false",),
    }
    assert finding_kinds((*KL_LOSS, *switches.get(kind, (off,))), {**HEALTHY, **changed}, history) == []


def test_every_kind_can_be_found() -> None:
    metrics = {
        **HEALTHY,
        "actor/ppo_kl": 0.06,
        "actor/grad_norm": 200.0,
        "actor/entropy": 0.0,
        "actor/pg_clipfrac": 0.9,
        "health/duplicate_responses": 1.0,
        "health/ngram_repetition": 1.0,
        "critic/score/max": 0.0,
        "response_length/clip_ratio": 1.0,
        "training/rollout_log_prob_diff_mean": 1.0,
    }
    found = finding_kinds(KL_LOSS, metrics, flat(best_score=0.4, best_step=1, since_best=[0.4] * 5))
    assert found == [kind for kind in FINDINGS if kind != "ppo_kl_low"]


def test_a_low_ppo_kl_means_nothing_without_a_kl_or_with_one_update() -> None:
    low = {"actor/ppo_kl": 0.0, "actor/ratio_mean": 1.0, "actor/lr": 1e-6}
    one_update = f"{ACTOR}.ppo_mini_batch_size=16"
    assert finding_kinds((), low, flat()) == []
    assert finding_kinds((*KL_LOSS, one_update), low, flat()) == []
    assert finding_kinds((*KL_LOSS, one_update, f"{ACTOR}.ppo_epochs=2"), low, flat()) == ["ppo_kl_low"]


def test_a_low_ppo_kl_means_nothing_while_scores_rise_or_the_learning_rate_is_low() -> None:
    low = {"actor/ppo_kl": 0.0, "actor/ratio_mean": 1.0, "actor/lr": 1e-6}
    assert finding_kinds(KL_LOSS, low, flat()) == ["ppo_kl_low"]
    assert finding_kinds(KL_LOSS, {**low, "actor/lr": 4e-7}, flat()) == []
    rising = History(first_scores=[0.3, 0.5] * 5, last_scores=[0.5, 0.7] * 5, num_scores=20)
    assert finding_kinds(KL_LOSS, low, rising) == []
    players = [
        f"actor_rollout_ref.rollout.gateway.{name}"
        for name in ("enable=true", "command=[game]", "players=[white,black]")
    ]
    assert finding_kinds((*KL_LOSS, *players), low, flat()) == [], "what white wins black loses"
    young = History(first_scores=[0.3, 0.5] * 5, last_scores=[0.3, 0.5] * 5, num_scores=19)
    assert finding_kinds(KL_LOSS, low, young) == []
    # A low k1 estimate is no finding: the ratio's mean shows that probabilities change by some 6%, up and down.
    assert finding_kinds(KL_LOSS, {**low, "actor/ratio_mean": 1.002}, flat()) == []


def test_equal_rewards_of_a_few_trajectories_are_chance() -> None:
    few = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2")  # 8 trajectories a step
    equal = {"critic/score/mean": 0.0, "critic/score/min": 0.0, "critic/score/max": 0.0}
    assert finding_kinds(few, equal, History(equal=3)) == []
    assert finding_kinds(few, equal, History(equal=4)) == ["equal_rewards"]
    assert finding_kinds(few, {**equal, "reward/model_step_score": 0.3}, History(equal=4)) == []


def test_a_step_off_the_difference_is_also_what_was_learnt_meanwhile() -> None:
    advice = []
    for mode in ("sync", "one_step_off"):
        config = configuration(f"trainer.mode={mode}")
        metrics = {"training/rollout_log_prob_diff_mean": 0.11}
        (found,) = find(
            config, make_controls(config.algorithm, config.actor_rollout_ref.actor, 100), metrics, History()
        )
        advice.append(f"lower {ACTOR}.optim.lr (responses are a step older)" in found.advice)
    assert advice == [False, True]


def test_advice_has_keys_and_values() -> None:
    config = configuration(*KL_LOSS, *KL_REWARD)
    controls = make_controls(config.algorithm, config.actor_rollout_ref.actor, 100)
    (high,) = find(config, controls, {"actor/ppo_kl": 0.08}, History())
    assert high.message == "actor/ppo_kl is 0.08 nats, over 0.05: the policy moves too far in one step"
    assert high.advice == (
        "Do: raise algorithm.kl_ctrl.kl_coef from 0.004 to 0.008 and raise actor_rollout_ref.actor.kl_loss_coef from 0.01 "
        "to 0.02; or set actor_rollout_ref.actor.target_kl=0.05, or lower actor_rollout_ref.actor.optim.lr from 1e-06"
    )
    # The advice starts from the coefficient in force, not from the configured one.
    controls.kl_loss.scale(4.0)
    (high,) = find(config, controls, {"actor/ppo_kl": 0.08}, History())
    assert "kl_loss_coef from 0.04 to 0.08" in high.advice
    plain = configuration()
    (high,) = find(
        plain,
        make_controls(plain.algorithm, plain.actor_rollout_ref.actor, 100),
        {"actor/ppo_kl": 0.08},
        History(),
    )
    assert high.advice.startswith(
        "Do: add a KL to the reference policy (actor_rollout_ref.actor.use_kl_loss=true"
    )


def test_validations_that_rise_do_not_stagnate() -> None:
    after_a_lucky_one = [0.50, 0.53, 0.55, 0.58, 0.60]
    assert finding_kinds((), HEALTHY, History(0.6, 0.62, 2, after_a_lucky_one)) == []
    assert finding_kinds((), HEALTHY, History(0.6, 0.62, 2, [0.60, 0.53, 0.55, 0.58, 0.50])) == ["stagnation"]


def test_the_demo_has_no_findings() -> None:
    """The accuracy rises from 34 to 80%; the KL is a few thousandths of a nat in each step, and some of its estimates are negative."""
    overrides = ("data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.optim.lr=3e-4")
    watcher = monitor(*KL_REWARD, *overrides, "actor_rollout_ref.rollout.n=1")
    steps = read_metrics(Path(__file__).with_name("demo_metrics.jsonl"))
    assert [(step["step"], watcher.check(step["step"], step)) for step in steps] == [
        (number, []) for number in range(1, 41)
    ]


COLLAPSES: dict[str, Callable[[int], dict[str, float]]] = {
    # For each kind of finding, its metrics n steps after the last healthy step, before noise is applied.
    "ppo_kl_high": lambda n: {"actor/ppo_kl": 0.03 * 1.5**n},
    "grad_norm": lambda n: {"actor/grad_norm": 50.0 * 2.0**n},
    "entropy": lambda n: {"actor/entropy": 0.1 / 2.0**n},
    "clip_fraction": lambda n: {"actor/pg_clipfrac": min(0.9, 0.3 + 0.1 * n)},
    "duplicate_responses": lambda n: {"health/duplicate_responses": min(1.0, 0.85 + 0.05 * n)},
    "ngram_repetition": lambda n: {"health/ngram_repetition": min(0.9, 0.4 + 0.1 * n)},
    "equal_rewards": lambda n: {"critic/score/mean": 0.0, "critic/score/max": 0.0},
    "long_responses": lambda n: {"response_length/clip_ratio": min(0.95, 0.4 + 0.1 * n)},
    "mismatch": lambda n: {"training/rollout_log_prob_diff_mean": 0.05 * 1.5**n},
}


SHARES = ("actor/pg_clipfrac", "health/duplicate_responses", "health/ngram_repetition")
EXACT = ("critic/score/min", "critic/score/max", "actor/lr", "actor/ratio_mean")


def noisy(metrics: dict[str, float], noise: random.Random) -> dict[str, float]:
    """The metrics, each changed at random by up to 20%; shares change by up to 5% and stay at or below 100%."""
    found = dict(metrics)
    for name in sorted(metrics.keys() - set(EXACT)):
        spread = 0.05 if name in SHARES else 0.2
        found[name] *= noise.uniform(1 - spread, 1 + spread)
    return {name: min(value, 1.0) if name in SHARES else value for name, value in found.items()}


@pytest.mark.parametrize("kind", [*COLLAPSES, "ppo_kl_low"])
def test_a_collapse_is_found_within_few_steps_and_nothing_before(kind: str) -> None:
    noise = random.Random(kind)
    watcher = monitor(*KL_LOSS, "data.train_batch_size=64")
    well = {name: value for name, value in HEALTHY.items() if name != "val/score/mean"}
    if kind == "ppo_kl_low":  # a policy that has not moved since the first step
        still = {**well, "actor/ppo_kl": 1e-6, "actor/ratio_mean": 1.0}
        found = [
            watcher.check(step, {**still, "critic/score/mean": noise.gauss(0.3, 0.03)})
            for step in range(1, 31)
        ]
        assert [step for step, findings in enumerate(found, 1) if findings] == [24]
        assert found[23][0].kind == kind
        return
    for step in range(1, 101):
        assert watcher.check(step, noisy(well, noise)) == []
    for number in range(12):
        found = watcher.check(101 + number, noisy({**well, **COLLAPSES[kind](number)}, noise))
        if found:
            break
    assert [finding.kind for finding in found] == [kind]


def test_every_kind_has_its_collapse() -> None:
    assert {*COLLAPSES, "ppo_kl_low", "stagnation"} == set(RULES)


@pytest.mark.parametrize("seed", range(3))
def test_noise_about_a_threshold_is_seldom_a_finding(seed: int) -> None:
    """Every second step is over the bound, so five in a row come every 62 steps, and only rarely are they beyond noise."""
    noise, watcher, reports = random.Random(seed), monitor("health.every=1"), 0
    for step in range(1, 1001):
        reports += bool(watcher.check(step, {"actor/ppo_kl": max(noise.gauss(0.05, 0.05), 1e-3)}))
    assert reports <= 40


def test_what_counts_say_of_a_share() -> None:
    def findings(number: int, trajectories: int) -> list[Finding]:
        config = configuration(f"data.train_batch_size={trajectories // 4}", f"{ACTOR}.ppo_mini_batch_size=1")
        controls = make_controls(config.algorithm, config.actor_rollout_ref.actor, 100)
        return find(config, controls, {"response_length/clip_ratio": 0.55}, History()) * number

    # By hand: log(0.55 / 0.5) is 0.0953; its error is sqrt(0.45 / 0.55 / trajectories), divided by the root of the number of steps.
    assert not beyond_noise(findings(5, 64))  # 2 * 0.0506 = 0.101
    assert beyond_noise(findings(6, 64))  # 2 * 0.0462 = 0.092
    assert beyond_noise(findings(1, 512))  # 2 * 0.0400
