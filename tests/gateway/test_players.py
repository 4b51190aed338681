"""Sessions in which requests belong to several players, over HTTP: their trajectories and their scores."""

import httpx
import pytest

from megarl.gateway.players import checked_scores, score_of

SIDES = ("white", "black")


@pytest.fixture
def game(serve):
    """A session's client, and ask(player, text)."""
    served = serve(["e4.", "e5."], players=SIDES)
    client = httpx.Client(base_url=served.url, headers={"x-api-key": served.session().token})

    def ask(player, text="Move."):
        body = {"model": player, "messages": [{"role": "user", "content": text}], "max_tokens": 20}
        answer = client.post("/v1/messages" if player == "black" else "/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    return client, ask


def trajectories(client):
    found = client.get("/session/trajectories").json()["trajectories"]
    return [(one["uid"], one["player"], one["score"]) for one in found]


def test_each_player_has_its_trajectories_and_its_score(game):
    client, ask = game
    ask("white")
    ask("black")
    assert trajectories(client) == [("s.0.black", "black", None), ("s.1.white", "white", None)]
    assert client.post("/session/score", json={"score": {"white": 1, "black": -1}}).status_code == 200
    assert trajectories(client) == [("s.0.black", "black", -1.0), ("s.1.white", "white", 1.0)]
    client.post("/session/score", json={"score": 0.5, "numbers": {"moves": 2}})  # for all players
    assert [score for *_, score in trajectories(client)] == [0.5, 0.5]


@pytest.mark.parametrize(
    "score, told",
    [
        ({"white": 1.0}, "no score of player black"),
        (
            {"white": 1.0, "blakc": -1.0},
            "no player 'blakc'; did you mean 'black'? the players are white, black",
        ),
        ({"white": 1.0, "black": True}, "player 'black' must be a finite number"),
        ({}, "no score of player white, black"),
    ],
)
def test_scores_that_are_refused(game, score, told):
    client, ask = game
    ask("white")
    ask("black")
    answer = client.post("/session/score", json={"score": score})
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "score"


def test_without_players_a_score_is_one_number(serve):
    served = serve(["e4."])
    client = httpx.Client(base_url=served.url, headers={"x-api-key": served.session().token})
    answer = client.post("/session/score", json={"score": {"policy": 1.0}})
    assert answer.status_code == 400 and "gateway.players" in answer.json()["error"]["message"]
    message = {"role": "user", "content": "Move."}
    client.post("/v1/chat/completions", json={"model": "policy", "messages": [message]})
    (one,) = client.get("/session/trajectories").json()["trajectories"]
    assert one["uid"] == "s.0" and "player" not in one


def test_a_player_that_has_asked_nothing_needs_no_score():
    assert checked_scores({"white": 1}, SIDES, ["white"]) == {"white": 1.0}
    assert checked_scores({"white": 1, "black": 0}, SIDES, ["white"]) == {"white": 1.0, "black": 0.0}
    assert score_of({"white": 1.0}, "black") is None and score_of(2.0, "black") == 2.0


def test_requests_of_no_player_have_no_score_of_their_own(game):
    client, ask = game
    ask("policy")
    ask("white")
    answer = client.post("/session/score", json={"score": {"white": 1}})
    assert answer.status_code == 400 and "called no player" in answer.json()["error"]["message"]
    assert client.post("/session/score", json={"score": 1}).status_code == 200
