"""The health of a run: findings in its metrics and trajectories, advice, and automatic actions.

Guarantees:
- A finding is reported (printed, and as a line of `health.jsonl`) after `health.patience` consecutive steps that are more than noise
  (`findings.beyond_noise`), and its kind is not reported again for `health.every` steps.
- Coefficients change only with `health.auto_action`, and a run stops only for `health.early_stop`; both are reported.

The thresholds are rules of thumb: ppo_kl up to 0.03 nats a token is usual, over 0.05 the KL coefficient should rise;
gradient norms are under 10, over 100 the learning rate is too high; where trajectories repeat each other the KL coefficient
is doubled and the clip ratio set to 0.1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from megarl.algorithms.metrics import duplicate_share, ngram_repetition
from megarl.config import TrainConfig
from megarl.data.trajectories import ragged
from megarl.trainer.health.findings import ACTOR, Finding, History, beyond_noise, find, kl_coefficients
from megarl.trainer.run.logger import keep_lines
from megarl.trainer.run.run import Run
from megarl.trainer.stages.advantages import Controls
from megarl.trainer.stages.given_responses import own_rows
from megarl.util.files import naming

HEALTH_FILE = "health.jsonl"
MOST = 20  # consecutive steps that are compared
COLLAPSE = ("ppo_kl_high", "duplicate_responses", "ngram_repetition")  # findings that `auto_action` acts on


@dataclass
class HealthMonitor:
    """Checks every step of a run.

    Attributes:
        controls: coefficients that `auto_action` changes.
        in_a_row: by kind, the findings of the last consecutive steps, at most `MOST`.
        reported: by kind, the step of the last report.
        stop: the reason to end the run after this step; None: it continues.
    """

    config: TrainConfig
    controls: Controls
    history: History = field(default_factory=History)
    in_a_row: dict[str, list[Finding]] = field(default_factory=dict)
    reported: dict[str, int] = field(default_factory=dict)
    stop: str | None = None

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """The findings to report after `step`; sets `stop`.

        Args:
            metrics: all metrics of the step, including `repetition_metrics`.
        """
        health = self.config.health
        self.history.add(step, metrics)
        found = {finding.kind: finding for finding in find(self.config, self.controls, metrics, self.history)}
        most = max(MOST, health.patience)
        self.in_a_row = {
            kind: [*self.in_a_row.get(kind, []), finding][-most:] for kind, finding in found.items()
        }
        # Validations are some steps apart: the rule itself counts them.
        lasting = [
            finding
            for kind, finding in found.items()
            if kind == "stagnation"
            or (len(self.in_a_row[kind]) >= health.patience and beyond_noise(self.in_a_row[kind]))
        ]
        return self._due(step, lasting)

    def check_validation(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """As `check`, for the metrics of a validation that came after the other metrics of its step."""
        self.history.add(step, metrics)
        return self._due(step, find(self.config, self.controls, metrics, self.history))

    def _due(self, step: int, lasting: list[Finding]) -> list[Finding]:
        health = self.config.health
        for finding in lasting:
            if finding.kind in health.early_stop:
                self.stop = f"{finding.message} (health.early_stop has {finding.kind})"
        due = [
            finding
            for finding in lasting
            if finding.kind not in self.reported or step - self.reported[finding.kind] >= health.every
        ]
        self.reported |= {finding.kind: step for finding in due}
        return due

    def act(self, findings: list[Finding]) -> list[str]:
        """With `health.auto_action`, raise KL coefficients and lower clip ratios where the policy collapses; returns
        the changes as text."""
        health, controls = self.config.health, self.controls
        if not health.auto_action or not any(finding.kind in COLLAPSE for finding in findings):
            return []
        done = []
        for key, controller in kl_coefficients(self.config, controls).items():
            before = controller.coef
            factor = min(health.kl_coef_factor, health.kl_coef_max / before) if before > 0 else 1.0
            if factor > 1:
                controller.scale(factor)
                done.append(f"{key} from {before:g} to {controller.coef:g}")
        for name in ("clip_low", "clip_high"):
            before = getattr(controls, name)
            if before > health.clip_ratio:
                setattr(controls, name, health.clip_ratio)
                done.append(
                    f"{ACTOR}.{name.replace('clip', 'clip_ratio')} from {before:g} to {health.clip_ratio:g}"
                )
        return done

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; the controls, which it changes, have a state of their own."""
        return {
            "history": asdict(self.history),
            "in_a_row": {
                kind: [asdict(finding) for finding in findings] for kind, findings in self.in_a_row.items()
            },
            "reported": dict(self.reported),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = History(**state["history"])
        self.in_a_row = {
            kind: [Finding(**finding) for finding in findings] for kind, findings in state["in_a_row"].items()
        }
        self.reported = dict(state["reported"])


def start_monitor(run: Run, config: TrainConfig, controls: Controls) -> HealthMonitor:
    """The monitor of a run; earlier reports in its folder about steps that are still to come are dropped."""
    if (run.folder / HEALTH_FILE).exists():
        keep_lines(run.folder / HEALTH_FILE, run.resumed_step)
    return HealthMonitor(config, controls)


def watch(
    run: Run, monitor: HealthMonitor, step: int, metrics: Mapping[str, float], batch: pa.Table
) -> dict[str, float]:
    """Check a step, report its findings and act as configured; returns the metrics health/...

    health/findings counts the reports of this step, health/actions the changes.
    """
    if not monitor.config.health.enable:
        return {}
    found = repetition_metrics(own_rows(batch))
    findings = monitor.check(step, {**metrics, **found})
    actions = monitor.act(findings)
    _tell(run, step, findings)
    for action in actions:
        run.say(f"health: step {step}: changed {action} (health.auto_action)")
        _write(run.folder, step, {"kind": "action", "message": action})
    if monitor.stop is not None:
        run.say(f"health: step {step}: stopping: {monitor.stop}")
        _write(run.folder, step, {"kind": "stop", "message": monitor.stop})
    return {**found, "health/findings": float(len(findings)), "health/actions": float(len(actions))}


def watch_validation(run: Run, monitor: HealthMonitor, step: int, metrics: Mapping[str, float]) -> None:
    """Check a validation's results that came after their step, and report the findings; the next step stops the run if one asks for it."""
    if monitor.config.health.enable:
        _tell(run, step, monitor.check_validation(step, metrics))


def _tell(run: Run, step: int, findings: list[Finding]) -> None:
    for finding in findings:
        run.say(f"health: step {step}: {finding.message}. {finding.advice}")
        seen = {name: getattr(finding, name) for name in ("kind", "value", "message", "advice")}
        _write(run.folder, step, seen)


def repetition_metrics(batch: pa.Table) -> dict[str, float]:
    """health/duplicate_responses and health/ngram_repetition (see algorithms.metrics) of trajectories that have a live
    token, as far as they are defined."""
    mask, offsets = ragged(batch, "response_mask")
    ids, _ = ragged(batch, "response_ids")
    rows = [
        (ids[start:end], prompt)
        for start, end, prompt in zip(offsets, offsets[1:], batch["prompt_uid"].to_pylist(), strict=False)
        if mask[start:end].any()
    ]
    responses = [tokens for tokens, _ in rows]
    found = {
        "health/duplicate_responses": duplicate_share(responses, [prompt for _, prompt in rows]),
        "health/ngram_repetition": ngram_repetition(responses),
    }
    return {name: value for name, value in found.items() if value is not None}


def _write(folder: Path, step: int, entry: Mapping[str, Any]) -> None:
    path = folder / HEALTH_FILE
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "time": time.time(), **entry}) + "\n")
