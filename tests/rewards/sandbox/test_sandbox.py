"""Programs that try to get out, in both kinds of jail."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.rewards.sandbox import jail, sandbox
from megarl.rewards.sandbox.sandbox import Limits, best_isolation, run_tests
from tests.rewards.processes.found import descendants, is_running
from tests.waiting import wait_for

# The program reads from its input the name of what it shall do.
PROGRAM = """
import os, sys, time

def write(path):
    with open(path, "w") as file:
        file.write("x")
    print(open(path).read())

def fill_tmp():
    for number in range(10):
        with open(f"/tmp/{number}", "wb") as file:
            file.write(bytes(3 << 20))

def syscall(*arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def many_threads():
    import threading
    for _ in range(100000):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()

def subprocess_():
    import subprocess
    subprocess.run(["/bin/sh", "-c", "true"], check=True)

def socket_(*kind):
    import socket
    socket.socket(*kind)

def thread():
    import threading
    threading.Thread(target=lambda: (time.sleep(0.1), print("from a thread"))).start()

def spin():
    while True:
        pass

def flood():
    while True:
        print("x" * 100000)

def numpy_():
    import numpy
    print(numpy.arange(4).sum())

what = input()
{
    "sum": lambda: print(sum(map(int, sys.stdin.read().split()))),
    "environment": lambda: print(sorted(os.environ)),
    "thread": thread,
    "numpy": numpy_,
    "exit": lambda: (print("bye"), exit()),
    "exit 2": lambda: sys.exit(2),
    "raise": lambda: 1 / 0,
    "loop": spin,
    "sleep": lambda: time.sleep(100),
    "memory": lambda: bytearray(2 << 30),
    "threads": many_threads,
    "output": flood,
    "write outside": lambda: write(sys.stdin.read().strip()),
    "overwrite": lambda: write(os.__file__),
    "delete": lambda: os.unlink(sys.stdin.read().strip()),
    "open files": lambda: [open("/dev/null") for _ in range(1000)],
    "fork": lambda: [os.fork() for _ in range(1000)],
    "subprocess": subprocess_,
    "exec": lambda: os.execv(sys.executable, ["python"]),
    "tcp": lambda: socket_(),
    "unix": lambda: socket_(1),
    "kill parent": lambda: os.kill(os.getppid(), 9),
    "kill all": lambda: os.kill(-1, 9),
    "limits": lambda: __import__("resource").setrlimit(9, (-1, -1)),
    "mount": lambda: syscall(165, b"none", b"/tmp", b"tmpfs", 0, None),
    "unshare": lambda: syscall(272, 0x10000000),
    "ptrace": lambda: syscall(101, 16, os.getppid(), 0, 0),
    "io_uring": lambda: syscall(425, 1, None),
    "x32": lambda: syscall(0x40000000 + 41, 2, 1, 0),
    "memfd": lambda: os.memfd_create("x"),
    "segfault": lambda: __import__("ctypes").string_at(0),
    "tmp": lambda: write("/tmp/megarl_test_file"),
    "fill tmp": fill_tmp,
    "read": lambda: print(len(open(sys.stdin.read().strip()).read())),
    "list": lambda: print(sorted(os.listdir("/"))),
    "mode": lambda: os.chmod(sys.stdin.read().strip(), 0o777),
}[what]()
"""
REFUSED = [
    "fork", "subprocess", "exec", "tcp", "unix", "kill parent", "kill all", "mount", "unshare", "ptrace",
    "io_uring", "memfd",
]  # fmt: skip
FAILS = {
    "exit 2": "",
    "raise": "ZeroDivisionError",
    "memory": "MemoryError",
    "threads": "RuntimeError: can't start new thread",
    "output": "OSError: [Errno 27] File too large",
    "write outside": "Error: [Errno",
    "overwrite": "Error: [Errno",
    "delete": "Error: [Errno",
    "mode": "Error: [Errno",
    "open files": "OSError: [Errno 24] Too many open files",
    "x32": "OSError: [Errno 38]",
    "limits": "not allowed to raise maximum limit",
    **dict.fromkeys(REFUSED, "[Errno 1] Operation not permitted"),
}
SUCCEEDS = {
    "sum": "6",
    "environment": "['LC_ALL', 'OPENBLAS_NUM_THREADS']",
    "thread": "from a thread",
    "numpy": "6",
    "exit": "bye",
}


@pytest.fixture(scope="module", params=["namespaces", "seccomp"])
def isolation(request):
    if request.param == "namespaces" and best_isolation() != "namespaces":
        pytest.skip("this system gives ordinary processes no namespaces")
    return request.param


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside") / "file"
    path.write_text("precious")
    return path


@pytest.fixture(scope="module")
def results(isolation, victim):
    """The results of all attempts, made in one run: a jail for each attempt would take long."""
    names = [*FAILS, *SUCCEEDS, "tmp", "fill tmp", "read", "list", "segfault"]
    inputs = {"sum": "1 2\n3", "write outside": f"{victim.parent}/new"}

    def run(names, seconds):
        tests = [{"kind": "stdin", "input": f"{name}\n{inputs.get(name, victim)}\n"} for name in names]
        limits = Limits(seconds=seconds, memory_mb=512, total_seconds=100)
        return dict(zip(names, run_tests(PROGRAM, tests, limits, isolation), strict=True))

    return run(names, 20.0) | run(["loop", "sleep"], 0.5)


@pytest.mark.parametrize("name", FAILS)
def test_what_fails(results, name):
    assert results[name].outcome == "error"
    assert FAILS[name] in results[name].stderr


@pytest.mark.parametrize("name", SUCCEEDS)
def test_what_succeeds(results, name):
    assert (results[name].outcome, results[name].output.strip()) == ("ok", SUCCEEDS[name])


def test_time_and_signals(results):
    assert {name: results[name].outcome for name in ("loop", "sleep", "segfault")} == {
        "loop": "timeout",
        "sleep": "timeout",
        "segfault": "killed",
    }


def test_nothing_outside_was_changed(results, victim):
    assert [path.name for path in victim.parent.iterdir()] == ["file"]
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode & 0o777 != 0o777
    assert not Path("/tmp/megarl_test_file").exists()


def test_output_is_bounded(results):
    assert len(results["output"].output) == 4 << 20


def test_files(isolation, results):
    if isolation == "namespaces":
        assert results["tmp"].output == "x\n"
        assert "No space left on device" in results["fill tmp"].stderr
        assert "FileNotFoundError" in results["read"].stderr
        assert "etc" not in results["list"].output and "'home'" not in results["list"].output
    else:
        assert "Operation not permitted" in results["tmp"].stderr
        assert "Operation not permitted" in results["fill tmp"].stderr
        assert (
            results["read"].output == "8\n"
        )  # cannot be prevented without namespaces; the documentation says so


def test_calls_return_values_and_cannot_forge_success(isolation):
    program = (
        "import os, sys\n"
        "class Solution:\n"
        "    def pair(self, a, b):\n        print('noise')\n        return (a, {'b': b}, range(2))\n"
        "def leave(): os._exit(0)\n"
        "def leave_politely(): sys.exit(0)\n"
        "def forge(): os.write(3, b'token\\n1'); os._exit(0)\n"
        "def huge(): return 'x' * 10_000_000\n"
    )
    tests = [
        {"kind": "call", "function": "pair", "arguments": [1, [2]]},
        *({"kind": "call", "function": name, "arguments": []} for name in ("leave", "leave_politely", "forge", "huge", "none")),
        {"kind": "assert", "code": "assert Solution().pair(1, 2)[0] == 1"},
        {"kind": "assert", "code": "assert Solution().pair(1, 2)[0] == 2"},
        {"kind": "assert", "code": "leave()\nassert False"},
        {"kind": "assert", "code": "leave_politely()\nassert False"},
    ]  # fmt: skip
    results = run_tests(program, tests, Limits(20.0), isolation)
    assert results[0].value == '[1, {"b": [2]}, [0, 1]]'
    assert [result.outcome for result in results] == [
        "ok",
        *["error"] * 3,
        "error",
        "error",
        "ok",
        *["error"] * 3,
    ]
    assert {result.value for result in results[1:]} == {None}


def test_the_program_sees_no_other_test(isolation):
    """Each test runs in a process of its own."""
    program = "import builtins\nbuiltins.seen = getattr(builtins, 'seen', 0) + 1\nprint(builtins.seen)"
    results = run_tests(program, [{"kind": "stdin"}] * 2, Limits(20.0), isolation)
    assert [result.output for result in results] == ["1\n", "1\n"]


def test_python_may_be_installed_behind_a_link(isolation, tmp_path):
    """uv's environments name their Python by a link."""
    link, environment = tmp_path / "python", tmp_path / "environment"
    link.symlink_to(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (environment / "lib" / version / "site-packages").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {link}/bin\n")
    python = environment / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(link / "bin" / version)
    code = (
        "from megarl.rewards.sandbox.sandbox import *\n"
        "assert sys.base_prefix != os.path.realpath(sys.base_prefix)\n"
        f"print(run_tests('import heapq', [{{'kind': 'stdin'}}], Limits(20.0), {isolation!r}))"
    )
    root = Path(sandbox.__file__).parents[3]
    done = subprocess.run([python, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert "outcome='ok'" in done.stdout, done


def test_total_time_and_stopping_at_failures(isolation):
    tests = [{"kind": "stdin", "input": text} for text in ("0", "1", "2", "0")]
    program = "import time\nx = int(input())\n1 / (1 - x)\nif x == 2:\n    time.sleep(100)"
    results = run_tests(program, tests, Limits(50.0), isolation, stop_at_failure=True)
    assert [result.outcome for result in results] == ["ok", "error"]
    results = run_tests(program, tests, Limits(50.0, total_seconds=3.0), isolation)
    assert [result.outcome for result in results] == ["ok", "error", "timeout"]


def test_a_program_does_not_outlive_who_asked(isolation, tmp_path):
    code = (
        "from megarl.rewards.sandbox.sandbox import *\n"
        f"run_tests('import time\\nwhile True: time.sleep(1)  # {tmp_path}', [{{'kind': 'stdin'}}], Limits(50.0), {isolation!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        family = wait_for(lambda: len(found := descendants(process.pid)) >= 2 and found)
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, family)))


def test_a_hard_limit_below_a_programs_is_an_error_and_not_a_score(isolation):
    code = (
        "import resource\n"
        "from megarl.rewards.sandbox.sandbox import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"print(run_tests('', [{{'kind': 'stdin'}}], Limits(), {isolation!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert f"RuntimeError: the code sandbox cannot be set up (isolation {isolation!r})" in done.stderr
    assert "RLIMIT_FSIZE=4194304 is over the hard limit here, 1048576" in done.stderr


def test_a_kernel_that_refuses_the_filter_is_an_error(monkeypatch):
    def refuse(may_write):
        raise OSError(22, "prctl(22)")

    monkeypatch.setattr(jail.seccomp, "apply", refuse)
    request = {"memory_mb": 8192, "seconds": 5.0, "isolation": "seccomp", "program": ""}
    with pytest.raises(OSError, match="prctl"):
        jail._run(request, {"kind": "stdin"}, 20.0)


def test_a_program_cannot_claim_that_its_sandbox_was_not_set_up(isolation):
    program = "import os\nos.write(4, b'not set up')"
    (result,) = run_tests(program, [{"kind": "stdin"}], Limits(20.0), isolation)
    assert result.outcome == "error" and "Bad file descriptor" in result.stderr


def test_namespaces_in_which_an_empty_program_fails_are_not_taken(monkeypatch):
    monkeypatch.setattr(sandbox, "run_tests", lambda *_: [sandbox.TestResult("killed", "", "")])
    with pytest.raises(RuntimeError, match="ended with 'killed'"):
        best_isolation.__wrapped__()
