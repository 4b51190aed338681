"""A task for an agent with a calculator: a tiny model that knows how to call it, but guesses as often.

    python -m examples.agents.calculator_task --out outputs/agent

writes a random model, demonstrations for `megarl sft`, and problems for `megarl train`:

    user: Tom has 3 pens and buys 4.
    assistant: <tool_call> {"name": "calculate", "arguments": {"expression": "3+4"}} </tool_call>
    tool: 7
    assistant: #### 7

In the other demonstrations the assistant answers a random number at once. So what reinforcement learning can teach is to use the tool.
With `--work` there is no tool, and the assistant writes "3 + 4 = 7 #### 7" in its place. data/questions.jsonl has the problems of both splits for
other environments.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import AutoTokenizer

from examples.arithmetic import DATA_SOURCE, SIGNS, Problem, make_problems
from examples.tiny_model import make_tiny_model
from megarl.data.files import write_parquet
from megarl.data.gsm8k import WORD_PROBLEM_SCHEMA, word_problem

TOOL = "calculate"
# Calls in the form of Qwen2.5 (SGLang's parser qwen25). Tools are not described: there is one, which demonstrations show.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n' + ({'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson) + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def demonstration(problem: Problem, guess: int | None, work: bool = False) -> list[dict[str, Any]]:
    """A chat in which the assistant calls the tool, or writes its work, or, given a guess, answers it at once."""
    user = {"role": "user", "content": problem.question}
    if work and guess is None:
        return [user, {"role": "assistant", "content": problem.answer(show_work=True)}]
    if guess is not None:
        return [user, {"role": "assistant", "content": f"#### {guess}"}]
    arguments = json.dumps({"expression": f"{problem.a}{SIGNS[problem.op]}{problem.b}"})
    call = {"id": "call00001", "type": "function", "function": {"name": TOOL, "arguments": arguments}}
    return [
        user,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": str(problem.result)},
        {"role": "assistant", "content": f"#### {problem.result}"},
    ]


def write_task(
    folder: Path, *, num_sft: int = 2000, num_train: int = 256, num_test: int = 16, guesses: float = 0.5, seed: int = 1,
    max_operand: int = 9, hidden_size: int = 128, num_layers: int = 2, work: bool = False,
) -> None:  # fmt: skip
    """Write model/, data/sft.jsonl, data/train.parquet, data/test.parquet and data/questions.jsonl.

    Args:
        guesses: the part of the demonstrations that do not call the tool.
        work: the others work the answer out in words.
    """
    problems = make_problems(num_sft + num_train + num_test, seed=seed, max_operand=max_operand)
    generator = np.random.default_rng((seed, 1))
    guessed = [int(number) for number in generator.integers(0, 2 * max_operand + 1, num_sft)]
    chats = [
        demonstration(problem, guess if generator.random() < guesses else None, work)
        for problem, guess in zip(problems[:num_sft], guessed, strict=True)
    ]
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    with (data / "sft.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": chat}) + "\n" for chat in chats)
    _write_prompts(data / "train.parquet", problems[num_sft : num_sft + num_train], "train")
    _write_prompts(data / "test.parquet", problems[num_sft + num_train :], "test")
    with (data / "questions.jsonl").open("w", encoding="utf-8") as file:
        for problem in problems[num_sft:]:
            work = f"{problem.a} {SIGNS[problem.op]} {problem.b}"
            row = {"question": problem.question, "work": work, "answer": str(problem.result)}
            file.write(json.dumps(row) + "\n")
    words = [
        json.dumps({"name": TOOL, "arguments": {"expression": "3+4"}}),
        "<tool_call>\n</tool_call>",
        "tool",
        "#### 7",
    ]
    texts = [text for problem in problems for text in (problem.question, *words)]
    model = make_tiny_model(
        folder / "model",
        texts,
        hidden_size=hidden_size,
        ffn_hidden_size=3 * hidden_size,
        num_layers=num_layers,
        seed=seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)


def _write_prompts(path: Path, problems: Sequence[Problem], split: str) -> None:
    rows = [
        word_problem(
            DATA_SOURCE,
            problem.question,
            str(problem.result),
            split,
            index,
            problem.question,
            f"#### {problem.result}",
        )
        for index, problem in enumerate(problems)
    ]
    write_parquet(pa.Table.from_pylist(rows, schema=WORD_PROBLEM_SCHEMA), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", action="store_true", help="demonstrations of work in place of calls")
    options = parser.parse_args()
    write_task(options.out, seed=options.seed, work=options.work)
