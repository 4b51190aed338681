"""The memory of a sync on the trainer's side, over connections that come and go."""

import os
from types import SimpleNamespace

from megarl.hybrid_engine import Slots
from megarl.layout import Box
from megarl.rollout.packets import SHARED, Parcel, Slice, SyncShare
from megarl.trainer.actor import ActorWorker


def share(count: int) -> SyncShare:
    """To one engine rank, a float32 tensor of so many numbers."""
    whole = Slice("w", "w", Box.whole((count,)), "float32")
    return SyncShare(0, {0: SHARED}, ((Parcel(0, 0, (whole,)),),), {})


def test_slots_of_the_same_sizes_are_the_same_memory():
    slots = Slots("cpu")
    first = slots.take(2, 4096)
    files = list(slots.files)
    assert [slot.data_ptr() for slot in slots.take(2, 4096)] == [slot.data_ptr() for slot in first]
    assert slots.files == files
    assert [len(slot) for slot in slots.take(2, 8192)] == [8192] * 2
    assert [os.fstat(file).st_size for file in slots.files] == [8192] * 2
    slots.close()
    assert slots.files == []


def test_an_actor_keeps_its_slots_when_it_is_connected_anew(tmp_path):
    """As after the death of an engine, which never gives back what it had opened."""
    actor = SimpleNamespace(outbox=None, slots=Slots("cpu"), info=SimpleNamespace(scratch=str(tmp_path)))
    addresses, memory = [], []
    for _ in range(2):
        addresses.append(ActorWorker.open_outbox(actor, share(1000), "127.0.0.1", 30.0))
        memory.append([slot.data_ptr() for slot in actor.outbox._slots])
    assert addresses[0] != addresses[1]
    assert memory[0] == memory[1] and len(memory[0]) == 1
    actor.outbox.close()
    actor.slots.close()
