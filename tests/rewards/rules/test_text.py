import pytest

from megarl.rewards.rules.text import exact_match, extract_choice, extract_text, multiple_choice, search_r1


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
    """The values that verl 0.9.1 gives, but for an answer that is an article alone."""
    assert search_r1("searchR1_nq", response, truth)["score"] == score
