import dataclasses
import json
from math import prod

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from megarl.models import logical_tensors, read_model_config
from megarl.models.config import IndexerConfig
from tests.models.published import CONFIGS, PARAMETERS


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
    "name", ["DeepSeek-V3", "DeepSeek-V3.2", "GLM-4.7-Flash", "GLM-5", "Kimi-K2-Instruct"]
)
def test_llama3_rope_scaling_of_latent_attention_is_refused(tmp_path, name):
    """Megatron-core has no such type there, and would rotate without scaling."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    with pytest.raises(ValueError, match=r"rope type 'llama3' is not supported; supported: default, yarn"):
        read_published(tmp_path, name, rope_scaling=rope, rope_parameters=None)


def test_a_share_that_rotates_may_be_in_rope_scaling(tmp_path):
    """Transformers 5 reads it there: its class rotates as many dimensions."""
    rope = {"rope_parameters": None, "rope_theta": 1e4}
    rope["rope_scaling"] = {"rope_type": "default", "partial_rotary_factor": 0.25}
    folder = write(tmp_path, tiny(Glm4MoeConfig, head_dim=16), **rope, partial_rotary_factor=None)
    found = Glm4MoeRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    assert read_model_config(folder).rotary_percent == 2 * len(found) / 16 == 0.25
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.25 changes the computation"):
        read_model_config(write(tmp_path, tiny(LlamaConfig), **rope))


def read_published(tmp_path, name, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return read_model_config(str(tmp_path))


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models_are_accepted_as_they_are_and_as_transformers_writes_them_again(tmp_path, name):
    config = read_published(tmp_path, name)
    if config.family == "kimi_k2":  # transformers has no class for it
        return
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again.get("text_config", again)["rope_parameters"]
    assert read_model_config(str(tmp_path / "again")) == config


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_numbers_of_parameters(tmp_path, name):
    config = read_published(tmp_path, name)
    assert sum(map(prod, logical_tensors(config, mtp=True).values())) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-oss-20b", "20.9"), ("gpt-oss-120b", "116.8"), ("DeepSeek-V3.2", "671.9"), ("GLM-5", "743.9")],
)
def test_some_have_the_parameters_of_transformers_class(tmp_path, name, billions):
    """The headers of gpt-oss's files in MXFP4 count bytes of packed values. Its billions are from arXiv:2508.10925, section 2."""
    config = read_published(tmp_path, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    number = sum(tensor.numel() for tensor in model.parameters())
    number += sum(
        tensor.numel() for name, tensor in model.named_buffers() if name.endswith("correction_bias")
    )
    assert sum(map(prod, logical_tensors(config).values())) == number
    assert f"{number / 1e9:.1f}" == billions


def test_scales_of_deepseeks_float8_files(tmp_path):
    config = read_published(tmp_path, "DeepSeek-V3")
    assert config.fp8_block == (128, 128)
    quantised = [
        shape
        for name, shape in logical_tensors(config, mtp=True).items()
        if "_proj" in name and not name.endswith("eh_proj.weight")
    ]
    assert sum(-(-rows // 128) * -(-columns // 128) for rows, columns in quantised) == 41_540_496


def test_facts_of_mixtures(tmp_path):
    deepseek = read_published(tmp_path, "DeepSeek-V3")
    assert deepseek.moe.dense_layers == (0, 1, 2) and deepseek.moe.shared_ffn_hidden_size == 2048
    assert (deepseek.moe.num_groups, deepseek.moe.topk_group, deepseek.moe.scaling_factor) == (8, 4, 2.5)
    assert (deepseek.moe.scoring, deepseek.moe.expert_bias, deepseek.head_dim) == ("sigmoid", True, 192)
    assert deepseek.rope_scaling["factor"] == 40 and deepseek.rope_scaling["mscale_all_dim"] == 1
    assert deepseek.num_mtp_layers == 1
    air = read_published(tmp_path, "GLM-4.5-Air")
    assert (air.qk_norm, air.qkv_bias, air.rotary_percent, air.moe.dense_layers) == (False, True, 0.5, (0,))
    qwen = read_published(tmp_path, "Qwen3-30B-A3B")
    assert (qwen.moe.scoring, qwen.moe.expert_bias, qwen.moe.top_k) == ("softmax", False, 8)
    assert qwen.moe.shared_ffn_hidden_size == 0 and qwen.qk_norm
    glm = read_published(tmp_path, "GLM-4.7")
    assert glm == dataclasses.replace(read_published(tmp_path, "GLM-4.5"), max_position_embeddings=202752)
    flash = read_published(tmp_path, "GLM-4.7-Flash")
    assert (flash.head_dim, flash.mla.v_head_dim, flash.norm_epsilon, flash.moe.dense_layers) == (
        256,
        256,
        1e-5,
        (0,),
    )
    minimax = read_published(tmp_path, "MiniMax-M2")
    assert (minimax.qk_norm, minimax.qk_norm_all_heads, minimax.rotary_percent) == (True, True, 0.5)
    assert (minimax.moe.ffn_hidden_size, minimax.moe.shared_ffn_hidden_size, minimax.fp8_block) == (
        1536,
        0,
        (128, 128),
    )
    assert minimax.moe.expert_bias and not minimax.moe.dense_layers and minimax.num_mtp_layers == 0
    kimi = read_published(tmp_path, "Kimi-K2-Instruct")
    assert (kimi.family, kimi.architecture, kimi.num_mtp_layers) == ("kimi_k2", "DeepseekV3ForCausalLM", 0)


def test_facts_of_gpt_oss(tmp_path):
    config = read_published(tmp_path, "gpt-oss-120b")
    assert (config.qkv_bias, config.output_bias, config.sinks, config.qk_norm) == (True, True, True, False)
    assert (config.window, config.window_layers) == (128, tuple(range(0, 36, 2)))
    assert (config.moe.num_experts, config.moe.top_k, config.moe.biases, config.moe.clamp) == (
        128,
        4,
        True,
        7,
    )
    assert config.rope_scaling["truncate"] is False and config.fp8_block is None
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swiglu_limit": 5.0}, r"swiglu_limit=5\.0 changes the computation"),
        ({"swiglu_limit": None}, r"swiglu_limit=None changes the computation"),
        ({"attention_bias": False}, "attention_bias=False changes the computation"),
        ({"layer_types": ["full_attention"]}, "for each of the 24 layers, found 1 of them"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 12}, "found .'chunked_attention'. among them"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8' is not supported; supported: mxfp4"),
        ({"sliding_window": None}, "lacks sliding_window"),
    ],
)  # fmt: skip
def test_gpt_oss_with_other_facts_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        read_published(tmp_path, "gpt-oss-20b", **fields)


def test_facts_of_sparse_attention(tmp_path):
    deepseek = read_published(tmp_path, "DeepSeek-V3.2")
    indexer = IndexerConfig(tuple(range(61)), heads=64, head_dim=128, topk=2048, interleaved=False)
    assert deepseek.indexer == indexer
    plain = {"family": "deepseek_v3", "architecture": "DeepseekV3ForCausalLM", "indexer": None}
    assert dataclasses.replace(deepseek, **plain) == read_published(tmp_path, "DeepSeek-V3")
    glm = read_published(tmp_path, "GLM-5")
    assert glm.indexer == IndexerConfig(tuple(range(78)), heads=32, head_dim=128, topk=2048, interleaved=True)
    assert (glm.norm_epsilon, glm.head_dim, glm.mla.q_lora_rank, glm.rope_scaling) == (1e-5, 256, 2048, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
        {"indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_layers_share_the_choice_of_an_indexer_as_in_transformers_and_sglang(tmp_path, fields):
    """GLM-5.2's config can say it in three ways."""
    found = read_published(tmp_path, "GLM-5", **fields).indexer.layers
    config = AutoConfig.from_pretrained(tmp_path)
    assert found == tuple(layer for layer, kind in enumerate(config.indexer_types) if kind == "full")
    assert (len(found), found[:4], found[-1]) == (21, (0, 1, 2, 6), 74)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def test_facts_of_gated_delta_nets(tmp_path):
    config = read_published(tmp_path, "Qwen3-Next-80B-A3B-Instruct")
    net = config.delta_net
    assert [layer for layer in range(48) if layer not in net.layers] == list(range(3, 48, 4))
    assert (net.keys, net.values, net.conv) == (2048, 4096, 4)
    assert (config.rotary_percent, config.output_gate, config.zero_centered_norms) == (0.25, True, True)
    assert (config.moe.shared_ffn_hidden_size, config.moe.shared_gate) == (512, True)
    assert config.num_mtp_layers == 1  # the published config does not mention it
    assert (
        read_published(tmp_path, "Qwen3-Next-80B-A3B-Instruct", num_nextn_predict_layers=0).num_mtp_layers
        == 0
    )


def test_facts_of_models_beside_a_vision_tower(tmp_path):
    config = read_published(tmp_path, "Qwen3.5-397B-A17B")
    assert (config.family, config.is_nested, config.dtype) == ("qwen3_5_moe", True, "bfloat16")
    assert config.context_length == ("max_position_embeddings", 262144)
    assert [layer for layer in range(60) if layer not in config.delta_net.layers] == list(range(3, 60, 4))
    assert (config.delta_net.keys, config.delta_net.values) == (2048, 8192)
    assert (config.rotary_percent, config.rope_theta, config.rope_scaling) == (0.25, 1e7, None)
    assert (config.moe.shared_ffn_hidden_size, config.moe.shared_gate, config.moe.norm_topk_prob) == (
        1024,
        True,
        True,
    )
    weights = logical_tensors(config)
    assert not [name for name in weights if "visual" in name or "language_model" in name]
    # 397 billion with the vision tower
    assert 396e9 < sum(prod(shape) for shape in weights.values()) < 397e9
    dense = read_published(tmp_path, "Qwen3.5-27B")
    assert (dense.family, dense.moe, dense.num_mtp_layers, dense.ffn_hidden_size) == (
        "qwen3_5",
        None,
        1,
        17408,
    )
    text = CONFIGS["Qwen3.5-27B"]["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert read_model_config(str(tmp_path)) == dataclasses.replace(dense, is_nested=False, architecture="")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "text_config: config field attn_output_gate=False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .*is not that of rope_parameters, 0.25"),
        (
            {"rope_parameters": {"mrope_section": [11, 11, 11]}},
            "mrope_section must be three counts with the sum 32",
        ),
        ({"rope_parameters": {"mrope_section": [16, 16]}}, "mrope_section must be three counts"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=False must be the same in text_config"),
        (
            {"model_type": "qwen3_5_text"},
            "model_type='qwen3_5_text' is not supported; supported: qwen3_5_moe_text",
        ),
        ({"layer_types": ["full_attention"] * 60}, "layer_types must have full_attention in every layer of"),
    ],
    ids=str,
)
def test_a_language_model_beside_a_vision_tower_with_other_facts_is_refused(tmp_path, fields, message):
    text = {**CONFIGS["Qwen3.5-397B-A17B"]["text_config"], **fields}
    with pytest.raises(ValueError, match=message):
        read_published(tmp_path, "Qwen3.5-397B-A17B", text_config=text)


def test_a_folder_that_lacks_its_vision_tower_is_refused(tmp_path):
    with pytest.raises(ValueError, match="language_model_only=True"):
        read_published(tmp_path, "Qwen3.5-27B", language_model_only=True)


def test_yarn(tmp_path):
    config = read_published(tmp_path, "Qwen3-8B", rope_scaling=YARN)
    assert config.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-8B", {"attention_bias": True}, "attention_bias=True"),
        ("Qwen3-8B", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Qwen3-8B", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("Qwen3-8B", {"head_dim": None}, "lacks head_dim"),
        ("Qwen3-8B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("Qwen3-8B", {"rope_scaling": {**YARN, "attention_factor": 1.2}}, "rope attention_factor=1.2"),
        ("DeepSeek-V3", {"rope_scaling": {**YARN, "truncate": False}}, "rope truncate=false"),
        ("Qwen3-8B", {"rope_scaling": {**YARN, "mscale": 1.0}}, "rope mscale=1.0"),
        ("Qwen3-8B", {"rope_scaling": {**YARN, "factor": None}}, "rope type 'yarn' lacks factor"),
        ("Qwen3-8B", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        (
            "Qwen3-8B",
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
            "weight_block_size=None",
        ),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]"),
        ("Qwen3-30B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("Qwen3-30B-A3B", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("Qwen3-30B-A3B", {"norm_topk_prob": None}, "lacks norm_topk_prob"),
        ("Qwen3-Next-80B-A3B-Instruct", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\]"),
        ("Qwen3-Next-80B-A3B-Instruct", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("Qwen3-Next-80B-A3B-Instruct", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ("Qwen3-Next-80B-A3B-Instruct", {"linear_key_head_dim": None}, "lacks linear_key_head_dim"),
        (
            "Qwen3-Next-80B-A3B-Instruct",
            {"linear_num_value_heads": 24},
            "must be a multiple of linear_num_key_heads",
        ),
        (
            "Qwen3-Next-80B-A3B-Instruct",
            {"layer_types": ["linear_attention", "full_attention"] * 24},
            "layer_types must have full_attention in every layer of full_attention_interval=4",
        ),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave=False"),
        ("DeepSeek-V3", {"attention_bias": True}, "attention_bias=True"),
        ("DeepSeek-V3", {"num_key_value_heads": 64}, "num_key_value_heads=64"),
        ("DeepSeek-V3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("DeepSeek-V3", {"n_shared_experts": None}, "lacks n_shared_experts"),
        ("DeepSeek-V3.2", {"index_topk": None}, "lacks index_topk"),
        ("DeepSeek-V3.2", {"index_topk_freq": 4}, "index_topk_freq=4"),
        ("DeepSeek-V3.2", {"index_kpool": 4}, "index_kpool=4"),
        ("DeepSeek-V3.2", {"num_experts": 128}, "num_experts=128"),
        ("DeepSeek-V3.2", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("DeepSeek-V3.2", {"mlp_bias": True}, "mlp_bias=True"),
        (
            "DeepSeek-V3.2",
            {"layer_types": ["full_attention"] * 61},
            "deepseek_sparse_attention for each of the 61",
        ),
        ("GLM-5", {"q_lora_rank": None}, "lacks q_lora_rank"),
        ("GLM-5", {"index_k_norm_type": "rms"}, "index_k_norm_type='rms'"),
        ("GLM-5", {"indexer_types": ["shared"] * 78}, "full for the first"),
        ("GLM-5", {"index_topk_pattern": "FS"}, "for each of the 78 layers"),
        ("GLM-5", {"mlp_layer_types": ["sparse"] * 78}, "mlp_layer_types=.* first_k_dense_replace=3"),
        ("Kimi-K2-Instruct", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("GLM-4.7-Flash", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        (
            "GLM-4.7-Flash",
            {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45},
            "mlp_layer_types=.* first_k_dense_replace=1",
        ),
        ("GLM-4.7-Flash", {"n_group": 7}, "multiple of n_group"),
        ("MiniMax-M2", {"attn_type_list": [0] + [1] * 61}, "attn_type_list="),
        ("MiniMax-M2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
        ("MiniMax-M2", {"use_qk_norm": False}, "use_qk_norm=False"),
        ("MiniMax-M2", {"use_routing_bias": None}, "use_routing_bias=None"),
        ("MiniMax-M2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("MiniMax-M2", {"shared_intermediate_size": 1536}, "shared_intermediate_size=1536"),
        ("MiniMax-M2", {"rotary_dim": None}, "lacks rotary_dim"),
        (
            "MiniMax-M2",
            {"partial_rotary_factor": 1.0},
            "partial_rotary_factor=1 is not rotary_dim / head_dim, 0.5",
        ),
        ("MiniMax-M2", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        # What a class of transformers fills in otherwise than other families' classes do.
        ("DeepSeek-V3", {"n_group": None, "topk_group": None}, "lacks n_group, topk_group"),
        ("DeepSeek-V3.2", {"topk_group": None}, "lacks topk_group"),
        ("MiniMax-M2", {"rope_theta": None}, "lacks rope_theta"),
        ("gpt-oss-20b", {"rope_theta": None}, "lacks rope_theta"),
        ("gpt-oss-20b", {"rope_scaling": None}, "lacks rope_type"),
        ("GLM-4.5", {"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ("GLM-4.5", {"use_qk_norm": None}, "lacks use_qk_norm"),
    ],
)
def test_a_changed_fact_is_refused_by_name(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        read_published(tmp_path, name, **changes)


@pytest.mark.parametrize("cls", [Qwen3Config, Qwen3MoeConfig, DeepseekV3Config, Glm4MoeConfig])
def test_what_transformers_makes_by_itself_is_accepted(tmp_path, cls):
    """The classes' own defaults, except fields for which some class has no default."""
    folder = write(tmp_path, cls(num_hidden_layers=2, head_dim=128))
    assert read_model_config(folder).family == cls.model_type


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (Qwen2Config, {"use_sliding_window": True}, "use_sliding_window=True"),
        (Qwen2Config, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LlamaConfig, {"attention_bias": True}, "attention_bias=True"),
        (LlamaConfig, {"mlp_bias": True}, "mlp_bias=True"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope type 'linear'"),
        (
            LlamaConfig,
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported without its weights.* llama, minimax_m2, qwen2, qwen3",
        ),
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
