"""Seconds of passes over a batch: micro-batches that go through a pipeline's stages, and the optimizer steps between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.costs.speed import Passes

# A pipeline's seconds. One forward and one backward pass in turn (1F1B), with `chunks` interleaved model chunks a stage, as in Narayanan
# et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2: filling and emptying p stages takes (p - 1) / v times a micro-batch's passes,
# in addition to the m micro-batches themselves. If stages take unequally long, the m micro-batches wait for the slowest; the
# pipeline then takes at most as long as computed here.


def pipeline_seconds(stages: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Seconds from the first pass to the last.

    Args:
        stages: seconds that each stage takes for a micro-batch, forward and backward (or forward alone).
        micro_batches: m. chunks: v.
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / chunks


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Part of the time that a stage waits, if all take equally long: (p - 1) / (m v + p - 1)."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)


@dataclass(frozen=True)
class PassTime:
    """Passes over a batch.

    Attributes:
        seconds: of all of them, without `reduce` and `adam`. micro_batches: of one of `updates` mini-batches, on a rank.
        bubble: part of the seconds that stages wait for each other, if they take equally long.
        reduce, adam: seconds of gradients and weights between data parallel ranks, and of the optimizer.
    """

    seconds: float
    micro_batches: int
    bubble: float
    updates: int = 1
    reduce: float = 0.0
    adam: float = 0.0

    @property
    def total(self) -> float:
        return self.seconds + self.reduce + self.adam


def pass_time(
    passes: Passes, rows: float, length: float, most: int | None, most_rows: int | None, updates: int = 1
) -> PassTime:
    """The time of `updates` passes over a mini-batch.

    Args:
        rows: texts of a mini-batch, over all ranks, of `length` tokens each.
        most, most_rows: tokens, or texts, of a micro-batch.
    """
    layout = passes.layout
    own = max(1.0, rows / layout.dp)
    fit = most_rows if most is None else max(1.0, most // length)
    micro_batches = -(-own // fit)
    if layout.vpp is not None:  # the interleaved schedule takes them in groups
        micro_batches = -(-micro_batches // layout.pp) * layout.pp
    count = int(micro_batches)
    stages = passes.stages(own * length / count, length)
    seconds = pipeline_seconds(stages, count, layout.num_chunks)
    whole = passes.trained == "weights"
    return PassTime(
        updates * seconds,
        count,
        bubble(layout.pp, count, layout.num_chunks),
        updates,
        updates * passes.reduce_seconds() if whole else 0.0,
        updates * passes.adam_seconds() if whole else 0.0,
    )
