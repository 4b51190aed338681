"""A small process that waits for another one to end and kills the processes that it leaves behind.

Run as a script (standard library only, 7 MiB, asleep until something ends):

    python -S -I guard.py <pid> <parent pid or 0> <mark> <directories to remove...>

Guarantees:

- Once `pid` has ended, however it ended, its descendants are killed: all processes that carry `mark` (a
  `NAME=value` that the watched process put into its environment before it started anything), also those in a
  session of their own, and all that are still in its process group, which catches children that were
  forked without exec.
- If the parent of `pid` ends first (the raylet is gone), `pid` gets `GRACE_SECONDS` to end by itself and is
  then killed.
- One line beginning with `ENDED` says on stdout how `pid` ended; the controller shows it to the user.
- The directories are removed once no process is left that could write into them, and with them the shared memory that files in
  them name (`remove_scratch`).

A guard carries no mark itself: it must outlive the processes that others kill, to get to the end of this list.

Why not leave it to Ray (2.60): the raylet kills the process group of a worker that ended, but not children with
a session of their own, and no process does it once the raylet itself was killed; the raylet's own agents sometimes
outlive it. PR_SET_PDEATHSIG reaches only direct children and follows the thread, not the process, that started
them.
"""

import contextlib
import fcntl
import glob
import os
import select
import shutil
import signal
import struct
import sys
import time

MARK_PREFIX = "MEGARL_"  # of the names of all marks
# Without it setproctitle, which Ray and SGLang call, overwrites the memory that /proc/<pid>/environ shows.
KEEP_ENVIRON = {"SPT_NOENV": "1"}
ENDED = "[guard] process ended: "
# Suffix of files in a scratch folder whose lines are patterns of its processes' files in SHARED_MEMORY.
NAMES = ".shared-memory"
# Name of a link in a scratch folder to a folder on the disk, which is removed with it: the scratch folder is in memory.
DISK = "disk"
SHARED_MEMORY = "/dev/shm/"
GRACE_SECONDS = 3.0
SWEEP_SECONDS = 10.0

# ioctl(pidfd, PIDFD_GET_INFO) of <linux/pidfd.h>, since Linux 6.15 with the exit status; struct pidfd_info is
# 64 bytes: u64 mask, u64 cgroup, 11 x u32 ids, i32 wait status.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3


def parent_of(pid: int) -> int | None:
    """Parent of `pid`, None if there is no such process or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def process_state(pid: int) -> str | None:
    """As ps shows it (R, S, D, T for stopped), None if there is no such process or it is a zombie."""
    fields = _stat(pid)
    return None if fields is None else fields[0]


def marked_processes(mark: str, process_group: int | None = None) -> list[int]:
    """Living processes with `mark` in their environment, or in `process_group`; never the caller."""
    needle = b"\0" + mark.encode() + b"\0"
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        fields = _stat(int(name))
        if fields is None:
            continue
        if (process_group is not None and int(fields[2]) == process_group) or needle in _environment(name):
            found.append(int(name))
    return found


def kill_marked(mark: str, process_group: int | None = None) -> list[int]:
    """SIGKILLs all `marked_processes` until none is left or SWEEP_SECONDS are over; returns the pids it found."""
    killed: list[int] = []
    deadline = time.monotonic() + SWEEP_SECONDS
    # More than one round: a process may fork between the listing and its end.
    while (pids := marked_processes(mark, process_group)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if pid not in killed:
                killed.append(pid)
        time.sleep(0.05)
    return killed


def main(handle: int | None, pid: int, parent: int, mark: str, directories: list[str]) -> None:
    """Waits for the end of `pid`, then cleans up. `handle`: its pidfd; None: it has ended already."""
    oom_kills = _oom_kills()
    if handle is None:
        cause = "before its guard was there"
    else:
        _wait_for_end(handle, pid, parent)
        cause = _exit_cause(handle)
    if _oom_kills() > oom_kills:
        cause += " (the kernel's out-of-memory killer was at work on this machine)"
    killed = kill_marked(mark, process_group=pid)
    with contextlib.suppress(OSError):  # the log's disk may be full
        print(f"{ENDED}{cause}" + (f"; killed what it left behind: {killed}" if killed else ""), flush=True)
    for directory in directories:
        remove_scratch(directory)


def remove_scratch(directory: str) -> None:
    """Remove a folder whose processes have ended, the shared memory that its files name, and its folder on the disk; other processes may do
    so at the same time."""
    for file in glob.glob(f"{glob.escape(directory)}/*{NAMES}"):
        try:
            with open(file) as lines:
                patterns = lines.read().split("\n")
        except FileNotFoundError:
            continue
        for pattern in patterns:
            if not pattern.startswith(SHARED_MEMORY):
                continue
            for path in glob.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
    with contextlib.suppress(OSError):  # there is none
        shutil.rmtree(os.readlink(f"{directory}/{DISK}"), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _wait_for_end(handle: int, pid: int, parent: int) -> None:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    while not poller.poll(1000 if parent else None):
        if parent and parent_of(pid) != parent and not poller.poll(GRACE_SECONDS * 1000):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            parent = 0


def _handle_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _exit_cause(handle: int) -> str:
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    deadline = time.monotonic() + 0.5
    # The status is there once the parent has reaped the process, a moment after the pidfd became readable.
    while time.monotonic() < deadline:
        try:
            fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
        except OSError:  # a kernel that cannot tell
            break
        if struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT:
            status = struct.unpack_from("<i", info, 60)[0]
            if os.WIFSIGNALED(status):
                return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
            return f"exited with status {os.WEXITSTATUS(status)}"
        time.sleep(0.02)
    return "killed or crashed (this kernel does not tell which)"


def _oom_kills() -> int:
    with open("/proc/vmstat") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _stat(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from the state on: state, parent, process group, ...; None: no such process, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields


def _environment(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read() + b"\0"
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
        return b""


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1):  # for all processes of a job: the guard waits for its end
        signal.signal(number, signal.SIG_IGN)
    # Before the process that started this one goes on: whatever ends it from then on, the guard knows how.
    watched = _handle_of(int(sys.argv[1]))
    # A second fork: Ray kills the direct children of a worker that exits, and the guard must outlive it.
    if os.fork() == 0:
        main(watched, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
