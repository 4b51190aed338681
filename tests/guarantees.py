"""Guarantees that docstrings of modules and classes state, and the table of docs/contributing.md that names the tests of each.

    python -m tests.guarantees

brings the table's texts up to date with the docstrings and the files of functions up to date with the package, and prints what it
could not match. Tests of a new guarantee are entered by hand.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "contributing.md"
NO_TEST = "no test"
_HEADER = re.compile(
    r"(?:^|\. )(?:(?:Further g|G)uarantees?\b|Promises\b|What (?:the|this) room promises|What a page guarantees)[^:\n]*:",
    re.MULTILINE,
)
_OF_ANOTHER_KIND = re.compile(r"(?:It )?must not know|It knows nothing", re.IGNORECASE)
_ROW = re.compile(r"^\| (.+?) \| (.+?) \|$")
_TITLE = re.compile(r"^### `(megarl\S*)`$")


class Guarantee(NamedTuple):
    module: str  # "megarl/layout/plan.py"
    text: str


class Row(NamedTuple):
    """A row of the table; `line`: its number in the page, from 0; `tests`: "tests/layout::test_deterministic"."""

    line: int
    folder: str
    text: str
    tests: tuple[str, ...]


def stated() -> list[Guarantee]:
    """All guarantees in docstrings of modules and classes, by module."""
    found = []
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        source = path.read_text()
        if re.search("guarantee|promise", source, re.IGNORECASE):
            tree = ast.parse(source)
            for node in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
                texts = guarantees_in(ast.get_docstring(node) or "")
                found += [Guarantee(str(path.relative_to(ROOT)), text) for text in texts]
    return found


def guarantees_in(docstring: str) -> Iterator[str]:
    """The items of a docstring's lists of guarantees; from a paragraph its sentences, and their parts between semicolons."""
    for header in _HEADER.finditer(docstring):
        rest = docstring[header.end() :]
        if rest.lstrip().startswith("- "):
            block = re.split(r"\n\s*\n(?!- )", rest.strip(), maxsplit=1)[0]
            items = re.split(r"(?:^|\n)\s*- ", block)[1:]
        else:
            paragraph = re.split(r"\n\s*\n", rest, maxsplit=1)[0]
            sentences = re.split(r"\.(?:\s+|$)", paragraph)
            kept = [sentence for sentence in sentences if not _OF_ANOTHER_KIND.match(sentence.strip())]
            items = [item for sentence in kept for item in re.split(r";\s+", sentence)]
        yield from filter(None, (" ".join(item.split()).rstrip(";.") for item in items))


def rows() -> list[Row]:
    """The rows of the page's table."""
    folder, found = "", []
    for number, line in enumerate(PAGE.read_text().splitlines()):
        if title := _TITLE.match(line):
            folder = title[1]
        elif folder and (row := _ROW.match(line)) and row[1] != "guarantee" and set(row[1]) != {"-"}:
            tests = () if row[2] == NO_TEST else tuple(re.findall(r"`([^`]+)`", row[2]))
            found.append(Row(number, folder, row[1].replace("\\|", "|"), tests))
    return found


def matched(
    guarantees: Sequence[Guarantee], rows: Sequence[Row], least: float = 0.5
) -> list[tuple[Guarantee, Row]]:
    """Each guarantee with a row of its own: the row with the most words in common, at least a share of `least` of the longer text's words."""
    words = [Counter(_words(one.text)) for one in (*guarantees, *rows)]
    sizes = [sum(counter.values()) for counter in words]
    pairs = []
    for index in range(len(guarantees)):
        for other in range(len(guarantees), len(words)):
            longer = max(sizes[index], sizes[other])
            if min(sizes[index], sizes[other]) >= least * longer:
                share = sum((words[index] & words[other]).values()) / longer
                if share >= least:
                    same_folder = guarantees[index].module.startswith(rows[other - len(guarantees)].folder)
                    pairs.append((share, same_folder, index, other - len(guarantees)))
    found: dict[int, int] = {}
    for _, _, index, row in sorted(pairs, key=lambda pair: (-pair[0], -pair[1], pair[2:])):
        if index not in found and row not in found.values():
            found[index] = row
    return [(guarantees[index], rows[row]) for index, row in found.items()]


def unmatched(
    guarantees: Sequence[Guarantee], rows: Sequence[Row], least: float = 0.5
) -> tuple[list[Guarantee], list[Row]]:
    """Guarantees without a row, and rows whose guarantee no docstring states."""
    pairs = matched(guarantees, rows, least)
    known, used = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    return [one for one in guarantees if one not in known], [row for row in rows if row not in used]


def references(page: str) -> list[tuple[str, str]]:
    """(file, name) of each "`megarl/...py`: `name`", with further names after "and"."""
    found = re.findall(r"`(megarl/[\w/]+\.py)`: (`\w+`(?:\s+and\s+`\w+`)*)", page)
    return [(path, name) for path, names in found for name in re.findall(r"`(\w+)`", names)]


def _words(text: str) -> Iterable[str]:
    return re.findall(r"\w+", text.lower())


def update_files() -> None:
    """Correct in the page the files of functions and classes that were moved."""
    page = PAGE.read_text()
    for path, name in references(page):
        defines = re.compile(rf"^ *(?:async )?(?:def|class) {name}\b", re.MULTILINE)
        if not (ROOT / path).is_file() or not defines.search((ROOT / path).read_text()):
            room = ROOT / Path(*Path(path).parts[:2])
            found = [
                str(file.relative_to(ROOT)) for file in room.rglob("*.py") if defines.search(file.read_text())
            ]
            if len(found) == 1:
                page = page.replace(f"`{path}`: `{name}`", f"`{found[0]}`: `{name}`")
            else:
                print(f"{path} does not define {name}: it is in {found or 'no file of this folder'}")
    PAGE.write_text(page)


def update_texts(least: float = 0.3) -> None:
    """Write the docstrings' texts into the rows that belong to them."""
    lines, guarantees, table = PAGE.read_text().splitlines(), stated(), rows()
    for guarantee, row in matched(guarantees, table, least):
        tests = ", ".join(f"`{test}`" for test in row.tests) or NO_TEST
        lines[row.line] = f"| {guarantee.text.replace('|', chr(92) + '|')} | {tests} |"
    PAGE.write_text("\n".join(lines) + "\n")
    new, gone = unmatched(guarantees, table, least)
    for guarantee in new:
        print(f"enter a row with its tests: {guarantee.module}: {guarantee.text}")
    for row in gone:
        print(f"no docstring states it any more: {PAGE.name}:{row.line + 1}: {row.text}")


if __name__ == "__main__":
    update_files()
    update_texts()
