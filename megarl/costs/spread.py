"""How far runs were from their plans: what a planned number of seconds is worth."""

LOW, HIGH = 0.91, 1.61
"""Eight of ten public runs took between so many times as long as planned (`benchmarks/published.py`, all of its rows; a test holds them)."""


def likely(seconds: float) -> tuple[float, float]:
    """Between what eight of ten runs with this plan would end."""
    return seconds * LOW, seconds * HIGH
