"""The contents of a run folder: metrics, findings, failures, trajectories, configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.cluster.report import FOLDER as FAILURES
from megarl.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from megarl.data.trajectories import list_lengths, read_trajectories, take
from megarl.report.timeline import RecordedTimeline, read_timeline
from megarl.trainer.health.monitor import HEALTH_FILE
from megarl.trainer.run.earlier_runs import CONFIG_FILE
from megarl.trainer.run.facts import RunFacts, read_facts
from megarl.trainer.run.logger import METRICS_FILE, read_metrics
from megarl.trainer.stages.saved_trajectories import step_file
from megarl.trainer.stages.scoring import ERRORS_FILE
from megarl.util.yaml_loader import safe_load

SCORES_FILE, EVALUATION_FILE = "scores.json", "trajectories.parquet"  # of `megarl eval`
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
        name: distinguishes it from the other runs of the page.
        facts: None: a run of a version that did not write them, or an evaluation.
        steps: the metrics of each step, in order, each step once.
        lengths: by step whose trajectories were read, by column ("prompt", "response"), the tokens of each trajectory.
        findings: reports of health. failures: the first lines of each file in failures/, by key.
        reward_errors: how many rewards failed.
        timeline: None: the run has none.
    """

    folder: Path
    name: str
    facts: RunFacts | None
    config_text: str
    config: Mapping[str, Any]
    steps: list[dict[str, float]]
    lengths: dict[int, dict[str, list[int]]]
    samples: list[Sample]
    findings: list[dict[str, Any]]
    failures: list[dict[str, str]]
    reward_errors: int
    timeline: RecordedTimeline | None

    @property
    def is_evaluation(self) -> bool:
        return (self.folder / SCORES_FILE).is_file()

    @property
    def total_steps(self) -> int | None:
        """`trainer.total_training_steps`; None: as many as its epochs have."""
        return (self.config.get("trainer") or {}).get("total_training_steps")

    @cached_property
    def columns(self) -> dict[str, list[tuple[int, float]]]:
        """By metric (step, value) of the steps that have it."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step in self.steps:
            number = int(step["step"])
            for name, value in step.items():
                found.setdefault(name, []).append((number, value))
        return found

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) of the steps that have it."""
        return self.columns.get(metric, [])


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read run folders; runs whose folders have the same name are named by as much of their paths as it takes.

    Raises:
        ValueError: as `read_run`; a folder that is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path} is given twice")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return [
        read_run(folder, "/".join(path.parts[-parts:])) for folder, path in zip(folders, paths, strict=True)
    ]


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read a run folder, also of a run that is still going, was killed, or failed before its first step ended.

    Raises:
        ValueError: it is not a run folder; names the missing folder or files.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    failures = sorted((folder / FAILURES).glob("*.txt"))
    if not any((folder / file).is_file() for file in (METRICS_FILE, SCORES_FILE)) and not failures:
        raise ValueError(
            f"{folder} is not a run folder: it has neither {METRICS_FILE} (of train, sft, rm and dpo) nor {SCORES_FILE} (of eval)"
        )
    steps = _steps(folder)
    path = folder / CONFIG_FILE
    config_text = path.read_text(encoding="utf-8") if path.is_file() else ""
    config = safe_load(config_text) or {}
    tables = _tables(folder, config, [int(step["step"]) for step in steps])
    return RunRecord(
        folder=folder,
        name=name or folder.resolve().name,
        facts=read_facts(folder),
        config_text=config_text,
        config=config,
        steps=steps,
        lengths={
            step: {name: list_lengths(table, f"{name}_ids").tolist() for name in ("prompt", "response")}
            for step, table in tables.items()
        },
        samples=_samples(tables, config),
        findings=_json_lines(folder / HEALTH_FILE),
        failures=[_head(file) for file in failures],
        reward_errors=len(_json_lines(folder / ERRORS_FILE)),
        timeline=read_timeline(folder),
    )


def _steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run by step; of a step that was logged twice, before and after a resume, the later ones. An
    evaluation is one step."""
    if (folder / METRICS_FILE).is_file():
        by_step = {int(step["step"]): step for step in read_metrics(folder)}
        return [by_step[number] for number in sorted(by_step)]
    if (folder / SCORES_FILE).is_file():
        scores = json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))
        numbers = {f"val/{name}": value for name, value in scores.items() if isinstance(value, int | float)}
        return [{"step": 0, **numbers}]
    return []


def _tables(folder: Path, config: Mapping[str, Any], steps: list[int]) -> dict[int, pa.Table]:
    """The trajectories of the first and the last step that have a file; of an evaluation its only ones."""
    answers = folder / EVALUATION_FILE
    if answers.is_file():
        return {0: read_trajectories(answers, finite=False)}
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
    model = config.get("actor_rollout_ref", config).get("model", {})
    path = model.get("tokenizer_path") or model.get("path")
    read = _reader(path)
    found = []
    for step, table in tables.items():
        scores = table["score"].to_numpy() if "score" in table.column_names else np.zeros(table.num_rows)
        order = np.argsort(-scores, kind="stable")
        places = np.unique(np.linspace(0, len(order) - 1, min(_NUM_SAMPLES, len(order))).astype(int))
        for row in take(table, order[places]).to_pylist():
            prompt, response = (_shortened(read(row[name])) for name in ("prompt_ids", "response_ids"))
            truth = _shortened(row["ground_truth"] or "")
            found.append(Sample(step, float(row.get("score", np.nan)), prompt, response, truth))
    return found


def _reader(path: str | None) -> Callable[[list[int]], str]:
    """A function that makes text of token ids: the model's tokenizer if it is on this machine, and needs no code of its own; else the
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
