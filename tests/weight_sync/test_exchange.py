"""Members of an exchange: their hub, their communicator (over gloo, and with a stand-in for NCCL's), and rounds of messages."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from megarl.weight_sync import group_transport, hub
from megarl.weight_sync.exchange import Exchange, join_exchange
from megarl.weight_sync.group_transport import GroupTransport, agree
from megarl.weight_sync.hub import GONE, Hub, Member, MemberStore
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.packets import HEADER, NIXL, ExchangeShare, Message, header_bytes
from megarl.weight_sync.transport import Part
from tests.waiting import wait_for

PATIENCE = 30.0  # seconds; more than anything here takes


def name(member: int) -> str:
    return f"trainer rank {member}" if member < 2 else f"engine rank {member - 2}"


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run `work` in a thread. Returns: a function that waits for it, and returns its result or raises its error."""
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


@pytest.fixture
def join() -> Iterator[Callable[..., Member]]:
    """join(number, timeout=...) -> a member of one exchange."""
    meeting, members = Hub("127.0.0.1"), []

    def join(number: int, timeout: float = PATIENCE) -> Member:
        members.append(Member(meeting.address, number, name, timeout))
        return members[-1]

    yield join
    for member in members:
        member.close()
    meeting.close()


def test_a_value_reaches_who_asks_before_and_after_it_is_set(join) -> None:
    first, second = join(0), join(1)
    asked = in_thread(lambda: second.get("key"))
    first.set("key", b"\x00value" * 20_000)
    assert asked() == b"\x00value" * 20_000 == join(2).get("key") == first.get("key")


def test_the_store_of_a_process_group_is_checked_without_waiting(join) -> None:
    first, second = MemberStore(join(0)), MemberStore(join(1))
    assert not first.check(["key"])
    first.set("key", b"value")
    assert first.check(["key"]) and not first.check(["key", "other"]) and not second.check(["key"])
    assert second.get("key") == b"value" and second.check(["key"])


def test_a_key_that_nobody_sets_is_an_error_in_time(join) -> None:
    with pytest.raises(LinkError, match=r"not all members of the weight sync came within 0\.2 s"):
        join(0, timeout=0.2).get("key")


def test_the_end_of_a_member_is_told_to_all_by_name_also_to_those_who_come_later(join) -> None:
    first, second, third = join(0), join(1), join(3)
    ended = threading.Event()
    first.on_end(ended.set)
    asked = in_thread(lambda: second.get("key"))
    third.close()
    with pytest.raises(LinkError, match="engine rank 1 closed its connection: it has died or given up"):
        asked()
    assert ended.wait(PATIENCE)
    second.close()  # the first member's end is reported as the cause, not this one
    late = join(2)
    assert late.wait_for_word() == first.problem == f"engine rank 1 {GONE}"
    with pytest.raises(LinkError, match="engine rank 1"):
        late.set("key", b"")
    again = threading.Event()
    late.on_end(again.set)
    assert again.is_set()


def test_the_end_of_the_hub_is_the_end_of_the_first_trainer_rank() -> None:
    meeting = Hub("127.0.0.1")
    member = Member(meeting.address, 1, name, PATIENCE)
    meeting.close()
    assert member.wait_for_word() == f"trainer rank 0 {GONE}"
    with pytest.raises(LinkError, match="trainer rank 0 could not be reached"):
        Member(("127.0.0.1", 1), 1, name, PATIENCE)


def groups(join: Callable[..., Member], size: int) -> list[GroupTransport]:
    making = [
        in_thread(lambda number=number: GroupTransport(join(number), size, "cpu")) for number in range(size)
    ]
    return [transport() for transport in making]


def part(peer: int, data: torch.Tensor) -> Part:
    return Part(peer, data, 0, 0, 0)


