import pytest

from megarl.rewards.rules.text import (
    exact_match,
    extract_choice,
    extract_text,
    gsm8k,
    gsm8k_flexible,
    multiple_choice,
    search_r1,
)


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B).", "B"),
        ("Answer: C", "C"),
        ("**Answer:** D", "D"),
        ("Answer: **E**", "E"),
        ("**Answer**: C", "C"),
        ("**Answer**:\nC", "C"),
        ("Answer\uff1aC", "C"),
        ("I first thought the answer is A. But the correct answer is B.", "B"),
        ("option B is right", "B"),
        ("The answer I chose is (C).", "C"),
        ("The choice I\u2019d make: answer D", "D"),
        ("The answer I is right", "I"),
        ("The answer is I, I think", "I"),
        (r"\boxed{A}", "A"),
        (r"The answer is B, so \boxed{\text{(C)}}", "C"),
        ("<answer> B </answer>", "B"),
        ("B", "B"),
        (" (D). ", "D"),
        ("(C) or (D)? Rather (D)", "D"),
        ("the answer is Berlin", None),
        ("A cat", None),
        ("", None),
    ],
)
def test_choices(response, letter):
    assert extract_choice(response) == letter


def test_multiple_choice():
    assert multiple_choice("mmlu", "Answer: B", "(B)") == {"score": 1.0, "pred": "B"}
    assert multiple_choice("mmlu", "Answer: B", "A") == {"score": 0.0, "pred": "B"}
    assert multiple_choice("mmlu", "none", "A") == {"score": 0.0, "pred": None}
    with pytest.raises(ValueError, match="must be a letter, not 'Berlin'"):
        multiple_choice("mmlu", "Answer: B", "Berlin")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("I say <answer>Paris</answer> or <answer> New\nYork </answer>", "New\nYork"),
        (r"so \boxed{\text{Paris}}", "Paris"),
        ("Answer: x\nThe answer is: Paris.", "Paris."),
        ("**Answer**: Paris", "Paris"),
        ("**Answer: Paris**", "Paris"),
        ("Answer:\n\nParis", "Paris"),
        ("the answer\uff1aParis", "Paris"),
        (" Paris ", "Paris"),
    ],
)
def test_texts(response, text):
    assert extract_text(response) == text


def test_exact_match():
    assert exact_match("qa", "Answer: new  york.", "New York") == {"score": 1.0, "pred": "new  york."}
    assert exact_match("qa", "York", '["New York", "york"]')["score"] == 1.0
    assert exact_match("qa", "-5", "5")["score"] == 0.0
    assert exact_match("qa", "[1", "[1")["score"] == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (
            "<think>x</think><answer> The Eiffel-Tower. </answer>",
            '{"target": ["Eiffel Tower", "eiffeltower"]}',
            1.0,
        ),
        ("<answer>Paris</answer> no, <answer>Rome</answer>", '{"target": ["Rome"]}', 1.0),
        ("<answer>Paris</answer> no, <answer>Rome</answer>", '{"target": "Paris"}', 0.0),
        ("<answer>a cat</answer>", '["The cat"]', 1.0),
        ("<answer>a cat</answer>", "cat", 1.0),
        ("<answer>the</answer>", "A", 0.0),
        ("<answer></answer>", "A", 0.0),
        ("<answer>athens</answer>", "thens", 0.0),
        ("Rome", '{"target": ["Rome"]}', 0.0),
        ("<answer>Rome</answer>" * 10, '{"target": ["Rome"]}', 1.0),
        ("<answer>Rome</answer>" * 11, '{"target": ["Rome"]}', 0.25),
    ],
)
def test_search_r1(response, truth, score):
    """The values that verl 0.9.1 gives, except for an answer that is only an article."""
    assert search_r1("searchR1_nq", response, truth)["score"] == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "7", 1.0),
        ("#### 8", "7", 0.0),
        ("The answer is 7", "7", 0.0),  # the format is part of the task
        ("#### -12", "-12", 1.0),
        ("#### 12", "-12", 0.0),
        ("#### 1,234,567", "1234567", 1.0),
        ("#### 1234", "1,234", 1.0),  # a ground truth as GSM8K itself writes it
        ("#### 3.50", "3.50", 1.0),
        ("#### 3.50", "3.5", 0.0),  # compared as text
        ("#### 7 apples", "7", 1.0),
        ("#### 7.", "7", 0.0),  # as verl scores it
        ("#### $7", "7", 0.0),
        ("####7", "7", 0.0),
        ("#### 5\nno, wait\n#### 7", "7", 1.0),
        ("#### 7\nno, wait\n#### 5", "7", 0.0),
        ("#### 7\nthen #### nothing", "7", 1.0),
        ("#### seven", "7", 0.0),
        ("", "7", 0.0),
        (
            "#### 72",
            "48 / 2 = 24 clips in May.\n48 + 24 = 72 altogether.\n#### 72",
            1.0,
        ),  # GSM8K's column answer
        ("#### 48", "48 / 2 = 24 clips in May.\n48 + 24 = 72 altogether.\n#### 72", 0.0),
        ("#### 1234", "#### 1,234", 1.0),
        ("#### ,", "nothing follows ####", 0.0),
    ],
)
def test_gsm8k_wants_its_mark(response, truth, score):
    assert gsm8k("openai/gsm8k", response, truth)["score"] == score


def test_gsm8k_only_the_last_300_characters_count():
    answer = "#### 7"
    assert gsm8k("openai/gsm8k", answer + "x" * (300 - len(answer)), "7")["score"] == 1.0
    assert gsm8k("openai/gsm8k", answer + "x" * (301 - len(answer)), "7")["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so 3 apples and 7 pears", "7"),
        ("The answer is 42.", "42"),
        ("It costs $1,234.50.", "1234.50"),
        ("minus -3, then.", "-3"),
        ("half: .5", ".5"),
        ("#### 7", "7"),
        ("none...", None),
    ],
)
def test_gsm8k_flexible_takes_the_last_number(response, answer):
    assert gsm8k_flexible("openai/gsm8k", response, "7") == {"score": float(answer == "7"), "pred": answer}
