"""Files by path, glob and URL: in fsspec's memory, and from a web server on this machine."""

import importlib
import io
import json
import os
import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.files import iter_rows, num_rows
from megarl.data.prompts import PromptDataset
from megarl.data.sources import DataFile, resolve_files
from megarl.data.stream import cut_pieces, read_piece
from tests.data.shared import prompt_row


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


class _Ranges(SimpleHTTPRequestHandler):
    """A web server's files; parts of them too, as servers of data have it, but not of whole/..."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        if wanted is None or self.path.startswith("/whole/"):
            with suppress(BrokenPipeError):  # the reader has seen that it gets the whole, and hangs up
                super().do_GET()
            return
        with open(self.translate_path(self.path), "rb") as file:
            data = file.read()
        first, last = wanted.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """(URL of a web server, the folder that it serves)."""
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, directory=str(tmp_path)))
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", tmp_path
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def parquet_bytes(rows, row_group_size=None):
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=row_group_size)
    return buffer.getvalue()


def test_local_files(tmp_path, monkeypatch):
    for name in ("b.parquet", "a.parquet", "c.jsonl"):
        (tmp_path / name).touch()
    a, b, c = (DataFile(str(tmp_path / name)) for name in ("a.parquet", "b.parquet", "c.jsonl"))
    assert resolve_files(b.name) == [b]
    assert resolve_files(f"{tmp_path}/*.parquet") == [a, b]
    assert resolve_files([c.name, f"{tmp_path}/?.parquet"]) == [c, a, b]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_files("~/a.parquet") == [a]
    assert (a.stem, a.suffix, a.is_remote) == ("a", ".parquet", False)


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("{}/x.parquet", r"data file .*x\.parquet does not exist"),
        ("{}/*.parquet", r"no file matches the pattern .*\*\.parquet"),
        ("{}", r"is a folder; give the files in it"),
        (["{}/c.jsonl", "{}/*.jsonl"], r"c\.jsonl is given more than once"),
        ([], "no data files given"),
    ],
)
def test_what_is_wrong_with_local_files_is_named(tmp_path, pattern, message):
    (tmp_path / "c.jsonl").touch()
    given = [p.format(tmp_path) for p in pattern] if isinstance(pattern, list) else pattern.format(tmp_path)
    with pytest.raises(ValueError, match=message):
        resolve_files(given)


def test_files_in_memory(memory):
    rows = [{"a": number} for number in range(5)]
    memory.pipe("/data/x.parquet", parquet_bytes(rows))
    memory.pipe("/data/y.parquet", parquet_bytes(rows[:2]))
    memory.pipe("/data/z.jsonl", b'{"a": 7}\n\n{"a": 8}\n')
    x, y = resolve_files("memory://data/*.parquet")
    assert [x.stem, y.stem] == ["x", "y"] and x.is_remote
    assert [row for _, row in iter_rows(x)] == rows and num_rows(y) == 2
    (lines,) = resolve_files("memory://data/z.jsonl")
    assert list(iter_rows(lines)) == [(0, {"a": 7}), (1, {"a": 8})]
    (copied,) = resolve_files("simplecache::memory://data/x.parquet")  # kept on this machine once read
    assert [row for _, row in iter_rows(copied)] == rows
    assert copied.stem == "x"


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("memory://data/gone.parquet", r"no file matches memory://data/gone\.parquet"),
        ("memory://data/*.arrow", r"no file matches memory://data/\*\.arrow"),
        (
            "memory://data",
            r"memory://data is a folder; give the files in it, for example memory://data/\*\.parquet",
        ),
        ("nothing://data/x.parquet", r"nothing://data/x.parquet: the protocol nothing:// is unknown"),
    ],
)
def test_what_is_wrong_with_a_url_is_named(memory, pattern, message):
    memory.pipe("/data/x.parquet", b"")
    with pytest.raises(ValueError, match=message):
        resolve_files(pattern)


def test_a_missing_package_is_named(monkeypatch):
    known = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to access Nowhere"}
    monkeypatch.setitem(importlib.import_module("fsspec.registry").known_implementations, "nowhere", known)
    with pytest.raises(
        ValueError,
        match=r"nowhere://x\.parquet: nowhere:// needs a package that is not installed: Install no_such_package",
    ):
        resolve_files("nowhere://x.parquet")


def test_what_is_no_parquet_is_named(memory):
    memory.pipe("/x.parquet", b"PAR1 or not, this is none PAR2")
    with pytest.raises(ValueError, match=r"data file memory://x\.parquet is no valid Parquet file"):
        num_rows(resolve_files("memory://x.parquet")[0])


def test_files_of_a_web_server(server, tokenizer):
    url, folder = server
    rows = [prompt_row(truth=str(number)) for number in range(6)]
    (folder / "train.parquet").write_bytes(parquet_bytes(rows, row_group_size=2))
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"{url}/train.parquet?download=true", f"{url}/more.jsonl"]
    dataset = PromptDataset(files, tokenizer, max_prompt_length=64)
    uids = [f"{name}:{number}" for name in ("train", "more") for number in range(6)]
    assert dataset.table["uid"].to_pylist() == uids
    assert dataset.table["ground_truth"].to_pylist() == [str(number) for number in range(6)] * 2
    pieces = cut_pieces(resolve_files(files), 2)
    assert [row.uid for piece in pieces for row in read_piece(piece, ["prompt"])] == uids
    with pytest.raises(ValueError, match=r"no file matches http://.*/gone\.parquet"):
        resolve_files(f"{url}/gone.parquet")


def test_a_web_server_that_serves_no_parts_is_named(server):
    url, folder = server
    (folder / "whole").mkdir()
    (folder / "whole" / "x.parquet").write_bytes(os.urandom(6_000_000) + parquet_bytes([prompt_row()]))
    (file,) = resolve_files(f"{url}/whole/x.parquet")
    with pytest.raises(ValueError, match=r"data file http://.*/whole/x\.parquet cannot be read: .*range"):
        num_rows(file)


def test_a_copy_of_a_file_that_is_not_served_in_parts(server, tokenizer):
    """As the error above advises."""
    url, folder = server
    (folder / "whole").mkdir()
    (folder / "whole" / "x.parquet").write_bytes(parquet_bytes([prompt_row()] * 3))
    dataset = PromptDataset(
        f"simplecache::{url}/whole/x.parquet?download=true", tokenizer, max_prompt_length=64
    )
    assert dataset.table["uid"].to_pylist() == ["x:0", "x:1", "x:2"]


def test_a_web_server_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match=r"no file matches http://127\.0\.0\.1:9/x\.parquet .*Cannot connect"
    ):
        resolve_files("http://127.0.0.1:9/x.parquet")
