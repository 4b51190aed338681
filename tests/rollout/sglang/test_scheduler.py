"""What a scheduler's process does before it imports SGLang; in processes that do not import it at all."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# A copy of a process with a connection; it ends only when it is told to.
FORK = """
import multiprocessing, os, socket
from megarl.rollout.sglang.scheduler import forked, let_go_of_sockets
own, other = socket.socketpair()
multiprocessing.set_start_method("spawn")
def child(ready, end):
    let_go_of_sockets()
    ready.send(None)
    end.recv()
with forked():
    reader, ready = multiprocessing.Pipe(duplex=False)
    end, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.Process(target=child, args=(ready, end))
    process.start()
assert reader.recv() is None and multiprocessing.get_start_method() == "spawn"
own.close()
assert other.recv(1) == b"" and process.is_alive()
writer.send(None)
process.join()
print("ended", process.exitcode)
"""
# Its main module counts how often it is run; the target is unpickled before the argument, as a scheduler's.
SPAWN = """
import ctypes, gc, multiprocessing, pathlib, signal, sys
runs = pathlib.Path(sys.argv[1])
with runs.open("a") as file:
    file.write(f"{__name__}\\n")
if __name__ == "__main__":
    from megarl.rollout.sglang.scheduler import without_main
    from tests.rollout.sglang.test_scheduler import Argument, Target
    context = multiprocessing.get_context("spawn")
    def answer():
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=Target(), args=(Argument(), writer))
        process.start()
        print(reader.recv())
        process.join()
    with without_main():
        answer()
    answer()
"""


class Target:
    """Unpickled as a scheduler's main function is; tells what was so when its argument was unpickled."""

    def __reduce__(self) -> tuple:
        from megarl.rollout.sglang.scheduler import SchedulerMain

        return _target, (SchedulerMain(),)


class Argument:
    def __reduce__(self) -> tuple:
        return _state, ()


def _target(main) -> type:
    from megarl.rollout.sglang.scheduler import SchedulerMain

    assert type(main) is SchedulerMain
    return _tell


def _tell(state: tuple, writer) -> None:
    writer.send(state)


def _state() -> tuple:
    import ctypes
    import gc

    died_with = ctypes.c_int()
    get_pdeathsig = 2  # linux/prctl.h
    ctypes.CDLL(None).prctl(get_pdeathsig, ctypes.byref(died_with))
    return gc.isenabled(), died_with.value, "sglang" in sys.modules


def test_it_ends_with_its_parent_and_collects_no_garbage_before_the_import(tmp_path: Path) -> None:
    script, runs = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, str(script), str(runs)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "(False, 9, False)\n" * 2, done.stderr
    assert runs.read_text() == "__main__\n__mp_main__\n"  # not by the child of `without_main`


def test_a_copy_leaves_connections_to_the_process_that_it_was_made_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORK)
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout == "ended 0\n", done.stderr
