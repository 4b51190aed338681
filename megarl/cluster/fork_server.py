"""Fork servers: a process makes the imports of ranks once, and each rank's process is a copy (fork) of it.

A rank's process spends most of its start on imports: torch and Megatron, or SGLang. On a laptop they cost each rank seconds of
its few cores, and hundreds of MiB. So a cluster on this machine has a fork server for each kind of process that a run will have
(`ProcessKind`). It makes the imports of that kind while the controller makes its own imports and reads data, and then waits to be copied.

Ray starts its workers by a command of its own, whose interpreter a `runtime_env` may replace (`py_executable`). Ranks with a fork server
get this file, run as a script, as their interpreter: it asks the fork server for a copy, which then runs Ray's command with the
script's arguments, environment, folder and files. Ray (2.60) accepts any process as its worker that registers with the token that it
gave to the command. A fork server that is missing, or does not come up in time, costs time and nothing else: the script then becomes
the process that Ray asked for.

A fork server must not import anything that a copy must not inherit: Ray itself reads its settings when it is imported. CUDA does not
survive a fork of a process that uses it, so a machine with GPUs has no fork servers.

This file needs the standard library only.
"""

import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module

# Ray waits 60 s for a worker; after this time it gets a worker that makes its imports itself.
WAIT_SECONDS = 30.0
_READY = b"+"
_LENGTH = 8  # bytes of a message's length
_STREAMS = 3
_OOM_SCORE = "/proc/self/oom_score_adj"  # the kernel shall kill Ray's workers first


@dataclass(frozen=True)
class ProcessKind:
    """A kind of process, whose members make the same imports.

    Attributes:
        modules: the modules that they import; not Ray.
        env: variables that their environment must have before the imports.
    """

    modules: tuple[str, ...]
    env: tuple[tuple[str, str], ...]


def start_fork_server(path: str, kind: ProcessKind) -> subprocess.Popen:
    """Start a fork server, with the environment of its copies and the `sys.path` of this process.

    It carries the cluster's mark, so that it ends with this process at the latest (see cluster.py).

    Args:
        path: its socket, in a folder of the cluster; its output goes into a file next to it.

    Returns: its process, which the caller ends and waits for.
    """
    with open(f"{path}.log", "w") as log, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)  # from now on requests are kept
        task = json.dumps([listener.fileno(), sys.path, kind.modules])
        return subprocess.Popen(
            # -P: no modules are imported from the folder of this file.
            [sys.executable, "-P", __file__, "--serve", path, task],
            pass_fds=[listener.fileno()],
            env=os.environ | dict(kind.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def interpreter(path: str) -> str:
    """The command that Ray starts instead of Python, to get a copy from the fork server at `path`."""
    return shlex.join([sys.executable, "-S", "-I", __file__, path])


def serve(listener: socket.socket, modules: list[str]) -> list[str]:
    """Make the imports, then a copy of this process for each request, until the parent of the first asker (Ray's raylet) has ended.

    Returns: only in a copy: the arguments of the command that it runs.
    """
    _import(modules)
    # `select` waits for three things: a request, the end of a copy (by a pipe that the signal's arrival writes to), and the end of
    # Ray's raylet, which is known from the first request on.
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that Python writes to `waker`
    signal.set_wakeup_fd(waker)
    waited, raylet = [listener.fileno(), woken], None
    while True:
        ready, _, _ = select.select(waited, [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap()
        if raylet in ready:
            sys.exit()
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        with connection:
            request = _request(connection)
            if request is None:
                continue
            wanted, files = request
            if raylet is None:
                raylet = os.pidfd_open(wanted["parent"])
                waited.append(raylet)
            if os.fork() == 0:
                # The copy must not hold the server's files: an open listener would keep requests that nobody answers.
                for number in (listener.detach(), woken, waker, raylet, connection.detach()):
                    os.close(number)
                _become(wanted, files)
                return wanted["arguments"]
            for number in files:
                os.close(number)
            connection.sendall(_READY)


def _import(modules: list[str]) -> None:
    import gc

    gc.disable()  # see megarl/util/memory.py
    for name in modules:
        import_module(name)
    gc.freeze()  # a collection in a copy would write to all of it
    gc.enable()


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _request(connection: socket.socket) -> tuple[dict, list[int]] | None:
    """The request, and the files of the asker's standard streams; None: the asker did not wait for an answer."""
    try:
        connection.sendall(_READY)
        head, files, _, _ = socket.recv_fds(connection, _LENGTH, _STREAMS)
        if len(head) < _LENGTH:
            return None
        text = _receive(connection, int.from_bytes(head, "little"))
    except ConnectionError:
        return None
    return json.loads(text), files


def _receive(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        parts.append(connection.recv(length))
        if not parts[-1]:
            raise ConnectionError("the asker has ended")
        length -= len(parts[-1])
    return b"".join(parts)


def _become(wanted: dict, files: list[int]) -> None:
    """In a copy: take over the asker's streams, environment, folder, signal mask and process group."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if wanted["leads"]:  # Ray ends a worker's process group after it
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted["blocked"])  # Ray's workers do not get Ctrl-C
    for stream, number in enumerate(files):
        os.dup2(number, stream)
        os.close(number)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["folder"])
    with open(_OOM_SCORE, "w") as file:
        file.write(wanted["oom_score"])
    if "numpy" in sys.modules:  # Python's own random numbers differ from copy to copy, numpy's would not
        sys.modules["numpy"].random.seed()


def ask(path: str, arguments: list[str]) -> bool:
    """Whether the fork server at `path` has made a copy that runs `python *arguments` in place of this process."""
    with open(_OOM_SCORE) as file:
        score = file.read()
    wanted = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "oom_score": score,
        "leads": os.getpgrp() == os.getpid(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }
    text = json.dumps(wanted).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_SECONDS)
        try:
            connection.connect(path)
            if connection.recv(1) != _READY:  # it has ended
                return False
        except OSError:
            return False
        # From here on there may be a copy: a failure is an error, not a reason to run the command here.
        socket.send_fds(connection, [len(text).to_bytes(_LENGTH, "little")], range(_STREAMS))
        connection.sendall(text)
        if connection.recv(1) != _READY:
            raise ConnectionError(f"the fork server at {path} has ended while it made a process")
    return True


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        number, folders, modules = json.loads(sys.argv[3])
        sys.path[:] = folders
        sys.argv[:] = serve(socket.socket(fileno=number), modules)
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif not ask(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
