"""Two ends of a control channel, and the packet channel that they make: over gloo, and with a stand-in for NCCL's groups."""

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from megarl.weight_sync import links
from megarl.weight_sync.links import ChannelStore, ControlChannel, LinkError, PacketChannel, agree

PATIENCE = 30.0  # seconds; more than anything here takes


def lines(timeout: float = PATIENCE) -> tuple[ControlChannel, ControlChannel]:
    here, there = socket.socketpair()
    return ControlChannel(here, "engine rank 3", timeout), ControlChannel(there, "trainer rank 5", timeout)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run it in a thread; what is returned waits for it, and returns or raises as it did."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["value"] = work()
        except Exception as error:
            found["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE)
        assert not thread.is_alive()
        if "error" in found:
            raise found["error"]
        return found["value"]

    return result


class Communicators:
    """In place of torch's NCCL groups: `made` of them, what the environment said then, and what making a communicator does."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, connect: Callable[[], None] = lambda: None) -> None:
        self.made: list[Any] = []
        self._connect = connect

    def __call__(self, store, end, size, options) -> Any:
        group = Communicator(self._connect, os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        self.made.append(group)
        return group


class Communicator:
    def __init__(self, connect: Callable[[], None], blocking: str | None) -> None:
        self.connect, self.blocking, self.aborted, self.place = connect, blocking, False, None

    def eager_connect_single_device(self, place: torch.device) -> None:
        self.place = place
        self.connect()

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def on_gpus(monkeypatch) -> Callable[..., Communicators]:
    def groups(connect: Callable[[], None] = lambda: None) -> Communicators:
        made = Communicators(connect)
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", made, raising=False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        return made

    return groups


def test_ends_with_other_settings_refuse_each_other_by_name():
    here, there = lines()
    other = in_thread(
        lambda: agree(ChannelStore(there), 1, there.peer, {"NCCL_CUMEM_ENABLE": "1", "NCCL_X": "2"})
    )
    with pytest.raises(LinkError, match=r"engine rank 3 .* NCCL_CUMEM_ENABLE is 1 there and 0 here;"):
        agree(ChannelStore(here), 0, here.peer, {"NCCL_CUMEM_ENABLE": "0", "NCCL_X": "2"})
    with pytest.raises(LinkError, match=r"trainer rank 5 .* NCCL_CUMEM_ENABLE is 0 there and 1 here;"):
        other()


def test_a_pair_on_gpus_compares_settings_and_has_its_communicator(on_gpus, monkeypatch):
    made = on_gpus()
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    here, there = lines()
    asked = []
    monkeypatch.setattr(links, "agree", lambda store, end, peer, settings: asked.append((end, peer)))
    other = in_thread(lambda: PacketChannel(there, 1, "cuda"))
    pair = PacketChannel(here, 0, "cuda")
    other()
    assert sorted(asked) == [(0, "engine rank 3"), (1, "trainer rank 5")]
    # None of them has a thread that ends the process when something fails.
    assert [(group.place, group.blocking) for group in made.made] == [(torch.device("cuda", 1), "1")] * 2
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    pair.close()
    assert [group.aborted for group in made.made].count(True) == 1
    assert here._socket.fileno() == -1


def test_a_peer_that_dies_while_the_communicator_is_made_is_an_error_at_once(on_gpus, monkeypatch):
    here, there = lines(timeout=1e6)
    begun, never = threading.Event(), threading.Event()

    def connect() -> None:
        begun.set()
        never.wait()

    on_gpus(connect)
    monkeypatch.setattr(links, "agree", lambda *args: None)
    there.send(b"said before")  # an unread word is no sign of life
    made = in_thread(lambda: PacketChannel(here, 0, "cuda"))
    assert begun.wait(PATIENCE)
    there.close()
    with pytest.raises(LinkError, match="engine rank 3 closed its connection: it has died or given up"):
        made()
    never.set()


def test_a_peer_that_never_joins_the_communicator_is_an_error_in_time(on_gpus, monkeypatch):
    here, there = lines(timeout=0.3)
    never = threading.Event()
    on_gpus(never.wait)
    monkeypatch.setattr(links, "agree", lambda *args: None)
    with pytest.raises(LinkError, match=r"engine rank 3 said nothing for 0\.3 s"):
        PacketChannel(here, 0, "cuda")
    never.set()
    there.close()


def test_what_the_communicator_raises_names_the_peer(on_gpus, monkeypatch):
    here, there = lines()

    def connect() -> None:
        raise RuntimeError("NCCL error: unhandled system error\nmore")

    on_gpus(connect)
    monkeypatch.setattr(links, "agree", lambda *args: None)
    with pytest.raises(
        LinkError, match=r"engine rank 3 could not be reached .*: NCCL error: unhandled system"
    ):
        PacketChannel(here, 0, "cuda")
    there.close()


def test_closing_a_pair_ends_what_waits_in_it_here_and_there():
    here, there = lines()
    other = in_thread(lambda: PacketChannel(there, 1, "cpu"))
    pair, peer = PacketChannel(here, 0, "cpu"), other()
    waiting = in_thread(lambda: peer.receive(torch.zeros(4, dtype=torch.uint8)))
    pair.close()
    with pytest.raises(LinkError, match="trainer rank 5"):
        waiting()
    peer.close()
