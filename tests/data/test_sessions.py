"""Sessions in tables of trajectories: rows of one request are neighbours, and count once."""

import numpy as np
import pyarrow as pa

from megarl.data.sessions import by_request, first_rows, last_rows, num_sessions, request_of
from megarl.trainer.stages.rollouts import in_order


def table(*uids: str) -> pa.Table:
    return pa.table({"uid": [*uids], "row": [*range(len(uids))]})


def test_the_request_of_a_trajectory() -> None:
    assert request_of("gsm8k/v1.2:7@3/4.0") == request_of("gsm8k/v1.2:7@3/4.11") == "gsm8k/v1.2:7@3/4"
    assert request_of("v1.2/4") == "v1.2/4" and request_of("v1.2/greedy") == "v1.2/greedy"
    assert request_of("v1.2") == "v1.2"


def test_rows_of_sessions() -> None:
    rows = table("a/0.0", "a/0.1", "a/1", "a.1/1.0", "a.1/10.0")
    assert first_rows(rows).tolist() == [0, 2, 3, 4] and last_rows(rows).tolist() == [1, 2, 3, 4]
    assert num_sessions(rows) == 4
    found = {uid: own["row"].to_pylist() for uid, own in by_request(rows).items()}
    assert found == {"a/0": [0, 1], "a/1": [2], "a.1/1": [3], "a.1/10": [4]}
    alone = table("a/0", "a/1")
    assert np.array_equal(first_rows(alone), last_rows(alone)) and num_sessions(alone) == 2


def test_the_rows_of_a_session_stay_together_in_their_requests_order() -> None:
    came = table("b/0.0", "a/1.0", "a/1.1", "a/0.0", "a/0.1", "a/0.2")
    ordered = in_order(came, ["a/0", "a/1", "b/0"])
    assert ordered["uid"].to_pylist() == ["a/0.0", "a/0.1", "a/0.2", "a/1.0", "a/1.1", "b/0.0"]
    assert ordered["row"].to_pylist() == [3, 4, 5, 1, 2, 0]
