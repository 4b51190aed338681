"""The processes that exist."""

from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Children and their children; none if the process ends during the search."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for child in children] + [
        grandchild for child in children for grandchild in descendants(int(child))
    ]


def is_running(pid: int) -> bool:
    """Whether the process can still do something: one that has ended may stay as a zombie until its parent waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
