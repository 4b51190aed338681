"""In-flight requests: prompts whose responses are being generated, finished groups that wait to be trained on, and their files.

Nothing is started here. In a checkpoint they are Arrow tables that are read back the same in every bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.config import FilterGroupsConfig
from megarl.data.files import read_arrow, write_arrow
from megarl.data.trajectories import expand_prompts, replace_column, take
from megarl.trainer.stages.groups import Groups, metric_values
from megarl.trainer.stages.rollouts import greedy_requests
from megarl.trainer.stages.scoring import Scored, concat_scored, group_numbers


@dataclass
class InFlightPrompt:
    """A prompt whose responses are under way.

    Attributes:
        uid: under which it is asked: "<the data's>@<version>".
        name: the data's uid.
        number: in the order in which prompts were drawn.
        version: of the weights when it was asked.
        prompt: its row of the prompt table, under `uid`.
        answers: by uid, the trajectories that are there, of one row each.
    """

    uid: str
    name: str
    number: int
    version: int
    prompt: pa.Table
    answers: dict[str, pa.Table] = field(default_factory=dict)

    def requests(self, n: int, greedy: bool) -> list[pa.Table]:
        """The samples that are asked for, and, for ReMax, the greedy answer."""
        return [expand_prompts(self.prompt, n), *([greedy_requests(self.prompt)] if greedy else [])]

    def table(self) -> pa.Table:
        """The trajectories in the order of their requests: samples, then the greedy answer."""
        return pa.concat_tables(
            [self.answers[uid] for uid in sorted(self.answers, key=_sample)]
        ).combine_chunks()


def _sample(uid: str) -> float:
    last = uid.rsplit("/", 1)[1]
    return float(last) if last.isdigit() else float("inf")


@dataclass(frozen=True)
class FinishedGroup:
    """A group that is whole and scored; of `Asked` what is still of use."""

    uid: str
    name: str
    number: int
    version: int
    scored: Scored


@dataclass
class InFlight:
    """What is asked, what is whole, and what a step may take.

    Attributes:
        num_prompts: of a step.
        num_answers: of a prompt.
        max_staleness: most steps between the one whose weights began a group, and the one that trains on it.
        last_step: after it nothing is trained.
        prompts: prompts with unfinished groups, by uid.
        ready: in the order in which they became whole.
        dropped: since the last step's batch: groups that teach nothing (see `Groups`).
        too_late: since then: groups that no step could take in time.
        drawn: prompts so far.
        given_up: uids of prompts of which no answer is of use any more.
    """

    options: FilterGroupsConfig
    num_prompts: int
    num_answers: int
    max_staleness: int
    last_step: int
    prompts: dict[str, InFlightPrompt] = field(default_factory=dict)
    ready: list[FinishedGroup] = field(default_factory=list)
    dropped: list[FinishedGroup] = field(default_factory=list)
    too_late: int = 0
    drawn: int = 0
    given_up: set[str] = field(default_factory=set)

    def room(self, step: int, taken: bool) -> int:
        """How many prompts may be asked more during a step; `taken`: it has its batch already."""
        steps = min(self.max_staleness + 1, self.last_step - step + 1) - taken
        return max(0, steps * self.num_prompts - len(self.prompts) - len(self.ready))

    def ask(self, prompts: pa.Table, version: int) -> None:
        """Have prompts (rows of a prompt table) answered from now on."""
        used = {
            *self.prompts,
            *(group.uid for group in self.ready),
            *(group.uid for group in self.dropped),
        }
        for row, name in enumerate(prompts["uid"].to_pylist()):
            uid, again = f"{name}@{version}", 1
            while uid in used:
                again += 1
                uid = f"{name}@{version}~{again}"
            used.add(uid)
            prompt = replace_column(prompts.slice(row, 1), "uid", pa.array([uid], pa.string()))
            self.prompts[uid] = InFlightPrompt(uid, name, self.drawn, version, prompt)
            self.drawn += 1

    def receive(self, table: pa.Table) -> pa.Table:
        """Trajectories came; returns those that somebody waits for."""
        rows = []
        for row, (uid, prompt_uid) in enumerate(
            zip(table["uid"].to_pylist(), table["prompt_uid"].to_pylist(), strict=True)
        ):
            if prompt_uid in self.given_up:
                continue
            came = self.prompts[prompt_uid].answers
            assert uid not in came, f"trajectory {uid} came twice"
            came[uid] = table.slice(row, 1)
            rows.append(row)
        return take(table, rows)

    def finished(self) -> list[InFlightPrompt]:
        """Prompts whose answers are all there, and not scored yet."""
        return [one for one in self.prompts.values() if len(one.answers) == self.num_answers]

    def due(self, step: int) -> bool:
        """Whether the step's batch is there once what is whole has been scored, if all of it stays."""
        whole = self.finished()
        return bool(whole) and not self.is_enough(step) and self._suffice(step, [*whole, *self.ready])

    def keep(self, groups: list[InFlightPrompt], scored: Scored) -> None:
        """Groups that were whole have been scored: rows group by group, in their order.

        Raises:
            ValueError: the reward does not give the metric that groups are compared by.
        """
        values = metric_values(scored, self.options.metric) if self.options.enable else None
        numbers = group_numbers(scored.table)
        for number, asked in enumerate(groups):
            rows = np.flatnonzero(numbers == number)
            group = FinishedGroup(asked.uid, asked.name, asked.number, asked.version, scored.take(rows))
            of_live = None if values is None else values[rows[group.scored.live]]
            teaches = of_live is None or (len(of_live) > 1 and float(np.ptp(of_live)) > 0.0)
            (self.ready if teaches else self.dropped).append(group)
            del self.prompts[asked.uid]

    def give_up(self, groups: list[InFlightPrompt]) -> None:
        """These are of no use any more; what still comes of them is left out."""
        for asked in groups:
            del self.prompts[asked.uid]
            self.given_up.add(asked.uid)

    def is_enough(self, step: int) -> bool:
        """Whether the step's batch is there: enough groups, and of the old ones so many that the others fit into later steps."""
        return self._suffice(step, self.ready)

    def take(self, step: int) -> tuple[Groups, dict[str, float]]:
        """The step's batch, the oldest groups of those that are ready; and what is told of it."""
        assert self.is_enough(step)
        chosen = sorted(self.ready, key=lambda group: group.version)[: self.num_prompts]
        chosen.sort(key=lambda group: group.number)
        assert all(group.version >= step - self.max_staleness for group in chosen), "drop_late comes before"
        taken = {group.uid for group in chosen}
        self.ready = [group for group in self.ready if group.uid not in taken]
        dropped, self.dropped = self.dropped, []
        metrics = {"staleness/too_late": float(self.too_late), "staleness/waiting": float(len(self.ready))}
        self.too_late = 0
        groups = Groups(replace(self.options, enable=False), self.num_prompts)
        groups.names = {group.uid: group.name for group in [*chosen, *dropped]}
        groups.add(concat_scored([group.scored for group in chosen]))
        metrics |= groups.metrics()
        if self.options.enable:
            every = concat_scored([group.scored for group in [*chosen, *dropped]])
            metrics["filter_groups/dropped"] = float(len(dropped))
            metrics["filter_groups/score_before"] = float(every.scores[every.live].mean())
        columns = groups.parts[0].table.column_names
        for group in dropped:  # a sampler hears of them, too
            groups.parts.append(replace(group.scored, table=group.scored.table.select(columns)))
        return groups, metrics

    def drop_late(self, step: int) -> None:
        """Before a step: leave out what it could not train on in time, which is only so after a step that was left out."""
        oldest = step - self.max_staleness
        late = [one for one in self.prompts.values() if one.version < oldest]
        self.give_up(late)
        in_time = [group for group in self.ready if group.version >= oldest]
        self.too_late += len(late) + len(self.ready) - len(in_time)
        self.ready = in_time

    def _suffice(self, step: int, there: Sequence[InFlightPrompt | FinishedGroup]) -> bool:
        """Whether a step can take its batch from `there`, and later ones all else that is under way in its time."""
        every = [*self.prompts.values(), *self.ready]
        if len(there) < self.num_prompts:
            return False
        for later in range(self.max_staleness + 1):
            oldest = step - self.max_staleness + later
            old = sum(one.version <= oldest for one in every)
            if sum(one.version <= oldest for one in there) < old - later * self.num_prompts:
                return False
        return True


