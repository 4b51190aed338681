"""The process around the tests: sets up the jail, runs each test in a child, and reports.

A request is a JSON object: `isolation`, `folders` (readable in addition to /usr), `paths` (for sys.path), `program`,
`seconds` (a test), `total_seconds`, `memory_mb`, `tests`, each with `kind`:
- "stdin": the program with `input` as its standard input; the result is its output.
- "call": `function` of the program (or of its class Solution) with `arguments`; the result is its return value.
- "assert": `code` after the program, in the same module; it passes if that ends.

In the last two the program finds the names of `_FOR_FUNCTIONS` without importing them.

The answer is `{"results": [...]}`, one object a test that was run (those after `total_seconds`, or with `stop_at_failure`
after one that did not end well, are not), or `{"error": text}` if the jail cannot be set up here. A result has
`outcome` ("ok", "error", "timeout", "killed"), `output`, `stderr` (its end), and for a call `value`.
"""

import builtins
import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import select
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any, TextIO

from megarl.rewards.sandbox import namespaces, seccomp

OUTPUT_BYTES = 4 << 20
_STDERR_BYTES = 2000
_OPEN_FILES = 64
_WALL_PER_CPU = 2  # a busy machine must not make a right program wrong
_PR_SET_PDEATHSIG = 1
# Names that problems of functions take for granted, such as `List` in the signature that they begin with: those of verl's rule (but for
# numpy), and what LeetCode has besides.
_FOR_FUNCTIONS = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys, time
from bisect import bisect_left, bisect_right, insort
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest, nsmallest
from itertools import accumulate, combinations, permutations, product
from math import ceil, cos, exp, fabs, floor, gcd, inf, log, log2, sin, sqrt, tan
from typing import Any, Callable, DefaultDict, Deque, Dict, FrozenSet, Generator, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union
"""


def main(parent: int) -> None:
    """Serve one request of the process `parent`."""
    _die_with_parent()
    _end_unless(os.getppid() == parent)
    request = json.load(sys.stdin)
    sys.path[:] = [*sys.path[1:], *request["paths"]]  # without the folder that megarl is in
    sys.dont_write_bytecode = True
    given: dict[str, Any] = {}
    exec(_FOR_FUNCTIONS, given)  # once: all tests are forks of this process
    request["given"] = {name: value for name, value in given.items() if name != "__builtins__"}
    try:
        if request["isolation"] == "namespaces":
            _enter_namespaces()
            namespaces.make_root(request["folders"])
        namespaces.drop_capabilities()
        answer: dict[str, Any] = {"results": _run_all(request)}
    except (OSError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def _enter_namespaces() -> None:
    """Return in the first process of new namespaces, whose end is the end of all others there."""
    namespaces.enter()
    _die_with_parent()  # again: a change of credentials unsets it
    read, write = os.pipe()
    if first := os.fork():
        os.close(read)
        status = os.waitpid(first, 0)[1]
        os._exit(0 if status == 0 else 1)
    os.close(write)
    _die_with_parent()
    # Its parent is in another pid namespace, so getppid tells nothing; the other end of the pipe does.
    _end_unless(not select.select([read], [], [], 0)[0])
    os.close(read)


def _run_all(request: dict[str, Any]) -> list[dict[str, Any]]:
    end = time.monotonic() + request["total_seconds"]
    results: list[dict[str, Any]] = []
    for test in request["tests"]:
        seconds = min(_WALL_PER_CPU * request["seconds"], end - time.monotonic())
        if seconds <= 0:
            break
        results.append(_run(request, test, seconds))
        if request["stop_at_failure"] and results[-1]["outcome"] != "ok":
            break
    return results


def _run(request: dict[str, Any], test: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One test in a child. OSError: the child could not be set up."""
    names = ("input", "output", "stderr", "value", "failure")
    files = [os.memfd_create(name) for name in names]
    try:
        os.write(files[0], test.get("input", "").encode())
        os.lseek(files[0], 0, os.SEEK_SET)
        token, parent = secrets.token_hex(), os.getpid()
        child = os.fork()
        if child == 0:
            _die_with_parent()
            _end_unless(os.getppid() == parent)
            _be_child(request, test, token, files)
        outcome = _outcome(child, seconds)
        texts = {name: _text(file) for name, file in zip(names, files, strict=True)}
    finally:
        for file in files:
            os.close(file)
    if texts["failure"]:
        raise OSError(texts["failure"])
    result = {"outcome": outcome, "output": texts["output"], "stderr": texts["stderr"][-_STDERR_BYTES:]}
    # The program may end the process, or print anything: without this line its test did not reach its end.
    head, _, value = texts["value"].partition("\n")
    if test["kind"] != "stdin" and outcome == "ok":
        if head != token:
            result["outcome"] = "error"
        elif test["kind"] == "call":
            result["value"] = value
    return result


