"""Layers' settings that depend on installed packages."""

from dataclasses import replace

import pytest
import torch

from megarl.config.schema.models import RECOMPUTE_MODULES
from megarl.layout.grid import ParallelLayout
from megarl.megatron import transformer_config
from megarl.models import read_model_config
from megarl.util.packages import shipped


@pytest.mark.parametrize(
    ("changes", "heads", "tp", "fused"),
    [
        ({}, 128, 1, True),
        ({}, 128, 2, True),
        ({"v_head_dim": 96}, 128, 1, False),
        ({"qk_rope_head_dim": 48}, 128, 1, False),
        ({}, 20, 1, False),
        ({}, 24, 2, False),
    ],
)
def test_latent_attentions_rotary_kernel_takes_powers_of_two_alone(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], heads: int, tp: int, fused: bool
) -> None:
    """Triton refuses ranges, which are widths of queries and values, that are no powers of two when it compiles, in the first forward pass.
    The kernel processes heads in blocks and writes past the last head: interpreted with 3 heads in blocks of 2, it corrupts the heap."""
    monkeypatch.setattr(transformer_config, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(transformer_config, "MLATransformerConfig", dict)
    config = read_model_config(str(shipped() / "recipes" / "models" / "deepseek-v3"))
    config = replace(config, num_attention_heads=heads, mla=replace(config.mla, **changes))
    layout = ParallelLayout(world=tp, tp=tp, sp=tp > 1)
    settings = transformer_config.transformer_config(config, layout, torch.bfloat16, None)
    assert settings["apply_rope_fusion"] is fused


def built(model: str, layout: ParallelLayout | None = None, **options):
    """Megatron's own configuration for a model of the recipes."""
    config = read_model_config(str(shipped() / "recipes" / "models" / model))
    granularity, dtype = options.pop("granularity", None), options.pop("dtype", torch.bfloat16)
    return transformer_config.transformer_config(
        config, layout or ParallelLayout(world=1), dtype, granularity, **options
    )


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen2.5-7b"])
def test_overrides_are_fields_of_the_configuration_that_is_built(model: str) -> None:
    given = {
        "moe_shared_expert_overlap": False,
        "deterministic_mode": False,
        "cp_comm_type": "a2a",
        "attention_backend": "fused",
    }
    found = built(model, overrides=given)
    assert (found.cp_comm_type, found.attention_backend.name) == ("a2a", "fused")
    assert (
        found.apply_rope_fusion is False
        and built(model, overrides={"persist_layer_norm": True}).persist_layer_norm
    )


def test_what_megatron_itself_refuses_is_told_with_the_key() -> None:
    with pytest.raises(
        ValueError,
        match=r"override_transformer_config: Megatron-core refuses the settings: .*fused permutation",
    ):
        built("deepseek-v3", overrides={"moe_permute_fusion": True})


def test_deepeps_dispatcher_needs_its_package() -> None:
    with pytest.raises(ValueError, match="the package deep_ep is not installed; leave it out for alltoall"):
        built("deepseek-v3", overrides={"moe_token_dispatcher_type": "flex"})


def test_kernels_of_experts_are_fused_where_transformer_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not built("deepseek-v3").moe_permute_fusion and not built("deepseek-v3").moe_router_fusion
    monkeypatch.setattr(transformer_config, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(transformer_config, "MLATransformerConfig", dict)
    found = built("deepseek-v3")
    assert found["moe_permute_fusion"] and found["moe_router_fusion"]


@pytest.mark.filterwarnings("ignore:If you are using transformer_engine")
def test_parts_that_are_computed_again() -> None:
    modules = ("core_attn", "mlp", "moe", "shared_experts")
    found = built("deepseek-v3", granularity="selective", recompute_modules=modules)
    assert (found.recompute_granularity, tuple(found.recompute_modules)) == ("selective", modules)
    assert built("deepseek-v3", granularity="selective").recompute_modules == ["core_attn"]


@pytest.mark.parametrize("module", sorted({"layernorm", "mla_up_proj", "moe_act"}))
def test_parts_whose_output_is_freed_need_transformer_engine(module: str) -> None:
    assert module in RECOMPUTE_MODULES
    with pytest.raises(ValueError, match=f"recompute_modules has {module}: .*needs Transformer Engine"):
        built("deepseek-v3", granularity="selective", recompute_modules=(module, "mlp"))


def test_stages_are_as_the_layout_has_them() -> None:
    """Megatron's own parser of the notation gives the same layers."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from megarl.config.pipeline_layout import parse_layout
    from megarl.layout.grid import layers_of

    text = "E,t*4|(ttt|)*2,tttt|tt|(t*3|)*2tt,L"
    theirs = PipelineParallelLayerLayout(PipelineParallelLayerLayout.parse_str_to_list(text), 4)
    layout = ParallelLayout(world=4, pp=4, vpp=2, chunk_layers=parse_layout(text))
    config = built("qwen2.5-0.5b", layout)
    assert config.num_layers == 24 and config.pipeline_model_parallel_layout.layout == theirs.layout
    first = 0
    for chunk in range(2):
        for stage in range(4):
            count = sum(layer.name == "decoder" for layer in theirs.layout[stage][chunk])
            assert layers_of(layout, 24, stage)[chunk] == list(range(first, first + count))
            first += count
    assert first == 24


QWEN, CUT = "qwen2.5-7b", ParallelLayout(world=2, cp=2)


@pytest.fixture
def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_config, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(transformer_config, "TransformerConfig", dict)


def test_what_only_transformer_engine_cannot_have_is_taken_without_it() -> None:
    built(QWEN, CUT, dtype=torch.float32)
    built(QWEN, overrides={"deterministic_mode": True})


@pytest.mark.usefixtures("with_transformer_engine")
def test_cut_sequences_have_no_attention_in_float32_on_gpus() -> None:
    built(QWEN, dtype=torch.float32)
    built(QWEN, CUT)
    with pytest.raises(
        ValueError, match=r"dtype=float32 with megatron\.context_parallel_size=2: .*no attention"
    ):
        built(QWEN, CUT, dtype=torch.float32)


@pytest.mark.usefixtures("with_transformer_engine")
def test_deterministic_attention_needs_the_variable_that_transformer_engine_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    with pytest.raises(ValueError, match=r"deterministic_mode=true needs NVTE_.*=0 .* is not set: "):
        built(QWEN, overrides={"deterministic_mode": True})
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    built(QWEN, overrides={"deterministic_mode": True})
