"""Which checkpoints are kept."""

from pathlib import Path

import pytest

from megarl.checkpoints import Keep
from megarl.checkpoints.retention import STATE_FILE, kept_steps, read_best, write_best

STEPS = [5, 10, 15, 20, 100]


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        (Keep(), None, {5, 10, 15, 20, 100}),
        (Keep(last=1), None, {100}),
        (Keep(last=2), None, {20, 100}),
        (Keep(last=9), None, {5, 10, 15, 20, 100}),
        (Keep(last=1, every=10), None, {10, 20, 100}),
        (Keep(last=1), 10, {10, 100}),
        (Keep(last=1, best=False), 10, {100}),
        (Keep(last=1), 11, {100}),
        (Keep(last=1, every=15), 5, {5, 15, 100}),
    ],
)
def test_the_rules(keep: Keep, best: int | None, kept: set[int]) -> None:
    assert kept_steps(STEPS, keep, best) == kept
    assert kept_steps(reversed(STEPS), keep, best) == kept
    assert kept_steps([], keep, best) == set()


def test_the_best_is_remembered_and_a_damaged_file_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    assert read_best(tmp_path, lines.append) is None
    for best in (7, 9, None):
        write_best(tmp_path, best)
        assert read_best(tmp_path, lines.append) == best
    assert lines == []
    for content in (b"", b"\xff", b"[]", b'{"best": "7"}'):
        (tmp_path / STATE_FILE).write_bytes(content)
        assert read_best(tmp_path, lines.append) is None
    assert len(lines) == 4 and all(STATE_FILE in line for line in lines)
