"""Sessions: the trajectories, one or several, that an agent's requests have made of one request of the run.

An agent may ask the policy in branches, and each path of its session is a trajectory (megarl/gateway/tree.py): rows "<request's uid>.0",
"<request's uid>.1", ... in the order of their ends, neighbours in every table. Every other row is a session of its own.

In self-play a session has several players, all of them the policy: its rows are "<request's uid>.0.<player>", ..., player by player. Groups,
mini-batches and pass@k count sessions. A player of a session is compared with the same player of the prompt's other
sessions.

Guarantees, each asserted by a test:

- the rows of a session are neighbours, in their order, wherever a table's rows are put in order, and so are those of each of its players;
- a session without players has one score, that of its last trajectory; with players each of these has one. It counts once wherever sessions
  are counted;
- any name of a player comes back from a uid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa

from megarl.data.trajectories import replace_column, take


def trajectory_uid(request: str, number: int, player: str | None = None) -> str:
    """The uid of a session's trajectory; `player`: None in a session without players."""
    return f"{request}.{number}" if player is None else f"{request}.{number}.{quote(player, safe='')}"


def request_of(uid: str) -> str:
    """The uid of the request that a trajectory belongs to."""
    head, slash, sample = uid.rpartition("/")
    return f"{head}/{sample.partition('.')[0]}" if slash else uid


def player_of(uid: str) -> str | None:
    """The player that a trajectory belongs to; None: its session has no players."""
    _, slash, sample = uid.rpartition("/")
    name = sample.split(".", 2)[2:] if slash else ()
    return unquote(name[0]) if name else None


def first_rows(table: pa.Table) -> np.ndarray:
    """The number of each session's first row: int64 [sessions]."""
    return _starts([request_of(uid) for uid in table["uid"].to_pylist()])


def last_rows(table: pa.Table) -> np.ndarray:
    """The number of each session's last row: int64 [sessions]."""
    return _ends(first_rows(table), table.num_rows)


def first_rows_of_players(table: pa.Table) -> np.ndarray:
    """The number of the first row of each player of each session, a session without players counting as one: int64 [players]."""
    return _starts([(request_of(uid), player_of(uid)) for uid in table["uid"].to_pylist()])


def last_rows_of_players(table: pa.Table) -> np.ndarray:
    """The number of the last row of each player of each session: int64 [players]."""
    return _ends(first_rows_of_players(table), table.num_rows)


def _starts(keys: Sequence[object]) -> np.ndarray:
    """The rows whose key differs from the key of the row before."""
    return np.array([row for row, key in enumerate(keys) if row == 0 or key != keys[row - 1]], dtype=np.int64)


def _ends(first: np.ndarray, num_rows: int) -> np.ndarray:
    return np.append(first, num_rows)[1:] - 1


def players(table: pa.Table) -> np.ndarray:
    """The player of each row, "" without one: str [rows]."""
    return np.array([player_of(uid) or "" for uid in table["uid"].to_pylist()], dtype=str)


def group_ids(table: pa.Table) -> list[str]:
    """The group in which each row is compared: its prompt or, in sessions with players, its prompt and player."""
    found = zip(table["prompt_uid"].to_pylist(), players(table).tolist(), strict=True)
    return [f"{prompt}\n{player}" if player else prompt for prompt, player in found]


def num_sessions(table: pa.Table) -> int:
    return len(first_rows(table))


def rows_by_request(table: pa.Table) -> dict[str, range]:
    """The row numbers of each session, by the uid of its request."""
    bounds = np.append(first_rows(table), table.num_rows).tolist()
    uids = table["uid"].to_pylist()
    return {request_of(uids[start]): range(start, end) for start, end in itertools.pairwise(bounds)}


def by_request(table: pa.Table) -> dict[str, pa.Table]:
    """The rows of each session, by the uid of its request."""
    return {uid: table.slice(rows.start, len(rows)) for uid, rows in rows_by_request(table).items()}


def requested(table: pa.Table, rows: list[int], uids: list[str]) -> pa.Table:
    """Rows of a table of requests, once for each trajectory, under the trajectories' uids."""
    return replace_column(take(table, rows), "uid", pa.array(uids, pa.string()))
