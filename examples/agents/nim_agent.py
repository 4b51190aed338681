"""Nim, a game that the policy plays against itself.

White and black take one or two stones in turn, and who takes the last one wins. Both are the policy: they are the names of the model that
their requests call, and each sees its own chat alone. A reply that is no legal move loses. Where a row of the data has
`extra_info.policy`, that player alone is the policy, and the other one draws its moves.
"""

import json
import os
import random
import urllib.request
from typing import Any

PLAYERS = ("white", "black")


def ask(player: str, chat: list[dict[str, Any]]) -> dict[str, Any]:
    """The player's next message."""
    body = json.dumps({"model": player, "messages": chat, "max_tokens": 4}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def play(task: dict[str, Any]) -> dict[str, Any]:
    """A game: 1 for the winner, -1 for the loser, and whether the loser has made no legal move."""
    facts, drawn = task["extra_info"], random.Random(task["uid"])  # the same draws in every validation
    chats: dict[str, list[dict[str, Any]]] = {player: [] for player in PLAYERS}
    stones, moves, illegal = int(facts["stones"]), 0, False
    while stones and not illegal:
        player = PLAYERS[moves % 2]
        legal = [str(number) for number in (1, 2) if number <= stones]
        if facts.get("policy") in (None, player):
            chats[player].append({"role": "user", "content": f"{stones} stones"})
            chats[player].append(ask(player, chats[player]))
            move = chats[player][-1]["content"]
        else:
            move = drawn.choice(legal)
        illegal = move not in legal
        stones, moves = stones - (0 if illegal else int(move)), moves + 1
    winner = PLAYERS[moves % 2] if illegal else player
    scores = {player: 1.0 if player == winner else -1.0 for player in PLAYERS}
    return {"score": scores, "numbers": {"illegal": float(illegal), "moves": float(moves)}}
