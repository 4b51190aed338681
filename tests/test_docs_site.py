"""The documentation: README.md, the site of mkdocs.yml, and links between pages and files.

- README.md is short, has the two commands, and all its links lead to files that exist.
- Every page of docs/ is in the navigation once.
- Links and anchors between pages hold, also where mkdocs is not installed.
- The site builds with --strict.
- docs/cli.md is the output of tools/cli_reference.py.
- Every megarl command in a block of code is one that the parser accepts, with keys and recipes that exist.
"""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megarl.cli import main as cli
from megarl.config.loading import SCHEMAS, load_with_origins

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
MOST_LINES = 150


def prose(page: Path) -> str:
    """The text of a page without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[tuple[str, str]]:
    """File and anchor of each link within the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "``", prose(page))):
        if not re.match(r"\w+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def test_readme_is_short_and_has_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    commands = re.findall(r"^make (\w+) +# \S", text, re.MULTILINE)
    assert commands == ["demo", "test"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*commands, "test-all", "docs"} <= set(targets)
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make test-all"
    for statement in ("megarl has run on one GPU", "Apache-2.0"):
        assert statement in text


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for file, anchor in links(page):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []


def test_readme_leads_to_every_guide() -> None:
    linked = {Path(file).name for file, _ in links(ROOT / "README.md")}
    guides = next(part["Guides"] for part in navigation() if "Guides" in part)
    assert len(guides) > 10
    assert {file for entry in guides for file in entry.values()} - linked == set()


def navigation() -> list[dict]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def files_of(part: list | dict | str) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for entry in part.values() if isinstance(part, dict) else part:
            yield from files_of(entry)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(files_of(navigation())) == [page.name for page in PAGES]


def test_the_command_line_reference_is_that_of_the_parser() -> None:
    """If this fails: python tools/cli_reference.py > docs/cli.md"""
    made = runpy.run_path(str(ROOT / "tools/cli_reference.py"))
    assert made["page"]() == (DOCS / "cli.md").read_text()


def test_the_command_line_reference_has_every_option() -> None:
    made = runpy.run_path(str(ROOT / "tools/cli_reference.py"))
    sections = dict(re.findall(r"^## `([^`]+)`\n(.*?)(?=^## |\Z)", made["page"](), re.MULTILINE | re.DOTALL))
    assert len(sections) > 20
    for name, _, command in made["commands"](made["parser"]()):
        for option in re.findall(r"^  (--[\w-]+)", command.format_help(), re.MULTILINE):
            assert f"| `{option}` |" in sections[name], (name, option)


def console_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each `megarl` in the page's blocks of commands, without comments; a backslash continues a line."""
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.match(r"(?:\$ )?megarl (.*)", line):
                yield shlex.split(re.sub(r"\[key=value \.\.\.\]", "a.key=value", command[1]), comments=True)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_commands_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "RUNNERS", dict.fromkeys(cli.RUNNERS, lambda options: 0))
    for arguments in console_commands(page):
        assert cli.main(arguments) == 0, arguments
        if arguments[0] in SCHEMAS and arguments[1].startswith("recipe:"):
            load_with_origins(SCHEMAS[arguments[0]], arguments[1], arguments[2:])
    for name in re.findall(r"\brecipe:(?:models/)?[a-z][\w.-]*\w", page.read_text()):
        stem = ROOT / "recipes" / name.removeprefix("recipe:")
        assert stem.is_dir() or stem.with_name(f"{stem.name}.yaml").is_file(), name


def test_the_way_on_gpus_says_what_was_run_and_has_recipes_for_a_node() -> None:
    page = (DOCS / "quickstart_gpus.md").read_text()
    assert "What has and has not been run on a GPU: nothing has been run on two." in page
    recipes = re.findall(r"^\| `([\w.]+)` \| .* \| \d x 80 GB \|$", page, re.MULTILINE)
    assert len(recipes) == 5 and all((ROOT / f"recipes/{name}.yaml").is_file() for name in recipes)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: make install")
    pytest.importorskip("material", reason="mkdocs-material is not installed: make install")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert built.returncode == 0, built.stderr
    for page in PAGES:
        file = tmp_path / "site" / page.with_suffix(".html").name
        assert file.is_file()
        assert "](" not in re.sub(r"<(pre|code)\b.*?</\1>", "", file.read_text(), flags=re.DOTALL)
