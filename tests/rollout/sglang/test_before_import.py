"""The environment of engines, and the first lines that schedulers run, as forks and as new processes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from megarl.cluster.worker import rank_environment
from megarl.rollout.sglang.before_import import prepare_schedulers, sglang_environment


def test_kernels_in_float8_are_not_compiled_for_every_number_of_tokens():
    """SGLang reads only variables that are in its own table; the table has this name."""
    name = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    table = Path(spec.submodule_search_locations[0], "srt", "environ.py").read_text()
    assert f"    {name} = EnvBool(" in table
    assert sglang_environment("cuda", 8)[name] == "1"
    assert name not in sglang_environment("cpu", 8)


def test_an_engine_is_not_bound_to_loopback():
    """Engines on several machines are members of one exchange of weights: loopback is of their group's choice, on one machine alone."""
    for single_machine, interface in ((True, "lo"), (False, None)):
        environment = rank_environment((), single_machine) | sglang_environment("cpu", 1)
        assert environment.get("GLOO_SOCKET_IFNAME") == interface


def test_the_memory_saver_finds_the_runtime_that_torch_has(tmp_path: Path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    environment = {"LD_LIBRARY_PATH": f"/toolkit/lib{os.pathsep}"}
    for _ in range(2):
        prepare_schedulers(environment, tmp_path, "bfloat16")
        assert environment["LD_LIBRARY_PATH"] == f"/toolkit/lib{os.pathsep}{folder}"
    environment = {}
    prepare_schedulers(environment, tmp_path / "no", "bfloat16")
    assert "LD_LIBRARY_PATH" not in environment


def test_windows_of_gated_delta_nets_have_the_models_type():
    environment: dict[str, str] = {}
    prepare_schedulers(environment, Path("/no"), "float16")
    assert environment == {"SGLANG_MAMBA_CONV_DTYPE": "float16"}


def test_the_allocator_does_not_map_memory_beneath_the_saver():
    settings = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    environment = {**settings, "HOME": "/home"}
    prepare_schedulers(environment, Path("/no"), "bfloat16")
    assert not settings.keys() & environment.keys() and environment["HOME"] == "/home"


ROOT = Path(__file__).resolve().parents[3]
# A fork of a process with a connection; it ends only when it receives a message.
FORK = """
import multiprocessing, os, socket
from megarl.rollout.sglang.before_import import forked, let_go_of_sockets
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
# The main module counts how often it is run; the target is unpickled before the argument, as it is in a scheduler.
SPAWN = """
import ctypes, gc, multiprocessing, pathlib, signal, sys
runs = pathlib.Path(sys.argv[1])
with runs.open("a") as file:
    file.write(f"{__name__}\\n")
if __name__ == "__main__":
    from megarl.rollout.sglang.before_import import without_main
    from tests.rollout.sglang.test_before_import import Argument, Target
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
    """Unpickled as a scheduler's main function is; reports the state of the process when its argument was unpickled."""

    def __reduce__(self) -> tuple:
        from megarl.rollout.sglang.before_import import SchedulerMain

        return _target, (SchedulerMain(),)


class Argument:
    def __reduce__(self) -> tuple:
        return _state, ()


def _target(main) -> type:
    from megarl.rollout.sglang.before_import import SchedulerMain

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
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "(False, 9, False)\n" * 2, done.stderr
    assert runs.read_text() == "__main__\n__mp_main__\n"  # the child of `without_main` does not run it


def test_a_copy_leaves_connections_to_the_process_that_it_was_made_of(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORK)
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "ended 0\n", done.stderr
