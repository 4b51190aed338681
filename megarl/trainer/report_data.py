"""What a run folder tells: metrics, findings, failures, trajectories, configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from megarl.cluster.report import FOLDER as FAILURES
from megarl.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from megarl.data.trajectories import list_lengths, read_trajectories
from megarl.trainer.dumped import step_file
from megarl.trainer.health import HEALTH_FILE
from megarl.trainer.logger import METRICS_FILE, read_metrics
from megarl.trainer.report_timeline import Recorded, read_timeline
from megarl.trainer.resumed import CONFIG_FILE
from megarl.trainer.scoring import ERRORS_FILE

_LONGEST_TEXT = 2000  # characters of a prompt or a response that are shown
_NUM_SAMPLES = 3  # of a step: the best, one in the middle, the worst


@dataclass(frozen=True)
class Sample:
    """A trajectory as people read it."""

    step: int
    score: float
    prompt: str
    response: str
    ground_truth: str


@dataclass(frozen=True)
class RunRecord:
    """Everything that the report shows of a run.

    Attributes:
        steps: the metrics of each step.
        lengths: by step of which the trajectories were read, by column ("prompt", "response"), tokens of each.
        findings: what health reported. failures: the first lines of each file in failures/, by key.
        reward_errors: how many rewards failed.
        timeline: None: the run has none.
    """

    folder: Path
    config_text: str
    steps: list[dict[str, float]]
    lengths: dict[int, dict[str, list[int]]]
    samples: list[Sample]
    findings: list[dict[str, Any]]
    failures: list[dict[str, str]]
    reward_errors: int
    timeline: Recorded | None

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) of the steps that have it."""
        return [(step["step"], step[metric]) for step in self.steps if metric in step]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder, also of a run that is still going, or was killed.

    Raises:
        ValueError: it is none, or no step has ended yet; says what was found.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    if not (folder / METRICS_FILE).is_file():
        raise ValueError(f"{folder} is not the folder of a run that trains: it has no {METRICS_FILE}")
    steps = read_metrics(folder)
    if not steps:
        failed = f"; why it ended is in {folder / FAILURES}" if (folder / FAILURES).is_dir() else ""
        raise ValueError(f"no step of the run in {folder} has ended yet{failed}")
    path = folder / CONFIG_FILE
    config_text = path.read_text(encoding="utf-8") if path.is_file() else ""
    config = yaml.safe_load(config_text) or {}
    tables = _tables(folder, config, [int(step["step"]) for step in steps])
    errors = folder / ERRORS_FILE
    return RunRecord(
        folder=folder,
        config_text=config_text,
        steps=steps,
        lengths={
            step: {name: list_lengths(table, f"{name}_ids").tolist() for name in ("prompt", "response")}
            for step, table in tables.items()
        },
        samples=_samples(tables, config),
        findings=_json_lines(folder / HEALTH_FILE),
        failures=[_head(file) for file in sorted((folder / FAILURES).glob("*.txt"))],
        reward_errors=len(_json_lines(errors)),
        timeline=read_timeline(folder),
    )


def _tables(folder: Path, config: Mapping[str, Any], steps: list[int]) -> dict[int, pa.Table]:
    """The trajectories of the first and the last step that have a file."""
    trainer = config.get("trainer", {})
    rollouts = Path(trainer.get("rollout_data_dir") or folder / "rollouts")
    if not rollouts.is_dir():  # the run folder was moved here from elsewhere
        rollouts = folder / "rollouts"
    there = [step for step in steps if step_file(rollouts, step).is_file()]
    return {
        step: read_trajectories(step_file(rollouts, step), finite=False)
        for step in dict.fromkeys(there[:1] + there[-1:])
    }


def _samples(tables: Mapping[int, pa.Table], config: Mapping[str, Any]) -> list[Sample]:
    if not tables:
        return []
    model = config.get("actor_rollout_ref", {}).get("model", {})
    path = model.get("tokenizer_path") or model.get("path")
    read = _reader(path)
    found = []
    for step, table in tables.items():
        scores = table["score"].to_numpy() if "score" in table.column_names else np.zeros(table.num_rows)
        order = np.argsort(-scores, kind="stable")
        places = np.unique(np.linspace(0, len(order) - 1, min(_NUM_SAMPLES, len(order))).astype(int))
        for row in table.take(pa.array(order[places])).to_pylist():
            texts = [_shortened(read(row[name])) for name in ("prompt_ids", "response_ids")]
            found.append(
                Sample(step, float(row.get("score", np.nan)), *texts, _shortened(row["ground_truth"] or ""))
            )
    return found


def _reader(path: str | None) -> Callable[[list[int]], str]:
    """What makes text of token ids: the model's tokenizer if it is on this machine, and needs no code of its own; else the
    ids are shown."""
    folder = Path(path) if path is not None else None
    if folder is not None and any((folder / name).is_file() for name in TOKENIZER_FILES):
        try:
            return load_tokenizer(folder).decode
        except ValueError:
            pass
    return lambda ids: "token ids: " + " ".join(map(str, ids))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} [...]"


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, if it is there; one that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _head(path: Path) -> dict[str, str]:
    """The `key: value` lines that a report of a failure begins with, and the first line of its `error`."""
    head, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    facts = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    said = [line for line in rest.splitlines() if not line.startswith("=") and line != "the error"]
    return {"file": path.name, **facts, "error": said[0] if said else ""}
