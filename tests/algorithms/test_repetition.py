"""Repetition of responses, by hand, and what may not change it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.repetition import duplicate_share, ngram_repetition


def responses(*texts: str) -> list[np.ndarray]:
    return [np.array([ord(letter) for letter in text], dtype=np.int32) for text in texts]


def test_duplicates_by_hand() -> None:
    # Of prompt p: 3 responses, 2 different: (3 - 2) / 2. Of q: both the same: 1. r has one response only.
    share = duplicate_share(responses("ab", "ab", "ba", "xyz", "xyz", "ab"), ["p", "p", "p", "q", "q", "r"])
    assert share == pytest.approx((0.5 + 1.0) / 2)
    assert duplicate_share(responses("a", "b"), ["p", "p"]) == 0.0
    assert duplicate_share(responses("a", "a"), ["p", "q"]) is None
    assert duplicate_share([], []) is None


def test_ngrams_by_hand() -> None:
    # abcdabcdabcd: 9 runs of 4 tokens, of which abcd, bcda, cdab, dabc are different: 5/9 occurred before.
    assert ngram_repetition(responses("abcdabcdabcd")) == pytest.approx(5 / 9)
    assert ngram_repetition(responses("aaaaa")) == pytest.approx(1 / 2)
    assert ngram_repetition(responses("abcdefgh")) == 0.0
    # A response that is too short has no part in the mean.
    assert ngram_repetition(responses("abc", "aaaaa", "abcdef")) == pytest.approx((1 / 2 + 0) / 2)
    assert ngram_repetition(responses("abc", "")) is None


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6))
def test_ngrams_are_counted_exactly(tokens: list[list[int]]) -> None:
    rates = []
    for response in tokens:
        runs = Counter(tuple(response[start : start + 4]) for start in range(len(response) - 3))
        if runs:
            rates.append(1 - len(runs) / runs.total())
    found = ngram_repetition([np.array(response, dtype=np.int32) for response in tokens])
    assert found == (pytest.approx(np.mean(rates)) if rates else None)
