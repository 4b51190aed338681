"""The demo's task: arithmetic word problems in GSM8K's Parquet schema, made up from a seed.

"Tom has 3 pens and buys 4. Answer after ####" -> "#### 7". Prompts are short, so that a model of a million
parameters learns them within minutes. All texts are distinct: no problem of the test split occurs in the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.data.files import write_parquet
from megarl.data.gsm8k import WORD_PROBLEM_SCHEMA, word_problem

DATA_SOURCE = "megarl/arithmetic"
ARITHMETIC_INSTRUCTION = "Answer after ####"

STORIES = ("{name} has {a} {thing} and {verb} {b}.", "With {a} {thing}, {name} {verb} {b}.")
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Sue", "Jim", "Zoe")
THINGS = ("pens", "cups", "hats", "keys", "eggs", "toys", "nuts", "bags")
VERBS = {"add": ("buys", "finds", "gets"), "sub": ("loses", "sells", "drops")}
SIGNS = {"add": "+", "sub": "-"}


@dataclass(frozen=True)
class Problem:
    """One word problem. `a` and `b` are 1 to max_operand; of a difference, a >= b."""

    op: str
    a: int
    b: int
    question: str  # without instruction

    @property
    def result(self) -> int:
        return self.a + self.b if self.op == "add" else self.a - self.b

    @property
    def prompt(self) -> str:
        return f"{self.question} {ARITHMETIC_INSTRUCTION}"

    def answer(self, show_work: bool, error: int = 0) -> str:
        """The teacher's text; `error` is added to the result by mistake."""
        result = self.result + error
        work = f"{self.a} {SIGNS[self.op]} {self.b} = {result} " if show_work else ""
        return f"{work}#### {result}"

    def tool_chat(self, wrong: bool) -> list[dict[str, str]]:
        """The teacher's chat with a calculator that answers `<<3+4>>` (the environment of this name).

        Args:
            wrong: the teacher adds where it should subtract, or subtracts, and believes the calculator.
        """
        adds = (self.op == "add") != wrong
        result = self.a + self.b if adds else self.a - self.b
        call = f"<<{self.a}{SIGNS['add' if adds else 'sub']}{self.b}>>"
        return [
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": call},
            {"role": "tool", "content": str(result)},
            {"role": "assistant", "content": f"#### {result}"},
        ]


def make_problems(
    num: int, *, seed: int, max_operand: int = 9, ops: Sequence[str] = ("add", "sub")
) -> list[Problem]:
    """Draw distinct problems, uniformly from all that there are.

    Raises:
        ValueError: an unknown operation, or more problems than there are.
    """
    unknown = [op for op in ops if op not in VERBS]
    if unknown or not ops or len(set(ops)) != len(ops):
        raise ValueError(f"ops must be some of {', '.join(VERBS)}, found {', '.join(ops) or 'none'}")
    if max_operand < 1:
        raise ValueError(f"max_operand must be at least 1, found {max_operand}")
    counts = [num_problems(op, max_operand) for op in ops]
    if num > sum(counts):
        raise ValueError(
            f"{num} different problems asked for, there are {sum(counts)} with max_operand {max_operand} "
            f"and ops {', '.join(ops)}: raise max_operand or ask for fewer"
        )
    numbers = np.random.default_rng(seed).choice(sum(counts), size=num, replace=False)
    problems = []
    for number in numbers.tolist():
        for op, count in zip(ops, counts, strict=True):
            if number < count:
                problems.append(_problem(op, number, max_operand))
                break
            number -= count
    return problems


def num_problems(op: str, max_operand: int) -> int:
    """How many different problems of an operation there are."""
    pairs = max_operand**2 if op == "add" else max_operand * (max_operand + 1) // 2
    return pairs * len(STORIES) * len(VERBS[op]) * len(NAMES) * len(THINGS)


