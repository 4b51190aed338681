"""Where the members of an exchange meet: one store for all of them, and the news that a member is gone.

The first trainer rank serves the hub in a thread. Every member keeps a connection to it as long as the exchange lasts. Members make
their communicator through the store; a connection that ends, because its process died or gave up, ends the exchange for all: each member
is told which one it was, and aborts the operations that wait in its communicator. So no member waits for the timeout of an operation that
cannot end.

torch's TCPStore could be the store, but does not report a member's end.
"""

import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store

from megarl.weight_sync.links import LinkError

Result = TypeVar("Result")
_FRAME = struct.Struct("<BqII")  # kind, member, bytes of the key, bytes of the value
JOIN, SET, GET, VALUE, LOST, FORGET = range(6)
GONE = "closed its connection: it has died or given up"
WORD_SECONDS = 5.0  # until the hub has told of a member's end that a communicator has noticed already


def _send(connection: socket.socket, kind: int, member: int = 0, key: str = "", value: bytes = b"") -> None:
    name = key.encode()
    connection.sendall(_FRAME.pack(kind, member, len(name), len(value)) + name + value)


class _Frames:
    """The frames that arrive over a connection, cut out of its bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[tuple[int, int, str, bytes]]:
        """The frames that are complete with `data`: (kind, member, key, value)."""
        self._bytes += data
        found = []
        while len(self._bytes) >= _FRAME.size:
            kind, member, key, value = _FRAME.unpack_from(self._bytes)
            end = _FRAME.size + key + value
            if len(self._bytes) < end:
                break
            name = bytes(self._bytes[_FRAME.size : _FRAME.size + key]).decode()
            found.append((kind, member, name, bytes(self._bytes[_FRAME.size + key : end])))
            del self._bytes[:end]
        return found


class Hub:
    """Serves the members of one exchange until it is closed."""

    def __init__(self, host: str) -> None:
        """`host`: an address of this machine that all members reach."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._waker, self._ended = socket.socketpair()
        self._values: dict[str, bytes] = {}
        self._asked: dict[str, list[socket.socket]] = defaultdict(list)
        self._members: dict[socket.socket, int] = {}
        self._lost: int | None = None
        threading.Thread(target=self._serve, name="hub", daemon=True).start()

    def close(self) -> None:
        """End the exchange; may be called again."""
        self._waker.close()

    def _serve(self) -> None:
        frames: dict[socket.socket, _Frames] = defaultdict(_Frames)
        with selectors.DefaultSelector() as selector, self._listener, self._ended:
            for known in (self._listener, self._ended):
                selector.register(known, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._ended:
                        for member in frames:
                            member.close()
                        return
                    if connection is self._listener:
                        accepted, _ = self._listener.accept()
                        frames[accepted] = _Frames()
                        selector.register(accepted, selectors.EVENT_READ)
                        continue
                    data = _receive(connection)
                    if not data:
                        selector.unregister(connection)
                        del frames[connection]
                        self._end_of(connection)
                        connection.close()
                        continue
                    for frame in frames[connection].add(data):
                        self._answer(connection, *frame)

    def _answer(self, connection: socket.socket, kind: int, member: int, key: str, value: bytes) -> None:
        if kind == JOIN:
            self._members[connection] = member
            if self._lost is not None:
                _tell(connection, LOST, self._lost)
        elif kind == SET:
            self._values[key] = value
            for waiting in self._asked.pop(key, ()):
                _tell(waiting, VALUE, 0, key, value)
        elif kind == FORGET:
            self._values.pop(key, None)
        elif key in self._values:
            _tell(connection, VALUE, 0, key, self._values[key])
        else:
            self._asked[key].append(connection)

    def _end_of(self, connection: socket.socket) -> None:
        """A connection has ended; the first one that belongs to a member ends the exchange."""
        member = self._members.pop(connection, None)
        if member is not None and self._lost is None:
            self._lost = member
            for other in self._members:
                _tell(other, LOST, member)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


def _tell(connection: socket.socket, kind: int, member: int = 0, key: str = "", value: bytes = b"") -> None:
    with suppress(OSError):  # the connection is gone, which the selector reports
        _send(connection, kind, member, key, value)


class Member:
    """One member's connection to the hub.

    Raises:
        LinkError: the hub could not be reached.
    """

    def __init__(
        self, address: tuple[str, int], number: int, name: Callable[[int], str], timeout: float
    ) -> None:
        """`name`: returns a member's name, for messages; `timeout`: seconds to wait for other members."""
        self.number, self.timeout, self.name = number, timeout, name
        try:
            self._connection = socket.create_connection(address, timeout)
        except OSError as error:
            raise LinkError(f"{name(0)} could not be reached at {address}: {error}") from None
        self._connection.settimeout(None)
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()
        self._problem: str | None = None
        self._abort: Callable[[], None] | None = None
        self._closed = False
        _send(self._connection, JOIN, number)
        threading.Thread(target=self._listen, name="hub member", daemon=True).start()

    @property
    def problem(self) -> str | None:
        """How the exchange has ended; None: it has not."""
        return self._problem

    def on_end(self, abort: Callable[[], None]) -> None:
        """Call `abort` in another thread when the exchange ends without this member's doing; if it has ended, call it at once."""
        with self._news:
            self._abort = abort
            ended = self._problem is not None
        if ended:
            abort()

    def set(self, key: str, value: bytes) -> None:
        with self._news:
            if self._problem is not None:
                raise LinkError(self._problem)
            self._values[key] = value
        try:
            _send(self._connection, SET, self.number, key, value)
        except OSError:
            raise LinkError(self.wait_for_word() or f"{self.name(0)} {GONE}") from None

    def get(self, key: str) -> bytes:
        """The value of a key; waits until some member has set it.

        Raises:
            LinkError: the exchange has ended, or the key did not come in time.
        """
        with self._news:
            known = key in self._values
        if not known:
            try:
                _send(self._connection, GET, self.number, key)
            except OSError:
                raise LinkError(self.wait_for_word() or f"{self.name(0)} {GONE}") from None
        with self._news:
            self._news.wait_for(lambda: key in self._values or self._problem is not None, self.timeout)
            if key in self._values:
                return self._values[key]
            raise LinkError(
                self._problem or f"not all members of the weight sync came within {self.timeout:g} s"
            )

    def forget(self, key: str, *, at_hub: bool) -> None:
        """Drop a key that no member will ask for any more, here and, by the member that has set it, `at_hub`."""
        with self._news:
            self._values.pop(key, None)
        if at_hub:
            with suppress(OSError):  # the hub is gone, which `_listen` reports
                _send(self._connection, FORGET, self.number, key)

    def knows(self, key: str) -> bool:
        """Whether this member has set a key, or got it; the hub is not asked."""
        with self._news:
            return key in self._values

    def wait_for_word(self) -> str | None:
        """How the exchange has ended, as the hub tells soon after a communicator has noticed the end; None: the hub tells nothing."""
        with self._news:
            self._news.wait_for(lambda: self._problem is not None, WORD_SECONDS)
            return self._problem

    def while_all_live(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which waits for other members without a timeout, and return its result.

        It runs in a thread of its own, which is abandoned if the exchange ends or `timeout` passes.

        Raises:
            LinkError: the exchange has ended, or `timeout` passed.
            Exception: any exception of `work`.
        """
        future: Future[Result] = Future()
        threading.Thread(target=_fulfil, args=(future, work), name="exchange", daemon=True).start()
        deadline = time.monotonic() + self.timeout
        while not wait_for([future], timeout=0.1).done:
            if self._problem is not None:
                raise LinkError(self._problem)
            if time.monotonic() > deadline:
                raise LinkError(f"not all members of the weight sync came within {self.timeout:g} s")
        return future.result()

    def close(self) -> None:
        """Leave: for all other members the exchange has ended. May be called again."""
        self._closed = True
        with self._news:
            self._problem = self._problem or "this rank has given up the exchange of weights"
            self._news.notify_all()
        with suppress(OSError):  # the hub has closed it before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self) -> None:
        frames = _Frames()
        while data := _receive(self._connection):
            for kind, member, key, value in frames.add(data):
                if kind == LOST:
                    self._end(f"{self.name(member)} {GONE}")
                else:
                    with self._news:
                        self._values[key] = value
                        self._news.notify_all()
        if not self._closed:
            self._end(f"{self.name(0)} {GONE}")

    def _end(self, problem: str) -> None:
        with self._news:
            if self._problem is not None:
                return
            self._problem, abort = problem, self._abort
            self._news.notify_all()
        if abort is not None:
            abort()


def _fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # raised where it is waited for
        future.set_exception(error)


class MemberStore(Store):
    """The hub's store, as torch's process groups use it."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub says str, its groups give bytes
        self._member.set(key, value)

    def get(self, key: str) -> bytes:
        return self._member.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._member.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._member.knows(key) for key in keys)
