"""What is found in metrics, when it is said, and what is done about it; numbers by hand, at random, and of the demo.

`demo_metrics.jsonl` has those metrics of a run of `recipes/quickstart_ppo.yaml`, as `make demo` makes it, that checks look at.
"""

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from megarl.config import TrainConfig, load_config, resolve
from megarl.config.health_section import FINDINGS
from megarl.trainer.controls import make_controls
from megarl.trainer.findings import CHECKS, Finding, History, beyond_noise, find
from megarl.trainer.health import HealthMonitor, repetition_metrics, start_monitor, watch
from megarl.trainer.logger import read_metrics

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
    return HealthMonitor(config, make_controls(config, num_steps=100))


def kinds(overrides: tuple[str, ...], metrics: dict[str, float], history: History | None = None) -> list[str]:
    config = configuration(*overrides)
    return [
        finding.kind for finding in find(config, make_controls(config, 100), metrics, history or History())
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


def flat(**other: Any) -> History:
    """The history of a run whose scores do not rise."""
    scores = [0.3, 0.5] * 5
    return History(0.6, first_scores=scores, last_scores=scores, num_scores=20, equal=1, **other)


def test_a_healthy_step_has_no_findings() -> None:
    assert kinds(KL_LOSS, HEALTHY, flat(best_score=0.4, best_step=3)) == []
    assert kinds(KL_LOSS, {}) == []
    assert kinds(KL_LOSS, dict.fromkeys(HEALTHY, math.nan)) == []


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("ppo_kl_high", {"actor/ppo_kl": 0.051}),
        ("ppo_kl_low", {"actor/ppo_kl": -0.004, "actor/ratio_mean": 1.004009}),
        ("grad_norm", {"actor/grad_norm": 101.0}),
        ("entropy", {"actor/entropy": 0.009}),
        ("entropy", {"actor/entropy": 0.05}),  # of the first step's 0.6 less than a tenth
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
    assert kinds(KL_LOSS, {**HEALTHY, **changed}, history) == [kind]
    off = f"health.{kind}=null"
    switches = {
        "entropy": ("health.entropy_min=null", "health.entropy_ratio=null"),
        "equal_rewards": ("health.equal_rewards=false",),
    }
    assert kinds((*KL_LOSS, *switches.get(kind, (off,))), {**HEALTHY, **changed}, history) == []


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
    found = kinds(KL_LOSS, metrics, flat(best_score=0.4, best_step=1, since_best=[0.4] * 5))
    assert found == [kind for kind in FINDINGS if kind != "ppo_kl_low"]


def test_a_low_ppo_kl_means_nothing_without_a_kl_or_with_one_update() -> None:
    low = {"actor/ppo_kl": 0.0, "actor/ratio_mean": 1.0, "actor/lr": 1e-6}
    one_update = f"{ACTOR}.ppo_mini_batch_size=16"
    assert kinds((), low, flat()) == []
    assert kinds((*KL_LOSS, one_update), low, flat()) == []
    assert kinds((*KL_LOSS, one_update, f"{ACTOR}.ppo_epochs=2"), low, flat()) == ["ppo_kl_low"]


def test_a_low_ppo_kl_means_nothing_while_scores_rise_or_the_learning_rate_is_low() -> None:
    low = {"actor/ppo_kl": 0.0, "actor/ratio_mean": 1.0, "actor/lr": 1e-6}
    assert kinds(KL_LOSS, low, flat()) == ["ppo_kl_low"]
    assert kinds(KL_LOSS, {**low, "actor/lr": 4e-7}, flat()) == []
    rising = History(first_scores=[0.3, 0.5] * 5, last_scores=[0.5, 0.7] * 5, num_scores=20)
    assert kinds(KL_LOSS, low, rising) == []
    young = History(first_scores=[0.3, 0.5] * 5, last_scores=[0.3, 0.5] * 5, num_scores=19)
    assert kinds(KL_LOSS, low, young) == []
    # k1 alone is noise: here the probabilities change by some 6%, up and down.
    assert kinds(KL_LOSS, {**low, "actor/ratio_mean": 1.002}, flat()) == []


def test_equal_rewards_of_a_few_trajectories_are_chance() -> None:
    few = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2")  # 8 trajectories a step
    equal = {"critic/score/mean": 0.0, "critic/score/min": 0.0, "critic/score/max": 0.0}
    assert kinds(few, equal, History(equal=3)) == []
    assert kinds(few, equal, History(equal=4)) == ["equal_rewards"]


def test_a_step_off_the_difference_is_also_what_was_learnt_meanwhile() -> None:
    advice = []
    for mode in ("sync", "one_step_off"):
        config = configuration(f"trainer.mode={mode}")
        metrics = {"training/rollout_log_prob_diff_mean": 0.11}
        (found,) = find(config, make_controls(config, 100), metrics, History())
        advice.append(f"lower {ACTOR}.optim.lr (responses are a step older)" in found.advice)
    assert advice == [False, True]


def test_advice_has_keys_and_values() -> None:
    config = configuration(*KL_LOSS, *KL_REWARD)
    controls = make_controls(config, 100)
    (high,) = find(config, controls, {"actor/ppo_kl": 0.08}, History())
    assert high.message == "actor/ppo_kl is 0.08 nats, over 0.05: the policy moves too far in one step"
    assert high.advice == (
        "Do: raise algorithm.kl_ctrl.kl_coef from 0.004 to 0.008 and raise actor_rollout_ref.actor.kl_loss_coef from 0.01 "
        "to 0.02; or set actor_rollout_ref.actor.target_kl=0.05, or lower actor_rollout_ref.actor.optim.lr from 1e-06"
    )
    # What is in force counts, not what the run began with.
    controls.kl_loss.scale(4.0)
    (high,) = find(config, controls, {"actor/ppo_kl": 0.08}, History())
    assert "kl_loss_coef from 0.04 to 0.08" in high.advice
    plain = configuration()
    (high,) = find(plain, make_controls(plain, 100), {"actor/ppo_kl": 0.08}, History())
    assert high.advice.startswith(
        "Do: add a KL to the reference policy (actor_rollout_ref.actor.use_kl_loss=true"
    )


def said(watcher: HealthMonitor, values: list[float], name: str = "actor/grad_norm") -> list[int]:
    """The steps, from 1, in which something was to be reported."""
    return [step for step, value in enumerate(values, 1) if watcher.check(step, {name: value})]


def test_it_must_last_and_is_not_repeated_at_once() -> None:
    bad, good = 500.0, 1.0
    assert said(monitor("health.patience=2", "health.every=3"), [bad, good, bad, bad, bad, bad, bad]) == [
        4,
        7,
    ]
    assert said(monitor("health.patience=1", "health.every=10"), [good, bad, good, bad]) == [2]
    # Another kind has its own count.
    watcher = monitor("health.patience=1")
    assert [finding.kind for finding in watcher.check(1, {"actor/grad_norm": bad})] == ["grad_norm"]
    both = {"actor/grad_norm": bad, "actor/pg_clipfrac": 0.9}
    assert [finding.kind for finding in watcher.check(2, both)] == ["clip_fraction"]


def test_entropy_is_compared_with_the_first_step() -> None:
    watcher = monitor("health.patience=1", "health.entropy_min=null", "health.entropy_ratio=0.5")
    assert said(watcher, [math.nan, 0.02, 0.011, 0.009], "actor/entropy") == [4]
    assert watcher.history.first_entropy == 0.02


def test_stagnation_counts_validations() -> None:
    watcher = monitor("health.stagnation=2", "health.early_stop=[stagnation]")
    scores: dict[int, float] = {0: 0.5, 2: 0.6, 4: 0.6, 6: 0.55, 8: 0.7}
    watcher.history.add(0, {"val/score/mean": scores[0]})
    found = []
    for step in range(1, 7):
        metrics = {"val/score/mean": scores[step]} if step in scores else {"actor/entropy": 1.0}
        found += [(step, finding.message) for finding in watcher.check(step, metrics)]
    assert found == [(6, "val/score/mean has not risen above 0.6 (step 2) in 2 validations")]
    assert watcher.stop is not None and watcher.stop.endswith("(health.early_stop has stagnation)")


def test_validations_that_rise_do_not_stagnate() -> None:
    after_a_lucky_one = [0.50, 0.53, 0.55, 0.58, 0.60]
    assert kinds((), HEALTHY, History(0.6, 0.62, 2, after_a_lucky_one)) == []
    assert kinds((), HEALTHY, History(0.6, 0.62, 2, [0.60, 0.53, 0.55, 0.58, 0.50])) == ["stagnation"]


def test_the_demo_has_no_findings() -> None:
    """It rises from 34 to 80%, with a KL of a few thousandths of a nat in each step, and negative estimates of it."""
    overrides = ("data.train_batch_size=128", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.optim.lr=3e-4")
    watcher = monitor(*KL_REWARD, *overrides, "actor_rollout_ref.rollout.n=1")
    steps = read_metrics(Path(__file__).with_name("demo_metrics.jsonl"))
    assert [(step["step"], watcher.check(step["step"], step)) for step in steps] == [
        (number, []) for number in range(1, 41)
    ]


COLLAPSES: dict[str, Callable[[int], dict[str, float]]] = {
    # What each kind's metrics are n steps after all was well, but for noise.
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
    """The metrics, each multiplied with a random number: by as much as 20%, shares by 5%, to 100% at most."""
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
    if kind == "ppo_kl_low":  # a policy that has stood still from the beginning
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
    assert {*COLLAPSES, "ppo_kl_low", "stagnation"} == set(CHECKS)


@pytest.mark.parametrize("seed", range(3))
def test_noise_about_a_threshold_is_seldom_a_finding(seed: int) -> None:
    """A step in two is over the bound: five in a row come every 62 steps; that these are beyond noise is rarer by far."""
    noise, watcher, reports = random.Random(seed), monitor("health.every=1"), 0
    for step in range(1, 1001):
        reports += bool(watcher.check(step, {"actor/ppo_kl": max(noise.gauss(0.05, 0.05), 1e-3)}))
    assert reports <= 40


def test_a_resumed_monitor_goes_on_counting() -> None:
    first, metrics = monitor("health.patience=3"), {"actor/grad_norm": 500.0, "actor/entropy": 0.4}
    assert first.check(1, metrics) == first.check(2, metrics) == []
    second = monitor("health.patience=3")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.history == first.history
    assert [finding.kind for finding in second.check(3, metrics)] == ["grad_norm"]


def test_what_counts_say_of_a_share() -> None:
    def findings(number: int, trajectories: int) -> list[Finding]:
        config = configuration(f"data.train_batch_size={trajectories // 4}", f"{ACTOR}.ppo_mini_batch_size=1")
        controls = make_controls(config, 100)
        return find(config, controls, {"response_length/clip_ratio": 0.55}, History()) * number

    # By hand: log(0.55 / 0.5) is 0.0953; its error sqrt(0.45 / 0.55 / trajectories), over the root of the steps.
    assert not beyond_noise(findings(5, 64))  # 2 * 0.0506 = 0.101
    assert beyond_noise(findings(6, 64))  # 2 * 0.0462 = 0.092
    assert beyond_noise(findings(1, 512))  # 2 * 0.0400


def test_only_named_findings_stop() -> None:
    watcher = monitor("health.patience=2", "health.early_stop=[grad_norm]")
    both = {"actor/grad_norm": 500.0, "actor/pg_clipfrac": 0.9}
    watcher.check(1, both)
    assert watcher.stop is None
    watcher.check(2, {"actor/pg_clipfrac": 0.9})
    assert watcher.stop is None
    watcher.check(3, both)
    watcher.check(4, both)
    assert watcher.stop is not None and "grad_norm" in watcher.stop


def act(watcher: HealthMonitor, step: int, metrics: dict[str, float]) -> list[str]:
    return watcher.act(watcher.check(step, metrics))


def test_actions_double_the_kl_and_lower_the_clip_ratio() -> None:
    options = (
        "health.auto_action=true",
        "health.patience=1",
        "health.every=2",
        f"{ACTOR}.clip_ratio_high=0.28",
    )
    watcher = monitor(*KL_LOSS, *KL_REWARD, *options)
    controls = watcher.controls
    assert act(watcher, 1, {"actor/grad_norm": 500.0}) == []
    assert act(watcher, 2, {"actor/ppo_kl": 0.2}) == [
        "algorithm.kl_ctrl.kl_coef from 0.004 to 0.008",
        f"{ACTOR}.kl_loss_coef from 0.01 to 0.02",
        f"{ACTOR}.clip_ratio_low from 0.2 to 0.1",
        f"{ACTOR}.clip_ratio_high from 0.28 to 0.1",
    ]
    assert (controls.kl.coef, controls.kl_loss.coef) == (pytest.approx(0.008), pytest.approx(0.02))
    assert (controls.clip_low, controls.clip_high) == (0.1, 0.1)
    assert act(watcher, 3, {"actor/ppo_kl": 0.2}) == []  # it was said a step ago
    assert act(watcher, 4, {"health/ngram_repetition": 0.8}) == [
        "algorithm.kl_ctrl.kl_coef from 0.008 to 0.016",
        f"{ACTOR}.kl_loss_coef from 0.02 to 0.04",
    ]


def test_actions_have_a_bound_and_leave_alone_what_is_not_used() -> None:
    watcher = monitor(
        *KL_LOSS, "health.auto_action=true", "health.patience=1", "health.every=1", "health.kl_coef_max=0.03"
    )
    for step in range(1, 5):
        act(watcher, step, {"actor/ppo_kl": 0.2})
    assert watcher.controls.kl_loss.coef == pytest.approx(0.03)
    assert watcher.controls.kl.coef == configuration().algorithm.kl_ctrl.kl_coef


def test_without_auto_action_nothing_changes() -> None:
    watcher = monitor(*KL_LOSS, "health.patience=1")
    before = watcher.controls.state_dict()
    assert watcher.check(1, {"actor/ppo_kl": 0.2})
    assert act(watcher, 20, {"actor/ppo_kl": 0.2}) == []
    assert watcher.controls.state_dict() == before


def batch() -> pa.Table:
    """Prompt p: three responses, one of them twice; prompt q: one that repeats itself and one without a live token."""
    responses = [[1, 2, 3], [1, 2, 3], [4, 5], [7, 7, 7, 7, 7], [8, 8, 8, 8, 8, 8]]
    masks = [[True] * len(ids) for ids in responses]
    masks[-1] = [False] * 6
    return pa.table(
        {
            "prompt_uid": ["p", "p", "p", "q", "q"],
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "response_mask": pa.array(masks, pa.list_(pa.bool_())),
        }
    )


def test_repetition_leaves_out_trajectories_without_a_live_token() -> None:
    assert repetition_metrics(batch()) == {"health/duplicate_responses": 0.5, "health/ngram_repetition": 0.5}


def run_in(folder: Path) -> tuple[Any, io.StringIO]:
    text = io.StringIO()
    return SimpleNamespace(folder=folder, resumed_step=-1, say=lambda line: text.write(line + "\n")), text


def test_findings_actions_and_the_end_are_printed_and_written(tmp_path: Path) -> None:
    run, text = run_in(tmp_path)
    (tmp_path / "health.jsonl").write_text("of an earlier run\n")
    options = ("health.auto_action=true", "health.patience=1", "health.early_stop=[ppo_kl_high]")
    config = configuration(*KL_LOSS, *options)
    watcher = start_monitor(run, config, make_controls(config, 100))
    metrics = watch(run, watcher, 7, {"actor/ppo_kl": 0.2}, batch())
    assert metrics["health/findings"] == 1.0 and metrics["health/actions"] == 3.0
    assert metrics["health/duplicate_responses"] == 0.5
    lines = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert [(line["step"], line["kind"]) for line in lines] == [
        (7, "ppo_kl_high"),
        (7, "action"),
        (7, "action"),
        (7, "action"),
        (7, "stop"),
    ]
    assert lines[0]["value"] == 0.2 and lines[0]["advice"].startswith("Do: raise")
    printed = text.getvalue().splitlines()
    assert printed[0].startswith("health: step 7: actor/ppo_kl is 0.2 nats, over 0.05")
    assert (
        printed[1] == f"health: step 7: changed {ACTOR}.kl_loss_coef from 0.01 to 0.02 (health.auto_action)"
    )
    assert printed[-1].startswith("health: step 7: stopping: actor/ppo_kl")


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    run, text = run_in(tmp_path)
    config = configuration("health.enable=false")
    watcher = start_monitor(run, config, make_controls(config, 100))
    assert watch(run, watcher, 1, {"actor/ppo_kl": 9.0}, batch()) == {}
    assert text.getvalue() == "" and list(tmp_path.iterdir()) == []