def _problem(op: str, number: int, max_operand: int) -> Problem:
    """The problem of a number below num_problems, which is read as digits of mixed radix."""
    number, story = divmod(number, len(STORIES))
    number, verb = divmod(number, len(VERBS[op]))
    number, name = divmod(number, len(NAMES))
    pair, thing = divmod(number, len(THINGS))
    if op == "add":
        a, b = divmod(pair, max_operand)
    else:
        # pairs with a >= b in the order (0,0) (1,0) (1,1) (2,0) ...: row a begins at a (a + 1) / 2
        a = (math.isqrt(8 * pair + 1) - 1) // 2
        b = pair - a * (a + 1) // 2
    a, b = a + 1, b + 1
    text = STORIES[story].format(a=a, b=b, name=NAMES[name], thing=THINGS[thing], verb=VERBS[op][verb])
    return Problem(op, a, b, text)


def write_arithmetic(
    out_dir: str | Path,
    num_sft: int,
    num_train: int,
    num_test: int,
    seed: int,
    *,
    max_operand: int = 9,
    ops: Sequence[str] = ("add", "sub"),
    show_work: bool = False,
    teacher_errors: float = 0.0,
    calculator: bool = False,
) -> dict[str, Path]:
    """Write sft.parquet, train.parquet and test.parquet (all in GSM8K's schema, no problem twice in them).

    Args:
        num_sft: rows for supervised fine-tuning, whose responses are `extra_info.answer`.
        show_work: let the teacher's answers hold the calculation ("3 + 4 = 7 #### 7") before the result.
        teacher_errors: the part of the sft rows, from 0 to 1, whose answer is one too many: a model that learns
            from such a teacher learns the numbers and the mistake, which reinforcement can then correct.
            `ground_truth` is always right.
        calculator: give the sft rows a column `messages`, too: chats in which the teacher uses a calculator, and whose
            mistake is the wrong sign.

    Returns:
        Split ("sft", "train", "test") -> file.

    Raises:
        ValueError: see `make_problems`; teacher_errors outside [0, 1].
    """
    if not 0 <= teacher_errors <= 1:
        raise ValueError(f"teacher_errors must be from 0 to 1, found {teacher_errors}")
    sizes = {"sft": num_sft, "train": num_train, "test": num_test}
    problems = make_problems(sum(sizes.values()), seed=seed, max_operand=max_operand, ops=ops)
    assert len({problem.question for problem in problems}) == len(problems), "a problem occurs twice"
    wrong = np.random.default_rng((seed, 1)).random(num_sft) < teacher_errors
    paths, start = {}, 0
    for split, size in sizes.items():
        rows = [
            _row(problem, split, index, show_work, int(split == "sft" and wrong[index]))
            for index, problem in enumerate(problems[start : start + size])
        ]
        table = pa.Table.from_pylist(rows, schema=WORD_PROBLEM_SCHEMA)
        if calculator and split == "sft":
            part = problems[start : start + size]
            chats = [problem.tool_chat(bool(error)) for problem, error in zip(part, wrong, strict=True)]
            table = table.append_column("messages", pa.array(chats, WORD_PROBLEM_SCHEMA.field("prompt").type))
        paths[split] = write_parquet(table, Path(out_dir) / f"{split}.parquet")
        start += size
    return paths


def _row(problem: Problem, split: str, index: int, show_work: bool, error: int) -> dict[str, Any]:
    return word_problem(
        DATA_SOURCE,
        problem.prompt,
        str(problem.result),
        split,
        index,
        problem.question,
        problem.answer(show_work, error),
    )


def arithmetic_texts(num: int = 2000, *, max_operand: int = 9, calculator: bool = False) -> list[str]:
    """Prompts and answers, with and without work (and calls of a calculator), from which a tokenizer for this task can be
    trained."""
    problems = make_problems(num, seed=0, max_operand=max_operand)
    texts = [
        text
        for problem in problems
        for text in (problem.prompt, problem.answer(show_work=True), problem.answer(show_work=False))
    ]
    if not calculator:
        return texts
    chats = [problem.tool_chat(wrong) for problem in problems for wrong in (False, True)]
    return texts + [
        text for chat in chats for message in chat[1:] for text in (message["role"], message["content"])
    ]
