"""The content of manifests, and manifests that are refused."""

import hashlib
import io
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from megarl.checkpoints import FileFacts, Manifest, find_damage, read_checkpoint, seal_file, seal_files
from megarl.checkpoints import manifest as manifests
from megarl.checkpoints.manifest import parse_manifest, step_of

FACTS = FileFacts(3, hashlib.sha256(b"abc").hexdigest())


def written(**files: FileFacts) -> bytes:
    return Manifest(4, "1.2.3", files, {"lr": 1e-6, "best": float("-inf")}).to_bytes()


def test_a_manifest_comes_back_as_it_was() -> None:
    content = written(a=FACTS, b=FACTS)
    manifest = parse_manifest(content, "manifest.json")
    assert manifest == Manifest(4, "1.2.3", {"a": FACTS, "b": FACTS}, {"lr": 1e-6, "best": float("-inf")})
    assert manifest.to_bytes() == content
    assert manifest.num_bytes == 6


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../up", "a/../../up", "a//b", "./a", ".", "", "a\0b", "manifest.json"]
)
def test_names_outside_of_the_folder_are_refused(name: str) -> None:
    """Files of a remote are written under these names."""
    with pytest.raises(ValueError, match="no file of its folder"):
        parse_manifest(written(**{name: FACTS}), "manifest.json")


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FORMAT", 2)
    content = written()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 2; this version of megarl reads 1"):
        parse_manifest(content, "manifest.json")
    for other in (b"[]", b"{}", b"null"):
        with pytest.raises(ValueError, match="no manifest"):
            parse_manifest(other, "manifest.json")


def test_only_one_spelling_of_a_step_is_a_folder() -> None:
    names = ("step-0", "step-40", "step-040", "step--1", "step-4 ", ".step-4.a-1.partial", "steps-4")
    assert [step_of(name) for name in names] == [0, 40, None, None, None, None, None]


def test_sealed_files_have_their_size_and_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "CHUNK_BYTES", 1000)
    sizes = (0, 1, 999, 1000, 1001, 54321)
    for size in sizes:
        (tmp_path / str(size)).write_bytes(bytes(index * 7 % 251 for index in range(size)))
    facts = seal_files(tmp_path, map(str, sizes))
    for size in sizes:
        digest = hashlib.sha256((tmp_path / str(size)).read_bytes()).hexdigest()
        assert facts[str(size)] == seal_file(tmp_path / str(size)) == FileFacts(size, digest)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        seal_files(tmp_path, ["0", "nowhere"])


def test_verification_that_takes_a_while_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-4"
    folder.mkdir()
    (folder / "a").write_bytes(b"abc")
    (folder / "manifest.json").write_bytes(written(a=FACTS))
    for seconds, shown in ((60.0, False), (0.0, True)):
        monkeypatch.setattr(manifests, "SHOW_AFTER_SECONDS", seconds)
        console = Console(file=io.StringIO(), force_terminal=True, width=100)
        if shown:
            read = manifests.read_facts
            monkeypatch.setattr(manifests, "read_facts", lambda *args, read=read: _slowly(read, *args))
        assert find_damage(read_checkpoint(folder), console=console) == []
        assert ("verifying step-4" in console.file.getvalue()) is shown


def _slowly(read, *args):  # type: ignore[no-untyped-def]
    time.sleep(0.2)
    return read(*args)


def test_a_signal_ends_verification_before_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are read no further than they are when it comes."""
    ending, whole = threading.Event(), []

    class Readers(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ending.set()
            super().shutdown(wait=wait)

    def read(path: Path, advance: Callable[[int], object]) -> FileFacts:
        ending.wait()
        advance(1)
        whole.append(path.name)
        return FACTS

    def told(futures: object, timeout: float) -> None:
        raise SystemExit(75)

    monkeypatch.setattr(manifests, "ThreadPoolExecutor", Readers)
    monkeypatch.setattr(manifests, "read_facts", read)
    monkeypatch.setattr(manifests, "wait", told)
    with pytest.raises(SystemExit, match="75"):
        manifests.read_all_facts(tmp_path, {str(number): 1 for number in range(3 * manifests.NUM_THREADS)})
    assert whole == []


def test_many_damaged_files_are_not_all_named() -> None:
    assert manifests.shortened([f"file {n} is missing" for n in range(7)]).endswith(
        "file 4 is missing; and 2 more"
    )
    assert manifests.shortened(["a is missing", "b is missing"]) == "a is missing; b is missing"