def test_parts_move_between_all_members_at_once(join) -> None:
    transports = groups(join, 3)
    values = [
        [torch.full((1000,), 10 * here + there, dtype=torch.uint8) for there in range(3)] for here in range(3)
    ]
    found = [[torch.zeros(1000, dtype=torch.uint8) for _ in range(3)] for _ in range(3)]
    others = [[peer for peer in range(3) if peer != here] for here in range(3)]
    moving = [
        transports[here].move(
            [part(peer, values[here][peer]) for peer in others[here]],
            [part(peer, found[here][peer]) for peer in others[here]],
        )
        for here in range(3)
    ]
    for one in moving:
        one.wait()
    for here in range(3):
        for peer in others[here]:
            assert torch.equal(found[here][peer], values[peer][here])


def test_closing_a_member_ends_what_waits_at_all_others_and_names_it(join) -> None:
    transports = groups(join, 3)
    nothing = torch.zeros(4, dtype=torch.uint8)
    waiting = [in_thread(transports[here].move([], [part(0, nothing)]).wait) for here in (1, 2)]
    transports[2].close()
    for wait, cause in zip(
        waiting, ("engine rank 0 closed its connection", "this rank has given up"), strict=True
    ):
        with pytest.raises(LinkError, match=cause):
            wait()
    with pytest.raises(LinkError, match="engine rank 0 closed its connection"):
        transports[0].move([], [part(1, nothing)])


def test_a_silent_member_is_named_within_the_timeout(join, monkeypatch) -> None:
    monkeypatch.setattr(hub, "WORD_SECONDS", 0.2)  # no member ends, so the hub has nothing to report
    making = [in_thread(lambda n=n: GroupTransport(join(n, timeout=3.0), 2, "cpu")) for n in range(2)]
    transports = [make() for make in making]
    with pytest.raises(LinkError, match=r"trainer rank 0 .* within 3 s|trainer rank 0 said nothing for 3 s"):
        transports[1].move([], [part(0, torch.zeros(4, dtype=torch.uint8))]).wait()


def test_a_member_that_cannot_make_its_transport_leaves_and_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)  # as if the package were not installed
    meeting = Hub("127.0.0.1")
    share = ExchangeShare(0, 2, 1, ((),), ((),))
    waiting = in_thread(lambda: join_exchange(share, meeting.address, "cpu", PATIENCE, False))
    without = replace(share, member=1, transport=NIXL)
    with pytest.raises(LinkError, match="needs the package nixl"):
        join_exchange(without, meeting.address, "cpu", PATIENCE, False)
    with pytest.raises(LinkError, match="engine rank 0 closed its connection: it has died or given up"):
        waiting()
    meeting.close()


