"""A failure's report: one file with the failure and the Python stacks and logs of all processes, also of ranks that hang in C code."""

import os
import re
import signal
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ray

from megarl.cluster.guard import marked_processes, process_state
from megarl.cluster.hosts import log_tail, submit
from megarl.cluster.ranks import RankFailure, RankProcess, RunFailure, Watched
from megarl.util.files import whole_file

_NODE_SECONDS = 15.0  # for a machine to answer
_ANSWER_SECONDS = 1.0  # for a process to write its stacks
_REST_SECONDS = 0.1  # without another line, after which the stacks count as complete
# Files whose functions wait for other ranks (torch 2.13, megatron-core 0.19).
_WAITING = re.compile(
    r"torch/distributed/|p2p_communication\.py|param_and_grad_buffer\.py"
    r"|megarl/weight_sync/(links|inbox)\.py|megarl/util/rendezvous\.py"
)
_CALLED = re.compile(r"megarl/cluster/worker\.py\", line \d+ in (start|invoke)\b")
FOLDER = "failures"
_LINE = "=" * 100


@dataclass(frozen=True)
class ProcessStacks:
    """One process; `state` as /proc tells it (R, S, D, T), `text` the output of faulthandler, "" if there was none."""

    pid: int
    title: str
    state: str
    text: str

    @property
    def stopped(self) -> bool:
        return self.state in ("T", "t")


@dataclass(frozen=True)
class RankStacks:
    """A rank's processes and the end of its log, as its machine reports them; `processes` is empty where none lives."""

    processes: tuple[ProcessStacks, ...]
    log_tail: str

    @property
    def waits_for_others(self) -> bool:
        """Whether its own process, the first, runs and is in a collective."""
        own = self.processes[:1]
        return any(not one.stopped and _WAITING.search(one.text) for one in own)

    @property
    def is_called(self) -> bool:
        """Whether its own process works on a call, or wrote no stacks."""
        own = self.processes[:1]
        return any(not one.text or _CALLED.search(one.text) for one in own)


def stacks_of(processes: Sequence[RankProcess]) -> list[RankStacks | None]:
    """The stacks of ranks and of the processes that they started, in order; None: the rank's machine did not answer in time."""
    here = ray.get_runtime_context().get_node_id()
    nodes: dict[str, list[tuple[int, str, str]]] = {}
    for process in processes:
        nodes.setdefault(process.node_id, []).append((process.pid, process.mark, process.log_path))
    refs = {node: submit(node, stacks_here, ranks) for node, ranks in nodes.items() if node != here}
    found = {node: stacks_here(ranks) for node, ranks in nodes.items() if node == here}
    deadline = time.monotonic() + _NODE_SECONDS
    for node, ref in refs.items():
        try:
            found[node] = ray.get(ref, timeout=max(0.1, deadline - time.monotonic()))
        except ray.exceptions.RayError:
            continue
    answers = {node: iter(of_node) for node, of_node in found.items()}
    return [next(answers[process.node_id]) if process.node_id in answers else None for process in processes]


def stacks_here(ranks: Sequence[tuple[int, str, str]]) -> list[RankStacks]:
    """The stacks of ranks of this machine, each given as (process id, mark, log)."""
    # A rank's processes share its log, so they write one after the other; ranks write at the same time.
    with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as pool:
        return list(pool.map(lambda rank: _stacks_of_rank(*rank), ranks))


def _stacks_of_rank(pid: int, mark: str, log_path: str) -> RankStacks:
    tail = log_tail(log_path)[0]
    if not pid:
        return RankStacks((), tail)
    pids = [pid, *(other for other in marked_processes(mark, process_group=pid) if other != pid)]
    stacks = [_stacks_of_process(each) for each in pids]
    return RankStacks(tuple(one for one in stacks if one is not None), tail)


def _stacks_of_process(pid: int) -> ProcessStacks | None:
    state = process_state(pid)
    if state is None:
        return None
    try:
        title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
        text = _written_stacks(pid) if state not in ("T", "t") and _handles_sigusr1(pid) else ""
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return None
    return ProcessStacks(pid, title[:200], state, text)


def _handles_sigusr1(pid: int) -> bool:
    """Whether the process has a handler of SIGUSR1, which would kill it otherwise."""
    with open(f"/proc/{pid}/status") as lines:
        caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _written_stacks(pid: int) -> str:
    """The stacks that a process writes to its log at SIGUSR1."""
    log_path = os.readlink(f"/proc/{pid}/fd/2")
    if not os.path.isfile(log_path):
        return ""
    with open(log_path, "rb") as file:
        file.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGUSR1)
        text, deadline, quiet = b"", time.monotonic() + _ANSWER_SECONDS, 0.0
        while time.monotonic() < deadline and not (text and quiet >= _REST_SECONDS):
            time.sleep(0.02)
            part = file.read()
            quiet = 0.0 if part else quiet + 0.02
            text += part
    return text.decode(errors="replace")


def write_report(
    run_dir: Path, failure: RunFailure, groups: Sequence[Watched], facts: dict[str, str]
) -> Path:
    """Write `<run_dir>/failures/<UTC time>.txt`, and name it in the failure's message.

    The file has the failure and the `facts` (such as step and phase), the controller's stack, and for each rank of `groups`
    the stacks of its processes and the last lines of its log.
    """
    processes = [process for group in groups for process in group.watched]
    found = stacks_of(processes)
    parts = [_head(failure, facts), _section("the error", str(failure))]
    parts.append(_section("the controller", "".join(traceback.format_stack()[:-2])))
    parts += [_rank_part(process, stacks) for process, stacks in zip(processes, found, strict=True)]
    folder = run_dir / FOLDER
    path = _unused_path(folder, time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    with whole_file(path) as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")
    failure.name_report(path)
    return path


def _head(failure: RunFailure, facts: dict[str, str]) -> str:
    lines = {"time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), **facts}
    if isinstance(failure, RankFailure):
        lines |= {
            "role": failure.role,
            "rank": str(failure.rank),
            "host": failure.host,
            "process": str(failure.pid),
            "cause": failure.cause,
            "log": failure.log_path,
        }
    return "\n".join(f"{name}: {value}" for name, value in lines.items()) + "\n"


def _rank_part(process: RankProcess, stacks: RankStacks | None) -> str:
    if stacks is None:
        return _section(f"{process}", "its machine did not answer in time")
    lines = []
    if not stacks.processes or stacks.processes[0].pid != process.pid:
        lines.append("its process is gone")
    for one in stacks.processes:
        state = "stopped" if one.stopped else f"state {one.state}"
        lines += [f"-- process {one.pid}, {state}: {one.title}", one.text or "(no Python stacks)\n"]
    lines += [f"-- last lines of {process.log_path}", stacks.log_tail or "(empty)"]
    return _section(f"{process}", "\n".join(lines))


def _section(title: str, text: str) -> str:
    return f"{_LINE}\n{title}\n{_LINE}\n{text}\n"


def _unused_path(folder: Path, name: str) -> Path:
    """A path for `name` that no other report of the same second has."""
    number = 1
    while (path := folder / (f"{name}.txt" if number == 1 else f"{name}-{number}.txt")).exists():
        number += 1
    return path
