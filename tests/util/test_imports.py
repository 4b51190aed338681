"""The collector pauses while modules are imported, and leaves out what they made."""

import gc

import pytest

from megarl.util.imports import without_collection


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
