import json

import pytest

from megarl.rewards.rules.code_tests import (
    compute_score,
    extract_program,
    read_tests,
    same_output,
    same_value,
)

ADDS = "a, b = map(int, input().split())\nprint(a + b)"


def score(program, ground_truth, **options):
    if not isinstance(ground_truth, str):
        ground_truth = json.dumps(ground_truth)
    return compute_score("taco", f"Like so:\n```python\n{program}\n```\n", ground_truth, **options)


def stdin(*pairs):
    return {"inputs": [one for one, _ in pairs], "outputs": [other for _, other in pairs]}


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("first\n```python\na = 1\n```\nbetter\n```python\na = 2\n```\nso", "a = 2\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```py\na = 1", "a = 1"),
        ("```python\na = 1\n```\nIt prints\n```text\n7\n```", "a = 1\n"),
        ("```python\na = 1\n```\nIt prints\n```text\n7\n```\nin constant time.\n", "a = 1\n"),
        ("```text\n7\n```\nis printed by\n```python\na = 1\n```", "a = 1\n"),
        ("In C++:\n```cpp\nint a;\n```\nand here:\n```Python\na = 1\n```\nso", "a = 1\n"),
        ("```python\na = 1\n```\nIt prints\n```\n7\n```\n", "a = 1\n"),
        ("```python title=main.py\na = 1\n```\nand\n```sh -e\nls\n```\nhere", "a = 1\n"),
        ("<think>```python\nwrong\n```</think>```python\nright\n```", "right\n"),
        ("a = 1", "a = 1"),
    ],
)
def test_programs(response, program):
    assert extract_program(response) == program


def test_programs_with_input_and_output():
    assert score(ADDS, stdin(("1 2\n", "3\n"), ("5 5", "10"))) == {"score": 1.0, "acc": 1.0}
    half = score(ADDS, stdin(("1 2", "3"), ("5 5", "11")))
    assert (half["score"], half["acc"]) == (0.5, 0.0)
    assert half["failure"] == "test 2 of 2: printed '10\\n', not '11'"
    assert score("print(", stdin(("1 2", "3")))["failure"].startswith("test 1 of 1: error: SyntaxError")
    for slow in ("while True: pass", "import time; time.sleep(100)"):
        result = score(slow, stdin(("", "3")), time_limit=0.3)
        assert result == {"score": 0.0, "acc": 0.0, "failure": "test 1 of 1: timeout"}


def test_the_first_ten_tests_are_scored_and_the_others_up_to_a_failure():
    right, wrong = ("1 2", "3"), ("1 2", "4")
    assert score(ADDS, stdin(*[right] * 12)) == {"score": 1.0, "acc": 1.0}
    assert score(ADDS, stdin(*[right] * 10, wrong, right))["score"] == 10 / 11
    assert score(ADDS, stdin(*[right] * 11, wrong))["score"] == 11 / 12
    assert score(ADDS, stdin(wrong, *[right] * 11))["score"] == 9 / 10
    result = score(ADDS, stdin(*[right] * 11, ("x", "3"), right, right))
    assert result["score"] == 11 / 12
    assert result["failure"].startswith("test 12 of 14: error: ValueError: invalid literal")


def test_time_for_all_tests():
    slow = f"import time\n{ADDS}\nif a == 9:\n    time.sleep(100)"
    result = score(
        slow,
        stdin(("1 2", "3"), ("1 3", "4"), ("9 1", "10"), ("1 4", "5")),
        time_limit=20.0,
        total_seconds=3.0,
    )
    assert result["score"] == 2 / 4
    assert result["failure"] == "test 3 of 4: timeout"


def test_functions():
    truth = {"fn_name": "add", "inputs": [[1, 2], "3\n[4]"], "outputs": [3, [3, 4]]}
    program = "def add(a, b):\n    return a + b if isinstance(b, int) else [a, *b]"
    assert score(program, truth)["score"] == 1.0
    assert score("class Solution:\n    def add(self, a, b): return 3", truth)["score"] == 0.5
    assert score("def add(a, b): return a + b", {**truth, "inputs": [[1, 2], [1, 1]]})["score"] == 0.5
    # An object that equals everything in the program's process does not do so outside of it.
    cheat = "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    assert score(cheat, truth)["score"] == 0.0
    # A result may be wrapped in a list of one.
    assert score("def f(): return 7", {"fn_name": "f", "inputs": [[]], "outputs": [[7]]})["score"] == 1.0


def test_functions_find_the_names_that_their_problems_take_for_granted():
    program = (
        "class Solution:\n    def combinations(self, numbers: List[int], k: int) -> Optional[int]:\n"
        "        return ceil(len(Counter(numbers)) / k)"
    )
    # itertools has a function of this name, too
    truth = {"fn_name": "combinations", "inputs": [[[1, 1, 2, 3], 2]], "outputs": [2]}
    assert score(program, truth)["score"] == 1.0
    same = "def same(numbers: List[int]): return numbers"
    assert score(same, {"assert_case": ["assert same([1]) == [1]"]})["score"] == 1.0
    assert (
        score("print(Counter(input()))", stdin(("a", "")))["score"] == 0.0
    )  # whole programs import what they use


def test_assertions():
    assert score("def f(): return 7", {"assert_case": ["assert f() == 7", "assert f() == 8"]})["score"] == 0.5
    assert score("def f(): return 7", "def check(g):\n    assert g() == 7\ncheck(f)")["score"] == 1.0
    assert score("import os\nos._exit(0)", "assert f() == 7")["score"] == 0.0


@pytest.mark.parametrize(
    "truth", ["", "[]", '{"inputs": ["1"]}', '{"inputs": ["1"], "outputs": []}', "print(3)"]
)
def test_ground_truths_that_are_none(truth):
    with pytest.raises(ValueError, match='ground truth of the rule code must be JSON with "inputs"'):
        read_tests(truth)


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2 3", True),
        ("0.33333334", "0.3333333333", True),
        ("0.334", "0.3333333333", False),
        ("3", "3.0", True),
        ("3.0", "3", False),  # integers are exact
        ("10000000000000001", "10000000000000000", False),
        ("YES", "Yes", False),
        ("1 2", "1", False),
        ("", "", True),
    ],
)
def test_outputs(printed, wanted, same):
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        ([1, [2.0000001]], [1, [2.0]], True),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (True, 1, False),
        (1, 1.0, True),
        ("a", "a", True),
        ([1], [1, 2], False),
        (None, None, True),
        (10**400, 1024.0, False),  # more than a float can be
        (1e300, 10**400, False),
    ],
)
def test_values(value, wanted, same):
    assert same_value(value, wanted) is same
