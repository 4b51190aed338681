"""What is under way as files of a checkpoint: Arrow tables, the same in every bit when they are read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.data.files import read_arrow, write_arrow
from megarl.trainer.schedule.in_flight import Asked, UnderWay, Whole
from megarl.trainer.stages.scoring import Scored, concat_scored

_ASKED, _GROUPS, _TRAJECTORIES, _DRAWN, _COUNTS = (
    "asked.arrow", "groups.arrow", "trajectories.arrow", "drawn.arrow", "counts.json",
)  # fmt: skip
_NUMBER = "number/"  # begins the names of the rewards' numbers, beside the trajectories' columns
_PRED, _ERROR = "reward/pred", "reward/error"


def save_under_way(state: UnderWay, drawn: pa.Table | None, folder: Path) -> None:
    """Write it into an empty folder.

    Args:
        drawn: prompts that were drawn, and not asked yet.
    """
    asked, groups = list(state.asked.values()), [*state.ready, *state.dropped]
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


def load_under_way(state: UnderWay, folder: Path) -> pa.Table | None:
    """Read it into a `state` that is new; returns the prompts that were drawn, and not asked yet."""
    counts = json.loads((folder / _COUNTS).read_text(encoding="utf-8"))
    state.drawn, state.too_late = counts["drawn"], counts["too_late"]
    if (folder / _ASKED).exists():
        table = read_arrow(folder / _ASKED)
        prompts = table.drop_columns(["name", "number", "version"])
        for row, (uid, *facts) in enumerate(_facts(table)):
            state.asked[uid] = Asked(uid, *facts, prompts.slice(row, 1))
    if (folder / _GROUPS).exists():
        scored = _as_scored(read_arrow(folder / _TRAJECTORIES))
        prompt_uids = np.array(scored.table["prompt_uid"].to_pylist())
        groups = [
            Whole(uid, *facts, scored.take(np.flatnonzero(prompt_uids == uid)))
            for uid, *facts in _facts(read_arrow(folder / _GROUPS))
        ]
        state.ready, state.dropped = groups[: counts["ready"]], groups[counts["ready"] :]
    return read_arrow(folder / _DRAWN) if (folder / _DRAWN).exists() else None


def _beside(table: pa.Table, of: list[Asked] | list[Whole]) -> pa.Table:
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