def _outcome(child: int, seconds: float) -> str:
    ended = os.pidfd_open(child)
    try:
        in_time = bool(select.select([ended], [], [], seconds)[0])
        if not in_time:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    finally:
        os.close(ended)
    if not in_time:
        return "timeout"
    if os.WIFSIGNALED(status):
        return "timeout" if os.WTERMSIG(status) == signal.SIGXCPU else "killed"
    return "ok" if os.WEXITSTATUS(status) == 0 else "error"


def _be_child(request: dict[str, Any], test: dict[str, Any], token: str, files: list[int]) -> None:
    """Become the process of a test; never returns."""
    code = 1
    try:
        for target, source in enumerate(files):
            os.dup2(source, target)
        os.closerange(len(files), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
        builtins.exit = builtins.quit = sys.exit  # the module site, which is not imported here, makes them
        try:
            _set_limits(request["memory_mb"], request["seconds"])
            seccomp.apply(may_write=request["isolation"] == "namespaces")
        except BaseException as error:
            os.write(4, (str(error) or type(error).__name__).encode())
            raise
        os.close(4)  # the program must not be able to claim such a failure
        if test["kind"] != "stdin":
            vars(builtins).update(request["given"])  # there they hide no function of the program's
        code = _perform(request["program"], test, token)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _stream(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)


def _set_limits(memory_mb: int, seconds: float) -> None:
    """ValueError: a hard limit of this process is below a program's."""
    memory, whole = memory_mb << 20, math.ceil(seconds)
    for name, value, most in (
        ("RLIMIT_AS", memory, memory),
        ("RLIMIT_FSIZE", OUTPUT_BYTES, OUTPUT_BYTES),
        ("RLIMIT_NOFILE", _OPEN_FILES, _OPEN_FILES),
        ("RLIMIT_CORE", 0, 0),
        ("RLIMIT_CPU", whole, whole + 1),  # SIGXCPU, marking a timeout, then SIGKILL
    ):
        kind = getattr(resource, name)
        try:
            resource.setrlimit(kind, (value, most))
        except ValueError:
            hard = resource.getrlimit(kind)[1]
            raise ValueError(
                f"{name}={most} is over the hard limit here, {hard}; raise that (ulimit -H)"
            ) from None


def _perform(program: str, test: dict[str, Any], token: str) -> int:
    """Run the program, and the call or assertions of its test; returns its exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    space = vars(module)
    try:
        exec(compile(program, "program.py", "exec"), space)
        if test["kind"] == "stdin":
            value = ""
        elif test["kind"] == "call":
            function = space.get(test["function"]) or getattr(space["Solution"](), test["function"])
            value = json.dumps(function(*test["arguments"]), default=_plain)
        else:
            exec(compile(test["code"], "tests.py", "exec"), space)
            value = ""
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        sys.stdout.flush()
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    data = f"{token}\n{value}".encode()
    while data:  # a write that reaches the limit of a file's size is a short one; the next fails
        data = data[os.write(3, data) :]
    return 0


def _plain(value: Any) -> Any:
    """A value that JSON has no type for: iterables as lists, numbers of libraries as numbers, anything else as text."""
    for convert in (list, float):
        with contextlib.suppress(TypeError, ValueError):
            return convert(value)
    return repr(value)


def _text(file: int) -> str:
    return os.pread(file, OUTPUT_BYTES, 0).decode(errors="replace")


def _die_with_parent() -> None:
    """Have the kernel kill this process at its parent's death; `_end_unless` handles a parent that died before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_unless(condition: bool) -> None:
    if not condition:
        os._exit(1)
