"""Tiny random models in Hugging Face format, with tokenizer and chat template: for the demo and for tests."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Tokenizer,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from examples.tiny_fields import HYBRIDS, LATENT, SPARSE, sparse_fields, usual_fields

PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
ROLES = ("user", "assistant", "system")

# Qwen's template without tools and without the system message that it adds by itself
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    # The same model as DeepSeek-V3; transformers has no class of its own for it.
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
_CLASSIFIERS = {
    "qwen2": Qwen2ForSequenceClassification,
    "llama": LlamaForSequenceClassification,
    "qwen3": Qwen3ForSequenceClassification,
}
_TOKEN_CLASSIFIERS = {
    "qwen2": Qwen2ForTokenClassification,
    "llama": LlamaForTokenClassification,
    "qwen3": Qwen3ForTokenClassification,
}
# By head: the families' classes, and labels.
_HEADS = {"score": (_CLASSIFIERS, 1), "step_scores": (_TOKEN_CLASSIFIERS, 2)}
# What an MTP layer has before and after an ordinary one: norms, and the projection.
_MTP = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
_WITH_VISION = {
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
_HYBRID_MTP = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
_NUM_BASE_TOKENS = 3 + 256  # special tokens and bytes
_BIAS_STD = 0.1
_NORM_STD = 0.05
_LABELS_STD = 0.3  # with which probabilities of labels differ from token to token


def make_tiny_model(
    out_dir: str | Path,
    texts: Sequence[str],
    *,
    vocab_size: int = 512,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    ffn_hidden_size: int = 384,
    tie_word_embeddings: bool = False,
    max_position_embeddings: int = 1024,
    family: Literal[
        "qwen2",
        "llama",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "minimax_m2",
        "gpt_oss",
    ] = "qwen2",
    num_mtp_layers: int = 0,
    head: Literal["lm", "score", "step_scores"] = "lm",
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    fields: dict[str, Any] | None = None,
    vision: bool = False,
) -> Path:
    """Write a model folder: config, random weights (safetensors), generation config, tokenizer.

    Biases, norm weights and the bias of a router's choice are random too, so that a mistake in them shows in the
    output. Mixtures have 8 experts of a quarter of `ffn_hidden_size` and a dense first layer where the family
    has one; models with latent attention have as many key/value heads as heads.

    Args:
        texts: the training texts of the byte-level BPE tokenizer.
        vocab_size: rows of the embedding; the tokenizer has this many tokens or fewer.
        num_mtp_layers: multi-token prediction layers, written as the family's published checkpoints have them
            (transformers ignores them).
        head: "lm" for a language model; "score" for a reward model: one label's weight (`score.weight`) in place of
            the output layer, for the families that have no experts; "step_scores" for a process reward model: likewise a
            token classifier's two labels.
        fields: further fields of the Hugging Face config, in place of the family's usual ones.
        vision: with a vision tower, as the published models of Qwen3.5 have it.

    Raises:
        ValueError: unknown family or dtype, sizes that do not go together, a vocabulary without room for all
            bytes, MTP layers for a family without a mixture of experts after dense layers, a head that the family
            does not come with.
    """
    _check(family, dtype, num_layers, num_mtp_layers)
    if hidden_size % num_attention_heads or num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"hidden_size {hidden_size} must be a multiple of num_attention_heads {num_attention_heads}, "
            f"and that of num_key_value_heads {num_key_value_heads}"
        )
    if vocab_size < _NUM_BASE_TOKENS:
        raise ValueError(
            f"vocab_size must be at least {_NUM_BASE_TOKENS} (bytes and special tokens), found {vocab_size}"
        )
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.model_max_length = max_position_embeddings
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_attention_heads if family in LATENT else num_key_value_heads,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": dtype,
    }
    usual = usual_fields(family, hidden_size // num_attention_heads, ffn_hidden_size, max_position_embeddings)
    if family in SPARSE:
        usual |= sparse_fields(family, hidden_size // num_attention_heads, num_layers)
    config_class, model_class = _FAMILIES[family]
    assert head == "lm" or head in _HEADS, head
    if head != "lm":
        classes, sizes["num_labels"] = _HEADS[head]
        if family not in classes:
            raise ValueError(f"head {head!r} is there for {', '.join(classes)}, found {family!r}")
        model_class = classes[family]
    config = config_class(**{**sizes, **usual, **(fields or {})})
    if vision:
        if family not in _WITH_VISION:
            raise ValueError(f"vision is there for {', '.join(_WITH_VISION)}, found {family!r}")
        outer_class, model_class = _WITH_VISION[family]
        tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2,
                 "num_position_embeddings": 4, "out_hidden_size": hidden_size}  # fmt: skip
        outer = {"tie_word_embeddings": config.tie_word_embeddings, "dtype": dtype}
        config = outer_class(text_config=config.to_dict(), vision_config=tower, **outer)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):  # leave the caller's random numbers alone
        torch.manual_seed(seed)
        _save(_random_model(model_class, config, dtype), tokenizer, out_dir)
        if num_mtp_layers:
            _add_mtp_layers(model_class, config, num_mtp_layers, dtype, out_dir)
    if family == "qwen3_next":  # as published; transformers writes `layer_types` in its place
        none = {} if num_mtp_layers else {"num_nextn_predict_layers": 0}
        _change_config(out_dir, full_attention_interval=4, **none)
    elif family in HYBRIDS:
        own = {"full_attention_interval": 4, "mtp_num_hidden_layers": num_mtp_layers}
        if vision:
            _fuse_experts(out_dir / "model.safetensors")
            own = {"text_config": {**json.loads((out_dir / "config.json").read_text())["text_config"], **own}}
        _change_config(out_dir, **own)
    if family == "kimi_k2":
        _change_config(out_dir, model_type="kimi_k2")
    return out_dir


def _check(family: str, dtype: str, num_layers: int, num_mtp_layers: int) -> None:
    if family not in _FAMILIES:
        raise ValueError(f"family must be one of {', '.join(_FAMILIES)}, found {family!r}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, found {dtype!r}")
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, found {num_layers}")
    most = {**dict.fromkeys(HYBRIDS, 1), **dict.fromkeys((*LATENT, "glm4_moe"), num_mtp_layers)}.get(
        family, 0
    )
    if family in HYBRIDS and num_mtp_layers and num_layers % 4:
        raise ValueError(f"num_layers must be a multiple of 4, found {num_layers}: MTP layers have attention")
    if num_mtp_layers > most:
        raise ValueError(
            f"num_mtp_layers must be {'0 or 1' if most else 0} for family {family}, found {num_mtp_layers}"
        )


def _random_model(model_class: type, config: Any, dtype: str) -> PreTrainedModel:
    model = model_class(config).to(torch.float32)
    with torch.no_grad():
        for name, vector in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias"):
                vector.normal_(0.0, _BIAS_STD)
            elif name.endswith("sinks"):
                vector.normal_()
            elif name == "score.weight" and vector.shape[0] > 1:
                vector.normal_(0.0, _LABELS_STD)
            elif name.endswith("norm.weight"):
                # Hybrids' norms multiply by 1 + weight, all but those of their gated delta nets and of a vision tower.
                around_zero = _is_hybrid(config) and not ("linear_attn" in name or "visual" in name)
                vector.normal_(float(not around_zero), _NORM_STD)
    # Checkpoints keep the bias of a router's choice, and the norm of an indexer's keys, in float32.
    kept = {name: bias.clone() for name, bias in model.named_buffers() if name.endswith("correction_bias")}
    norms = [module for name, module in model.named_modules() if name.endswith(".indexer.k_norm")]
    model = model.to(getattr(torch, dtype))
    for name, bias in kept.items():
        module, _, buffer = name.rpartition(".")
        setattr(model.get_submodule(module), buffer, bias)
    for norm in norms:
        norm.to(torch.float32)
    return model


def _is_hybrid(config: Any) -> bool:
    return config.model_type.removesuffix("_text") in HYBRIDS


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out_dir: Path) -> None:
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def _add_mtp_layers(model_class: type, config: Any, count: int, dtype: str, out_dir: Path) -> None:
    """Add to the saved weights `count` layers in the way of DeepSeek-V3's checkpoint, or of hybrids'.

    Each is a decoder layer (here the last one of another random model) with norms and a projection before it; it
    repeats the model's embedding and head, but for these.
    """
    file, outer = out_dir / "model.safetensors", config
    tensors = load_file(file)
    kind = getattr(torch, dtype)
    own_names, config = _is_hybrid(config), getattr(config, "text_config", config)
    begin = "model.language_model." if outer is not config else "model."
    for index in range(count):
        number = config.num_hidden_layers + index
        layer = f"mtp.layers.{index}." if own_names else f"model.layers.{number}."
        other = out_dir / "mtp"
        _random_model(model_class, outer, dtype).save_pretrained(other)
        last = f"{begin}layers.{config.num_hidden_layers - 1}."
        for name, tensor in load_file(other / "model.safetensors").items():
            if name.startswith(last):
                tensors[layer + name.removeprefix(last)] = tensor
        before = "mtp." if own_names else layer
        *norms, projection = _HYBRID_MTP if own_names else _MTP
        for name in norms:
            norm = torch.empty(config.hidden_size).normal_(float(not own_names), _NORM_STD)
            tensors[f"{before}{name}.weight"] = norm.to(kind)
        matrix = torch.empty(config.hidden_size, 2 * config.hidden_size).normal_(
            0.0, config.initializer_range
        )
        tensors[f"{before}{projection}.weight"] = matrix.to(kind)
        if not own_names:
            tensors[layer + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            tensors[layer + "shared_head.head.weight"] = tensors[head].clone()
        shutil.rmtree(other)
    save_file(tensors, file, metadata={"format": "pt"})
    if not own_names:  # whose published config does not say it
        _change_config(out_dir, num_nextn_predict_layers=count)


def _fuse_experts(file: Path) -> None:
    """Put all experts' projections of a layer into one tensor, as published: gate's rows above up's."""
    tensors = load_file(file)
    for down in [name for name in tensors if name.endswith(".experts.0.down_proj.weight")]:
        layer = down.removesuffix("0.down_proj.weight")
        numbers = range(sum(name.startswith(layer) and name.endswith("down_proj.weight") for name in tensors))
        gate, up, down = (
            [tensors.pop(f"{layer}{number}.{kind}_proj.weight") for number in numbers]
            for kind in ("gate", "up", "down")
        )
        tensors[f"{layer}gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], dim=1)
        tensors[f"{layer}down_proj"] = torch.stack(down)
    save_file(tensors, file, metadata={"format": "pt"})


def _change_config(out_dir: Path, **fields: Any) -> None:
    file = out_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}, indent=2) + "\n")


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of Qwen2's kind, every digit a token of its own, with CHAT_TEMPLATE.

    It is of class Qwen2Tokenizer because transformers 5 rebuilds a saved tokenizer from the vocabulary and
    merges by its class: a plain one that was trained with other splitting rules would come back with
    different ids.
    """
    state = _byte_pairs(tuple(texts), vocab_size)
    tokenizer = Qwen2Tokenizer(
        vocab=dict(state["vocab"]),
        merges=[tuple(merge) for merge in state["merges"]],
        unk_token=None,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=[START_TOKEN],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def _byte_pairs(texts: tuple[str, ...], vocab_size: int) -> dict[str, Any]:
    """Vocabulary and merges, learnt once for all models with the same texts."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # the template's role names are in every chat, but not in the texts
    bpe.train_from_iterator([*texts, *list(ROLES) * max(1, len(texts))], trainer)
    return json.loads(bpe.to_str())["model"]
