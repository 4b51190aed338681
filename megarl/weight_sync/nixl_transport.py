"""The transport of an exchange by NIXL: one-sided reads over RDMA, or whatever else UCX finds (TCP between CPUs).

A member whose packets are complete says so to each that receives some; these read them out of its slot and say when they have them. Where packets lie
is in the plan, so a message is nothing but a number. There is no communicator: a member knows only its peers.

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
        self._agent: Any = self._call(
            lambda: nixl_agent(_name(member.number), nixl_agent_config(backends=["UCX"]))
        )
        self._slots: list[tuple[int, int, int]] = []  # address, bytes and device of each
        self._registered: Any = None
        self._times = 0  # slots were registered
        self._places: dict[
            int, tuple[int, list[tuple[int, int, int]]]
        ] = {}  # of peers' slots, and of which time they are
        self._said: dict[tuple[bytes, int], list[int]] = defaultdict(list)  # numbers that peers have said
        self._numbers: dict[tuple[bytes, int], int] = defaultdict(int)  # of messages with each peer

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """Register the slots that parts lie in, unless they are registered already, and tell where they are."""
        found = [(slot.data_ptr(), slot.nbytes, max(0, slot.get_device())) for slot in slots]
        if found != self._slots:
            self._call(lambda: self._register(found))

    def move(self, sends: Sequence[Part], receives: Sequence[Part]) -> Moving:
        if self._closed:
            raise LinkError(self._member.problem or "the exchange of weights was closed")
        if self._kind == "VRAM":
            torch.cuda.current_stream().synchronize()  # what is read from elsewhere has to lie there
        return _Future(self._thread.submit(self._move, list(sends), list(receives)))

    def close(self) -> None:
        self._closed = True
        self._member.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _call(self, work: Callable[[], Any]) -> Any:
        return self._thread.submit(work).result()

    def _register(self, slots: list[tuple[int, int, int]]) -> None:
        agent = self._agent
        if self._registered is not None:
            agent.deregister_memory(self._registered)
        regions = [(address, size, device, "") for address, size, device in slots]
        self._registered = agent.register_memory(regions, self._kind)
        self._slots, self._times = slots, self._times + 1
        if self._times == 1:
            about = agent.get_agent_metadata()
        else:  # peers know the agent: of new memory alone
            about = agent.get_partial_agent_metadata(self._registered, False, ["UCX"])
        told = {"agent": about.hex(), "slots": slots}
        self._member.set(f"nixl/{self._member.number}/{self._times}", json.dumps(told).encode())

    def _know(self, peer: int, times: int) -> list[tuple[int, int, int]]:
        """Where a peer's slots are, since it registered memory for the n-th time."""
        known, places = self._places.get(peer, (0, []))
        if known != times:
            told = json.loads(self._member.get(f"nixl/{peer}/{times}"))
            self._agent.add_remote_agent(bytes.fromhex(told["agent"]))
            places = [tuple(place) for place in told["slots"]]
            self._places[peer] = times, places
        return places

    def _move(self, sends: list[Part], receives: list[Part]) -> None:
        # Receivers read (RDMA's one-sided get): a sender only says that its packets are ready, and hears that they were taken.
        outgoing = sorted({part.peer for part in sends})
        incoming: dict[int, list[Part]] = defaultdict(list)
        for part in receives:
            incoming[part.peer].append(part)
        for peer in outgoing:
            if peer not in self._places:
                self._know(peer, 1)  # to be able to speak to it
            self._numbers[READY, peer] += 1
            message = b"%s %d %d" % (READY, self._numbers[READY, peer], self._times)
            with self._named(peer):
                self._agent.send_notif(_name(peer), message)
        reading: dict[int, Any] = {}
        waiting = set(incoming)
        deadline = time.monotonic() + self._member.timeout
        while waiting or reading or any(not self._is_taken(peer) for peer in outgoing):
            moved = self._hear()
            for peer in sorted(waiting):
                if self._said[READY, peer]:
                    times = self._said[READY, peer].pop(0)
                    with self._named(peer):
                        reading[peer] = self._read(peer, times, incoming[peer])
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
            # The time limit is that of a silence: a large exchange may take as long as it goes on.
            if moved:
                deadline = time.monotonic() + self._member.timeout
                continue
            if self._member.problem is not None:
                raise LinkError(self._member.problem)
            if time.monotonic() > deadline:
                silent = next(iter([*waiting, *reading, *outgoing]))
                raise LinkError(f"{self._member.name(silent)} said nothing for {self._member.timeout:g} s")
            time.sleep(POLL_SECONDS)

    def _is_taken(self, peer: int) -> bool:
        """Whether a peer has all that it was said to be ready."""
        return len(self._said[TAKEN, peer]) == self._numbers[READY, peer]

    def _read(self, peer: int, times: int, parts: list[Part]) -> Any:
        """Begin to read a peer's parts."""
        theirs, here = self._know(peer, times), self._slots
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
            b"%s %d 0" % (TAKEN, self._numbers[TAKEN, peer]),
        )
        if self._agent.transfer(handle) == "ERR":
            raise self._lost(peer)
        return handle

    @contextmanager
    def _named(self, peer: int) -> Iterator[None]:
        """Calls of the agent that concern a peer, whose end NIXL tells by an exception (1.5.1) that does not say whose."""
        try:
            yield
        except self._disconnected:
            raise self._lost(peer) from None

    def _lost(self, peer: int) -> LinkError:
        """What has happened, as the hub says soon after."""
        problem = self._member.wait_for_word()
        return LinkError(problem or f"{self._member.name(peer)} could not be read from by NIXL")

    def _hear(self) -> bool:
        """Take in what peers have said; returns whether there was anything."""
        heard = False
        for name, messages in self._agent.get_new_notifs().items():
            for message in messages:
                word, _, times = message.split()
                self._said[word, int(name.removeprefix("member-"))].append(int(times))
                heard = True
        return heard


def _name(member: int) -> str:
    return f"member-{member}"


class _Future:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()
