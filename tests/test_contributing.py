"""docs/contributing.md: its code works, the functions it names are where it says, and its list of guarantees is complete."""

import ast
import importlib
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.models import FAMILIES
from megarl.rewards import registry
from megarl.weight_sync.hub import Hub, Member
from tests import guarantees

ROOT = guarantees.ROOT
PAGE = guarantees.PAGE.read_text()


def names_in(path: Path) -> set[str]:
    """Functions, methods and classes that a file defines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_every_guarantee_is_in_the_list_and_no_other() -> None:
    """If a guarantee is missing: python -m tests.guarantees"""
    missing, gone = guarantees.unmatched(guarantees.stated(), guarantees.rows())
    assert [f"{one.module}: {one.text}" for one in missing] == []
    assert [f"line {row.line + 1}: {row.text}" for row in gone] == []


def test_every_test_that_is_named_exists() -> None:
    named: dict[str, list[tuple[int, str]]] = defaultdict(list)  # by folder: (line, name of a test)
    for row in guarantees.rows():
        for test in row.tests:
            folder, _, name = test.partition("::")
            named[folder].append((row.line + 1, name))
    assert sum(map(len, named.values())) > 300  # else this test checks nothing
    missing = []
    for folder, tests in named.items():
        files = (ROOT / folder).glob("test_*.py") if folder == "tests" else (ROOT / folder).rglob("test_*.py")
        source = "\n".join(file.read_text() for file in files)
        there = set(re.findall(r"^ *(?:async )?def (test_\w+)\(", source, re.MULTILINE))
        missing += [f"line {line}: {folder}::{name}" for line, name in tests if name not in there]
    assert missing == []


def test_rows_say_no_test_or_name_some() -> None:
    assert [row.line + 1 for row in guarantees.rows() if not all("::" in test for test in row.tests)] == []
    texts = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert all(line.endswith((f"| {guarantees.NO_TEST} |", "` |", "tests |")) for line in texts)


def test_functions_are_in_the_files_that_are_named() -> None:
    found = guarantees.references(PAGE)
    assert len(found) > 20
    wrong = [
        f"{path}: {name}"
        for path, name in found
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path)
    ]
    assert wrong == []


def test_guarantees_are_found_in_every_form() -> None:
    docstring = textwrap.dedent(
        """\
        What it is.

        Guarantees, each asserted by a test:

        - one; and
          more of it;
        - two.

        It knows nothing of models. Promises: three is so; four. Must not know: ranks, models; Ray.
        """
    )
    assert list(guarantees.guarantees_in(docstring)) == ["one; and more of it", "two", "three is so", "four"]


# The imports of the page's code.
IMPORTS = {
    "megarl.algorithms.policy_loss": (
        "PolicyLossOptions",
        "PolicyTokens",
        "Sums",
        "policy_loss",
        "register_policy_loss",
    ),
    "megarl.models": ("ModelConfig", "logical_tensors", "read_model_config"),
    "megarl.models.config": ("DECODER", "decoder_facts", "refuse_unsupported"),
    "megarl.models.fields": ("Fields",),
    "megarl.rewards.registry": ("register_reward", "rules_of"),
    "megarl.weight_sync.links": ("LinkError",),
    "megarl.weight_sync.transport": ("Part",),
    "torch": ("Tensor",),
    "transformers": ("MistralConfig", "MistralForCausalLM"),
    "typing": ("Any",),
}


@pytest.fixture(scope="module")
def code() -> Iterator[dict[str, Any]]:
    """The names that the page's code defines; other tests do not see what it registers."""
    names: dict[str, Any] = {name: importlib.import_module(name) for name in ("pytest", "torch")}
    for module, imported in IMPORTS.items():
        names |= {name: getattr(importlib.import_module(module), name) for name in imported}
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    with pytest.MonkeyPatch.context() as patch:
        for known in (POLICY_LOSSES, registry.REWARDS):
            patch.setattr(known, "_entries", dict(known._entries))
        patch.setattr(registry, "_RULE_OF", dict(registry._RULE_OF))
        patch.setattr(registry, "_COMPARES", set(registry._COMPARES))
        for _, text in blocks:
            exec(compile(textwrap.dedent(text), str(guarantees.PAGE), "exec"), names)
        patch.setitem(FAMILIES, names["MODEL_TYPE"], names["config_from_hf"])
        yield names


def test_the_policy_loss(code: dict[str, Any]) -> None:
    code["test_spo_by_hand"]()


def test_the_reward(code: dict[str, Any]) -> None:
    code["test_keywords"]()


def test_the_family(code: dict[str, Any], tmp_path: Path) -> None:
    code["test_every_weight_is_in_the_table"](tmp_path)


def test_the_transport(code: dict[str, Any]) -> None:
    hub = Hub("127.0.0.1")
    members = [Member(hub.address, number, "trainer rank {}".format, 10.0) for number in range(2)]
    code["test_parts_arrive_and_a_member_that_dies_is_named"](members)
    members[1].close()
    hub.close()
