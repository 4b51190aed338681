"""Worker classes for the tests of the cluster: no torch, so that they start fast."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy
import ray

from megarl.cluster import RankInfo


class LocalError(Exception):
    """Cannot be unpickled: its constructor takes other arguments than it passes on."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")
        self.lock = threading.Lock()  # cannot be pickled, either


IMPORTED = frozenset(sys.modules)  # the modules that are imported when a rank's class is


class Rank:
    """Does what the tests ask for."""

    def __init__(self, info: RankInfo, start_with: str | None = None, fail_rank: int | None = None) -> None:
        """The constructor ends when the file `start_with` is there."""
        self.info = info
        self.calls: list[Any] = []
        self.peer: socket.socket | None = None
        while start_with is not None and not os.path.exists(start_with):
            time.sleep(0.01)
        if info.rank == fail_rank:
            raise ValueError(f"no weights for rank {info.rank}")

    def get_info(self) -> RankInfo:
        return self.info

    def process_state(self) -> dict[str, Any]:
        with open("/proc/self/cmdline") as file:
            title = file.read().strip("\0")
        return {
            "main_thread": threading.current_thread() is threading.main_thread(),
            "nice": os.nice(0),
            "torch": "torch" in sys.modules,
            "title": title,
        }

    def origin(self, module: str) -> dict[str, Any]:
        """The origin of this process; `module` is a module that nothing here imports."""
        proc = Path("/proc/self")
        with (
            (proc / "cmdline").open() as title,
            (proc / "oom_score_adj").open() as score,
            (proc / "status").open() as status,
        ):
            return {
                "parent": os.getppid(),
                "before_start": module in IMPORTED,
                "folder": os.getcwd(),
                "oom_score": score.read(),
                "main_module": sys.modules["__main__"].__file__,
                "status": {line.partition(":")[0]: line for line in status},
                "environment": dict(os.environ),
                "random": float(numpy.random.rand()),
                "title": title.read().strip("\0"),
            }

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple, dict]:
        return self.info.rank, args, kwargs

    def append(self, value: Any) -> list[Any]:
        self.calls.append(value)
        return self.calls

    def write(self) -> None:
        print("from print", end="")
        print("from stderr", file=sys.stderr, end="")
        subprocess.run(["sh", "-c", "echo from a child; echo child error >&2"], check=True)

    def where(self, array: numpy.ndarray) -> tuple[bool, bool]:
        """(whether the array may be written, whether it lies in memory that Ray's object store shares)."""
        address = array.ctypes.data
        with open("/proc/self/maps") as lines:
            for line in lines:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                if start <= address < end:
                    return array.flags.writeable, "plasma" in line or "/dev/shm" in line
        return array.flags.writeable, False

    def put(self, size: int) -> ray.ObjectRef:
        return ray.put(numpy.full(size, self.info.rank))

    def meet(self) -> bytes:
        """Rank 0 listens on the rendezvous port, the others connect; all keep the connection open."""
        if self.info.rank == 0:
            with socket.create_server((self.info.master_addr, self.info.master_port)) as server:
                self.peer, _ = server.accept()
        else:
            for _ in range(1000):
                try:
                    self.peer = socket.create_connection((self.info.master_addr, self.info.master_port))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
        self.peer.sendall(b"%d" % self.info.rank)
        return self.peer.recv(1)

    def hang_on_peer(self) -> None:
        """Hangs, and raises once the connection is gone, as a collective does when a peer dies."""
        print("I hang now")
        if not self.peer.recv(1):
            raise ConnectionError("Connection closed by peer")

    def lose_peer(self, seconds: float) -> None:
        """Rank 0 raises at once, as if it had lost its connection to its peer; the peer exits a while later."""
        if self.info.rank == 0:
            raise ConnectionError("rank 1 closed its connection: it has died or given up")
        time.sleep(seconds)
        os._exit(9)

    def hang_if(self, rank: int) -> int:
        if self.info.rank == rank:
            print("I hang now")
            time.sleep(1000)
        return self.info.rank

    def reduce_unless(self, rank: int, seconds: float) -> None:
        """All ranks except `rank` wait in a torch collective, for at most `seconds`."""
        import datetime

        import torch
        import torch.distributed as dist

        address = f"tcp://{self.info.master_addr}:{self.info.master_port}"
        dist.init_process_group("gloo", address, world_size=self.info.world_size, rank=self.info.rank)
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        dist.barrier()
        if self.info.rank == rank:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1), group=group)

    def work_if(self, rank: int, seconds: float) -> int:
        """`rank` works in C code, with the interpreter's lock, for about `seconds`; the others sleep."""
        begun = time.monotonic()
        while self.info.rank == rank and time.monotonic() - begun < seconds:
            pow(3, 3_000_000)
        time.sleep(max(0.0, seconds - (time.monotonic() - begun)))
        return self.info.rank

    def open_on_a_slow_disk(self, pipe: str) -> int:
        """Wait in the kernel, uninterruptibly as for a disk (state "D"), until somebody opens `pipe` for writing: as the parent of a process
        that opens it before its program begins."""
        open_first = (os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=[open_first]), 0)
        return self.info.rank

    def fail_if(self, rank: int) -> None:
        if self.info.rank == rank:
            print("I shall raise")
            raise LocalError(3, 4)
        time.sleep(1000)

    def fail_in_turn(self, first: int, file: str) -> None:
        """`first` writes the file and raises, and the others raise a while later."""
        if self.info.rank == first:
            Path(file).touch()
            raise RuntimeError("failed first")
        while not os.path.exists(file):
            time.sleep(0.01)
        time.sleep(0.5)
        raise RuntimeError("failed later")

    def lose_at_once(self, rank: int, seconds: float) -> None:
        """`rank` raises as if another rank had closed its connection, before the others have raised the cause."""
        if self.info.rank == rank:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        time.sleep(seconds)
        raise ValueError("why")

    def return_lock(self) -> Any:
        return threading.Lock()

    def exit(self, status: int) -> None:
        os._exit(status)

    def crash(self) -> None:
        ctypes.string_at(0)

    def hold_the_interpreter(self) -> None:
        """Sleeps in C with the interpreter's lock, so that no Python thread of this process runs."""
        ctypes.PyDLL(None).sleep(1000)

    def start_children(self) -> list[int]:
        """Pids of: a child, one in a session of its own, and a grandchild whose parent has ended."""
        plain = subprocess.Popen(["sleep", "1000"])
        session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        command = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
        orphan = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=True)
        forked = os.fork()
        if forked == 0:
            time.sleep(1000)
        return [plain.pid, session.pid, int(orphan.stdout), forked]

    def wait_for_file(self, path: str) -> int:
        """Returns when the file is there."""
        while not os.path.exists(path):
            time.sleep(0.01)
        return self.info.rank
