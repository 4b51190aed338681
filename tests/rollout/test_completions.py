"""Results of coroutines as they complete, on a loop that runs only while results are waited for."""

import asyncio
import time

import pytest

from megarl.rollout.completions import Flight, Gate, NothingCompleted, as_completed


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    assert asyncio.all_tasks(loop) == set()  # nothing is left behind
    loop.close()


async def after(gate, value):
    await gate.wait()
    if isinstance(value, Exception):
        raise value
    return value


def gates(num):
    return [asyncio.Event() for _ in range(num)]


async def forever(ended):
    try:
        await asyncio.sleep(1000)
    except asyncio.CancelledError:
        await asyncio.sleep(0.01)  # like an abort that takes some time
        ended.append(True)
        raise


def test_a_flight_collects_for_some_time_but_the_last_ones_come_at_once(loop):
    doors, flight = gates(4), Flight(loop)
    flight.add([after(door, row) for row, door in enumerate(doors)])
    begun = time.monotonic()
    doors[3].set()
    loop.call_later(0.05, doors[1].set)
    assert sorted(flight.take(1.0)) == [1, 3]
    assert 1.0 <= time.monotonic() - begun < 15
    loop.call_later(0.1, doors[0].set)
    loop.call_later(0.2, doors[2].set)
    begun = time.monotonic()
    assert sorted(flight.take(30)) == [0, 2]  # at once, since all have completed
    assert time.monotonic() - begun < 15


def test_an_error_does_not_wait_for_others(loop):
    async def fails():
        await asyncio.sleep(0.1)
        raise ValueError("of one")

    ended, begun, flight = [], time.monotonic(), Flight(loop)
    flight.add([fails(), forever(ended)])
    with pytest.raises(ValueError, match="of one"):
        flight.take(30)
    flight.cancel()
    assert time.monotonic() - begun < 15 and ended == [True]


def test_a_flight_is_busy_while_one_runs(loop, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    doors, flight = gates(3), Flight(loop)
    assert flight.busy == 0.0
    flight.add([after(doors[0], 0)])
    now[0] += 3.0
    flight.add([after(doors[1], 1)])
    now[0] += 1.0
    assert flight.busy == 4.0
    doors[0].set()
    doors[1].set()
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    now[0] += 10.0  # while no coroutine runs
    assert flight.busy == 4.0
    flight.add([after(doors[2], 2)])
    now[0] += 2.0
    assert flight.busy == 6.0
    flight.cancel()


def test_results_come_when_they_are_there_whatever_the_order(loop):
    doors = gates(4)
    parts = as_completed(loop, [after(door, row) for row, door in enumerate(doors)], timeout=60)
    doors[3].set()
    doors[1].set()
    assert sorted(next(parts)) == [1, 3]
    doors[0].set()
    assert next(parts) == [0]
    doors[2].set()
    assert list(parts) == [[2]]
    assert list(as_completed(loop, [], timeout=5)) == []


def test_a_sign_of_life_gives_them_more_time(loop):
    signs = []

    async def slow():
        for _ in range(8):
            await asyncio.sleep(0.1)
            signs.append(time.monotonic())

    assert list(as_completed(loop, [slow()], 0.5, lambda: max(signs, default=0.0))) == [[None]]
    assert signs[-1] - signs[0] > 0.5
    with pytest.raises(NothingCompleted):
        list(as_completed(loop, [slow()], 0.5))


@pytest.mark.parametrize("error", [KeyError("mine"), TimeoutError("mine")])
def test_what_still_runs_is_cancelled_when_one_raises(loop, error):
    (door,), ended = gates(1), []
    door.set()
    with pytest.raises(type(error), match="mine"):
        list(as_completed(loop, [after(door, error), forever(ended)], timeout=60))
    assert ended == [True]


def test_what_still_runs_is_cancelled_when_the_caller_leaves(loop):
    (door,), ended = gates(1), []
    door.set()
    results = as_completed(loop, [forever(ended), after(door, 1)], timeout=60)
    assert next(results) == [1] and ended == []
    results.close()
    assert ended == [True]


def test_the_time_limit_is_that_between_two_results(loop):
    doors, ended = gates(3), []
    parts = as_completed(loop, [*(after(door, 1) for door in doors), forever(ended)], timeout=0.2)
    for door in doors:
        door.set()
        loop.run_until_complete(asyncio.sleep(0.15))  # in sum more than the limit
        assert next(parts) == [1]
    with pytest.raises(NothingCompleted, match=r"within 0\.2 s"):
        next(parts)
    assert ended == [True]


def test_a_flight_goes_on_from_call_to_call(loop):
    doors = gates(3)
    flight = Flight(loop)
    assert flight.take(5) == [] and len(flight) == 0  # nothing is waited for
    flight.add([after(door, row) for row, door in enumerate(doors)])
    assert flight.take(0.01) == [] and len(flight) == 3
    doors[2].set()
    doors[0].set()
    assert sorted(flight.take(0.01)) == [0, 2] and len(flight) == 1
    flight.add([after(doors[2], 4)])
    assert flight.take(0.01) == [4]
    flight.cancel()
    assert len(flight) == 0 and flight.take(5) == []


def test_a_flight_raises_what_one_raises_and_ends_the_others_if_told(loop):
    (door,), ended, flight = gates(1), [], Flight(loop)
    door.set()
    flight.add([after(door, KeyError("mine")), forever(ended)])
    with pytest.raises(KeyError, match="mine"):
        flight.take(60)
    assert ended == []
    flight.cancel()
    assert ended == [True]


def test_a_gate_knows_who_is_inside(loop):
    gate, order = Gate(), []

    async def through(name, door):
        async with gate.passed():
            order.append(f"{name} in")
            await door.wait()
        order.append(f"{name} out")

    (first, second), flight = gates(2), Flight(loop)
    flight.add([through("a", first)])
    gate.close()
    flight.add([through("b", second)])
    assert order == ["a in"] and gate.inside == 1
    assert not loop.run_until_complete(gate.left(0.01))
    first.set()
    assert loop.run_until_complete(gate.left(60))
    second.set()
    flight.take(0.01)
    assert order == ["a in", "a out"]
    gate.open()
    flight.take(60)
    assert order == ["a in", "a out", "b in", "b out"] and gate.inside == 0
