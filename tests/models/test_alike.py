"""Models of a type for which megarl has no family."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from megarl.models import logical_tensors, read_model_config
from tests.fixtures.tiny_models import as_type


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model of a family, with a config that calls it Mistral's."""

    def make(family: str) -> Path:
        folder = make_tiny_model(
            tmp_path / "model", ["two words"], hidden_size=32, num_layers=2, family=family
        )
        return as_type(folder, "mistral", "MistralForCausalLM")

    return make


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_it_has_the_facts_of_the_architecture_whose_weights_it_has(
    folder_of: Callable[[str], Path], family: str
) -> None:
    """Biases and norms of queries and keys are as in the files; exported files keep the model's own type."""
    folder = folder_of(family)
    config = read_model_config(str(folder))
    assert config.hf["model_type"] == "mistral" and config.architecture == "MistralForCausalLM"
    known = read_model_config(str(as_type(folder, family, "")))
    same = {"family": known.family, "architecture": "", "hf": known.hf}
    assert dataclasses.replace(config, **same) == known
    assert logical_tensors(config) == logical_tensors(known)


def test_without_weights_its_parts_are_given(folder_of: Callable[[str], Path]) -> None:
    """A Megatron checkpoint has the config in a folder of its own, without the model's files."""
    folder = folder_of("qwen2")
    config = read_model_config(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="not supported without its weights"):
        read_model_config(str(folder))
    assert read_model_config(str(folder), {"qkv_bias": True, "qk_norm": False}) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("residual_multiplier", 0.22),
        ("no_rope_layers", [1, 0]),
        ("use_bias", False),
        ("auto_map", {"AutoModelForCausalLM": "code.Model"}),
        ("quantization_config", {"quant_method": "awq"}),
    ],
)
def test_a_field_that_nobody_knows_is_refused(
    folder_of: Callable[[str], Path], field: str, value: object
) -> None:
    file = folder_of("llama") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ValueError, match=f"model_type 'mistral' is not supported.*{field}="):
        read_model_config(str(file.parent))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "relu2"),
        ("sliding_window", 4096),
        ("mlp_bias", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_what_is_known_to_change_the_computation_is_refused(
    folder_of: Callable[[str], Path], field: str, value: object
) -> None:
    file = folder_of("llama") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ValueError, match=f"{field}.* not supported"):
        read_model_config(str(file.parent))


def test_a_classifiers_folder_has_the_same_facts(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    config, file = read_model_config(str(folder)), folder / "model.safetensors"
    weights = load_file(file)
    head = weights.pop("lm_head.weight")
    save_file({**weights, "score.weight": head[:1].clone()}, file)
    assert read_model_config(str(folder)) == config


def test_other_weights_are_named(folder_of: Callable[[str], Path]) -> None:
    """An additional norm, as in OLMo 2; a missing projection; no weights at all."""
    folder = folder_of("llama")
    weights, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    norm = "model.layers.0.post_feedforward_layernorm.weight"
    save_file({**weights, norm: weights["model.norm.weight"].clone()}, file)
    with pytest.raises(ValueError, match=rf"{norm} \[32\]"):
        read_model_config(str(folder))
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight missing"):
        read_model_config(str(folder))
    file.unlink()
    with pytest.raises(ValueError, match="'mistral' is not supported without its weights"):
        read_model_config(str(folder))
