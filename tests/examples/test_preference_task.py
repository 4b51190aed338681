"""The preference task: its rule, its files, and what they hide."""

import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from examples import preference_task as task
from examples.arithmetic import NAMES, THINGS, Problem
from examples.tiny_model import train_tokenizer

SIZES = {"num_texts": 40, "num_sft": 1500, "num_rankings": 1500, "num_train": 60, "num_test": 50}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    files = task.write_preference_task(
        tmp_path_factory.mktemp("task"), **SIZES, seed=3, teacher_errors=0.4, label_noise=0.2
    )
    return {name: pq.read_table(path).to_pylist() for name, path in files.items()}


@pytest.mark.parametrize(
    "answer, name, thing, tone",
    [
        ("Sure, Tom has pens.", 1, 1, 1),
        (" Sure, Tom has pens.\n", 1, 1, 1),
        ("So Tom has pens.", 1, 1, 0),
        ("Sure, Ann has pens.", 0, 1, 1),
        ("Sure, Tom.", 1, 0, 1),
        ("Sure, Tom has cups.", 1, 0, 1),
        ("So Ann.", 0, 0, 0),
        ("Sure, Tom has pens pens.", 0, 0, 0),
        ("Sure, Tom Tom has pens.", 0, 0, 0),
        ("Sure, Tom has pens", 0, 0, 0),
        ("Tom has pens.", 0, 0, 0),
        ("pens", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_the_rule(answer: str, name: int, thing: int, tone: int) -> None:
    found = task.judge(answer, "Sure, Tom has pens.")
    assert found == {
        "name": name,
        "thing": thing,
        "tone": tone,
        "score": pytest.approx((name + thing + tone) / 3),
        "perfect": float(name and thing and tone),
    }


def test_a_plain_request_wants_a_plain_answer() -> None:
    assert task.judge("So Tom has pens.", "So Tom has pens.")["perfect"] == 1
    assert task.judge("Sure, Tom has pens.", "So Tom has pens.")["tone"] == 0


def test_a_request_and_what_it_wants() -> None:
    problem = Problem("sub", 5, 2, "With 5 eggs, Zoe sells 2.")
    polite, plain = (task.Request(problem, polite) for polite in (True, False))
    assert polite.prompt == "Story: With 5 eggs, Zoe sells 2. Who has what, please?"
    assert plain.prompt == "Story: With 5 eggs, Zoe sells 2. Who has what?"
    assert (polite.ideal, plain.ideal) == ("Sure, Zoe has eggs.", "So Zoe has eggs.")


def test_a_plain_text_asks_and_tells() -> None:
    request = task.Request(Problem("sub", 5, 2, "With 5 eggs, Zoe sells 2."), polite=True)
    generator, answers = np.random.default_rng(1), []
    for _ in range(500):
        text = request.text(generator)
        found = re.fullmatch(r"Story: With 5 eggs, Zoe sells 2\. (.*) So Zoe has eggs\.", text)
        answers += re.findall(r"(\w+)\? (Yes|No)\.", found[1])
    assert len(answers) == 500 * task.QUESTIONS
    assert all((word in ("Zoe", "eggs")) == (answer == "Yes") for word, answer in answers)
    assert {word for word, _ in answers} == {*NAMES, *THINGS}
    # 0.04 is more than three standard deviations of a mean of 2000
    assert sum(answer == "Yes" for _, answer in answers) / len(answers) == pytest.approx(0.5, abs=0.04)
    assert sum(word in NAMES for word, _ in answers) / len(answers) == pytest.approx(0.5, abs=0.04)


def question(prompt: str) -> str:
    return prompt.partition(" Who has")[0]


def test_no_problem_occurs_twice(rows) -> None:
    assert {name: len(part) for name, part in rows.items()} == {
        "texts": 40, "sft": 1500, "rankings": 1500, "train": 60, "test": 50, "pairs_test": 50,
    }  # fmt: skip
    questions = [re.match(r".*?\d\.", row["text"])[0] for row in rows["texts"]]
    for name in ("sft", "rankings", "train", "test", "pairs_test"):
        questions += [question(row["prompt"][0]["content"]) for row in rows[name]]
    assert len(questions) == len(set(questions)) == sum(len(part) for part in rows.values())


def test_demonstrations_lack_qualities_as_often_as_asked_for(rows) -> None:
    def mean(split: str, quality: str) -> float:
        judged = [
            task.judge(row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
            for row in rows[split]
        ]
        return sum(found[quality] for found in judged) / len(judged)

    # 0.04 is three standard deviations of a mean of 1500
    for quality in task.QUALITIES:
        assert mean("sft", quality) == pytest.approx(0.6, abs=0.04)
    assert mean("sft", "perfect") == pytest.approx(0.6**3, abs=0.04)
    assert mean("test", "perfect") == mean("train", "perfect") == 1


def ideal_of(row: dict) -> str:
    """The ideal answer, from nothing but the prompt's words."""
    words = row["prompt"][0]["content"].replace(",", "").split()
    name = next(word for word in words if word in NAMES)
    thing = next(word for word in words if word in THINGS)
    return f"{'Sure,' if 'please?' in words else 'So'} {name} has {thing}."


def test_rankings_follow_the_rule_but_for_the_noise(rows) -> None:
    right = 0
    for row in rows["rankings"]:
        assert len(set(row["responses"])) == 4
        scores = [task.judge(answer, ideal_of(row))["score"] for answer in row["responses"]]
        assert len(set(scores)) > 1 and min(row["ranks"]) == 1
        right += all(
            (row["ranks"][a] < row["ranks"][b]) == (scores[a] > scores[b])
            and (row["ranks"][a] == row["ranks"][b]) == (scores[a] == scores[b])
            for a, b in combinations(range(4), 2)
        )
    assert right / 1500 == pytest.approx(0.8, abs=0.035)
    for row in rows["pairs_test"]:
        chosen, rejected = (task.judge(row[name], ideal_of(row))["score"] for name in ("chosen", "rejected"))
        assert chosen > rejected


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    sizes = dict.fromkeys(SIZES, 5)
    first, again, other = (
        task.write_preference_task(tmp_path / name, **sizes, seed=seed)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    for name, path in first.items():
        assert path.read_bytes() == again[name].read_bytes() != other[name].read_bytes()


def test_a_word_is_the_same_token_in_a_story_and_in_an_answer() -> None:
    """Each copied word is one token, and the same one in both places; otherwise a tiny model does not learn to copy it in time."""
    tokenizer = train_tokenizer(task.preference_texts(), 512)
    for request in task.make_requests(200, 5, 6):
        pieces = tokenizer.tokenize(request.ideal)
        assert len(pieces) == (6 if request.polite else 5)
        copied = {token for token in pieces if token[1:] in (request.name, request.thing)}
        assert len(copied) == 2
        assert copied < set(tokenizer.tokenize(request.prompt))


def test_texts_for_a_tokenizer_have_all_words() -> None:
    words = Counter(word for text in task.preference_texts(500) for word in text.split())
    assert {"Sure,", "please?", "So", "Yes.", "No.", *NAMES, *THINGS} <= set(words)


@pytest.mark.parametrize("name", ["teacher_errors", "label_noise"])
def test_parts_outside_of_0_to_1_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be from 0 to 1, found 1.5"):
        task.write_preference_task(tmp_path, **SIZES, seed=1, **{name: 1.5})


def test_more_problems_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="different problems asked for"):
        task.write_preference_task(tmp_path, **{**SIZES, "num_texts": 30_000}, seed=1)
