"""Programs of a model against tests, in a sandbox: competitive programming, functions to be written, assertions.

`ground_truth` is JSON as verl's prime_code data has it: `{"inputs": [...], "outputs": [...]}`, with `fn_name` if a
function is called instead of a program run; or `{"assert_case": [...]}`, pieces of Python; or Python text with assertions.
"""

import json
import math
import re
import time
from typing import Any

from megarl.rewards.sandbox.sandbox import Limits, TestResult, run_tests

# A problem may have very many tests: after these, the first failure decides.
_NUM_SCORED = 10
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL | re.IGNORECASE)
# Of any language: else the end of a block of text would be taken for the beginning of the next one.
_BLOCK = re.compile(r"```[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    time_limit: float = 5.0,
    memory_mb: int = 512,
    total_seconds: float = 100.0,
    isolation: str = "auto",
) -> dict[str, Any]:
    """1.0 if the program passes all tests, else the share of tests that it passes.

    The first ten tests are run in any case; the others only if it passes these, and up to the first that it fails.
    Tests that `total_seconds` leaves no time for count as failed. `acc` is 1.0 if all passed, `failure` tells the outcome of
    the first that did not.

    ValueError: a ground truth of an unknown form. RuntimeError: the sandbox cannot be set up.
    """
    tests = read_tests(ground_truth)
    program = extract_program(solution_str)
    begun = time.monotonic()
    failures: list[str | None] = []
    for part, is_first in ((tests[:_NUM_SCORED], True), (tests[_NUM_SCORED:], False)):
        if not part or any(failures):
            break
        limits = Limits(time_limit, memory_mb, total_seconds - (time.monotonic() - begun))
        results = run_tests(program, [test for test, _ in part], limits, isolation, not is_first)
        found = [_failure(result, wanted) for result, (_, wanted) in zip(results, part, strict=False)]
        found += [f"not run within {total_seconds:g} s"] * (len(part) - len(results))
        if not is_first and any(found):
            found = found[: next(index for index, failure in enumerate(found) if failure) + 1]
        failures += found
    passed = failures.count(None)
    result: dict[str, Any] = {"score": passed / len(failures), "acc": float(passed == len(tests))}
    if passed < len(failures):
        index, failure = next((index, failure) for index, failure in enumerate(failures) if failure)
        result["failure"] = f"test {index + 1} of {len(tests)}: {failure}"
    return result


def extract_program(response: str) -> str:
    """The last fenced block that is marked as Python's, else the last one without a language, thinking aside; without one the whole text."""
    text = _THINKING.sub("", response)
    blocks = [(language.lower(), block) for language, block in _BLOCK.findall(text)]
    for languages in (_PYTHON, ("",)):
        found = [block for language, block in blocks if language in languages]
        if found:
            return found[-1]
    return text


def read_tests(ground_truth: str) -> list[tuple[dict[str, Any], Any]]:
    """Tests as the jail runs them, each with its expected result (None for assertions).

    ValueError: no JSON object of one of the known forms, nor Python text with assertions.
    """
    try:
        tests = json.loads(ground_truth)
    except ValueError:
        tests = {"assert_case": [ground_truth]} if "assert" in ground_truth else None
    if isinstance(tests, dict) and tests.get("assert_case"):
        return [({"kind": "assert", "code": code}, None) for code in tests["assert_case"]]
    inputs, outputs = (tests.get("inputs"), tests.get("outputs")) if isinstance(tests, dict) else (None, None)
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise ValueError(
            'the ground truth of the rule code must be JSON with "inputs" and "outputs", lists of one length, or with '
            f'"assert_case", or Python text with assertions; it is {ground_truth[:200]!r}'
        )
    name = tests.get("fn_name")
    if name is None:
        return [
            ({"kind": "stdin", "input": _text(one)}, _text(other))
            for one, other in zip(inputs, outputs, strict=True)
        ]
    return [
        ({"kind": "call", "function": name, "arguments": _arguments(one)}, _json_or_text(other))
        for one, other in zip(inputs, outputs, strict=True)
    ]


def _text(one: Any) -> str:
    """An input or output as text; a list holds its lines."""
    return "\n".join(map(str, one)) if isinstance(one, list) else str(one)


def _arguments(one: Any) -> list[Any]:
    """A list of arguments, or text with a JSON value a line."""
    return [_json_or_text(line) for line in one.split("\n")] if isinstance(one, str) else list(one)


def _json_or_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _failure(result: TestResult, wanted: Any) -> str | None:
    """Why a test failed; None: it passed."""
    if result.outcome != "ok":
        lines = result.stderr.strip().splitlines()
        return f"{result.outcome}: {lines[-1]}" if lines else result.outcome
    if wanted is None:
        return None
    if result.value is None:
        same = same_output(result.output, wanted)
        return None if same else f"printed {result.output[:200]!r}, not {wanted[:200]!r}"
    value = json.loads(result.value)
    # Some data sets wrap a returned value in a list of one.
    same = same_value(value, wanted) or (
        isinstance(wanted, list) and len(wanted) == 1 and same_value(value, wanted[0])
    )
    return None if same else f"returned {result.value[:200]}, not {json.dumps(wanted)[:200]}"


def same_output(printed: str, wanted: str) -> bool:
    """Equal word by word, however they are spaced; decimal numbers to a relative 1e-6."""
    ours, theirs = printed.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def same_value(value: Any, wanted: Any) -> bool:
    """Equal as JSON values; floats to a relative 1e-6."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same_value(value[key], wanted[key]) for key in value)
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, float) or isinstance(wanted, float):
        return isinstance(value, int | float) and isinstance(wanted, int | float) and _close(value, wanted)
    return value == wanted


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    if not any(mark in theirs for mark in ".eE"):  # whole numbers are exact
        return False
    try:
        return _close(float(ours), float(theirs))
    except ValueError:
        return False


def _close(value: float, wanted: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    except OverflowError:  # one is a whole number beyond all floats, which the other is
        return False
