import re

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import arithmetic
from megarl.data.sft import SftDataset
from megarl.data.trajectories import list_lengths
from tests.data.shared import render_prompt


def test_files_have_the_gsm8k_schema(tmp_path):
    paths = arithmetic.write_arithmetic(tmp_path, 30, 20, 10, seed=1)
    assert {split: path.name for split, path in paths.items()} == {
        "sft": "sft.parquet",
        "train": "train.parquet",
        "test": "test.parquet",
    }
    for (split, path), size in zip(paths.items(), (30, 20, 10), strict=True):
        rows = pq.read_table(path).to_pylist()
        assert len(rows) == size
        for index, row in enumerate(rows):
            (message,) = row["prompt"]
            assert row["data_source"] == "megarl/arithmetic"
            assert message["role"] == "user"
            assert message["content"] == row["extra_info"]["question"] + " Answer after ####"
            assert row["reward_model"] == {
                "style": "rule",
                "ground_truth": row["extra_info"]["answer"].removeprefix("#### "),
            }
            assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, index)


@given(st.integers(1, 30), st.sampled_from([("add",), ("sub",), ("add", "sub")]), st.integers(0, 99))
@settings(max_examples=30)
def test_results_follow_from_the_texts(max_operand, ops, seed):
    for problem in arithmetic.make_problems(40, seed=seed, max_operand=max_operand, ops=ops):
        a, b = map(int, re.findall(r"\d+", problem.question))
        gains = re.search(r"buys|finds|gets", problem.question) is not None
        assert gains or re.search(r"loses|sells|drops", problem.question)
        result = a + b if gains else a - b
        assert 1 <= a <= max_operand and 1 <= b <= max_operand and result >= 0
        assert ("add" if gains else "sub") in ops
        assert problem.answer(show_work=False) == f"#### {result}"
        assert problem.answer(show_work=True) == f"{a} {'+' if gains else '-'} {b} = {result} #### {result}"


def test_all_problems_are_different_and_reached():
    """Drawing as many problems as there are gives each one once: their number is right, and none is skipped."""
    for op, pairs in (("add", 9), ("sub", 6)):  # pairs of 1 to 3
        num = pairs * 2 * 3 * 8 * 8
        assert arithmetic.num_problems(op, 3) == num
        problems = arithmetic.make_problems(num, seed=0, max_operand=3, ops=[op])
        assert len({problem.question for problem in problems}) == num


def test_splits_are_disjoint(tmp_path):
    paths = arithmetic.write_arithmetic(tmp_path, 3000, 2000, 500, seed=5)
    texts = {
        split: [row[0]["content"] for row in pq.read_table(path)["prompt"].to_pylist()]
        for split, path in paths.items()
    }
    assert len({text for split in texts.values() for text in split}) == 5500


def test_seed_decides(tmp_path):
    first, again, other = (
        arithmetic.write_arithmetic(tmp_path / name, 5, 5, 5, seed=seed, show_work=True)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    for split in first:
        assert pq.read_table(first[split]).equals(pq.read_table(again[split]))
        assert not pq.read_table(first[split]).equals(pq.read_table(other[split]))


def test_prompts_and_responses_are_short(tokenizer, tmp_path):
    paths = arithmetic.write_arithmetic(tmp_path, 500, 1, 1, seed=0, max_operand=20)
    table = SftDataset(paths["sft"], tokenizer, max_length=64, response_key="extra_info.answer").table
    learnt = [sum(mask) for mask in table["loss_mask"].to_pylist()]
    assert max(learnt) <= 8
    assert max(list_lengths(table, "input_ids") - learnt) <= 24
    single_digits = arithmetic.make_problems(200, seed=0)
    assert {
        len(render_prompt(tokenizer, [{"role": "user", "content": p.prompt}])) for p in single_digits
    } == {21}


@pytest.mark.parametrize(
    "num, options, message",
    [
        (
            10**6,
            {},
            "1000000 different problems asked for, there are 48384 with max_operand 9 and ops add, sub",
        ),
        (1, {"ops": ["mul"]}, "ops must be some of add, sub, found mul"),
        (1, {"ops": []}, "ops must be some of add, sub, found none"),
        (1, {"max_operand": 0}, "max_operand must be at least 1, found 0"),
    ],
)
def test_wrong_requests(num, options, message):
    with pytest.raises(ValueError, match=message):
        arithmetic.make_problems(num, seed=0, **options)


def test_a_sloppy_teacher_is_one_too_high_as_often_as_asked_for_and_the_truth_stays(tmp_path) -> None:
    paths = arithmetic.write_arithmetic(tmp_path, 1000, 200, 10, seed=3, teacher_errors=0.7)
    errors = {}
    for split, path in paths.items():
        rows = pq.read_table(path).to_pylist()
        truths = [int(row["reward_model"]["ground_truth"]) for row in rows]
        answers = [int(row["extra_info"]["answer"].removeprefix("#### ")) for row in rows]
        errors[split] = [answer - truth for answer, truth in zip(answers, truths, strict=True)]
    assert set(errors["sft"]) == {0, 1} and 0.65 < sum(errors["sft"]) / 1000 < 0.75
    assert set(errors["train"]) == set(errors["test"]) == {0}
    with pytest.raises(ValueError, match=r"from 0 to 1, found 1\.5"):
        arithmetic.write_arithmetic(tmp_path, 1, 1, 1, seed=3, teacher_errors=1.5)


def test_a_teacher_with_a_calculator_believes_it(tmp_path) -> None:
    """A call's sign is right or wrong; the calculator's result, and the answer, follow from it."""
    paths = arithmetic.write_arithmetic(tmp_path, 400, 20, 10, seed=3, teacher_errors=0.7, calculator=True)
    assert "messages" not in pq.read_schema(paths["train"]).names
    rows = pq.read_table(paths["sft"]).to_pylist()
    wrong = 0
    for row in rows:
        question, call, told, answer = row["messages"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert [question] == row["prompt"]
        a, sign, b = re.fullmatch(r"<<(\d+)([+-])(\d+)>>", call["content"]).groups()
        assert told["content"] == str(int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert answer["content"] == f"#### {told['content']}"
        wrong += told["content"] != row["reward_model"]["ground_truth"]
    assert 0.62 < wrong / len(rows) < 0.78
    texts = arithmetic.arithmetic_texts(20, calculator=True)
    assert "tool" in texts and any(text.startswith("<<") for text in texts)
    assert arithmetic.arithmetic_texts(20) == texts[: len(texts) - 20 * 2 * 6]
