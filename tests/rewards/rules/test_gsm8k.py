import pytest

from megarl.rewards.rules.gsm8k import compute_score, compute_score_flexible, extract_answer

SOURCE = "openai/gsm8k"


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
def test_strict(response, truth, score):
    assert compute_score(SOURCE, response, truth)["score"] == score


def test_only_the_last_300_characters_count():
    answer = "#### 7"
    assert compute_score(SOURCE, answer + "x" * (300 - len(answer)), "7")["score"] == 1.0
    assert compute_score(SOURCE, answer + "x" * (301 - len(answer)), "7")["score"] == 0.0


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
def test_flexible_takes_the_last_number(response, answer):
    assert extract_answer(response, "flexible") == answer
    assert compute_score_flexible(SOURCE, response, "7") == {"score": float(answer == "7"), "pred": answer}


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="'lenient' is unknown; known: strict, flexible"):
        compute_score(SOURCE, "#### 7", "7", method="lenient")
