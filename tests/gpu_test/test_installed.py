"""The parts of step `installed` that need no GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.doctor.nodes import NodeFacts, node_facts
from megarl.gpu_test import installed
from megarl.gpu_test.installed import cudnn, findings, imported, imports
from megarl.gpu_test.runner import Check
from tests.gpu_test.test_steps import CARD, TWO, VERSIONS


def without_sglang(torch: str) -> tuple[NodeFacts, dict[str, str]]:
    versions = {"torch": torch}
    facts = node_facts(".", "")
    versions = {name: version for name, version in facts.versions.items() if name != "sglang"} | versions
    return replace(facts, versions=versions, missing=("sglang", "xgrammar"), cuda="13.0"), versions


def test_a_machine_that_only_trains_needs_no_sglang() -> None:
    facts, versions = without_sglang("2.11.0")
    found = {check.name: check.ok for check in findings(facts, replace(TWO, versions=versions))}
    assert (found["sglang"], found["what these import"]) == (None, None)
    facts, versions = without_sglang(VERSIONS["torch"])
    found = {check.name: check.ok for check in findings(facts, replace(TWO, versions=versions))}
    assert (found["sglang"], found["what these import"]) == (False, False)


def test_a_machine_that_only_trains_may_have_an_sglang_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "imported", lambda module, required: Check(module, required))
    older = replace(TWO, versions=VERSIONS | {"torch": "2.11.0", "ray": "2.60.0"})
    required = {check.name for check in imports(older) if check.ok}
    assert required == {"ray"}
    assert {check.name for check in imports(TWO) if check.ok} == {
        "sglang.srt.entrypoints.engine", "sgl_kernel", "torch_memory_saver",
    }  # fmt: skip


def test_a_card_that_cuda_hides_may_be_in_use() -> None:
    facts = replace(node_facts(".", ""), gpus=(replace(CARD, used=CARD.memory), CARD), cuda="13.0")
    assert "GPU 0" not in {check.name for check in findings(facts, replace(TWO, gpus=(CARD,)))}
    assert "GPU 0" in {check.name for check in findings(facts, replace(TWO, gpus=facts.gpus))}


def test_an_extension_finds_the_libraries_that_torch_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "extension.py").write_text(
        "import sys\nif 'torch' not in sys.modules: raise ImportError('libc10.so')"
    )
    (tmp_path / "broken.py").write_text("import os\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert imported("extension", required=True).ok
    check = imported("broken", required=True)
    assert check.ok is False and check.found == "no message, exit code -6"


def test_another_cudnn_than_torchs_is_a_check_that_is_wrong() -> None:
    def refused() -> int:
        raise RuntimeError("PyTorch was compiled against (9, 20, 0) but found runtime version (9, 14, 0)")

    check = cudnn(refused)
    assert check.ok is False and "(9, 14, 0)" in check.found and "LD_LIBRARY_PATH" in check.found
    right = cudnn(lambda: 92000)
    assert (right.ok, right.found) == (None, "92000")
