"""Fields of data classes, read from their source."""

import ast
from pathlib import Path

import pytest

from megarl.util.record_fields import RecordField, package_folder, read_fields

SOURCE = '''
LISTED = ["a", "b"]

class Other:
    hidden: int = 0

class Record(Base):
    """Text."""

    size: int = 1
    _private: int = 2
    share: Optional[float] = None
    names: List[str] = field(default_factory=list)
    either: Union[str, List[str]] = "x"
    mode: Literal["one", "two", None] = None
    call: Optional[Callable] = None
    kind: A[str, Arg(help="h", choices=LISTED)] = "a"
    lone: A[Optional[bool], "help"] = None
    table: dict[str, int] | None = None
    computed: A[str, Arg(choices=choices())] = "a"

    def method(self) -> int: ...
'''


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, RecordField]:
    (tmp_path / "record.py").write_text(SOURCE)
    return read_fields([tmp_path / "record.py"], ("Record",), lists=tmp_path / "record.py")


def test_public_fields_of_the_named_classes(fields: dict[str, RecordField]) -> None:
    names = "size share names either mode call kind lone table computed"
    assert list(fields) == names.split()
    assert (fields["kind"].choices, fields["kind"].type_text) == (("a", "b"), "str")
    assert fields["computed"].choices == ()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("size", [3, -1], [True, 1.5, "1", None, [1]]),
        ("share", [1, 0.5, None], ["x", True]),
        ("names", [["a"], []], ["a", [1], None]),
        ("either", ["a", ["a"]], [1, [1]]),
        ("mode", ["one", None], ["three"]),
        ("call", [None], ["print", 1]),
        ("kind", ["a", "b"], ["c", None]),
        ("lone", [True, None], [1, "true"]),
        ("table", [{"a": 1}, None], [[1]]),
        ("computed", ["anything"], [1]),
    ],
)
def test_values_that_fit(fields: dict[str, RecordField], name: str, right: list, wrong: list) -> None:
    assert [value for value in right if not fields[name].takes(value)] == []
    assert [value for value in wrong if fields[name].takes(value)] == []


def test_a_type_in_quotes_is_the_type() -> None:
    assert RecordField(ast.Constant("Optional[int]")).takes(None)


def test_a_package_that_is_not_there() -> None:
    assert package_folder("no_such_package_of_megarls") is None
    assert package_folder("megarl") == Path(__file__).resolve().parents[2] / "megarl"
