import re
from dataclasses import fields
from pathlib import Path

import pytest

import megarl.config
from megarl.config import EvalConfig, RMConfig, SFTConfig, TrainConfig
from megarl.config.problems import nearest_keys
from megarl.config.schema import field_types, section_type, table_type, walk


@pytest.mark.parametrize("schema", [TrainConfig, SFTConfig, RMConfig, EvalConfig])
def test_every_key_is_documented(schema: type) -> None:
    keys = list(walk(schema))
    assert len({key for key, _, _ in keys}) == len(keys) > 20
    for key, member, _ in keys:
        assert member.metadata["help"].endswith("."), key


@pytest.mark.parametrize("schema", [TrainConfig, SFTConfig, RMConfig, EvalConfig])
def test_defaults_are_among_the_choices(schema: type) -> None:
    for key, member, kind in walk(schema):
        if section_type(kind) is not None or table_type(kind) is not None:
            continue
        choices = member.metadata["choices"]
        defaults = member.default if isinstance(member.default, tuple) else (member.default,)
        if choices is not None:
            assert all(value is None or value in choices for value in defaults), key


def test_walk_names_keys_as_users_write_them() -> None:
    keys = [key for key, _, _ in walk(TrainConfig)]
    assert keys[0] == "data" and keys[1] == "data.train_files"
    assert "critic.optim.lr" in keys and "resource_pools.<name>.nnodes" in keys
    assert field_types(TrainConfig).keys() == {member.name for member in fields(TrainConfig)}


def test_nearest_keys_of_something_else_are_none() -> None:
    assert nearest_keys("trainer.zzz", [key for key, _, _ in walk(TrainConfig)]) == []


def test_every_key_is_read() -> None:
    """No key may exist that no code reads: its name stands in the code outside of the schema (and outside of these tables).

    Keys with only one legal value count as read, since all other values are refused when the configuration is loaded.
    """
    config = Path(megarl.config.__file__).parent
    tables = [*(config / "schema").glob("*.py"), config / "show.py"]
    code = "\n".join(path.read_text() for path in config.parent.rglob("*.py") if path not in tables)
    names = set(re.findall(r"(?<=[.\"'])\w+", code))
    unread = {
        key
        for schema in (TrainConfig, SFTConfig, RMConfig, EvalConfig)
        for key, member, kind in walk(schema)
        if section_type(kind) is None
        and table_type(kind) is None
        and not member.metadata.get("refused")
        and key.rpartition(".")[2] not in names
    }
    assert sorted(unread) == []