class KnownOnce:
    """An agent of NIXL that records its registered memory. Like nixl 1.5.1 it refuses (NIXL_ERR_NOT_ALLOWED) memory that a peer registered
    again at a known address; nixl does so only where the keys differ, and over TCP all keys are equal.
    """

    agents: list[Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.registered: list[Any] = []
        self.peers: list[str] = []
        self.agents.append(self)

    def register_memory(self, *args: Any) -> Any:
        self.registered.append(super().register_memory(*args))  # type: ignore[misc]
        return self.registered[-1]

    def deregister_memory(self, registered: Any) -> None:
        self.registered.remove(registered)
        super().deregister_memory(registered)  # type: ignore[misc]

    def add_remote_agent(self, metadata: bytes) -> None:
        self.peers.append(super().add_remote_agent(metadata))  # type: ignore[misc]
        assert len(self.peers) == len({*self.peers}), "NIXL_ERR_NOT_ALLOWED"


def test_by_nixl_slots_are_registered_while_they_are_there(monkeypatch) -> None:
    """On GPUs, slots are freed after each version, and the next slots lie at the same addresses."""
    nixl = pytest.importorskip("nixl._api", reason="needs the package nixl (requirements/dev_no_deps.txt)")
    agents: list[Any] = []
    monkeypatch.setattr(nixl, "nixl_agent", type("Agent", (KnownOnce, nixl.nixl_agent), {"agents": agents}))
    monkeypatch.setenv("UCX_TLS", "tcp")
    meeting = Hub("127.0.0.1")
    size = Message(0, 0, 0, (32,)).nbytes
    slots = [torch.zeros(2 * size, dtype=torch.uint8) for _ in range(2)]  # sent, received

    def join(number: int) -> Exchange:
        sends, receives = Message(1 - number, 0, size, (32,)), Message(1 - number, size, 0, (32,))
        share = ExchangeShare(number, 2, 1, ((sends,),), ((receives,),), transport=NIXL)
        return join_exchange(share, meeting.address, "cpu", PATIENCE, skip_unchanged=False)

    def move(number: int, version: int) -> None:
        slots[number][:size] = 10 * version + number
        exchanges[number].start(0, [slots[number]])
        exchanges[number].finish()

    def at_both(work: Callable[..., Any], *args: Any) -> list[Any]:
        working = [in_thread(lambda number=number: work(number, *args)) for number in range(2)]
        return [result() for result in working]

    exchanges = at_both(join)
    for version in range(1, 4):
        at_both(move, version)
        assert all((slots[number][size:] == 10 * version + 1 - number).all() for number in range(2))
        assert sum(len(agent.registered) for agent in agents) == 2
        for exchange in exchanges:
            exchange.forget_slots()
        assert not any(agent.registered for agent in agents)
    # However many versions there were, the hub and the members know of the last ones alone.
    last = {f"nixl/{number}/3" for number in range(2)}
    assert meeting._values.keys() == last
    assert all(exchange._transport._member._values.keys() == last for exchange in exchanges)
    for exchange in exchanges:
        exchange.close()
    meeting.close()


class Wires:
    """Takes the place of a transport and records what one member moves in each round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[Part], list[Part]]] = []
        self.waited = 0

    def use(self, slots) -> None: ...

    def move(self, sends, receives):
        self.rounds.append((list(sends), list(receives)))
        return self

    def wait(self) -> None:
        self.waited += 1

    def close(self) -> None: ...


def share_of_an_engine_rank() -> ExchangeShare:
    """The share of a rank that receives two slices of 32 bytes from trainer rank 0 in each of three buckets, and passes them on."""
    receives = tuple((Message(0, 0, 64 * bucket, (32, 32)),) for bucket in range(3))
    sends = tuple((Message(3, 0, 0, (32, 32)),) for _ in range(3))
    return ExchangeShare(2, 4, 2, sends, receives, behind=1)


def test_a_round_has_one_operation_and_one_wait_and_passes_on_the_bucket_before() -> None:
    wires, slots = Wires(), [torch.zeros(256, dtype=torch.uint8) for _ in range(2)]
    rounds = Exchange(share_of_an_engine_rank(), wires, skip_unchanged=False)
    began = []
    for bucket in range(5):
        began.append(rounds.start(bucket, slots))
        rounds.finish()
    assert began == [True, True, True, True, False]
    assert len(wires.rounds) == wires.waited == 4
    ends = [
        ([(p.peer, p.slot) for p in sends], [(p.peer, p.slot) for p in got]) for sends, got in wires.rounds
    ]
    assert ends == [
        ([], [(0, 0)]),
        ([(3, 0)], [(0, 1)]),
        ([(3, 1)], [(0, 0)]),
        ([(3, 0)], []),
    ]
    assert [part.peer_start for _, got in wires.rounds for part in got] == [0, 64, 128]


def test_only_slices_that_changed_follow_the_headers() -> None:
    sizes = (32, 20, 16, 48)
    message = Message(1, 0, 100, sizes)
    body = header_bytes(4)
    slot = torch.zeros(message.nbytes, dtype=torch.uint8)
    slot[HEADER + 32 : HEADER + 36] = torch.tensor([1, 1, 0, 1], dtype=torch.uint8)
    wires = Wires()
    share = ExchangeShare(0, 2, 1, ((message,),), ((),))
    rounds = Exchange(share, wires, skip_unchanged=True)
    assert rounds.start(0, [slot])
    rounds.finish()
    (headers, _), (bodies, _) = wires.rounds
    assert [(len(p.data), p.start, p.peer_start) for p in headers] == [(body, 0, 100)]
    # The slices of 32 and 20 bytes are neighbours, aligned to 16 bytes; the slice of 16 bytes is left out.
    assert [(len(p.data), p.start - body, p.peer_start - body) for p in bodies] == [
        (64, 0, 100),
        (48, 80, 180),
    ]


class Communicators:
    """Takes the place of torch's NCCL groups: `made` lists the groups; `connect` is called when a communicator is made."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, connect: Callable[[], None]) -> None:
        self.made: list[Any] = []
        self._connect = connect

    def __call__(self, store, number, size, options) -> Any:
        group = Communicator(self._connect, os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        self.made.append(group)
        return group


class Communicator:
    """Behaves like torch (ProcessGroupNCCL.cpp) when an operation is begun, waited for or aborted."""

    def __init__(self, connect: Callable[[], None], blocking: str | None) -> None:
        self.connect, self.blocking, self.aborted, self.place = connect, blocking, False, None
        self.calls: list[str] = []

    def eager_connect_single_device(self, place: torch.device) -> None:
        self.place = place
        self.connect()

    def abort(self) -> None:
        self.aborted = True

    def _start_coalescing(self) -> None:
        self.calls.append("begin")

    def _end_coalescing(self) -> "Communicator | None":
        """`endCoalescing`: returns nothing to wait for if there was no operation."""
        self.calls.append("end")
        return self if self.calls[-2:] != ["begin", "end"] else None

    def send(self, tensors, peer, tag) -> None:
        self._call(f"send {peer}")

    def recv(self, tensors, peer, tag) -> None:
        self._call(f"receive {peer}")

    def _call(self, name: str) -> None:
        """`pointToPoint`: an aborted communicator refuses operations."""
        if self.aborted:
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0. ")
        self.calls.append(name)

    def wait(self, timeout: timedelta) -> bool:
        """`WorkNCCL::wait`: the kernel of an aborted operation ends, and torch only waits for this end."""
        self.calls.append("wait")
        return True


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Communicators]:
    def groups(connect: Callable[[], None] = lambda: None) -> Communicators:
        made = Communicators(connect)
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", made, raising=False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        return made

    return groups


def test_members_with_other_settings_refuse_each_other_by_name(join) -> None:
    agree(join(0), {"NCCL_CUMEM_ENABLE": "0", "NCCL_X": "2"})
    with pytest.raises(
        LinkError, match=r"trainer rank 0 .* than engine rank 1: NCCL_CUMEM_ENABLE is 0 there and 1 here;"
    ):
        agree(join(3), {"NCCL_CUMEM_ENABLE": "1", "NCCL_X": "2"})


def test_on_gpus_a_round_is_one_grouped_operation_of_one_communicator(join, on_gpus, monkeypatch) -> None:
    made = on_gpus()
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    transport = GroupTransport(join(0), 4, "cuda")
    (group,) = made.made
    # Blocking wait: torch has no thread that ends the process when an operation fails.
    assert (group.place, group.blocking) == (torch.device("cuda", 1), "1")
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    data = torch.zeros(4, dtype=torch.uint8)
    transport.move([part(1, data), part(2, data)], [part(3, data)]).wait()
    assert group.calls == ["begin", "receive 3", "send 1", "send 2", "end", "wait"]
    transport.move([], []).wait()  # as when no slice of a bucket has changed
    transport.close()
    assert group.aborted


def death(member: Member, group: Communicator) -> None:
    """Let a member die, which the hub reports to the rank with this group."""
    member.close()
    wait_for(lambda: group.aborted)


def test_on_gpus_a_round_that_a_death_has_ended_has_not_arrived(join, on_gpus, monkeypatch) -> None:
    made = on_gpus()
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    other, transport = join(3), GroupTransport(join(0), 4, "cuda")
    moving = transport.move([], [part(1, torch.zeros(4, dtype=torch.uint8))])
    death(other, made.made[0])
    with pytest.raises(LinkError, match="engine rank 1 closed its connection: it has died or given up"):
        moving.wait()


def test_on_gpus_a_group_of_operations_ends_also_where_one_of_them_is_refused(
    join, on_gpus, monkeypatch
) -> None:
    """An open group would absorb all later NCCL operations of this thread: NCCL counts open groups by thread."""
    made = on_gpus()
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    other, transport = join(3), GroupTransport(join(0), 4, "cuda")
    (group,), data = made.made, torch.zeros(4, dtype=torch.uint8)
    receive = group.recv

    def dies_after(*args) -> None:
        receive(*args)
        death(other, group)

    monkeypatch.setattr(group, "recv", dies_after)
    with pytest.raises(LinkError, match="engine rank 1 closed its connection: it has died or given up"):
        transport.move([part(1, data)], [part(1, data)])
    assert group.calls == ["begin", "receive 1", "end"]


def test_on_gpus_the_first_error_of_a_group_is_told(join, on_gpus, monkeypatch) -> None:
    """NCCL raises an operation's error once more when the operation's group ends."""

    def refuse(word: str) -> Callable[..., None]:
        def refused(*args) -> None:
            raise torch.distributed.DistBackendError(word)

        return refused

    made = on_gpus()
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    monkeypatch.setattr(hub, "WORD_SECONDS", 0.1)
    transport = GroupTransport(join(0), 4, "cuda")
    monkeypatch.setattr(made.made[0], "recv", refuse("invalid argument"))
    monkeypatch.setattr(made.made[0], "_end_coalescing", refuse("error in a group"))
    with pytest.raises(LinkError, match="or has died: invalid argument"):
        transport.move([], [part(1, torch.zeros(4, dtype=torch.uint8))])


def test_a_member_that_dies_while_the_communicator_is_made_is_an_error_at_once(
    join, on_gpus, monkeypatch
) -> None:
    begun, never = threading.Event(), threading.Event()

    def connect() -> None:
        begun.set()
        never.wait()

    on_gpus(connect)
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    other, first = join(3), join(0, timeout=1e6)
    made = in_thread(lambda: GroupTransport(first, 4, "cuda"))
    assert begun.wait(PATIENCE)
    other.close()
    with pytest.raises(LinkError, match="engine rank 1 closed its connection: it has died or given up"):
        made()
    never.set()


def test_a_death_that_the_communicator_notices_first_is_told_by_name(join, on_gpus, monkeypatch) -> None:
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    other, first = join(3), join(0)

    def connect() -> None:
        threading.Timer(0.3, other.close).start()
        raise RuntimeError("Connection closed by peer")

    on_gpus(connect)
    with pytest.raises(LinkError, match="engine rank 1 closed its connection"):
        GroupTransport(first, 4, "cuda")


def test_an_error_of_the_communicator_alone_is_told_as_it_is(join, on_gpus, monkeypatch) -> None:
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    monkeypatch.setattr(hub, "WORD_SECONDS", 0.2)

    def connect() -> None:
        raise RuntimeError("unhandled system error\nLast error: no socket interface found")

    on_gpus(connect)
    with pytest.raises(RuntimeError, match=r"system error\nLast error: no socket") as raised:
        GroupTransport(join(0), 4, "cuda")
    assert not isinstance(raised.value, LinkError)


def test_a_member_that_never_joins_the_communicator_is_an_error_in_time(join, on_gpus, monkeypatch) -> None:
    never = threading.Event()
    on_gpus(never.wait)
    monkeypatch.setattr(group_transport, "agree", lambda member, settings: None)
    with pytest.raises(LinkError, match=r"not all members of the weight sync came within 0\.3 s"):
        GroupTransport(join(0, timeout=0.3), 4, "cuda")
    never.set()
