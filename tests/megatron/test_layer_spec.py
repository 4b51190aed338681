"""megarl reports which layers a machine has, and refuses a broken installation of Transformer Engine."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megarl import platform
from megarl.megatron import layer_spec
from megarl.megatron.layer_spec import layer_modules, layers_text


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


def _bounds_on_a_device() -> torch.Tensor:
    """Bounds of two packed sequences; torch refuses to read the values of a tensor on "meta", as a device's queue would have the host wait."""
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    bounds.positions = torch.empty(7, dtype=torch.int64, device="meta")
    return bounds


def test_with_transformer_engine_rotations_without_a_kernel_do_not_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as yarn's of grouped-query attention (gpt-oss) and plain ones of latent attention (GLM-5)."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def refuse(t: torch.Tensor, cu_seqlens: torch.Tensor, *unused: object, **more: object) -> None:
        cu_seqlens.tolist()

    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", refuse)  # Megatron's own asks for lengths
    monkeypatch.setattr(layer_spec, "has_transformer_engine", lambda: True)
    with layer_modules():
        pass
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False)
    found = rope_utils.apply_rotary_pos_emb(
        torch.empty(7, 2, 8, device="meta"),
        torch.empty(4, 1, 1, 8, device="meta"),
        config,
        _bounds_on_a_device(),
        cp_group=group,
    )
    assert found.shape == (7, 2, 8)


def test_a_gated_delta_net_does_not_wait_for_the_bounds_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = SimpleNamespace(module=GatedDeltaNet, submodules=SimpleNamespace(out_norm=torch.nn.RMSNorm))
    layer = SimpleNamespace(submodules=SimpleNamespace(self_attention=attention))
    monkeypatch.setattr(
        experimental_attention_variant_module_specs,
        "get_transformer_block_with_experimental_attention_variant_spec",
        lambda config, vp_stage: SimpleNamespace(layer_specs=[layer]),
    )
    config = SimpleNamespace(experimental_attention_variant="gated_delta_net")
    layer_spec.layer_spec(config, None, last=True)
    assert issubclass(attention.module, GatedDeltaNet)
    net, bounds = attention.module.__new__(attention.module), _bounds_on_a_device()
    assert net._resolve_cu_seqlens(bounds, bounds, 7, "cu_seqlens_q", cp_size=1) is bounds
