"""How long a pipeline takes for a mini-batch, and how long its stages wait for each other.

One forward and one backward pass in turn (1F1B), of `chunks` model chunks a stage interleaved, as Narayanan et al. 2021
(arXiv:2104.04473), sections 2.2.1 and 2.2.2, have it: filling and emptying p stages takes (p - 1) / v times a micro-batch's
passes, beside the m of these. Of stages that take unequally long the slowest is what m micro-batches wait for; it is then at
most as long as is said here.
"""

from collections.abc import Sequence


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
