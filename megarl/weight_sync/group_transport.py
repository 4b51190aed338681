"""The transport of an exchange by a process group of torch's: NCCL for tensors on GPUs, gloo for others.

On GPUs all that a member moves in a round is one grouped operation (ncclGroupStart and ncclGroupEnd) of the one communicator that all members
share, so that no communicator of two ranks is made.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from megarl.util import gloo, nccl
from megarl.weight_sync.hub import Member, MemberStore
from megarl.weight_sync.links import LinkError
from megarl.weight_sync.transport import Moving, Part


class GroupTransport:
    """A process group of torch's: NCCL for tensors on GPUs, gloo for others. `member` is closed with it.

    The constructor returns when all members have come; on GPUs it also makes the communicator.

    Raises:
        LinkError: a member is gone or did not come in time, or has another environment for NCCL.
    """

    def __init__(self, member: Member, size: int, device: str) -> None:
        self._member, self._device = member, device
        store = MemberStore(member)
        timeout = timedelta(seconds=member.timeout)
        if device != "cpu":
            agree(member, nccl.settings(os.environ))
        self._group: Any = self._connected(lambda: _group(store, member.number, size, device, timeout))
        if device != "cpu":
            place = torch.device(device, torch.cuda.current_device())
            self._connected(lambda: self._group.eager_connect_single_device(place))
        member.on_end(self._abort)

    def use(self, slots: Sequence[torch.Tensor]) -> None:
        """A process group takes any memory."""

    def move(self, sends: Sequence[Part], receives: Sequence[Part]) -> Moving:
        group = self._group
        if group is None:
            raise LinkError(self._member.problem or "the exchange of weights was closed")
        # No slice of the bucket has changed. For a group without operations torch returns no work.
        if not sends and not receives:
            return _Works(self, [], [])
        with self._errors():
            works: list[tuple[int | None, Any]]
            if self._device == "cpu":
                works = [(part.peer, group.recv([part.data], part.peer, 0)) for part in receives]
                works += [(part.peer, group.send([part.data], part.peer, 0)) for part in sends]
            else:  # one grouped operation of the communicator that all members share
                group._start_coalescing()
                try:
                    for part in receives:
                        group.recv([part.data], part.peer, 0)
                    for part in sends:
                        group.send([part.data], part.peer, 0)
                except BaseException:
                    # NCCL counts open groups by thread: this one would hold back all that the thread gives to NCCL afterwards. Its end may
                    # fail as the operation did, whose error is the one to tell.
                    with suppress(RuntimeError):
                        group._end_coalescing()
                    raise
                works = [(None, group._end_coalescing())]
        return _Works(self, works, [*sends, *receives])

    def close(self) -> None:
        self._member.close()
        self._abort()

    def wait(self, peer: int | None, work: Any) -> None:
        """Wait for an operation with `peer` (None: with any)."""
        timeout = self._member.timeout
        with self._errors(peer):
            arrived = work.wait(timedelta(seconds=timeout))
            # torch takes an aborted NCCL operation for one that has arrived (WorkNCCL::isCompleted in ProcessGroupNCCL.cpp).
            if self._member.problem is not None:
                raise LinkError(self._member.problem)
            if not arrived:
                name = self._member.name(peer) if peer is not None else "a member of the weight sync"
                raise LinkError(f"{name} said nothing for {timeout:g} s")

    def _connected(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, in which members connect; where it fails since a member is gone, the LinkError names that member."""
        try:
            return self._member.while_all_live(work)
        except RuntimeError as error:
            # Its own connections may show a member's end before the hub has told it.
            if isinstance(error, LinkError) or (word := self._member.wait_for_word()) is None:
                raise
            raise LinkError(word) from error

    def _abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    @contextmanager
    def _errors(self, peer: int | None = None) -> Iterator[None]:
        """Turn errors of the process group into a LinkError that names the member whose end caused them."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LinkError):
                raise
            first = str(error).strip().splitlines()[0]
            word = self._member.wait_for_word()
            if word is None:
                name = self._member.name(peer) if peer is not None else "a member of the weight sync"
                word = f"{name} could not be reached within {self._member.timeout:g} s, or has died: {first}"
            raise LinkError(word) from None


class _Works:
    """Operations of a process group, and the memory that they use."""

    def __init__(
        self, transport: GroupTransport, works: list[tuple[int | None, Any]], parts: Sequence[Part]
    ) -> None:
        self._transport, self._works, self._parts = transport, works, parts

    def wait(self) -> None:
        for peer, work in self._works:
            self._transport.wait(peer, work)
        self._works, self._parts = [], ()


def agree(member: Member, here: Mapping[str, str]) -> None:
    """Compare the NCCL settings of this process with the first member's.

    Raises:
        LinkError: they differ, so that the two would make their buffers in different ways.
    """
    key = "environment"
    if member.number == 0:
        member.set(key, json.dumps(dict(here)).encode())
        return
    there = json.loads(member.get(key))
    if found := nccl.disagreement(here, there):
        raise LinkError(
            f"{member.name(0)} has another environment for NCCL than {member.name(member.number)}: {found}; set them for the job "
            "or on all of its nodes"
        )


def _group(store: MemberStore, number: int, size: int, device: str, timeout: timedelta) -> Any:
    """A backend of torch.distributed; it has the sends and receives of a ProcessGroup."""
    if device == "cpu":
        return gloo.make_group(store, number, size, timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # With this variable the thread that waits gets the error, and raises a LinkError. Without it torch gives each group a thread that
    # ends the process when an operation of the group has failed or timed out (ProcessGroupNCCL.cpp). There is no other switch.
    with _variable("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return torch.distributed.ProcessGroupNCCL(store, number, size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
