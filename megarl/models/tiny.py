"""Tiny random models in Hugging Face format, with tokenizer and chat template: for the demo and for tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

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

_FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
_NUM_BASE_TOKENS = 3 + 256  # special tokens and bytes
_BIAS_STD = 0.1
_NORM_STD = 0.05


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
    family: Literal["qwen2", "llama"] = "qwen2",
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """Write a model folder: config, random weights (safetensors), generation config, tokenizer.

    Biases and norm weights are random too, so that a mistake in them shows in the output.

    Args:
        texts: what the byte-level BPE tokenizer is trained on.
        vocab_size: rows of the embedding; the tokenizer has this many tokens or fewer.

    Raises:
        ValueError: unknown family or dtype, sizes that do not go together, a vocabulary without room for all
            bytes.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family must be one of {', '.join(_FAMILIES)}, found {family!r}")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, found {dtype!r}")
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, found {num_layers}")
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
    config_class, model_class = _FAMILIES[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=ffn_hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):  # leave the caller's random numbers alone
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        _randomize_vectors(model)
    model = model.to(getattr(torch, dtype))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def _randomize_vectors(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, _BIAS_STD)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, _NORM_STD)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of Qwen2's kind, every digit a token of its own, with CHAT_TEMPLATE.

    It is of class Qwen2Tokenizer because transformers 5 rebuilds a saved tokenizer from the vocabulary and
    merges by its class: a plain one that was trained with other splitting rules would come back with
    different ids.
    """
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
    state = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=state["vocab"],
        merges=[tuple(merge) for merge in state["merges"]],
        unk_token=None,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=[START_TOKEN],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
