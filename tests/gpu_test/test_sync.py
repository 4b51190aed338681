"""Step `sync`, between two processes without a GPU."""

import json
from pathlib import Path

import pytest

from megarl.gpu_test import sync
from megarl.gpu_test.sync import config_folder
from tests.gpu_test.made_up import ends_at_once


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The configuration of a smaller model of the same family."""
    fields = json.loads(Path(config_folder(), "config.json").read_text())
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Path(tmp_path, "config.json").write_text(
        json.dumps({**fields, **sizes, **heads, "layer_types": ["full_attention"] * 2})
    )
    return str(tmp_path)


def test_versions_arrive_as_they_were_sent(tmp_path: Path, model: str) -> None:
    checks = list(sync.sync_versions(tmp_path, model, "cpu"))
    assert [check.ok for check in checks] == [True] * (2 + sync.NUM_VERSIONS), checks
    assert checks[1].figures["bytes"] > 100_000 and checks[1].figures["seconds"] > 0


def test_what_came_otherwise_is_named(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = sync._values
    monkeypatch.setattr(sync, "_values", lambda name, shape, version: values(name, shape, version + 1))
    checks = list(sync.sync_versions(tmp_path, model, "cpu"))
    assert [check.ok for check in checks[:2]] == [True, False]
    assert checks[1].found.startswith("wrong: ")


def test_a_sender_that_ends_is_not_waited_for(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_send", ends_at_once)
    with pytest.raises(RuntimeError, match="the sender ended with exit code 3"):
        list(sync.sync_versions(tmp_path, model, "cpu"))
