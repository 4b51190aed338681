import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model, train_tokenizer
from megarl.models.config import QWEN_HYBRIDS
from tests.fixtures.tiny_models import MTP_FAMILIES

SIZES = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 48,
}
CHAT = [{"role": "user", "content": "Tom has 12 pens"}]


@pytest.fixture(scope="module")
def texts():
    return arithmetic_texts(300)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tie", [False, True])
def test_reloads_identically(tmp_path, texts, family, tie):
    folder = make_tiny_model(tmp_path / "m", texts, family=family, tie_word_embeddings=tie, seed=3, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[family]
    assert model.get_input_embeddings().weight.shape == (512, 32)
    assert model.dtype == torch.float32
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == tie

    made, loaded = train_tokenizer(texts, 512), AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == made.get_vocab()
    for text in [*texts[:50], "Zoë 日本 42\n\n  x's", "<|im_start|>user\nhi<|im_end|>"]:
        ids = made(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text
    assert loaded.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\nTom has 12 pens<|im_end|>\n<|im_start|>assistant\n"
    )
    end = loaded.convert_tokens_to_ids("<|im_end|>")
    assert loaded.eos_token_id == end == model.config.eos_token_id
    assert GenerationConfig.from_pretrained(folder).eos_token_id == end
    assert loaded.pad_token_id == loaded.convert_tokens_to_ids("<|endoftext|>") == model.config.pad_token_id


def test_tokens(texts):
    tokenizer = train_tokenizer(texts, 512)
    assert len(tokenizer) <= 512
    assert tokenizer.tokenize("x 123") == ["x", "Ġ", "1", "2", "3"]
    # each part that occurs in every chat of the task costs one token
    assert tokenizer.tokenize("<|im_start|>assistant\n#### 7<|im_end|>") == [
        "<|im_start|>",
        "assistant",
        "Ċ",
        "####",
        "Ġ",
        "7",
        "<|im_end|>",
    ]


def test_seed_decides_and_the_callers_random_numbers_stay(tmp_path, texts):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    states = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = make_tiny_model(tmp_path / name, texts, seed=seed, **SIZES)
        states[name] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(states["a"][name], states["b"][name]) for name in states["a"])
    assert not any(torch.equal(states["a"][name], states["c"][name]) for name in states["a"])


def test_biases_and_norms_are_random(tmp_path, texts):
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, texts, **SIZES))
    vectors = {name: value for name, value in model.named_parameters() if value.ndim == 1}
    assert sum(name.endswith("proj.bias") for name in vectors) == 6  # q, k, v of two layers
    assert sum(name.endswith("norm.weight") for name in vectors) == 5
    assert all(value.std() > 0.01 for value in vectors.values())


def test_bfloat16(tmp_path, texts):
    folder = make_tiny_model(tmp_path, texts, dtype="bfloat16", **SIZES)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "qwen3_moe", *QWEN_HYBRIDS, "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"),
        *("glm_moe_dsa", "minimax_m2", "gpt_oss"),
    ],
)
def test_mixtures_and_latent_attention(tmp_path, texts, family):
    layers = 4 if family in QWEN_HYBRIDS else 2  # their fourth layer is the first one with attention
    mtp = int(family in MTP_FAMILIES)
    folder = make_tiny_model(
        tmp_path,
        texts,
        family=family,
        num_mtp_layers=mtp,
        dtype="bfloat16",
        **{**SIZES, "ffn_hidden_size": 64, "num_layers": layers},
    )
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    tensors = load_file(folder / "model.safetensors")
    extra = {name for name in tensors if name.startswith((f"model.layers.{layers}.", "mtp."))}
    assert bool(extra) == bool(mtp)
    projection = "mtp.fc" if family in QWEN_HYBRIDS else "model.layers.2.eh_proj"
    assert f"{projection}.weight" in extra or not mtp
    for name, bias in model.named_buffers():
        if name.endswith("correction_bias"):  # float32, and large enough to change which experts are chosen
            if family == "minimax_m2":  # transformers rounds its bias
                name, bias = name.replace(".mlp.", ".block_sparse_moe."), bias.float()
                tensors[name] = tensors[name].bfloat16().float()
            assert bias.dtype == tensors[name].dtype == torch.float32
            assert torch.equal(bias, tensors[name]) and bias.std() > 0.01
    if family == "gpt_oss":  # all experts of a layer in one tensor
        assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 32, 32)
    elif family not in (
        "qwen3",
        "qwen3_5",
    ):  # as in published files: each projection of an expert has a name of its own
        expert = "block_sparse_moe.experts.7.w1" if family == "minimax_m2" else "mlp.experts.7.gate_proj"
        assert tensors[f"model.layers.1.{expert}.weight"].shape == (16, 32)
    with torch.no_grad():
        assert model(torch.arange(20)[None]).logits.isfinite().all()


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_reward_models(tmp_path, texts, family):
    folder = make_tiny_model(tmp_path, texts, family=family, head="score", tie_word_embeddings=True, **SIZES)
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model(torch.arange(5, 9)[None]).logits.shape == (1, 1)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["score.weight"].shape == (1, 32) and "lm_head.weight" not in tensors


def test_kimi_is_deepseek_under_another_name(tmp_path, texts):
    folder = make_tiny_model(tmp_path, texts, family="kimi_k2", **SIZES)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"family": "gpt2"}, "family must be one of qwen2, llama, .*, found 'gpt2'"),
        ({"num_mtp_layers": 1}, "num_mtp_layers must be 0 for family qwen2, found 1"),
        (
            {"family": "glm4_moe", "head": "score"},
            "head 'score' is there for qwen2, llama, qwen3, found 'glm4_moe'",
        ),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16, found 'int8'"),
        ({"vocab_size": 100}, "vocab_size must be at least 259 .*, found 100"),
        ({"hidden_size": 30}, "hidden_size 30 must be a multiple of num_attention_heads 4"),
    ],
)
def test_wrong_sizes(tmp_path, texts, options, message):
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path / "m", texts, **{**SIZES, **options})
    assert not (tmp_path / "m").exists()
