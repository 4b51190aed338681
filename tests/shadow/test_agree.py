"""The check whether ranks' logs of collectives fit together, on logs that were written by hand and on logs of shadow ranks."""

import pytest

from megarl.shadow.agree import agree
from megarl.shadow.collectives import Collective


def call(group=(0, 1), operation="allreduce_", size=4, until=None, **rest) -> Collective:
    return Collective(
        operation, tuple(group), sizes=((size, "float32"),), communicator="c", until=until, **rest
    )


def waited(calls: list[Collective]) -> list[Collective]:
    """The calls, with a wait after each before the next begins."""
    return [one._replace(until=number + 1) for number, one in enumerate(calls)]


def send(source: int, target: int, group=(0, 1), **rest) -> Collective:
    return call(group, "send", peer=target, line=f"{source} to {target}", **rest)


def receive(source: int, group=(0, 1), **rest) -> Collective:
    return call(group, "recv_", peer=source, **rest)


def test_ranks_that_make_the_same_calls_come_to_their_ends() -> None:
    log = waited([call(), call(size=3), call((0, 1), "barrier")])
    found = agree({0: log, 1: log})
    assert found.problems == [] and found.matched == 3
    assert found.summary == "collectives of 2 ranks fit together (3 matched)"


def test_members_that_were_not_run_are_taken_to_join() -> None:
    found = agree({0: waited([call((0, 1, 2)), send(0, 2, (0, 1, 2))]), 1: waited([call((0, 1, 2))])})
    assert found.problems == [] and (found.matched, found.open_ended) == (1, 2)


def test_two_groups_in_crossed_order_are_a_deadlock() -> None:
    """If ranks wait after each call; two calls that are in flight at once do not block each other."""
    one, other = call(line="one"), call(size=3, line="other")._replace(communicator="d")
    found = agree({0: waited([one, other]), 1: waited([other, one])})
    assert any("ranks 0 -> 1 -> 0 wait for each other" in text for text in found.problems)
    assert "rank 0 stands at all_reduce of 4 x float32 (one) in group [0, 1]" in found.problems
    assert "rank 1 stands at all_reduce of 3 x float32 (other) in group [0, 1]" in found.problems
    assert agree({0: [one, other], 1: [other, one]}).problems == []


def test_calls_of_one_group_run_in_order_even_when_nobody_waits() -> None:
    logs = {0: [call(), call((0, 1), "barrier")], 1: [call((0, 1), "barrier"), call()]}
    (problem, *_) = agree(logs).problems
    assert "call 1 of group [0, 1] is not the same" in problem and "barrier" in problem


def test_a_collective_that_a_rank_leaves_out_is_named() -> None:
    group = (0, 1, 2)
    log = waited([call(group, line="a"), call(group, line="b"), call(group, line="c")])
    short = waited([log[0], log[2]])
    problems = agree({0: log, 1: short, 2: log}).problems
    assert "rank 1 leaves out call 2 of group [0, 1, 2]: the all_reduce of 4 x float32 (b)" in problems
    assert (
        "rank 1 never joins the all_reduce of 4 x float32 (c), call 3 of group [0, 1, 2], that ranks 0, 2 stand at; its end"
        in problems
    )


def test_sizes_that_differ_are_named() -> None:
    (problem,) = agree({0: waited([call(line="a")]), 1: waited([call(size=5, line="a")])}).problems
    assert "rank 0 calls all_reduce of 4 x float32 (a), rank 1 all_reduce of 5 x float32 (a)" in problem


def test_an_all_to_all_expects_what_is_sent() -> None:
    def exchange(sends: tuple[int, int], expects: tuple[int, int]) -> list[Collective]:
        sizes = ((sum(expects), "bfloat16"), (sum(sends), "bfloat16"))
        return waited([call(operation="alltoall_base_", sends=sends, expects=expects)._replace(sizes=sizes)])

    assert agree({0: exchange((1, 7), (1, 2)), 1: exchange((2, 0), (7, 0))}).problems == []
    (problem,) = agree({0: exchange((1, 7), (1, 2)), 1: exchange((2, 0), (5, 0))}).problems
    assert "rank 0 sends 7 elements to rank 1, which expects 5" in problem


def test_lone_sends_to_each_other_block_and_a_batch_does_not() -> None:
    lone = {0: waited([send(0, 1), receive(1)]), 1: waited([send(1, 0), receive(0)])}
    assert "ranks 0 -> 1 -> 0 wait for each other" in agree(lone).problems
    even = {0: lone[0], 1: waited([receive(0), send(1, 0)])}
    assert agree(even).problems == []
    batched = {rank: [one._replace(batch=1, until=2) for one in log] for rank, log in lone.items()}
    found = agree(batched)
    assert found.problems == [] and found.matched == 2


def test_what_is_sent_must_be_received() -> None:
    assert agree({0: waited([send(0, 1)]), 1: []}).problems == [
        "rank 1 never receives the 4 x float32 that rank 0 stands at: send of 4 x float32 (0 to 1); its end",
        "rank 0 stands at send of 4 x float32 (0 to 1) to rank 1",
        "rank 1 stands at its end",
    ]
    problems = agree({0: waited([send(0, 1)]), 1: waited([receive(0, size=5)])}).problems
    assert problems == ["rank 0 sends 4 x float32 (0 to 1) to rank 1, which expects 5 x float32"]


def test_a_rank_that_was_stopped_is_told_with_its_reason() -> None:
    problems = agree({0: waited([call()]), 1: []}, {1: "ValueError: nonsense"}).problems
    assert "rank 1 has not come to the all_reduce of 4 x float32" in problems[0]
    assert problems[-1] == "rank 1 stands at its end: ValueError: nonsense"


def without(log: list[Collective], number: int) -> list[Collective]:
    """The log of a rank that omits a call."""
    shorter = [*log[:number], *log[number + 1 :]]
    return [
        one._replace(until=one.until - 1) if one.until is not None and one.until > number else one
        for one in shorter
    ]


@pytest.mark.parametrize("operation", ["_allgather_base_", "allreduce_", "send"])
def test_a_call_that_a_shadow_rank_leaves_out_is_found(reports, operation: str) -> None:
    logs = {
        rank: [Collective.from_json(one) for one in report["log"]]
        for (role, rank), report in reports.items()
        if role == "actor"
    }
    assert agree(logs).problems == []
    victim = next(
        rank
        for rank, log in logs.items()
        if any(one.operation == operation and len(one.group) > 1 for one in log)
    )
    calls = [n for n, one in enumerate(logs[victim]) if one.operation == operation and len(one.group) > 1]
    lost = logs[victim][calls[len(calls) // 2]]
    logs[victim] = without(logs[victim], calls[len(calls) // 2])
    problems = agree(logs).problems
    assert any(f"rank {victim}" in text and lost.line in text for text in problems), problems
