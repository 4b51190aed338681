"""Pauses of the garbage collector, and freed memory that is kept, in processes of their own."""

import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.layout import Box, Layout, Piece, Plan, RankPlace, make_plan
from megarl.layout.placement import place_engines
from megarl.util.memory import collection_paused, without_collection

RANKS, TENSORS = 4, 1000
PLACES = tuple(RankPlace("node", str(rank)) for rank in range(RANKS))


def rows(name: str) -> Layout:
    def pieces(rank: int) -> list[Piece]:
        box, local = Box((rank * 2, 0), (2, 3)), Box((0, 0), (2, 3))
        return [Piece(f"tensor{number}", box, f"local{number}", local) for number in range(TENSORS)]

    return Layout.by_rank(name, RANKS, pieces, PLACES)


@pytest.mark.parametrize("on", [True, False])
def test_it_goes_on_as_it_was(on: bool) -> None:
    was_on = gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        with collection_paused(), collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is on
        with pytest.raises(ValueError, match="refused"), collection_paused():
            raise ValueError("refused")
        assert gc.isenabled() is on
    finally:
        gc.enable() if was_on else gc.disable()


@pytest.mark.parametrize(
    "work",
    [
        lambda plan: plan.copies,
        lambda plan: plan.copies_to(1),
        lambda plan: plan.deliveries_from(1),
        lambda plan: plan.account(),
        lambda plan: plan.buckets(1 << 20),
        lambda plan: place_engines(plan.source, plan.target, PLACES, RANKS),
    ],
    ids=["copies", "copies_to", "deliveries_from", "account", "buckets", "place_engines"],
)
def test_no_collection_in_a_plan(work: Callable[[Plan], object]) -> None:
    """Each function makes thousands of tuples; the collector starts at every few hundred new ones (Python 3.11: 700).

    It starts once when it is on again.
    """
    plan, began = make_plan(rows("source"), rows("target")), []
    assert gc.isenabled()
    gc.collect()
    gc.callbacks.append(lambda phase, _: began.append(phase) if phase == "start" else None)
    try:
        work(plan)
        meanwhile = len(began)
        kept = [(number,) for number in range(10_000)]
    finally:
        gc.callbacks.pop()
    assert meanwhile <= 1 and len(kept) == 10_000
    assert len(began) >= meanwhile + 3, "it works, and is seen"


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_pauses_and_goes_on_as_it_was(on: bool) -> None:
    was_on = gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        with without_collection():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() is on
        left_out = gc.get_freeze_count()
        assert left_out >= len(made)
        assert not any(thing is made for thing in gc.get_objects())
    finally:
        gc.enable() if was_on else gc.disable()
        gc.unfreeze()


def test_it_goes_on_when_an_import_fails() -> None:
    with pytest.raises(ImportError), without_collection():
        raise ImportError("no module")
    assert gc.isenabled()
    gc.unfreeze()


ROOT = Path(__file__).parents[2]
# Uses and frees 64 MiB a hundred times; then reports the memory that is still taken, and what is taken after it was given back.
USE = """
import ctypes, json, resource, sys, threading
import psutil
from megarl.util.memory import keep_freed_memory, return_freed_memory
libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_freed_memory()
def use(times):
    for _ in range(times):
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
def resident():
    return psutil.Process().memory_info().rss >> 20
def measure():
    before = resident()
    use(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(100)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    kept = resident() - before
    return_freed_memory()
    print(json.dumps({"faults": faults, "kept": kept, "left": resident() - before}))
thread = threading.Thread(target=measure)  # as an actor's call is not in its process's first thread
thread.start()
thread.join()
"""


def measured(how: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", USE, how], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_is_kept_and_given_back() -> None:
    """Sizes are in MiB; faults are of 4 KiB pages, or of larger ones."""
    usual, kept = measured("usual"), measured("keep")
    assert kept["faults"] * 20 < usual["faults"]
    assert usual["kept"] < 16 and kept["kept"] >= 60 and kept["left"] < 16
