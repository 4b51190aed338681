import base64
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data import files


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
    """Told by the schema of Parquet, and by the first row of JSON lines; fields of a struct are the rows' matter."""
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
    """A Parquet file of chats whose Arrow schema says `stored`, as another writer leaves it."""
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
    """pyarrow reads no nested dictionaries over several row groups at once."""
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
