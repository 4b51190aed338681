"""Wrong fields of a user's JSON files: one line names the file, the field and the value."""

import json

import pytest

from megarl.models import FAMILIES, read_model_config
from megarl.models.fields import Fields
from tests.models.published import CONFIGS


def read(tmp_path, name, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return read_model_config(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-8B", {"num_hidden_layers": "3"}, "num_hidden_layers must be a whole number from 1 to 10000, found '3'"),
        ("Qwen3-8B", {"num_hidden_layers": 10**12}, "num_hidden_layers must be"),
        ("Qwen3-8B", {"hidden_size": True}, "hidden_size must be a whole number from 1 on, found True"),
        ("Qwen3-8B", {"hidden_size": 4096.0}, "hidden_size must be a whole number from 1 on, found 4096.0"),
        ("Qwen3-8B", {"num_attention_heads": -32}, "num_attention_heads must be a whole number"),
        ("Qwen3-8B", {"num_key_value_heads": 0}, "num_key_value_heads must be a whole number"),
        ("Qwen3-8B", {"num_key_value_heads": 5}, "multiple of num_key_value_heads, found 32 and 5"),
        ("Qwen2.5-7B", {"num_attention_heads": 24, "num_key_value_heads": 4}, "hidden_size must be a multiple"),
        ("Qwen3-8B", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, found nan"),
        ("Qwen3-8B", {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number above 0, found '1e-6'"),
        ("Qwen3-8B", {"rope_theta": float("inf")}, "rope_theta must be a number above 0, found inf"),
        ("Qwen3-8B", {"rope_theta": [1e6]}, r"rope_theta must be a number above 0, found \[1000000.0\]"),
        ("Qwen3-8B", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, found 'false'"),
        ("Qwen3-8B", {"torch_dtype": "bfloat15"}, "dtype='bfloat15' is not supported; supported: float32"),
        ("Qwen3-8B", {"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of texts"),
        ("Qwen3-8B", {"layer_types": [["full_attention"]]}, "layer_types must be a list of texts"),
        ("Qwen3-8B", {"model_type": ["qwen3"]}, r"model_type must be a text, found \['qwen3'\]"),
        ("Qwen3-8B", {"rope_scaling": "yarn"}, "rope_scaling must be an object, found 'yarn'"),
        ("Qwen3-8B", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope: rope_type must be a text"),
        ("Qwen3-8B", {"quantization_config": "fp8"}, "quantization_config must be an object"),
        ("DeepSeek-V3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}, "two sizes"),
        ("DeepSeek-V3", {"n_routed_experts": 10**9}, "n_routed_experts must be a whole number"),
        ("DeepSeek-V3", {"n_routed_experts": 250}, "n_routed_experts must be a multiple of n_group, found 250 and 8"),
        ("DeepSeek-V3", {"num_experts_per_tok": 257}, "num_experts_per_tok must be a whole number from 1 to 256"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group must be a whole number from 1 to 8"),
        ("DeepSeek-V3", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
        ("GLM-4.5", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ("GLM-4.5", {"attention_bias": "yes"}, "attention_bias must be true or false"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_file_and_field(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, name, **changes)
    assert str(caught.value).startswith(f"{tmp_path}/config.json") and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", '"config"', "null"])
def test_a_config_that_is_no_object_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json should hold a JSON object, found"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("value", ["x", -1, [2], {"a": 1}, True, 1e40, float("nan"), 10**40])
def test_no_value_of_any_field_is_taken_for_what_it_is_not(name, value):
    """Each field in turn: a wrong value is refused with the field's name, or the field has no meaning for the model."""
    plain = FAMILIES[CONFIGS[name]["model_type"]](Fields(CONFIGS[name], "config.json"))
    for field in CONFIGS[name]:
        changed = Fields({**CONFIGS[name], field: value}, "config.json")
        try:
            found = FAMILIES[plain.family](changed)
        except ValueError as error:
            assert str(error).startswith("config.json") and "\n" not in str(error)
            shown = {"torch_dtype": "dtype", "rope_scaling": "rope"}.get(field, field)
            assert shown in str(error), error
        else:
            assert found == plain or (value is True and CONFIGS[name][field] is False), field
