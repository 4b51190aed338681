"""Dry runs of `megarl launch TARGET`, in the repository's root, for modules with a TARGET and a RECIPE."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def dry_run(
    in_root: None, capsys: pytest.CaptureFixture, request: pytest.FixtureRequest
) -> Callable[..., str]:
    """dry_run(arguments...): the text that the command prints."""

    def dry_run(*arguments: str, recipe: str = request.module.RECIPE) -> str:
        assert main(["launch", request.module.TARGET, recipe, "--dry-run", *arguments]) == 0
        return capsys.readouterr().out

    return dry_run


@pytest.fixture
def refused(
    in_root: None, capsys: pytest.CaptureFixture, request: pytest.FixtureRequest
) -> Callable[..., str]:
    """refused(arguments...): the message with which the command refuses them."""

    def refused(*arguments: str) -> str:
        assert main(["launch", request.module.TARGET, request.module.RECIPE, "--dry-run", *arguments]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        return output.err

    return refused
