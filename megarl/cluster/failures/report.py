"""One file that tells all of a failure: what failed and when, and where every other process was at that moment."""

import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.failures.errors import RankFailure, RunFailure
from megarl.cluster.failures.stacks import RankStacks, stacks_of
from megarl.cluster.ranks import RankProcess
from megarl.util.files import whole_file

if TYPE_CHECKING:
    from megarl.cluster.group import WorkerGroup

FOLDER = "failures"
_LINE = "=" * 100


def write_report(
    run_dir: Path, failure: RunFailure, groups: Sequence["WorkerGroup"], facts: dict[str, str]
) -> Path:
    """Write `<run_dir>/failures/<UTC time>.txt`, and name it in the failure's message.

    It has the failure and the `facts` (such as step and phase), where the controller is, and for each rank of `groups`
    the stacks of its processes and the last lines of its log.
    """
    processes = [process for group in groups for process in group.watched]
    found = stacks_of(processes)
    parts = [_head(failure, facts), _section("the error", str(failure))]
    parts.append(_section("the controller", "".join(traceback.format_stack()[:-2])))
    parts += [_rank_part(process, stacks) for process, stacks in zip(processes, found, strict=True)]
    folder = run_dir / FOLDER
    path = _free(folder, time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
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


def _free(folder: Path, name: str) -> Path:
    """A path for `name` that no other report of the same second has."""
    number = 1
    while (path := folder / (f"{name}.txt" if number == 1 else f"{name}-{number}.txt")).exists():
        number += 1
    return path
