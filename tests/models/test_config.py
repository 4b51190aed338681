import json

import pytest
from transformers import LlamaConfig, Qwen2Config

from megarl.models import read_model_config


def write(tmp_path, config, **changes):
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    content = {**json.loads(config.to_json_string(use_diff=False)), **changes}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def tiny(cls, **changes):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "rms_norm_eps": 3e-6,
        "max_position_embeddings": 256,
    }
    return cls(**{**sizes, **changes})


def test_facts_come_from_the_config(tmp_path):
    config = read_model_config(write(tmp_path, tiny(Qwen2Config, tie_word_embeddings=True)))
    assert (config.family, config.qkv_bias, config.tie_word_embeddings) == ("qwen2", True, True)
    assert (config.num_query_groups, config.head_dim, config.ffn_hidden_size) == (2, 8, 48)
    assert config.norm_epsilon == 3e-6


def test_rope_of_transformers_4_and_5(tmp_path):
    new = write(tmp_path, tiny(LlamaConfig), rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_model_config(new).rope_theta == 5e5
    old = {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": None}
    assert read_model_config(write(tmp_path, tiny(LlamaConfig), **old)).rope_theta == 1e6


def test_llama3_rope_scaling_is_read_and_other_constants_refused(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read_model_config(write(tmp_path, tiny(LlamaConfig), rope_parameters=rope))
    assert config.rope_scaling == {"rope_type": "llama3", "factor": 8.0}
    with pytest.raises(ValueError, match=r"high_freq_factor=2\.0 is not supported"):
        read_model_config(
            write(tmp_path, tiny(LlamaConfig), rope_parameters={**rope, "high_freq_factor": 2.0})
        )


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (Qwen2Config, {"use_sliding_window": True}, "use_sliding_window=True"),
        (Qwen2Config, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LlamaConfig, {"attention_bias": True}, "attention_bias=True"),
        (LlamaConfig, {"mlp_bias": True}, "mlp_bias=True"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        (LlamaConfig, {"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, qwen2"),
        (LlamaConfig, {"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, cls, changes, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(write(tmp_path, tiny(cls), **changes))


def test_no_model_there(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        read_model_config(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_model_config(str(tmp_path))
