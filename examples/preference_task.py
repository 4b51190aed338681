"""A preference task, made up from a seed: who has what in the stories of the demo's word problems, told in the tone of the
question.

"Story: Tom has 3 pens and buys 4. Who has what, please?" -> "Sure, Tom has pens."; without the "please" -> "So Tom has
pens." A rule (`judge`) tells how good an answer is by three qualities. Models never see it: they learn from demonstrations
of mixed quality, then from answers that it has ranked, some of them wrongly. So a rule that had no part in training can
measure the gain of each stage.

The plain texts tell the same stories, ask whether names and things occur in them ("Ann? No. pens? Yes."), and end with who
has what: the knowledge that a model may have before it learns to answer people. Without the questions a tiny reward model takes long to
find out that an answer's words should be those of the story. Names and things have a space before them wherever they
occur, and so are the same token in a story and in an answer: a tiny model learns to copy them within a hundred steps, while a
word that is one token at the start of a text and another one elsewhere takes it many times as long.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from examples.arithmetic import NAMES, THINGS, Problem, make_problems
from megarl.data.files import write_parquet
from megarl.data.gsm8k import WORD_PROBLEM_SCHEMA, word_problem

DATA_SOURCE = "megarl/who-has-what"
OPENINGS = {True: "Sure,", False: "So"}  # by politeness
QUALITIES = ("name", "thing", "tone")
QUESTIONS = 4  # of a plain text
RANKED = 4  # answers of a ranking
MISSING = 0.25  # of the answers without the right thing, the part that has none; the others have a wrong one

TEXT_SCHEMA = pa.schema([("text", pa.string())])
PAIR_SCHEMA = pa.schema(
    [
        ("prompt", WORD_PROBLEM_SCHEMA.field("prompt").type),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
    ]
)
RANKING_SCHEMA = pa.schema(
    [
        ("prompt", WORD_PROBLEM_SCHEMA.field("prompt").type),
        ("responses", pa.list_(pa.string())),
        ("ranks", pa.list_(pa.int64())),  # 1 is the best; equal ones are equally good
    ]
)

_ANSWER = re.compile(r"(Sure,|So) ([A-Z][a-z]+)(?: has ([a-z]+))?\.")


@dataclass(frozen=True)
class Flaws:
    """How often an answer lacks a quality, and how often words are out of place in it: probabilities, independent of each
    other."""

    name: float
    thing: float
    tone: float
    form: float = 0.0


# Without answers of a wrong form the reward model likes forms that it has never seen: `Sure, Tom has cups cups.`
COMPARED_FLAWS = Flaws(name=0.4, thing=0.5, tone=0.3, form=0.15)


@dataclass(frozen=True)
class Request:
    """A question about a story; a polite one wants a polite answer."""

    problem: Problem
    polite: bool

    @property
    def prompt(self) -> str:
        return f"{self.story} Who has what{', please' if self.polite else ''}?"

    @property
    def story(self) -> str:
        return f"Story: {self.problem.question}"

    @property
    def name(self) -> str:
        return next(name for name in NAMES if name in self.problem.question)

    @property
    def thing(self) -> str:
        return next(thing for thing in THINGS if f" {thing}" in self.problem.question)

    @property
    def ideal(self) -> str:
        """The only answer that has all qualities."""
        return _answer(self.name, self.thing, self.polite)

    def text(self, generator: np.random.Generator) -> str:
        """The story with questions about it, half of which are to be answered with no, and who has what."""
        questions = [self._yes_or_no(generator) for _ in range(QUESTIONS)]
        return f"{self.story} {' '.join(questions)} So {self.name} has {self.thing}."

    def flawed_answer(self, flaws: Flaws, generator: np.random.Generator) -> str:
        """An answer that lacks each quality as often as `flaws` says."""
        wrong = {name: generator.random() < getattr(flaws, name) for name in (*QUALITIES, "form")}
        name: str = self.name
        thing: str | None = self.thing
        if wrong["name"]:
            name = _another(NAMES, name, generator)
        if wrong["thing"]:
            thing = None if generator.random() < MISSING else _another(THINGS, self.thing, generator)
        answer = _answer(name, thing, self.polite != wrong["tone"])
        return _with_stray_words(answer, generator) if wrong["form"] else answer

    def _yes_or_no(self, generator: np.random.Generator) -> str:
        words, word = (NAMES, self.name) if generator.random() < 0.5 else (THINGS, self.thing)
        if generator.random() < 0.5:
            return f"{word}? Yes."
        return f"{_another(words, word, generator)}? No."


def judge(answer: str, ideal: str) -> dict[str, float]:
    """The hidden rule: each quality 0 or 1, `score`: their mean, `perfect`: whether it has all of them.

    name and thing: they are those of the story; tone: polite if the ideal answer is. An answer of another form than
    `Sure, Tom has pens.`, `So Tom has pens.`, `Sure, Tom.` or `So Tom.` has none.

    Args:
        ideal: of a Request.
    """
    found, best = _ANSWER.fullmatch(answer.strip()), _ANSWER.fullmatch(ideal)
    assert best is not None, ideal
    if found is None:
        return dict.fromkeys((*QUALITIES, "score", "perfect"), 0.0)
    values = {
        "name": float(found[2] == best[2]),
        "thing": float(found[3] == best[3]),
        "tone": float(found[1] == best[1]),
    }
    return {**values, "score": sum(values.values()) / len(values), "perfect": float(all(values.values()))}


def make_requests(num: int, seed: int, max_operand: int) -> list[Request]:
    """Draw `num` requests with different problems.

    Raises:
        ValueError: more than there are (see `make_problems`).
    """
    problems = make_problems(num, seed=seed, max_operand=max_operand)
    polite = np.random.default_rng((seed, 2)).random(num) < 0.5
    return [Request(problem, bool(asks)) for problem, asks in zip(problems, polite, strict=True)]


def write_preference_task(
    out_dir: str | Path,
    *,
    num_texts: int,
    num_sft: int,
    num_rankings: int,
    num_train: int,
    num_test: int,
    seed: int,
    max_operand: int = 6,
    teacher_errors: float = 0.3,
    label_noise: float = 0.1,
) -> dict[str, Path]:
    """Write the files of the three stages; no problem occurs twice in them.

    Files: texts.parquet (`TEXT_SCHEMA`); sft.parquet, train.parquet and test.parquet (GSM8K's schema, the ground truth
    is the ideal answer, of sft.parquet `extra_info.answer` the demonstration); rankings.parquet (`RANKING_SCHEMA`) and
    pairs_test.parquet (`PAIR_SCHEMA`).

    Args:
        num_test: requests of test.parquet, and pairs of pairs_test.parquet.
        teacher_errors: the part of the demonstrations, from 0 to 1, that lack a quality: for each of the three, independent of
            the others.
        label_noise: the part of the rankings, from 0 to 1, in which the best answer and another one of lower rank have
            changed places. The labels of pairs_test.parquet are right.

    Returns:
        File name without ending -> file.

    Raises:
        ValueError: see `make_requests`; a part outside [0, 1].
    """
    for name, part in (("teacher_errors", teacher_errors), ("label_noise", label_noise)):
        if not 0 <= part <= 1:
            raise ValueError(f"{name} must be from 0 to 1, found {part}")
    # One draw of requests is divided among the files, so that no problem occurs twice.
    flaws = Flaws(name=teacher_errors, thing=teacher_errors, tone=teacher_errors)
    sizes = [num_texts, num_sft, num_rankings, num_train, num_test, num_test]
    requests, generator = iter(make_requests(sum(sizes), seed, max_operand)), np.random.default_rng((seed, 1))
    texts, sft, rankings, train, test, pairs = (list(itertools.islice(requests, size)) for size in sizes)
    rows: dict[str, tuple[list[dict[str, Any]], pa.Schema]] = {
        "texts": ([{"text": request.text(generator)} for request in texts], TEXT_SCHEMA),
        "sft": (
            [
                _row(request, "sft", index, request.flawed_answer(flaws, generator))
                for index, request in enumerate(sft)
            ],
            WORD_PROBLEM_SCHEMA,
        ),
        "rankings": ([_ranking(request, label_noise, generator) for request in rankings], RANKING_SCHEMA),
        "train": (
            [_row(request, "train", index, request.ideal) for index, request in enumerate(train)],
            WORD_PROBLEM_SCHEMA,
        ),
        "test": (
            [_row(request, "test", index, request.ideal) for index, request in enumerate(test)],
            WORD_PROBLEM_SCHEMA,
        ),
        "pairs_test": ([_pair(request, generator) for request in pairs], PAIR_SCHEMA),
    }
    return {
        name: write_parquet(pa.Table.from_pylist(part, schema=schema), Path(out_dir) / f"{name}.parquet")
        for name, (part, schema) in rows.items()
    }


def preference_texts(num: int = 2000, *, max_operand: int = 6) -> list[str]:
    """Plain texts, prompts and answers, from which a tokenizer for this task can be trained."""
    requests = make_requests(num, 0, max_operand)
    generator = np.random.default_rng((0, 3))
    return [text for request in requests for text in (request.text(generator), request.prompt, request.ideal)]


def _row(request: Request, split: str, index: int, answer: str) -> dict[str, Any]:
    question = request.problem.question
    return word_problem(DATA_SOURCE, request.prompt, request.ideal, split, index, question, answer)


def _ranking(request: Request, noise: float, generator: np.random.Generator) -> dict[str, Any]:
    """Different answers, not all equally good, with the rank that the rule gives each (but for the noise)."""
    answers = _answers(request, RANKED, generator)
    scores = [judge(answer, request.ideal)["score"] for answer in answers]
    levels = sorted(set(scores), reverse=True)
    ranks = [levels.index(score) + 1 for score in scores]
    if generator.random() < noise:
        best = ranks.index(1)
        other = int(generator.choice([place for place, rank in enumerate(ranks) if rank > 1]))
        ranks[best], ranks[other] = ranks[other], ranks[best]
    return {"prompt": _chat(request), "responses": answers, "ranks": ranks}


def _pair(request: Request, generator: np.random.Generator) -> dict[str, Any]:
    """Two answers of different quality."""
    answers = _answers(request, 2, generator)
    better = int(np.argmax([judge(answer, request.ideal)["score"] for answer in answers]))
    return {"prompt": _chat(request), "chosen": answers[better], "rejected": answers[1 - better]}


def _answers(request: Request, num: int, generator: np.random.Generator) -> list[str]:
    """`num` different answers, not all of which the rule finds equally good."""
    while True:
        answers = [request.flawed_answer(COMPARED_FLAWS, generator) for _ in range(num)]
        scores = {judge(answer, request.ideal)["score"] for answer in answers}
        if len(set(answers)) == num and len(scores) > 1:
            return answers


def _chat(request: Request) -> list[dict[str, str]]:
    return [{"role": "user", "content": request.prompt}]


def _answer(name: str, thing: str | None, polite: bool) -> str:
    return f"{OPENINGS[polite]} {name}{f' has {thing}' if thing is not None else ''}."


def _another(words: Sequence[str], word: str, generator: np.random.Generator) -> str:
    others = [other for other in words if other != word]
    return others[generator.integers(len(others))]


def _with_stray_words(answer: str, generator: np.random.Generator) -> str:
    """One to three words of other answers, anywhere but most often at the end."""
    words = answer.removesuffix(".").split()
    known = (*THINGS, *NAMES, *OPENINGS.values(), "has")
    for _ in range(int(generator.integers(1, 4))):
        place = len(words) if generator.random() < 0.6 else int(generator.integers(len(words)))
        words.insert(place, known[generator.integers(len(known))])
    return f"{' '.join(words)}."
