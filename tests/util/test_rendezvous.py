"""Ranks that wait for each other at a store, each for as long as it takes."""

import threading

import pytest
from torch.distributed import HashStore

from megarl.util.rendezvous import wait_for_all


def test_it_returns_when_all_are_there_and_the_first_is_told_who_is_missing():
    store, said, told = HashStore(), [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    first = threading.Thread(target=wait_for_all, args=(store, "it is loaded", 0, 3, 60.0, say, 0.02))
    first.start()
    other = threading.Thread(target=wait_for_all, args=(store, "it is loaded", 2, 3, 60.0))
    other.start()
    assert told.wait(30)
    assert first.is_alive() and other.is_alive()
    wait_for_all(store, "it is loaded", 1, 3, 60.0)
    first.join(30)
    other.join(30)
    assert not first.is_alive() and not other.is_alive()
    assert said[0].startswith("it is loaded: not yet so on ") and " of 3 ranks: 1" in said[0]


def test_ranks_that_never_come_are_named():
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"it is loaded: not yet so on 2 of 3 ranks: 0, 2 within 0\.05 s"):
        wait_for_all(store, "it is loaded", 1, 3, 0.05)
