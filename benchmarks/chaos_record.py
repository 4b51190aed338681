"""The recording of chaos.py: a file that later calls go on with, and what its figures are."""

import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_blows import Blow
from facts import commit, environment

PACKAGES = ("megatron-core", "sglang", "ray", "torch")


@dataclass
class Record:
    """All that was recorded: by one call of chaos.py, or by several, one after the other.

    Attributes:
        parts: the facts of each call: its command, commit, dates, machine, and the seconds of its reference.
        cards: of the deck, that are still to be dealt.
        path: where it is written; None: nowhere.
    """

    seed: int
    steps: int
    parts: list[dict[str, Any]]
    blows: list[Blow]
    runs: list[dict[str, Any]]
    cards: list[tuple[str, str]]
    path: Path | None

    @property
    def stream(self) -> str:
        """The seed of this part's random numbers: each part has others."""
        return f"{self.seed}/{len(self.parts)}"

    def begin(self) -> None:
        """Begin a part."""
        self.parts.append(
            {
                **commit(),
                "begun": _now(),
                "written": _now(),
                "environment": environment(PACKAGES),
                "kills": 0,
                "kills_not_counted": 0,
            }
        )
        self.write()

    def struck(self, count: int) -> None:
        """So many blows to a run that goes on: they count when it is compared."""
        self.parts[-1]["kills_not_counted"] = count
        self.write()

    def add(self, blows: list[Blow], run: dict[str, Any], cards: list[tuple[str, str]]) -> None:
        """Add the outcome of a run and of the blows to it."""
        self.blows += blows
        self.runs.append({"part": len(self.parts), **run})
        self.parts[-1]["kills"] += len(blows)
        self.parts[-1]["kills_not_counted"] = 0
        self.cards = cards
        self.write()

    def report(self) -> dict[str, Any]:
        """All of it, as the file has it."""
        return {
            "seed": self.seed,
            "steps": self.steps,
            "summary": summary(self),
            "parts": self.parts,
            "cards": self.cards,
            "runs": self.runs,
            "blows": [asdict(blow) for blow in self.blows],
        }

    def write(self) -> None:
        """Into the file: it is there whole, the old one or the new one."""
        self.parts[-1]["written"] = _now()
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.partial")
        temporary.write_text(json.dumps(self.report(), indent=1) + "\n")
        temporary.replace(self.path)


def open_record(path: Path | None, seed: int, steps: int) -> Record:
    """The recording in a file, if there is one, to go on with; else a new one.

    Raises:
        ValueError: the file is none, or was recorded with another seed or number of steps.
    """
    if path is None or not path.exists():
        return Record(seed, steps, [], [], [], [], path)
    found = json.loads(path.read_text())
    if "parts" not in found:
        raise ValueError(f"{path} is no recording that can be continued: give --json another name")
    for name, value in (("seed", seed), ("steps", steps)):
        if found[name] != value:
            raise ValueError(f"{path} was recorded with --{name} {found[name]}, not {value}: give that")
    return Record(
        seed,
        steps,
        found["parts"],
        [Blow(**blow) for blow in found["blows"]],
        found["runs"],
        [(kind, name) for kind, name in found["cards"]],
        path,
    )


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def summary(record: Record) -> dict[str, Any]:
    """The figures of the whole; seconds are [median, most]."""
    blows, runs = record.blows, record.runs
    ends = sum((Counter(run["ends"]) for run in runs), Counter())
    return {
        "kills": len(blows),
        "kills_not_counted": sum(part["kills_not_counted"] for part in record.parts),
        "recovered": sum(blow.recovered for blow in blows),
        "steps_lost_most": max((blow.lost for blow in blows), default=0),
        "runs": len(runs),
        "runs_compared": sum(run["finished"] for run in runs),
        "differences": sum(len(run["differences"]) for run in runs),
        "expected_ends": {why: number for why, number in sorted(ends.items()) if why != "unexpected"},
        "unexpected_ends": ends["unexpected"],
        "orphans": sum(len(run["orphans"]) for run in runs),
        "seconds_to_notice": {
            name: median_and_most(
                [blow.seconds for blow in blows if blow.signal == name and blow.seconds is not None]
            )
            for name in ("SIGKILL", "SIGSTOP", "SIGTERM")
        },
        "seconds_to_go_on": median_and_most(
            [blow.recovery_seconds for blow in blows if blow.recovery_seconds is not None]
        ),
        "seconds_until_nothing_was_left": median_and_most(
            [seconds for run in runs for seconds in run["seconds_until_nothing_was_left"]]
        ),
        "seconds_a_kill": round(sum(run["seconds"] for run in runs) / len(blows), 1) if blows else None,
    }


def is_unharmed(figures: dict[str, Any]) -> bool:
    """Whether every blow was recovered from, every run compared, and nothing differs or was left behind."""
    harm = ("differences", "unexpected_ends", "orphans")
    return (
        figures["recovered"] == figures["kills"]
        and figures["runs_compared"] == figures["runs"]
        and not any(figures[name] for name in harm)
    )


def median_and_most(seconds: list[float]) -> list[float] | None:
    return [round(statistics.median(seconds), 1), round(max(seconds), 1)] if seconds else None
