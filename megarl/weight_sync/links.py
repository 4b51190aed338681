"""What a trainer rank and an engine rank say to each other while weights travel; the same at both ends.

Where the packets lie in memory that both ends map, they only exchange `Token`s over a Unix socket: "the packet of this
bucket is there", "it was taken". Where they do not, packets travel over a process group of the two ranks alone, outside
of any other group that their processes have: SGLang's own holds no trainer ranks, and a group of all would have to be
made anew with each engine that starts.

An end that dies, or that says nothing for too long, is a `LinkError` at the other, which names it.
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
from torch.distributed import Store

from megarl.util import nccl

Result = TypeVar("Result")
_TOKEN = struct.Struct("<qq")
_SIZES = struct.Struct("<qq")
Token = tuple[int, int]
"""(version, bucket)."""


class LinkError(RuntimeError):
    """The rank at the other end is gone, silent, or at something else."""


class Line:
    """One end of a control connection."""

    def __init__(self, connection: socket.socket, peer: str, timeout: float) -> None:
        self.peer, self.timeout = peer, timeout
        self._socket = connection

    def say(self, token: Token) -> None:
        self.send(_TOKEN.pack(*token))

    def expect(self, token: Token) -> None:
        """Wait for the token.

        Raises:
            LinkError: the peer ended, was silent for `timeout` seconds, or said another one.
        """
        found = _TOKEN.unpack(self.receive(_TOKEN.size))
        if found != token:
            raise LinkError(f"{self.peer} is at {describe(found)} where {describe(token)} was due")

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
        """Pass open files on; the receiver has them as its own."""
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
        """What `work` returns, which waits for the peer where no timeout reaches: in a thread of its own, that is left to
        itself if the peer ends or `timeout` passes.

        Args:
            every: seconds between two looks at the peer.

        Raises:
            LinkError: of the peer; whatever `work` raises.
        """
        future: Future[Result] = Future()
        threading.Thread(target=_fulfil, args=(future, work), name="link", daemon=True).start()
        ended, deadline = select.poll(), time.monotonic() + self.timeout
        # Of what the peer has said before, nothing is read here.
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


def describe(token: Token) -> str:
    return f"bucket {token[1]} of version {token[0]}"


@contextmanager
def naming_peer(peer: str, timeout: float) -> Iterator[None]:
    """Turn what a connection or a process group raises into a LinkError that names the peer."""
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


class LineStore(Store):
    """How the two ranks of a `Pair` learn of each other: what one sets the other gets, over their line.

    torch's TCPStore would do, but asks for the names of its clients' addresses: 5 s where no DNS server answers.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._known[key] = data
        self._line.send(_SIZES.pack(len(key), len(data)) + key.encode() + data)

    def get(self, key: str) -> bytes:
        while key not in self._known:
            key_size, value_size = _SIZES.unpack(self._line.receive(_SIZES.size))
            found = self._line.receive(key_size).decode()
            self._known[found] = self._line.receive(value_size)
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)


class Pair:
    """A process group of one trainer rank (end 0) and one engine rank (end 1), made by both ends of a line at once.

    On GPUs its communicator is there when this is: an end that dies while it is made is a LinkError at the other, as later.
    """

    def __init__(self, line: Line, end: int, device: str) -> None:
        self.peer, self.timeout, self._other, self._device = line.peer, line.timeout, 1 - end, device
        self._line, self._store = line, LineStore(line)
        with naming_peer(self.peer, self.timeout):
            if device != "cpu":
                agree(self._store, end, self.peer, nccl.settings(os.environ))
            self._group = _pair_group(self._store, end, device, timedelta(seconds=self.timeout))
        if device != "cpu":
            place = torch.device(device, torch.cuda.current_device())
            line.while_peer_lives(lambda: self._group.eager_connect_single_device(place))

    def close(self) -> None:
        """End the group, whatever waits in it, and tell the peer; may be called again."""
        if self._group is not None:
            self._group.abort()
        self._group = None  # gloo's connections end with it
        self._line.close()

    def send(self, tensor: torch.Tensor) -> "Sending":
        """Begin to send a uint8 tensor; it must not change before the sending is over."""
        with naming_peer(self.peer, self.timeout):
            size = torch.tensor([len(tensor)], device=self._device)
            works = [self._group.send([part], self._other, 0) for part in (size, tensor)]
        return Sending(self, works, (size, tensor))

    def receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """Wait for the next tensor, which is put at the beginning of `buffer`; returns that part of it."""
        with naming_peer(self.peer, self.timeout):
            size = torch.zeros(1, dtype=torch.int64, device=self._device)
            self.wait(self._group.recv([size], self._other, 0))
            count = int(size.item())
            if count > len(buffer):
                raise LinkError(f"{self.peer} sends {count} bytes where at most {len(buffer)} were due")
            part = buffer[:count]
            self.wait(self._group.recv([part], self._other, 0))
        return part

    def wait(self, work: torch.distributed.Work) -> None:
        if not work.wait(timedelta(seconds=self.timeout)):
            raise TimeoutError


class Sending:
    """Tensors on their way."""

    def __init__(self, pair: Pair, works: list, tensors: tuple[torch.Tensor, ...]) -> None:
        self._pair, self._works, self._tensors = pair, works, tensors

    def wait(self) -> None:
        """Returns when the tensors may be used again."""
        with naming_peer(self._pair.peer, self._pair.timeout):
            for work in self._works:
                self._pair.wait(work)
        self._tensors = ()


def agree(store: Store, end: int, peer: str, here: dict[str, str]) -> None:
    """Compare what NCCL finds in the environments of both ends.

    Raises:
        LinkError: they would make their buffers in different ways.
    """
    store.set(f"environment of end {end}", json.dumps(here))
    there = json.loads(store.get(f"environment of end {1 - end}"))
    if found := nccl.disagreement(here, there):
        raise LinkError(
            f"{peer} has another environment for NCCL: {found}; set them for the job or on all of its nodes"
        )


def _pair_group(store: Store, end: int, device: str, timeout: timedelta) -> Any:
    """A process group of torch's backend itself, whose `send` and `recv` torch's stubs leave out."""
    if device == "cpu":
        return torch.distributed.ProcessGroupGloo(store, end, 2, timeout)
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Who waits finds the error, and makes a LinkError of it. Otherwise torch gives each group a thread that ends the whole process
    # when something in the group has failed or taken too long (ProcessGroupNCCL.cpp). It asks nothing but the environment.
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
