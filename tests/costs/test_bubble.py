"""How long a pipeline takes, beside schedules that are played through pass by pass."""

import pytest

from megarl.costs.bubble import bubble, pipeline_seconds

FORWARD, BACKWARD = 2, 4


def order(stage: int, stages: int, micro_batches: int, chunks: int) -> list[tuple[str, int, int]]:
    """The passes of a stage as (kind, chunk, micro-batch): 1F1B, interleaved where there are chunks, after Narayanan et al.
    2021, figures 3 and 4."""
    total = micro_batches * chunks
    first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    first = min(first, total)

    def place(kind: str, number: int) -> tuple[str, int, int]:
        group, rest = divmod(number, stages * chunks)
        chunk = rest // stages if kind == "forward" else chunks - 1 - rest // stages
        return kind, chunk, group * stages + rest % stages

    if chunks == 1:

        def place(kind: str, number: int) -> tuple[str, int, int]:
            return kind, 0, number

    passes = [place("forward", number) for number in range(first)]
    for number in range(total - first):
        passes += [place("forward", first + number), place("backward", number)]
    return passes + [place("backward", number) for number in range(total - first, total)]


def played(times: list[tuple[float, float]], micro_batches: int, chunks: int = 1) -> float:
    """Seconds until all is done, if each stage takes its `times` (forward, backward) for a micro-batch."""
    stages = len(times)
    queues = [order(stage, stages, micro_batches, chunks) for stage in range(stages)]
    done: dict[
        tuple[str, int, int], float
    ] = {}  # (kind, place among all chunks of all stages, micro-batch) -> when
    free, last = [0.0] * stages, stages * chunks - 1
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, chunk, micro_batch = queue[0]
                place = chunk * stages + stage
                needed = []
                if kind == "forward":
                    needed += [("forward", place - 1, micro_batch)] if place else []
                else:
                    needed += [("forward", place, micro_batch)]
                    needed += [("backward", place + 1, micro_batch)] if place < last else []
                if any(each not in done for each in needed):
                    break
                start = max([free[stage], *(done[each] for each in needed)])
                free[stage] = start + times[stage][kind == "backward"] / chunks
                done[kind, place, micro_batch] = free[stage]
                queue.pop(0)
                moved = True
        assert moved, "a schedule that waits for itself"
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32), (4, 2)])
def test_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    seconds = played([(FORWARD, BACKWARD)] * stages, micro_batches)
    assert pipeline_seconds([FORWARD + BACKWARD] * stages, micro_batches) == seconds
    assert bubble(stages, micro_batches) == pytest.approx(1 - micro_batches * (FORWARD + BACKWARD) / seconds)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_interleaved(stages: int, micro_batches: int, chunks: int) -> None:
    seconds = played([(FORWARD, BACKWARD)] * stages, micro_batches, chunks)
    assert pipeline_seconds([FORWARD + BACKWARD] * stages, micro_batches, chunks) == pytest.approx(seconds)
    waits = 1 - micro_batches * (FORWARD + BACKWARD) / seconds
    assert bubble(stages, micro_batches, chunks) == pytest.approx(waits)


@pytest.mark.parametrize("slow", range(4))
def test_one_slow_stage(slow: int) -> None:
    """All others wait for it; where it is not the last, it has itself something to do while the pipeline fills."""
    times = [(1.5 * FORWARD, 1.5 * BACKWARD) if stage == slow else (FORWARD, BACKWARD) for stage in range(4)]
    seconds, most = played(times, 16), pipeline_seconds([sum(time) for time in times], 16)
    assert seconds <= most <= 1.07 * seconds
    assert slow < 3 or most == seconds
