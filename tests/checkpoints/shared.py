"""Small checkpoints, and functions that save, compare and damage them."""

from collections.abc import Callable
from pathlib import Path

from megarl.checkpoints import Checkpoint, CheckpointStore, FileFacts, seal_file


def content(step: int, name: str) -> bytes:
    """The content of a file of a checkpoint in these tests."""
    return f"{name} of step {step}\n".encode() * 100


NAMES = ("actor/shard_0", "actor/shard_1", "trainer.json")


def write_files(folder: Path, step: int) -> dict[str, FileFacts | None]:
    """Fill a partial folder; two files are sealed by their writer, one is left to the store."""
    for name in NAMES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content(step, name))
    return {name: None if name == "trainer.json" else seal_file(folder / name) for name in NAMES}


def save(store: CheckpointStore, step: int, **facts: object) -> Checkpoint:
    """Save and commit a checkpoint of `step`."""
    with store.building(step) as partial:
        return store.commit(step, partial, write_files(partial, step), facts)


def assert_whole(checkpoint: Checkpoint | None, step: int) -> None:
    """The checkpoint is of that step and has its complete content."""
    assert checkpoint is not None and checkpoint.step == step
    assert {
        path.relative_to(checkpoint.folder).as_posix(): path.read_bytes()
        for path in checkpoint.folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    } == {name: content(step, name) for name in NAMES}


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file; its size and its time stay."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    "flipped": (flip_bit, "another SHA-256"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "emptied": (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
}
