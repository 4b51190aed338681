"""The transport between one trainer rank and one engine rank while weights travel; the same code at both ends.

- Where packets are in memory that both ends map, the ends only exchange `Token`s over a Unix socket (`ControlChannel`): "the packet of
  this bucket is complete", "it was taken".
- Where they are not, packets travel over a process group of the two ranks alone (`PacketChannel`), outside of any other group that
  their processes have: SGLang's own holds no trainer ranks, and a group of all ranks would have to be made anew with each engine
  that starts.

If one end dies or is silent for too long, the other end raises a `LinkError` that names it.
"""

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup, Store

from megarl.util import nccl

Result = TypeVar("Result")
_TOKEN = struct.Struct("<qq")
_SIZES = struct.Struct("<qq")
Token = tuple[int, int]
"""(version, bucket)."""


class LinkError(RuntimeError):
    """The rank at the other end is gone, silent, or at another bucket or version."""


class ControlChannel:
    """One end of a control connection, which carries tokens and open files."""

    def __init__(self, connection: socket.socket, peer: str, timeout: float) -> None:
        self.peer, self.timeout = peer, timeout
        self._socket = connection

    def send_token(self, token: Token) -> None:
        self.send(_TOKEN.pack(*token))

    def expect_token(self, token: Token) -> None:
        """Wait for the token.

        Raises:
            LinkError: the peer ended, was silent for `timeout` seconds, or sent another token.
        """
        found = _TOKEN.unpack(self.receive(_TOKEN.size))
        if found != token:
            raise LinkError(
                f"{self.peer} is at {describe_token(found)} where {describe_token(token)} was due"
            )

    def send(self, data: bytes) -> None:
        with naming_peer(self.peer, self.timeout):
            self._socket.settimeout(self.timeout)
            self._socket.sendall(data)

    def receive(self, size: int) -> bytes:
        data = bytearray()
        deadline = time.monotonic() + self.timeout
        with naming_peer(self.peer, self.timeout):
            while len(data) < size:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                part = self._socket.recv(size - len(data))
                if not part:
                    raise ConnectionResetError
                data += part
        return bytes(data)

    def send_files(self, descriptors: list[int]) -> None:
        """Pass open files to the peer, which gets descriptors of its own."""
        with naming_peer(self.peer, self.timeout):
            socket.send_fds(self._socket, [b"f"], descriptors)

    def receive_files(self, count: int) -> list[int]:
        with naming_peer(self.peer, self.timeout):
            self._socket.settimeout(self.timeout)
            data, files, _, _ = socket.recv_fds(self._socket, 1, count)
            if not data:
                raise ConnectionResetError
        assert len(files) == count, (files, count)
        return files

    def while_peer_lives(self, work: Callable[[], Result], every: float = 0.1) -> Result:
        """Run `work`, which waits for the peer without a timeout, and return its result.

        It runs in a thread of its own, which is abandoned if the peer ends or `timeout` passes.

        Args:
            every: seconds between two checks that the peer is alive.

        Raises:
            LinkError: the peer ended, or `timeout` passed.
            Exception: any exception of `work`.
        """
        future: Future[Result] = Future()
        threading.Thread(target=_fulfil, args=(future, work), name="link", daemon=True).start()
        ended, deadline = select.poll(), time.monotonic() + self.timeout
        # The end of the connection alone: unread tokens of the peer stay unread.
        ended.register(self._socket, select.POLLRDHUP)
        with naming_peer(self.peer, self.timeout):
            while not wait_for([future], every).done:
                if ended.poll(0) and not wait_for([future], every).done:
                    raise ConnectionResetError
                if time.monotonic() > deadline:
                    raise TimeoutError
            return future.result()

    def close(self) -> None:
        self._socket.close()


def _fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised where it is waited for
        future.set_exception(error)


def describe_token(token: Token) -> str:
    return f"bucket {token[1]} of version {token[0]}"


@contextmanager
def naming_peer(peer: str, timeout: float) -> Iterator[None]:
    """Turn exceptions of a connection or a process group into a LinkError that names the peer."""
    try:
        yield
    except TimeoutError:
        raise LinkError(f"{peer} said nothing for {timeout:g} s") from None
    except OSError:
        raise LinkError(f"{peer} closed its connection: it has died or given up") from None
    except RuntimeError as error:  # of torch.distributed
        if isinstance(error, LinkError):
            raise
        first = str(error).strip().splitlines()[0]
        raise LinkError(f"{peer} could not be reached within {timeout:g} s, or has died: {first}") from None


