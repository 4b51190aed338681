"""The transport of an exchange by NIXL: one-sided reads over RDMA, or whatever else UCX finds (TCP between CPUs).

A member whose packets are complete notifies each receiver; receivers read the packets out of its slot and notify it when they have them. The plan
says where packets lie, so a notification holds numbers alone. There is no communicator: a member knows only its peers.

Written against nixl 1.5.1, an optional package: `pip install 'megarl[nixl]'`. Run on CPUs over TCP and shared memory; no GPU has run it.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from megarl.weight_sync.hub import Member
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.transport import Moving, Part

READY, TAKEN = b"ready", b"taken"
POLL_SECONDS = 1e-4


class NixlTransport:
    """A member's agent. Its calls all come from one thread, which also moves parts while the caller does something else.

    Raises:
        LinkError: NIXL is not installed, or a member is gone or silent.
    """

    def __init__(self, member: Member, device: str) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
            from nixl._bindings import nixlRemoteDisconnectError
        except ImportError as error:
            raise LinkError(
                f"rollout.sync_transport=nixl needs the package nixl on every node (pip install 'megarl[nixl]'): {error}"
            ) from None
        self._disconnected: type[Exception] = nixlRemoteDisconnectError
        self._member, self._kind = member, "DRAM" if device == "cpu" else "VRAM"
        self._thread = ThreadPoolExecutor(1, "nixl")
        self._closed = False
        self._make_agent = lambda: nixl_agent(_name(member.number), nixl_agent_config(backends=["UCX"]))
        self._agent: Any = self._call(self._make_agent)
        self._slots: list[tuple[int, int, int]] = []  # address, bytes and device of each
        self._registered: Any = None
        self._times = 0  # how often slots were registered
        self._places: dict[int, list[tuple[int, int, int]]] = {}  # by peer: its slots
        self._said: dict[tuple[bytes, int], int] = defaultdict(int)  # notifications of each peer
        self._numbers: dict[tuple[bytes, int], int] = defaultdict(int)  # of notifications to each peer

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """Register the slots that parts lie in, unless they are registered already, and tell peers where they are. Others are no longer
        registered."""
        found = [(slot.data_ptr(), slot.nbytes, max(0, slot.get_device())) for slot in slots]
        if found != self._slots:
            self._call(lambda: self._register(found))

    def move(self, sends: Sequence[Part], receives: Sequence[Part]) -> Moving:
        if self._closed:
            raise LinkError(self._member.problem or "the exchange of weights was closed")
        if self._kind == "VRAM":
            torch.cuda.current_stream().synchronize()  # packets must be complete before peers read them
        return _Future(self._thread.submit(self._move, list(sends), list(receives)))

    def close(self) -> None:
        self._closed = True
        self._member.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _call(self, work: Callable[[], Any]) -> Any:
        return self._thread.submit(work).result()

    def _register(self, slots: list[tuple[int, int, int]]) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None
        self._slots = slots
        if not slots:
            return
        self._times += 1
        if self._times > 1:
            # An agent never forgets a peer's memory: at a known address it refuses what was registered anew (NIXL_ERR_NOT_ALLOWED, nixl
            # 1.5.1). All that peers said to the old agent was heard: a version ends at all members before the next one begins.
            for member in (self._member.number, *self._places):
                self._member.forget(_key(member, self._times - 1), at_hub=member == self._member.number)
            self._agent, self._places = self._make_agent(), {}
        regions = [(address, size, device, "") for address, size, device in slots]
        self._registered = self._agent.register_memory(regions, self._kind)
        told = {"agent": self._agent.get_agent_metadata().hex(), "slots": slots}
        self._member.set(_key(self._member.number, self._times), json.dumps(told).encode())

    def _know(self, peer: int) -> list[tuple[int, int, int]]:
        """Where a peer's slots are. All members register slots equally often: once, or on GPUs once a version."""
        if peer not in self._places:
            try:
                told = json.loads(self._member.get(_key(peer, self._times)))
            except LinkError:
                raise self._silent(peer) from None
            self._agent.add_remote_agent(bytes.fromhex(told["agent"]))
            self._places[peer] = [tuple(place) for place in told["slots"]]
        return self._places[peer]

    def _move(self, sends: list[Part], receives: list[Part]) -> None:
        # Receivers read (RDMA's one-sided get): a sender only says that its packets are ready, and hears that they were taken.
        outgoing = sorted({part.peer for part in sends})
        incoming: dict[int, list[Part]] = defaultdict(list)
        for part in receives:
            incoming[part.peer].append(part)
        for peer in outgoing:
            self._numbers[READY, peer] += 1
            message = b"%s %d" % (READY, self._numbers[READY, peer])
            with self._named(peer):
                self._know(peer)  # an unknown agent cannot be notified
                self._agent.send_notif(_name(peer), message)
        reading: dict[int, Any] = {}
        waiting = set(incoming)
        deadline = time.monotonic() + self._member.timeout
        while waiting or reading or any(not self._is_taken(peer) for peer in outgoing):
            moved = self._hear()
            for peer in sorted(waiting):
                if self._said[READY, peer] > self._numbers[TAKEN, peer]:
                    with self._named(peer):
                        reading[peer] = self._read(peer, incoming[peer])
                    waiting.discard(peer)
                    moved = True
            for peer, handle in list(reading.items()):
                with self._named(peer):
                    state = self._agent.check_xfer_state(handle)
                if state == "ERR":
                    raise self._lost(peer)
                if state == "DONE":
                    self._agent.release_xfer_handle(handle)
                    del reading[peer]
                    moved = True
            # The time limit is for silence: a large exchange may take any time while something moves.
            if moved:
                deadline = time.monotonic() + self._member.timeout
                continue
            if self._member.problem is not None or time.monotonic() > deadline:
                untaken = [peer for peer in outgoing if not self._is_taken(peer)]
                raise self._silent(next(iter([*waiting, *reading, *untaken])))
            time.sleep(POLL_SECONDS)

    def _is_taken(self, peer: int) -> bool:
        """Whether a peer has taken all packets that it was told are ready."""
        return self._said[TAKEN, peer] == self._numbers[READY, peer]

    def _read(self, peer: int, parts: list[Part]) -> Any:
        """Begin to read a peer's parts."""
        theirs, here = self._know(peer), self._slots
        local = [(part.data.data_ptr(), len(part.data), here[part.slot][2]) for part in parts]
        remote = [
            (theirs[part.slot][0] + part.peer_start, len(part.data), theirs[part.slot][2]) for part in parts
        ]
        self._numbers[TAKEN, peer] += 1
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(local, self._kind),
            self._agent.get_xfer_descs(remote, self._kind),
            _name(peer),
            b"%s %d" % (TAKEN, self._numbers[TAKEN, peer]),
        )
        if self._agent.transfer(handle) == "ERR":
            raise self._lost(peer)
        return handle

    @contextmanager
    def _named(self, peer: int) -> Iterator[None]:
        """Name the peer that a call of the agent concerns: NIXL's exception (1.5.1) for a peer's end does not name it."""
        try:
            yield
        except self._disconnected:
            raise self._lost(peer) from None

    def _silent(self, peer: int) -> LinkError:
        """The error where nothing comes from a peer: how the exchange has ended, or else that the peer was silent for too long."""
        name, seconds = self._member.name(peer), self._member.timeout
        return LinkError(self._member.problem or f"{name} said nothing for {seconds:g} s")

    def _lost(self, peer: int) -> LinkError:
        """The error for a lost peer, in the hub's words if the hub tells of the loss soon after."""
        problem = self._member.wait_for_word()
        return LinkError(problem or f"{self._member.name(peer)} could not be read from by NIXL")

    def _hear(self) -> bool:
        """Record the notifications of peers; returns whether there were any."""
        heard = False
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages:
                word, _ = message.split()
                self._said[word, int(name.removeprefix("member-"))] += 1
                heard = True
        return heard


def _name(member: int) -> str:
    return f"member-{member}"


def _key(member: int, times: int) -> str:
    """Under which a member says where its slots are, which it has registered `times` times."""
    return f"nixl/{member}/{times}"


class _Future:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()
