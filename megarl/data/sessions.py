"""Sessions: what an agent's requests have made of one request of the run, as one or several trajectories.

An agent may ask the policy in branches, and each path of its session is a trajectory (megarl/gateway/tree.py): rows "<request's uid>.0",
"<request's uid>.1", ... in the order of their ends, neighbours in every table. Every other row is a session of its own.

Guarantees, each asserted by a test:

- the rows of a session are neighbours, in their order, wherever a table's rows are put in order;
- a session has one score, that of its last trajectory, and counts once wherever sessions are compared or counted.
"""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa

from megarl.data.trajectories import replace_column, take


def request_of(uid: str) -> str:
    """The uid of the request that a trajectory belongs to."""
    head, slash, sample = uid.rpartition("/")
    return f"{head}/{sample.partition('.')[0]}" if slash else uid


def first_rows(table: pa.Table) -> np.ndarray:
    """The number of each session's first row: int64 [sessions]."""
    requests = [request_of(uid) for uid in table["uid"].to_pylist()]
    return np.array(
        [row for row, one in enumerate(requests) if row == 0 or one != requests[row - 1]], dtype=np.int64
    )


def last_rows(table: pa.Table) -> np.ndarray:
    """The number of each session's last row: int64 [sessions]."""
    return np.append(first_rows(table)[1:], table.num_rows) - 1


def num_sessions(table: pa.Table) -> int:
    return len(first_rows(table))


def by_request(table: pa.Table) -> dict[str, pa.Table]:
    """The rows of each session, by the uid of its request."""
    bounds = np.append(first_rows(table), table.num_rows).tolist()
    uids = table["uid"].to_pylist()
    return {
        request_of(uids[start]): table.slice(start, end - start) for start, end in itertools.pairwise(bounds)
    }


def requested(table: pa.Table, rows: list[int], uids: list[str]) -> pa.Table:
    """Rows of a table of requests, once for each trajectory, under the trajectories' uids."""
    return replace_column(take(table, rows), "uid", pa.array(uids, pa.string()))
