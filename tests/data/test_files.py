"""Files by path, glob and URL: in fsspec's memory, and from a web server on this machine."""

import base64
import importlib
import io
import json
import os
import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data import files
from megarl.data.files import DataFile, iter_rows, num_rows, resolve_files
from megarl.data.prompts import PromptDataset
from megarl.data.stream import cut_pieces, read_piece
from tests.data.shared import prompt_row


def test_iter_rows_over_blocks(tmp_path):
    num = files.READ_BLOCK_ROWS + 5
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": list(range(num)), "b": ["x"] * num}), path)
    assert list(files.iter_rows(path, ["a", "absent"])) == [(row, {"a": row}) for row in range(num)]
    assert files.num_rows(path) == num


def test_iter_rows_of_json_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert list(files.iter_rows(path)) == [(0, {"a": 1}), (1, {"a": 2})]
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"x\.jsonl row 1: not valid JSON"):
        list(files.iter_rows(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl row 0: expected a JSON object, found list"):
        list(files.iter_rows(path))
    with pytest.raises(ValueError, match=r"unknown suffix '\.csv'"):
        list(files.iter_rows(tmp_path / "x.csv"))


def test_lookup():
    row = {"a": {"b": {"c": 1}}, "x.y": 2}
    assert files.lookup(row, "a.b.c") == 1
    assert files.lookup(row, "x.y") == 2
    with pytest.raises(ValueError, match=r"no 'a.z.c': a holds \['b'\]"):
        files.lookup(row, "a.z.c")
    with pytest.raises(ValueError, match=r"no 'q': the row holds \['a', 'x.y'\]"):
        files.lookup(row, "q")


def test_row_errors_shows_the_first_and_counts_the_rest(tmp_path):
    errors = files.RowErrors()
    errors.raise_if_any()
    for row in range(7):
        errors.add(tmp_path / "f.parquet", row, f"bad in its own way {row}")
    with pytest.raises(
        ValueError, match=r"f\.parquet row 0: bad in its own way 0\n(.*\n){4}\.\.\. and 2 more wrong rows$"
    ):
        errors.raise_if_any()


def test_the_same_problem_of_many_rows_is_one_line(tmp_path):
    errors = files.RowErrors()
    for row in range(1, 5996):
        errors.add(tmp_path / "f.jsonl", row, "no 'prompt'")
    errors.add(tmp_path / "g.jsonl", 3, "no 'prompt'")
    errors.add_file(tmp_path / "h.parquet", "no column 'prompt'")
    with pytest.raises(ValueError) as error:
        errors.raise_if_any()
    assert str(error.value).replace(f"{tmp_path}/", "").splitlines() == [
        "h.parquet: no column 'prompt'",
        "f.jsonl row 1: no 'prompt' (so in 5,994 more rows of this file)",
        "g.jsonl row 3: no 'prompt'",
    ]


def test_columns_that_a_file_lacks(tmp_path):
    """The schema of Parquet shows them, and the first row of JSON lines; fields of a struct are checked in the rows."""
    columns = [
        files.Column("a.x", "data.a_key"),
        files.Column("c", "data.c_key"),
        files.Column("d.e", "data.d_key"),
    ]

    def missing(path):
        return files.missing_columns(path, lambda present: columns)

    table = pa.table({"a": [{"b": 1}], "d.e": [2]})
    pq.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text('\n{"a": null, "d.e": 2}\n{"c": 1}\n')
    for name in ("x.parquet", "x.jsonl"):
        assert missing(tmp_path / name) == "no column 'c' (columns: a, d.e); set data.c_key"
    (tmp_path / "empty.jsonl").write_text("\n")
    assert missing(tmp_path / "empty.jsonl") is None
    wide = pa.table({f"f{number}": [0] for number in range(100)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    text = missing(tmp_path / "wide.parquet")
    assert (
        text.startswith("no column 'a.x', 'c', 'd.e' (columns: f0, f1,")
        and "f29, ...); set data.a_key; " in text
    )
    assert "f30" not in text


def test_find():
    row = {"a": {"b": {"c": 1}}, "x.y": 2, "n": None}
    assert [files.find(row, key) for key in ("a.b.c", "x.y", "a.z.c", "q", "n.m")] == [1, 2, None, None, None]


def test_write_parquet_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = files.write_parquet(pa.table({"a": [1]}), tmp_path / "x.parquet")

    def fail(table, target, **how):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(files.pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_parquet(pa.table({"a": [2]}), path)
    assert pq.read_table(path)["a"].to_pylist() == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.parquet"]


def chat_type(text):
    return pa.list_(pa.struct([("role", text), ("content", text)]))


def write_as(path, rows, stored, row_group_size):
    """A Parquet file of chats whose Arrow schema says `stored`, as other libraries write it."""
    table = pa.table({"messages": pa.array(rows, chat_type(pa.string()))})
    schema = pa.schema([("messages", stored)]).serialize().to_pybytes()
    with pq.ParquetWriter(path, table.schema, store_schema=False) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(schema).decode()})
    assert pq.ParquetFile(path).schema_arrow.field("messages").type == stored


@pytest.mark.parametrize(
    "text", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_chats_of_any_text_type_are_read_over_row_groups(tmp_path, text):
    """pyarrow cannot read nested dictionary types over several row groups at once."""
    rows = [[{"role": "user", "content": f"{row} {'x' * (row % 7)}"}] for row in range(3000)]
    write_as(tmp_path / "x.parquet", rows, chat_type(text), 700)
    assert [row["messages"] for _, row in files.iter_rows(tmp_path / "x.parquet")] == rows


def test_columns_that_cannot_be_read_are_named(tmp_path):
    def unreadable(**_):
        raise pa.ArrowNotImplementedError("Nested data conversions")
        yield

    schema = pa.schema([("messages", chat_type(pa.string_view()))])
    file = SimpleNamespace(schema_arrow=schema, iter_batches=unreadable)
    with pytest.raises(
        ValueError, match=r"x\.parquet cannot be read: Nested .*messages list<.*string_view.*anew"
    ):
        list(files.read_group(file, tmp_path / "x.parquet", 0, ["messages"]))


def test_maps_are_dicts(tmp_path):
    path = tmp_path / "x.parquet"
    kind = pa.map_(pa.string(), pa.int64())
    pq.write_table(pa.table({"a": pa.array([{"x": 1, "y": 2}], kind)}), path)
    assert [row for _, row in files.iter_rows(path)] == [{"a": {"x": 1, "y": 2}}]
    pq.write_table(pa.table({"a": pa.array([[("x", 1), ("x", 2)]], kind)}), path)
    with pytest.raises(ValueError, match="a map has a key twice"):
        list(files.iter_rows(path))


def test_nulls_of_absent_fields_are_dropped_from_chats_of_parquet(tmp_path):
    def message(role, content, **fields):
        return {"role": role, "content": content, **fields}

    def tool(**properties):
        return {"function": {"name": "f", "parameters": {"properties": properties}}}

    calls = [
        {"function": {"name": "f", "arguments": {"x": 1}}},
        {"function": {"name": "g", "arguments": {"y": "z"}}},
    ]
    rows = [
        {"a": {"chat": [message("user", "a"), message("assistant", None, tool_calls=calls)]}},
        {"a": {"chat": [message("user", "b", name="Ann")]}},
    ]
    rows[0] |= {"tools": [tool(role={"type": "string"})], "other": {"p": 1}}
    rows[1] |= {"tools": [tool(content={"type": "string", "enum": ["u"]})], "other": {"q": 2}}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = [
        files.without_filled_nulls(row, ["a.chat", "tools", "no.such"], path)
        for _, row in files.iter_rows(path)
    ]
    for row in rows:
        row["other"] = {"p": None, "q": None, **row["other"]}
    assert found == rows
    assert files.without_filled_nulls(
        {"a": None, "tools": [{"x": None}]}, ["tools"], tmp_path / "x.jsonl"
    ) == {
        "a": None,
        "tools": [{"x": None}],
    }


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


class _Ranges(SimpleHTTPRequestHandler):
    """A web server of files. It also serves parts of files, as servers of data do, except of files in whole/."""

    def do_GET(self):
        wanted = self.headers.get("Range")
        if wanted is None or self.path.startswith("/whole/"):
            with suppress(BrokenPipeError):  # the reader sees that it gets the complete file, and hangs up
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
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,))
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
    with pytest.raises(ValueError, match=r"data file memory://x\.parquet is not a valid Parquet file"):
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
    """The error in the test above advises such a URL."""
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
