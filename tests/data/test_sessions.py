"""Sessions in tables of trajectories: rows of one request are neighbours, and count once."""

import numpy as np
import pyarrow as pa
import pytest

from megarl.data.sessions import (
    by_request,
    first_rows,
    first_rows_of_players,
    group_ids,
    last_rows,
    last_rows_of_players,
    num_sessions,
    player_of,
    players,
    request_of,
    trajectory_uid,
)
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


@pytest.mark.parametrize("player", ["white", "openai/gpt-4o.1", "a b.c%2F", "schwarz \u2656", ""])
def test_a_uid_says_the_player(player: str) -> None:
    uid = trajectory_uid("v1.2:7@3/4", 11, player)
    assert (request_of(uid), player_of(uid)) == ("v1.2:7@3/4", player)
    assert uid.isascii() and uid.count("/") == 1
    alone = trajectory_uid("v1.2/4", 0)
    assert (alone, player_of(alone), player_of("v1.2/4"), player_of("v1.2.x")) == (
        "v1.2/4.0",
        None,
        None,
        None,
    )


def test_players_are_compared_and_their_sessions_counted() -> None:
    rows = table("a/0.0.b", "a/0.1.b", "a/0.2.w", "a/1.0.w", "a/2.0", "a/3", "a/4.0.w")
    rows = rows.append_column("prompt_uid", pa.array(["a"] * rows.num_rows))
    assert num_sessions(rows) == 5 and last_rows(rows).tolist() == [2, 3, 4, 5, 6]
    assert first_rows_of_players(rows).tolist() == [0, 2, 3, 4, 5, 6]
    assert last_rows_of_players(rows).tolist() == [1, 2, 3, 4, 5, 6]
    assert players(rows).tolist() == ["b", "b", "w", "w", "", "", "w"]
    of_white, of_black = group_ids(rows)[2], group_ids(rows)[0]
    assert group_ids(rows) == [of_black, of_black, of_white, of_white, "a", "a", of_white]
    assert len({of_white, of_black, "a"}) == 3
    assert by_request(rows)["a/0"]["row"].to_pylist() == [0, 1, 2]
    assert last_rows(rows.slice(0, 0)).tolist() == last_rows_of_players(rows.slice(0, 0)).tolist() == []
