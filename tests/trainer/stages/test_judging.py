"""Engines that judge: which rows each gets, and which engine gets the rows of a lost one."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from megarl.cluster import WorkerDied
from megarl.trainer.roles.judges import JudgeEngines
from megarl.trainer.stages.judging import Judging, share_out

LENGTHS = [3, 9, 2, 2, 6, 1, 1, 8]
PROMPTS = ["a", "a", "b", "b", "c", "c", "d", "e"]


def table() -> pa.Table:
    return pa.table(
        {
            "uid": [f"u{row}" for row in range(len(LENGTHS))],
            "prompt_uid": PROMPTS,
            "prompt_ids": [[1] for _ in LENGTHS],
            "response_ids": [[2] * (length - 1) for length in LENGTHS],
        }
    )


def test_rows_of_a_prompt_are_together_and_tokens_even() -> None:
    shares = share_out(table(), 3)
    assert sorted(row for share in shares for row in share) == list(range(len(LENGTHS)))
    of = {row: number for number, share in enumerate(shares) for row in share}
    assert of[0] == of[1] and of[2] == of[3] and of[4] == of[5]
    assert [sum(LENGTHS[row] for row in share) for share in shares] == [12, 9, 11]
    assert share_out(table(), 12)[5:] == [[]] * 7


class Engines:
    """A role's engines, which answer with their number and their rows; `lost`: ranks that die at their next call."""

    def __init__(self, role: str, count: int, lost: set[int] = frozenset()) -> None:
        self.role, self.world_size, self.lost = role, count, set(lost)
        self.processes = [SimpleNamespace(role=role, rank=rank) for rank in range(count)]
        self.calls: list[tuple[int, list[int]]] = []
        self.replaced = 0

    def processes_of(self, rank: int) -> list[SimpleNamespace]:
        return [self.processes[rank]]

    def call_rank(self, rank: int, method: str, read: object, rows: list[int], top: int) -> object:
        assert method == "judge"
        self.calls.append((rank, rows))
        return self, rank, rows, top

    def replace_lost(self, failure: WorkerDied | None = None) -> None:
        if failure is None:
            return
        assert failure.role == self.role
        self.processes[failure.rank] = SimpleNamespace(role=self.role, rank=failure.rank)
        self.lost.discard(failure.rank)
        self.replaced += 1


def wait(refs: list) -> list:
    for engines, rank, _, _ in refs:
        if rank in engines.lost:
            process = SimpleNamespace(role=engines.role, rank=rank, host="h", pid=1, log_path="l")
            raise WorkerDied(process, "killed", "", ())
    return [(rows, {"rank": rank, "top": top}) for _, rank, rows, top in refs]


def test_rows_of_a_lost_engine_are_asked_of_its_successor_alone() -> None:
    one, other = Engines("teacher_a", 2, lost={1}), Engines("teacher_b", 1)
    none = Engines("teacher_c", 2)
    judges = {engines.role: JudgeEngines(engines, engines) for engines in (one, other, none)}
    rows = {"teacher_a": np.array([0, 1, 4, 5]), "teacher_b": np.array([2, 3, 6, 7]), "teacher_c": []}
    run = SimpleNamespace(wait=wait)
    found = Judging(run, judges, table(), None, rows, 5).results()
    assert list(found) == ["teacher_a", "teacher_b"]
    assert sorted(row for rows, _ in found["teacher_a"] for row in rows) == [0, 1, 4, 5]
    assert found["teacher_b"] == [([2, 3, 6, 7], {"rank": 0, "top": 5})]
    assert [rank for rank, _ in one.calls] == [0, 1, 1] and one.calls[1] == one.calls[2]
    assert one.replaced == 1 and len(other.calls) == 1 and not none.calls


def test_the_loss_of_another_process_ends_the_run() -> None:
    one = Engines("ref", 1, lost={0})
    one_as_another = SimpleNamespace(wait=lambda refs: wait([(Engines("actor", 1, {0}), 0, [], 0)]))
    judging = Judging(one_as_another, {"ref": JudgeEngines(one, one)}, table(), None, {"ref": [0]}, 0)
    with pytest.raises(WorkerDied):
        judging.results()
