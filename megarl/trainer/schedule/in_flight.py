"""In-flight requests: prompts whose responses are being generated, finished groups that wait to be trained on, and their files.

Nothing is started here. In a checkpoint they are Arrow tables that are read back the same in every bit.

Guarantees:
- Every prompt that was drawn is trained on once, or left out for a reason that is counted; none is lost, none comes twice.
- A group is trained on at most `max_staleness` steps after the step whose weights began it. For that, so many prompts are in flight at
  most that all fit: (max_staleness + 1) steps' before a step takes its batch, max_staleness steps' from then on. A step takes the oldest
  finished groups, and waits for so many of the old prompts that the rest of them fits into the steps that are left to them, however many
  others are finished. Only where a step is left out (trainer.on_nonfinite) groups can come too late; these are dropped.
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
from megarl.data.sessions import by_request, players
from megarl.data.trajectories import expand_prompts, replace_column, take
from megarl.trainer.stages.groups import Groups, metric_values, teaches, too_few_teach
from megarl.trainer.stages.rollouts import GREEDY, greedy_requests
from megarl.trainer.stages.scoring import Scored, concat_scored, group_numbers


@dataclass
class InFlightPrompt:
    """A prompt whose responses are being generated.

    Attributes:
        uid: the uid of its requests: "<uid in the data>@<version>".
        name: the uid in the data.
        number: its position in the order in which prompts were drawn.
        version: the weight version when it was sent to the engines.
        prompt: its row of the prompt table, with `uid`.
        answers: finished trajectories by the uid of their request: one row, or those of a session.
    """

    uid: str
    name: str
    number: int
    version: int
    prompt: pa.Table
    answers: dict[str, pa.Table] = field(default_factory=dict)

    def requests(self, n: int, greedy: bool) -> list[pa.Table]:
        """Its requests: `n` samples and, for ReMax, the greedy answer."""
        return [expand_prompts(self.prompt, n), *([greedy_requests(self.prompt)] if greedy else [])]

    def request_uids(self, n: int, greedy: bool) -> list[str]:
        """The uids of `requests`, without making these."""
        return [
            *(f"{self.uid}/{number}" for number in range(n)),
            *([f"{self.uid}{GREEDY}"] if greedy else []),
        ]

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
    """A group whose responses are all generated and scored."""

    uid: str
    name: str
    number: int
    version: int
    scored: Scored


@dataclass
class InFlight:
    """In-flight prompts, finished groups, and which groups a step may train on.

    Attributes:
        num_prompts: prompts of a step.
        num_answers: responses to a prompt.
        max_staleness: the most steps between the one whose weights began a group and the one that trains on it.
        last_step: the last step of the run.
        prompts: prompts with unfinished groups, by uid.
        ready: finished groups in the order in which they were finished.
        dropped: groups without a learning signal (see `Groups`) since the last step's batch.
        too_late: the number of groups since then that no step could take in time.
        drawn: the number of prompts drawn so far.
        given_up: uids of prompts whose responses are discarded when they arrive.
        taken: uids of the last step's batch, and of the groups that were dropped for it.
        gen_batch_size: the prompts that `options.max_num_gen_batches` counts as a generation; None: those of a step.
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
    taken: set[str] = field(default_factory=set)
    gen_batch_size: int | None = None

    def room(self, step: int, taken: bool) -> int:
        """How many more prompts may be sent to engines during a step; `taken`: the step has its batch already."""
        steps = min(self.max_staleness + 1, self.last_step - step + 1) - taken
        return max(0, steps * self.num_prompts - len(self.prompts) - len(self.ready))

    def ask(self, prompts: pa.Table, version: int) -> None:
        """Add prompts (rows of a prompt table) whose responses are to be generated with the weights `version`.

        A prompt that comes again with these weights gets another uid, or the same noise would give it the same responses.
        """
        used = {
            *self.prompts,
            *self.given_up,
            *self.taken,
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
        """Store finished trajectories; returns those whose prompts have not been given up."""
        prompts = table["prompt_uid"].to_pylist()
        for uid, session in by_request(table).items():
            prompt_uid = session["prompt_uid"][0].as_py()
            if prompt_uid in self.given_up:
                continue
            came = self.prompts[prompt_uid].answers
            assert uid not in came, f"the trajectories of {uid} came twice"
            came[uid] = session
        return take(table, [row for row, prompt in enumerate(prompts) if prompt not in self.given_up])

    def finished(self) -> list[InFlightPrompt]:
        """Prompts whose responses are all generated and not scored yet."""
        return [one for one in self.prompts.values() if len(one.answers) == self.num_answers]

    def due(self, step: int) -> bool:
        """Whether scoring the finished groups would complete the step's batch, if none is dropped."""
        groups = self.finished()
        return bool(groups) and not self.is_enough(step) and self._suffice(step, [*groups, *self.ready])

    def keep(self, groups: list[InFlightPrompt], scored: Scored) -> None:
        """Take the scores of finished groups: rows group by group, in the order of `groups`.

        Raises:
            ValueError: the reward does not give the metric that groups are compared by; or too few groups teach something after as many
                as are allowed for a step.
        """
        values = metric_values(scored, self.options.metric) if self.options.enable else None
        numbers, names = group_numbers(scored.table), players(scored.table)
        for number, asked in enumerate(groups):
            rows = np.flatnonzero(numbers == number)
            group = FinishedGroup(asked.uid, asked.name, asked.number, asked.version, scored.take(rows))
            live = rows[group.scored.live]
            trains = values is None or teaches(values[live], names[live])
            (self.ready if trains else self.dropped).append(group)
            del self.prompts[asked.uid]
        self._refuse_too_many()

    def _refuse_too_many(self) -> None:
        """As `Groups.add`: no step is generated for without end."""
        limit = self.options.max_num_gen_batches * (self.gen_batch_size or self.num_prompts)
        every = [*self.ready, *self.dropped]
        if self.options.enable and len(self.ready) < self.num_prompts and 0 < limit <= len(every):
            mean = concat_scored([group.scored for group in every]).scores.mean()
            raise too_few_teach(self.options, len(self.ready), self.num_prompts, mean)

    def give_up(self, groups: list[InFlightPrompt]) -> None:
        """Discard these prompts, and their responses that have not arrived yet."""
        for asked in groups:
            del self.prompts[asked.uid]
            self.given_up.add(asked.uid)

    def is_enough(self, step: int) -> bool:
        """Whether the step's batch is complete: enough groups, and so many old ones that the remaining old ones fit into later steps."""
        return self._suffice(step, self.ready)

    def take(self, step: int) -> tuple[Groups, dict[str, float]]:
        """The step's batch, which is the oldest finished groups, and its metrics."""
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
        self.taken = {*groups.names}
        groups.add(concat_scored([group.scored for group in chosen]))
        metrics |= groups.metrics()
        if self.options.enable:
            every = concat_scored([group.scored for group in [*chosen, *dropped]]).by_player()
            metrics["filter_groups/dropped"] = float(len(dropped))
            metrics["filter_groups/score_before"] = float(every.scores[every.live].mean())
        columns = groups.parts[0].table.column_names
        for group in dropped:  # the sampler is told their scores, too
            groups.parts.append(replace(group.scored, table=group.scored.table.select(columns)))
        return groups, metrics

    def drop_late(self, step: int) -> list[str]:
        """Before a step: discard groups that are too old for it; there are such groups only after a step that was skipped.

        Returns: the uids of trajectories that were received, and that nobody will have scored.
        """
        oldest = step - self.max_staleness
        late = [one for one in self.prompts.values() if one.version < oldest]
        self.give_up(late)
        in_time = [group for group in self.ready if group.version >= oldest]
        self.too_late += len(late) + len(self.ready) - len(in_time)
        self.ready = in_time
        tables = [table for one in late for table in one.answers.values()]
        return [uid for table in tables for uid in table["uid"].to_pylist()]

    def _suffice(self, step: int, there: Sequence[InFlightPrompt | FinishedGroup]) -> bool:
        """Whether a step can take its batch from `there`, and later steps can take everything else before it is too old."""
        every: list[InFlightPrompt | FinishedGroup] = [*self.prompts.values(), *self.ready]
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
_NUMBER = "number/"  # prefix of the columns with the rewards' numbers
_PRED, _ERROR = "reward/pred", "reward/error"


def save_in_flight(state: InFlight, drawn: pa.Table | None, folder: Path) -> None:
    """Write the state into an empty folder.

    Args:
        drawn: prompts that were drawn and not sent to engines yet.
    """
    asked, groups = list(state.prompts.values()), [*state.ready, *state.dropped]
    if asked:
        table = pa.concat_tables([one.prompt for one in asked]).combine_chunks()
        write_arrow(_with_facts(table, asked), folder / _ASKED)
    if groups:
        write_arrow(_with_facts(pa.table({"uid": [group.uid for group in groups]}), groups), folder / _GROUPS)
        write_arrow(_as_table(concat_scored([group.scored for group in groups])), folder / _TRAJECTORIES)
    if drawn is not None:
        write_arrow(drawn.combine_chunks(), folder / _DRAWN)
    counts = {"ready": len(state.ready), "drawn": state.drawn, "too_late": state.too_late}
    (folder / _COUNTS).write_text(json.dumps(counts), encoding="utf-8")


def load_in_flight(state: InFlight, folder: Path) -> pa.Table | None:
    """Read the files into a new `state`; returns the prompts that were drawn and not sent to engines yet."""
    counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
    state.drawn, state.too_late = counts["drawn"], counts["too_late"]
    if (folder / _ASKED).exists():
        table = read_arrow(folder / _ASKED)
        prompts = table.drop_columns(["name", "number", "version"])
        for row, (uid, name, number, version) in enumerate(_facts(table)):
            state.prompts[uid] = InFlightPrompt(uid, name, number, version, prompts.slice(row, 1))
    if (folder / _GROUPS).exists():
        scored = _as_scored(read_arrow(folder / _TRAJECTORIES))
        prompt_uids = np.array(scored.table["prompt_uid"].to_pylist())
        groups = [
            FinishedGroup(uid, name, number, version, scored.take(np.flatnonzero(prompt_uids == uid)))
            for uid, name, number, version in _facts(read_arrow(folder / _GROUPS))
        ]
        state.ready, state.dropped = groups[: counts["ready"]], groups[counts["ready"] :]
    return read_arrow(folder / _DRAWN) if (folder / _DRAWN).exists() else None


def _with_facts(table: pa.Table, of: list[InFlightPrompt] | list[FinishedGroup]) -> pa.Table:
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