class ChannelStore(Store):
    """The rendezvous store of a `PacketChannel`'s two ranks: a key that one end sets, the other gets over their control channel.

    torch's TCPStore would do, but asks for the names of its clients' addresses: 5 s where no DNS server answers.
    """

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__()
        self._channel = channel
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub says str, its groups give bytes
        self._known[key] = value
        self._channel.send(_SIZES.pack(len(key), len(value)) + key.encode() + value)

    def get(self, key: str) -> bytes:
        while key not in self._known:
            key_size, value_size = _SIZES.unpack(self._channel.receive(_SIZES.size))
            found = self._channel.receive(key_size).decode()
            self._known[found] = self._channel.receive(value_size)
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)


class PacketChannel:
    """A process group of one trainer rank (end 0) and one engine rank (end 1), which both ends of a control channel make together.

    On GPUs the constructor also makes the communicator: if one end dies before that is done, the other raises a LinkError, as it does later.
    """

    def __init__(self, channel: ControlChannel, end: int, device: str) -> None:
        self.peer, self.timeout, self._other, self._device = channel.peer, channel.timeout, 1 - end, device
        self._channel, self._store = channel, ChannelStore(channel)
        with naming_peer(self.peer, self.timeout):
            if device != "cpu":
                agree(self._store, end, self.peer, nccl.settings(os.environ))
            self._group: ProcessGroup | None = _packet_group(
                self._store, end, device, timedelta(seconds=self.timeout)
            )
        if device != "cpu":
            place = torch.device(device, torch.cuda.current_device())
            # torch's stubs give a group's backends its sends and receives, not this method of NCCL's.
            group: Any = self._group
            channel.while_peer_lives(lambda: group.eager_connect_single_device(place))

    def close(self) -> None:
        """End the group, also if an operation waits in it, and the control channel, which the peer notices; may be called again."""
        if self._group is not None:
            self._group.abort()
        self._group = None  # gloo's connections end with it
        self._channel.close()

    def send(self, tensor: torch.Tensor) -> "Transfer":
        """Begin to send a uint8 tensor, which must not change before the transfer is complete."""
        with naming_peer(self.peer, self.timeout):
            size = torch.tensor([len(tensor)], device=self._device)
            group = self._open_group()
            works = [group.send([part], self._other, 0) for part in (size, tensor)]
        return Transfer(self, works, (size, tensor))

    def receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """Wait for the next tensor, write it to the beginning of `buffer`, and return that part."""
        with naming_peer(self.peer, self.timeout):
            size = torch.zeros(1, dtype=torch.int64, device=self._device)
            group = self._open_group()
            self.wait(group.recv([size], self._other, 0))
            count = int(size.item())
            if count > len(buffer):
                raise LinkError(f"{self.peer} sends {count} bytes where at most {len(buffer)} were due")
            part = buffer[:count]
            self.wait(group.recv([part], self._other, 0))
        return part

    def _open_group(self) -> ProcessGroup:
        if self._group is None:
            raise LinkError(f"the channel to {self.peer} is closed")
        return self._group

    def wait(self, work: torch.distributed.Work) -> None:
        if not work.wait(timedelta(seconds=self.timeout)):
            raise TimeoutError


class Transfer:
    """A transfer in progress, and its tensors."""

    def __init__(self, packet_channel: PacketChannel, works: list, tensors: tuple[torch.Tensor, ...]) -> None:
        self._packet_channel, self._works, self._tensors = packet_channel, works, tensors

    def wait(self) -> None:
        """Return when the tensors may be changed again."""
        with naming_peer(self._packet_channel.peer, self._packet_channel.timeout):
            for work in self._works:
                self._packet_channel.wait(work)
        self._tensors = ()


def agree(store: ChannelStore, end: int, peer: str, here: dict[str, str]) -> None:
    """Compare the NCCL settings in the environments of both ends.

    Raises:
        LinkError: the settings differ, so that the ends would make their buffers in different ways.
    """
    store.set(f"environment of end {end}", json.dumps(here).encode())
    there = json.loads(store.get(f"environment of end {1 - end}"))
    if found := nccl.disagreement(here, there):
        raise LinkError(
            f"{peer} has another environment for NCCL: {found}; set them for the job or on all of its nodes"
        )


def _packet_group(store: Store, end: int, device: str, timeout: timedelta) -> Any:
    """A backend of torch.distributed; it has the sends and receives of a ProcessGroup."""
    if device == "cpu":
        return torch.distributed.ProcessGroupGloo(store, end, 2, timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # With this variable the thread that waits gets the error, and raises a LinkError. Without it torch gives each group a thread that
    # ends the process when an operation of the group has failed or timed out (ProcessGroupNCCL.cpp). It has no other switch.
    with _variable("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return torch.distributed.ProcessGroupNCCL(store, end, 2, options)


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
