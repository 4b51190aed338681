"""When findings are reported, and which actions follow."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from megarl.trainer.health.monitor import (
    HealthMonitor,
    repetition_metrics,
    start_monitor,
    watch,
    watch_validation,
)
from megarl.trainer.stages.advantages import make_controls
from tests.trainer.healthy import ACTOR, KL_LOSS, KL_REWARD, configuration, monitor


def said(watcher: HealthMonitor, values: list[float], name: str = "actor/grad_norm") -> list[int]:
    """The steps, counted from 1, in which the monitor reported a finding."""
    return [step for step, value in enumerate(values, 1) if watcher.check(step, {name: value})]


def test_it_must_last_and_is_not_repeated_at_once() -> None:
    bad, good = 500.0, 1.0
    assert said(monitor("health.patience=2", "health.every=3"), [bad, good, bad, bad, bad, bad, bad]) == [
        4,
        7,
    ]
    assert said(monitor("health.patience=1", "health.every=10"), [good, bad, good, bad]) == [2]
    # Each kind of finding has its own count.
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


def test_validations_that_come_later_count_for_their_own_step(tmp_path: Path) -> None:
    """Late validations do not change the counts of findings that last from step to step."""
    watcher = monitor("health.stagnation=2", "health.early_stop=[stagnation]", "health.patience=2")
    run = SimpleNamespace(folder=tmp_path, say=[].append)
    found = []
    for step, late in ((1, None), (2, (0, 0.6)), (3, (1, 0.6)), (4, (2, 0.5))):
        if late is not None:
            watch_validation(run, watcher, late[0], {"val/score/mean": late[1], "timing_s/eval": 1.0})
        found += [(step, one.kind) for one in watcher.check(step, {"actor/grad_norm": 500.0})]
    assert found == [(2, "grad_norm")]
    assert (watcher.history.best_score, watcher.history.best_step) == (0.6, 0)
    (line,) = (tmp_path / "health.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["kind"]) == (2, "stagnation")
    assert watcher.stop is not None and watcher.stop.endswith("(health.early_stop has stagnation)")


def test_a_resumed_monitor_goes_on_counting() -> None:
    first, metrics = monitor("health.patience=3"), {"actor/grad_norm": 500.0, "actor/entropy": 0.4}
    assert first.check(1, metrics) == first.check(2, metrics) == []
    second = monitor("health.patience=3")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.history == first.history
    assert [finding.kind for finding in second.check(3, metrics)] == ["grad_norm"]


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
    assert act(watcher, 3, {"actor/ppo_kl": 0.2}) == []  # it was reported in the step before
    assert act(watcher, 4, {"health/ngram_repetition": 0.8}) == [
        "algorithm.kl_ctrl.kl_coef from 0.008 to 0.016",
        f"{ACTOR}.kl_loss_coef from 0.02 to 0.04",
    ]


def test_actions_have_a_bound_and_leave_unused_coefficients_alone() -> None:
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
    """Prompt p has three responses, two of them equal; prompt q has one that repeats a token and one without live tokens."""
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
    watcher = start_monitor(run, config, make_controls(config.algorithm, config.actor_rollout_ref.actor, 100))
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
    watcher = start_monitor(run, config, make_controls(config.algorithm, config.actor_rollout_ref.actor, 100))
    assert watch(run, watcher, 1, {"actor/ppo_kl": 9.0}, batch()) == {}
    assert text.getvalue() == "" and list(tmp_path.iterdir()) == []
