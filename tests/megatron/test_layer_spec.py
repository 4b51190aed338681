"""megarl reports which layers a machine has, and refuses a broken installation of Transformer Engine."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.models.gpt import gpt_layer_specs

from megarl import platform
from megarl.megatron.layer_spec import layers_text


def test_a_machine_without_gpus_has_megarls_own_layers() -> None:
    if platform.is_cuda():
        pytest.skip("there is a CUDA device")
    assert layers_text() == "megarl's own in torch (there is no CUDA device)"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates a machine with a GPU where megatron-core could not import Transformer Engine."""
    monkeypatch.setattr(platform, "is_cuda", lambda: True)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]  # the test's modules; monkeypatch then restores the original ones


def test_its_absence_is_said(on_a_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert layers_text().startswith("megarl's own in torch (Transformer Engine is not installed)")


def test_one_that_cannot_be_imported_is_refused_with_its_error(
    on_a_gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Like Transformer Engine 2.18 with a flash-attn-4 whose interface lacks a name; the package itself hides the error."""
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("try:\n    from . import pytorch\nexcept ImportError:\n    pass\n")
    (package / "pytorch/__init__.py").write_text("from collections import _validate_head_dims\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(
        ValueError, match=r"installed, but transformer_engine\.pytorch cannot be imported"
    ) as told:
        layers_text()
    assert "cannot import name '_validate_head_dims' from 'collections'" in str(told.value)


def test_one_that_was_mended_meanwhile_is_not_believed(
    on_a_gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    for file in ("__init__.py", "pytorch/__init__.py", "pytorch/fp8.py"):
        (package / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="can be imported now, but could not when megatron-core was"):
        layers_text()
