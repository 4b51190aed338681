"""The output of `megarl replay`; real replays are in test_debugging_runs.py."""

import io

from rich.console import Console

from megarl.trainer.loops.offline import print_comparison


def printed(logged: dict[str, float] | None, found: dict[str, float]) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=100)
    equal = print_comparison(console, 7, logged, found)
    return equal, console.file.getvalue()


def test_numbers_are_compared_bit_for_bit() -> None:
    equal, text = printed({"a": 0.1 + 0.2, "b": 1.0}, {"a": 0.3, "b": 1.0})
    assert not equal and text.count("differs") == 1
    assert "step 7: 1 of 2 numbers are not those of the run" in text
    equal, text = printed({"a": 0.3, "b": float("nan"), "c": 2.0}, {"a": 0.3, "b": float("nan")})
    assert equal and "step 7: all 2 numbers are equal bit for bit" in text


def test_a_step_of_which_nothing_was_logged_differs_in_nothing() -> None:
    equal, text = printed(None, {"a": 0.25, "b": 1.0})
    assert not equal and "differs" not in text and "numbers are not those" not in text
    assert "step 7: nothing to compare: metrics.jsonl has no line of this step" in text
    assert "0.25" in text and "logged" not in text.splitlines()[0]
