"""The reward that every framework is given: the share of a response's characters that are digits.

It rises within a few steps from a random policy on, so that a run which does not learn shows, and takes no time. Imports nothing of
any framework: each environment loads this very file.
"""


def digit_share(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """By the signature that megarl and verl call."""
    return digit_share(solution_str)
