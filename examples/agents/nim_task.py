"""Nim for a tiny model: it knows how a move is written, and plays well half of the time.

    python -m examples.agents.nim_task --out outputs/nim

writes a random model, demonstrations for `megarl sft`, and games for `megarl train` (examples/agents/nim_agent.py):

    user: 5 stones
    assistant: 1
    user: 2 stones
    assistant: 2

Who leaves a multiple of three wins. Half of the moves of demonstrations do so where it is possible, and the others are drawn, also where there
is one stone alone. In training the policy plays both sides. In data/test.jsonl it plays one of them, and the other one draws legal moves.
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.agents.nim_agent import PLAYERS
from examples.tiny_model import make_tiny_model

FEWEST, MOST = 4, 9  # stones of a game


def demonstration(generator: random.Random, skill: float = 0.5) -> list[dict[str, str]]:
    """A player's chat of a game; `skill`: the share of its moves that are good ones where there are some. All others are drawn."""
    stones, chat = generator.randint(1, MOST), list[dict[str, str]]()
    while stones > 0:
        drawn = generator.choice((1, 2))
        move = stones % 3 or drawn if generator.random() < skill else drawn
        chat += [
            {"role": "user", "content": f"{stones} stones"},
            {"role": "assistant", "content": str(move)},
        ]
        stones -= move + generator.choice((1, 2))
    return chat


def write_task(
    folder: Path, *, num_sft: int = 2000, num_train: int = 240, hidden_size: int = 64, seed: int = 1
) -> None:
    """Write model/, data/sft.jsonl, data/train.jsonl and data/test.jsonl."""
    generator, games = random.Random(seed), range(FEWEST, MOST + 1)
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    _write(data / "sft.jsonl", ({"messages": demonstration(generator)} for _ in range(num_sft)))
    _write(data / "train.jsonl", (_row(games[number % len(games)]) for number in range(num_train)))
    _write(data / "test.jsonl", (_row(stones, policy=player) for stones in games for player in PLAYERS))
    make_tiny_model(
        folder / "model",
        [f"{stones} stones" for stones in range(1, MOST + 1)],
        hidden_size=hidden_size,
        ffn_hidden_size=3 * hidden_size,
        num_layers=2,
        seed=seed,
    )


def _row(stones: int, **facts: str) -> dict[str, Any]:
    return {"data_source": "nim", "prompt": f"{stones} stones", "extra_info": {"stones": stones, **facts}}


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as output:
        output.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the task")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_task(options.out, seed=options.seed)