_ASKED, _GROUPS, _TRAJECTORIES, _DRAWN, _COUNTS = (
    "asked.arrow", "groups.arrow", "trajectories.arrow", "drawn.arrow", "counts.json",
)  # fmt: skip
_NUMBER = "number/"  # begins the names of the rewards' numbers, beside the trajectories' columns
_PRED, _ERROR = "reward/pred", "reward/error"


def save_in_flight(state: InFlight, drawn: pa.Table | None, folder: Path) -> None:
    """Write it into an empty folder.

    Args:
        drawn: prompts that were drawn, and not asked yet.
    """
    asked, groups = list(state.prompts.values()), [*state.ready, *state.dropped]
    if asked:
        table = pa.concat_tables([one.prompt for one in asked]).combine_chunks()
        write_arrow(_beside(table, asked), folder / _ASKED)
    if groups:
        write_arrow(_beside(pa.table({"uid": [group.uid for group in groups]}), groups), folder / _GROUPS)
        write_arrow(_as_table(concat_scored([group.scored for group in groups])), folder / _TRAJECTORIES)
    if drawn is not None:
        write_arrow(drawn.combine_chunks(), folder / _DRAWN)
    counts = {"ready": len(state.ready), "drawn": state.drawn, "too_late": state.too_late}
    (folder / _COUNTS).write_text(json.dumps(counts), encoding="utf-8")


