"""Verifies the files of a large checkpoint on all machines of a cluster at once, before a run continues from it.

A checkpoint of DeepSeek-V3 with its optimizer's states has 9.4 TB (14 bytes a parameter). One machine would read them while the
devices of all others wait.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from megarl.checkpoints import FileFacts, Verify, changed_files
from megarl.checkpoints.manifest import NUM_THREADS, difference, read_all_facts, reading_progress
from megarl.cluster import start_cluster, stop_cluster
from megarl.cluster.hosts import living_nodes, spread

# Bytes. A smaller checkpoint is read here in the time that joining a cluster takes, or a little more.
SPREAD_FROM = 64 << 30


def verify_in_cluster(address: str, run_folder: Path, spread_from: int = SPREAD_FROM) -> Verify:
    """A `Verify` that joins the Ray cluster at `address` where there is much to read, and leaves it again.

    Each machine reads a few files at a time, and more when it has read those. A machine that has failed, or can read none of its files
    since it does not have the folder, is given no others: it would be done with them at once, and take all that the others have not
    begun. Files that no machine can read are read by this process.

    Args:
        spread_from: the bytes from which all machines read.

    Raises (the `Verify`):
        ValueError: a machine reads a file otherwise than this one, so that its ranks would continue with something else.
        ConnectionError: as `start_cluster`.
    """

    def verify(folder: Path, files: Mapping[str, FileFacts], console: Console | None) -> dict[str, str]:
        if sum(facts.bytes for facts in files.values()) < spread_from:
            return changed_files(folder, files, console)
        cluster = start_cluster(address, 1, run_folder)
        try:
            return _changed_files(folder.absolute(), files, console)
        finally:
            stop_cluster(cluster)

    return verify


def _changed_files(folder: Path, files: Mapping[str, FileFacts], console: Console | None) -> dict[str, str]:
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in living_nodes()}
    parts = _parts(files, len(hosts))
    unread: dict[str, FileFacts] = {}
    differing: dict[str, str] = {}  # the host that has read the file
    progress = reading_progress(console)
    text = f"verifying {folder.name} on {len(hosts)} machines"
    task = progress.add_task(text, total=sum(facts.bytes for facts in files.values()))
    with nullcontext() if console is None else progress:
        for index, node, read in spread(list(hosts), _read_part, [(folder, part) for part in parts]):
            for name, size in parts[index].items():
                if node is None or isinstance(read[name], OSError):
                    unread[name] = files[name]
                elif difference(read[name], files[name]) is not None:
                    differing[name] = hosts[node]
                else:
                    progress.advance(task, size)
    changed = changed_files(folder, unread | {name: files[name] for name in differing}, console)
    for name, host in differing.items():
        if name not in changed:
            raise ValueError(
                f"{folder / name}: {host} reads other bytes than this machine, where they are as they were written; the folder must be "
                "on a file system that all machines share, and that machine must read it without errors"
            )
    return changed


def _read_part(folder: Path, sizes: Mapping[str, int]) -> dict[str, FileFacts | OSError]:
    """`read_all_facts` on a machine.

    Raises:
        OSError: it can read none of the files.
    """
    read = read_all_facts(folder, sizes)
    errors = [found for found in read.values() if isinstance(found, OSError)]
    if errors and len(errors) == len(read):
        raise errors[0]
    return read


def _parts(files: Mapping[str, FileFacts], num_machines: int) -> list[dict[str, int]]:
    """The sizes of files in parts for one call each, large files first."""
    sizes = {name: facts.bytes for name, facts in files.items()}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    count = max(1, min(NUM_THREADS, len(names) // num_machines))
    return [
        {name: sizes[name] for name in names[start : start + count]} for start in range(0, len(names), count)
    ]
