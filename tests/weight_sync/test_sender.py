"""The memory of a weight sync on the trainer's side: kept across connections, or, if not lasting, freed between syncs."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.layout import Box
from megarl.trainer.workers.actor import ActorWorker
from megarl.weight_sync.inbox import Inbox
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.packets import Packet, PacketSpec, Slice, SyncShare
from megarl.weight_sync.sender import Outbox, Slots


def share(count: int) -> SyncShare:
    """A sender's share: a float32 tensor of `count` numbers for one engine rank that maps the slots."""
    spec = PacketSpec(0, (0,), 0, 0, (Slice("w", "w", Box.whole((count,)), "float32"),))
    return SyncShare(0, ((spec,),), ((0,),), spec.nbytes, {})


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
    """As after the death of an engine, which never closes the slots that it had opened."""
    actor = SimpleNamespace(outboxes={}, slots={}, info=SimpleNamespace(scratch=str(tmp_path)))
    addresses, memory = [], []
    for _ in range(2):
        addresses.append(ActorWorker.open_outbox(actor, share(1000), "127.0.0.1", 30.0))
        memory.append([slot.data_ptr() for slot in actor.outboxes["rollout"]._slots])
    assert addresses[0] != addresses[1]
    assert memory[0] == memory[1] and len(memory[0]) == 1
    # Engines of another role map other slots, and their connection does not affect the first one.
    addresses.append(ActorWorker.open_outbox(actor, share(1000), "127.0.0.1", 30.0, "eval"))
    assert len({*addresses}) == 3
    assert actor.outboxes["eval"]._slots[0].data_ptr() != memory[0][0]
    assert not actor.outboxes["rollout"]._closed
    for role in ("rollout", "eval"):
        actor.outboxes[role].close()
        actor.slots[role].close()


def take_version(inbox: Inbox, version: int, found: list[torch.Tensor]) -> None:
    """Take a version of one packet as an engine rank does, without ending the version."""
    inbox.begin()
    for _, data in inbox.take(version, 0):
        ((_, elements),) = Packet(data, share(1000).buckets[0][0].slices).places()
        found.append(elements.clone())
    inbox.release(version, 0)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("lasting", [True, False])
def test_slots_that_do_not_last_are_there_while_a_version_travels(tmp_path: Path, lasting: bool) -> None:
    """As on a GPU, with shared memory in place of CUDA IPC."""
    slots = Slots("cpu", lasting)
    outbox = Outbox(share(1000), str(tmp_path), "127.0.0.1", "cpu", 20.0, slots)
    assert (outbox.buffer_bytes > 0) == lasting
    found: list[torch.Tensor] = []
    inboxes: list[Inbox] = []

    def engine() -> None:
        inboxes.append(Inbox(share(1000), {0: outbox.address}, None, "cpu", 20.0))
        for version in (1, 2):
            take_version(inboxes[0], version, found)
            inboxes[0].end(version)

    thread = in_thread(engine)
    for version in (1, 2):
        sent = outbox.send(version, {"w": torch.full((1000,), float(version))})
        assert sent.buffer_bytes > 4000
        assert (outbox.buffer_bytes > 0) == (len(slots.files) > 0) == lasting
    thread.join()
    assert [set(values.tolist()) for values in found] == [{1.0}, {2.0}]
    outbox.close()
    inboxes[0].close()
    slots.close()


def test_an_engine_that_does_not_close_slots_breaks_the_connection_and_they_stay(tmp_path: Path) -> None:
    """The engine still has the slots open, so the sender must not replace them with new ones."""
    slots = Slots("cpu", lasting=False)
    outbox = Outbox(share(1000), str(tmp_path), "127.0.0.1", "cpu", 20.0, slots)

    def engine() -> None:
        inbox = Inbox(share(1000), {0: outbox.address}, None, "cpu", 20.0)
        take_version(inbox, 1, [])
        inbox.close()  # as if it was killed before the version's end

    thread = in_thread(engine)
    with pytest.raises(LinkError, match="engine rank 0"):
        outbox.send(1, {"w": torch.ones(1000)})
    thread.join()
    assert len(slots.files) == 1
    memory = slots.take(1, share(1000).slot_bytes)
    assert len(slots.files) == 1 and len(memory) == 1
    slots.close()


@dataclass
class Told:
    """Takes the place of an exchange; `slots`: the slots that existed when `forget_slots` was called."""

    there: Callable[[], list]
    slots: list | None = None
    moving: bool = False

    def start(self, *args: object) -> bool:
        return False

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def forget_slots(self) -> None:
        self.slots = list(self.there())


def test_an_exchange_forgets_slots_before_they_are_freed(tmp_path: Path, monkeypatch) -> None:
    """NIXL has the slots registered."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    slots = Slots("cpu", lasting=False)
    outbox = Outbox(share(1000), str(tmp_path), "127.0.0.1", "cpu", 20.0, slots)
    inbox = Inbox(share(1000), {0: outbox.address}, None, "cpu", 20.0)
    sending = Told(lambda: slots.files)
    receiving = Told(lambda: inbox._slots)
    outbox._exchange = sending

    def engine() -> None:
        take_version(inbox, 1, [])
        inbox.end(1)

    thread = in_thread(engine)
    outbox.send(1, {"w": torch.ones(1000)})
    thread.join()
    assert len(sending.slots) == 1 and slots.files == []

    inbox._sources, inbox._exchange, inbox._device = {}, receiving, "cuda"
    inbox._slots = [torch.zeros(4)]
    inbox.end(2)
    assert len(receiving.slots) == 1 and inbox._slots == []
    inbox.close()
    outbox.close()
    slots.close()
