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
        errors.add(tmp_path / "f.parquet", row, "bad")
    with pytest.raises(ValueError, match=r"f\.parquet row 0: bad\n(.*\n)+\.\.\. and 2 more wrong rows$"):
        errors.raise_if_any()


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