def load_in_flight(state: InFlight, folder: Path) -> pa.Table | None:
    """Read it into a `state` that is new; returns the prompts that were drawn, and not asked yet."""
    counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
    state.drawn, state.too_late = counts["drawn"], counts["too_late"]
    if (folder / _ASKED).exists():
        table = read_arrow(folder / _ASKED)
        prompts = table.drop_columns(["name", "number", "version"])
        for row, (uid, *facts) in enumerate(_facts(table)):
            state.prompts[uid] = InFlightPrompt(uid, *facts, prompts.slice(row, 1))
    if (folder / _GROUPS).exists():
        scored = _as_scored(read_arrow(folder / _TRAJECTORIES))
        prompt_uids = np.array(scored.table["prompt_uid"].to_pylist())
        groups = [
            FinishedGroup(uid, *facts, scored.take(np.flatnonzero(prompt_uids == uid)))
            for uid, *facts in _facts(read_arrow(folder / _GROUPS))
        ]
        state.ready, state.dropped = groups[: counts["ready"]], groups[counts["ready"] :]
    return read_arrow(folder / _DRAWN) if (folder / _DRAWN).exists() else None


def _beside(table: pa.Table, of: list[InFlightPrompt] | list[FinishedGroup]) -> pa.Table:
    for name in ("name", "number", "version"):
        table = table.append_column(name, pa.array([getattr(one, name) for one in of]))
    return table


def _facts(table: pa.Table) -> list[tuple]:
    return list(zip(*(table[name].to_pylist() for name in ("uid", "name", "number", "version")), strict=True))


def _as_table(scored: Scored) -> pa.Table:
    table = scored.table
    for name, values in scored.numbers.items():
        table = table.append_column(_NUMBER + name, pa.array(values, pa.float64()))
    table = table.append_column(_PRED, pa.array(scored.preds, pa.string()))
    return table.append_column(_ERROR, pa.array(scored.errors, pa.string()))


def _as_scored(table: pa.Table) -> Scored:
    names = [name for name in table.column_names if name.startswith(_NUMBER)]
    numbers = {name.removeprefix(_NUMBER): table[name].to_numpy() for name in names}
    preds, errors = table[_PRED].to_pylist(), table[_ERROR].to_pylist()
    return Scored(table.drop_columns([*names, _PRED, _ERROR]), numbers, preds, errors)
