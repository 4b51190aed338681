"""Nim against oneself: the game's rules by hand, and in a slow test a run of it that is resumed."""

import itertools
import json
from pathlib import Path

import pytest

from examples.agents import nim_agent
from examples.agents.nim_task import write_task
from megarl.data.sessions import by_request, players
from megarl.data.trajectories import environment_notes, read_trajectories
from tests.fixtures.runs import megarl, steps


@pytest.mark.parametrize(
    ("stones", "words", "winner", "asked"),
    [
        (4, "112", "white", ["white 4", "black 3", "white 2"]),
        (4, "22", "black", ["white 4", "black 2"]),
        (2, "x", "black", ["white 2"]),  # no number
        (2, "12", "white", ["white 2", "black 1"]),  # more stones than there are
    ],
)
def test_the_rules_by_hand(monkeypatch, stones, words, winner, asked) -> None:
    moves, found = iter(words), []

    def ask(player, chat):
        found.append(f"{player} {chat[-1]['content'].removesuffix(' stones')}")
        assert [message["role"] for message in chat[:-1]] == ["user", "assistant"] * (len(chat) // 2)
        return {"role": "assistant", "content": next(moves)}

    monkeypatch.setattr(nim_agent, "ask", ask)
    result = nim_agent.play({"uid": "a/0", "extra_info": {"stones": stones}})
    loser = "black" if winner == "white" else "white"
    assert result["score"] == {winner: 1.0, loser: -1.0} and found == asked
    legal = int(words[-1]) <= int(asked[-1].split()[1]) if words[-1].isdigit() else False
    assert result["numbers"] == {"illegal": float(not legal), "moves": float(len(asked))}


def test_an_opponent_draws_its_moves_and_the_best_answer_wins(monkeypatch) -> None:
    """From 4 stones on white wins by leaving a multiple of 3, whatever black does; the same uids give the same games again."""
    told = []

    def ask(player, chat):
        assert player == "white"
        told.append(chat[-1]["content"])
        return {"role": "assistant", "content": str(int(chat[-1]["content"].split()[0]) % 3)}

    monkeypatch.setattr(nim_agent, "ask", ask)
    facts = {"stones": 8, "policy": "white"}
    for _ in range(2):
        games = [nim_agent.play({"uid": f"a/{number}", "extra_info": facts}) for number in range(20)]
        assert {game["score"]["white"] for game in games} == {1.0}
    assert told[: len(told) // 2] == told[len(told) // 2 :] and len(set(told)) > 3


def test_demonstrations_are_games_of_a_player(tmp_path: Path) -> None:
    write_task(tmp_path, num_sft=50, num_train=6)
    chats = [json.loads(line)["messages"] for line in (tmp_path / "data/sft.jsonl").read_text().splitlines()]
    stones = [[int(message["content"].split()[0]) for message in chat[::2]] for chat in chats]
    assert all(2 <= before - after <= 4 for own in stones for before, after in itertools.pairwise(own))
    assert {message["content"] for chat in chats for message in chat[1::2]} == {"1", "2"}
    rows = [
        json.loads(line)["extra_info"] for line in (tmp_path / "data/test.jsonl").read_text().splitlines()
    ]
    assert {(row["stones"], row["policy"]) for row in rows} == {
        (stones, player) for stones in range(4, 10) for player in nim_agent.PLAYERS
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_self_play_goes_on_with_its_baselines(tmp_path: Path) -> None:
    """SPIRAL by hand over all steps; a second run makes the last two again from the first one's checkpoint, with its in-flight games."""
    write_task(tmp_path, num_sft=400)
    data, first, second = tmp_path / "data", tmp_path / "first", tmp_path / "second"
    sft = ["sft", "recipe:agent_sft", f"data.train_files={data}/sft.jsonl", f"model.path={tmp_path}/model"]
    train = [
        "train", "recipe:selfplay_cpu", f"data.train_files={data}/train.jsonl", f"data.val_files={data}/test.jsonl",
        f"actor_rollout_ref.model.path={tmp_path}/sft/hf", "data.train_batch_size=4", "trainer.save_freq=1", "trainer.mode=partial_rollouts",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.val_kwargs.n=1", "trainer.test_freq=3",
        "trainer.total_training_steps=3",
    ]  # fmt: skip
    resumed = ["trainer.resume_mode=path", f"trainer.resume_from_path={first}/checkpoints/step-1"]
    commands = [
        [*sft, f"trainer.default_local_dir={tmp_path}/sft", "trainer.total_training_steps=40"],
        [*train, f"trainer.default_local_dir={first}"],
        [*train, f"trainer.default_local_dir={second}", *resumed],
    ]
    for command in commands:
        done = megarl(*command, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    baselines = dict.fromkeys(nim_agent.PLAYERS, 0.0)
    for step, out in ((1, first), (2, second), (3, second)):
        (logged,) = [entry for entry in steps(out) if entry["step"] == step]
        table = read_trajectories(out / f"rollouts/step-{step:06d}.parquet")
        assert len(by_request(table)) == 4 * 4
        for session in by_request(table).values():
            scores = dict(zip(players(session).tolist(), session["score"].to_pylist(), strict=True))
            moves = environment_notes(session)[0].numbers["moves"]
            assert sum(scores.values()) == 0 or (len(scores) == 1 and moves == 1)
            for player, score in scores.items():
                baselines[player] = 0.95 * baselines[player] + (1.0 - 0.95) * score
        for player, value in baselines.items():
            assert logged[f"critic/baseline/nim/{player}"] == pytest.approx(value, abs=1e-12)
            assert -1.0 <= logged[f"reward/{player}/mean"] <= 1.0
    assert {
        "val/player/white/score/mean",
        "val/player/black/score/mean",
        "val/reward/illegal",
    } <= logged.keys()
