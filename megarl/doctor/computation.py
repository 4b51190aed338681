"""Whether a model of a type that megarl has no family for (`megarl.models.alike`) computes what megarl would compute for it.

Two small models with the same random weights have to give the same logits: one of transformers' class for the type, and one of its class for
the architecture as which the type is read. It takes a second or two, before anything of a run starts.
"""

from collections.abc import Callable
from typing import Any

from megarl.models import FAMILIES, ModelConfig

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 96,
}
_TOKENS = 48
_NEAR = 1e-4  # of logits of about 1, in float32
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id")


def check_computation(config: ModelConfig) -> None:
    """Check a type that megarl has no family for; imports transformers for such a type.

    Raises:
        ValueError: names the model type; transformers does not know it, or computes something else.
    """
    kind = config.hf["model_type"]
    if kind in FAMILIES:
        return
    import torch
    import transformers

    version = transformers.__version__
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        raise ValueError(
            f"model_type {kind!r}: transformers ({version}) does not know it, so that nothing tells what it computes, and engines cannot read it; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    values = _small(config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        ours = _class_of(config)(values).eval()
        for name, weight in ours.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name))
        settings = transformers.AutoConfig.for_model(kind, **values)
        theirs = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        try:
            theirs.load_state_dict(ours.state_dict())
        except RuntimeError as error:
            raise ValueError(
                f"model_type {kind!r}: {type(theirs).__name__} of transformers ({version}) does not have the folder's weights: {error}"
            ) from None
        tokens = torch.randint(_SIZES["vocab_size"], (1, _TOKENS))
        apart = float((theirs(tokens).logits - ours(tokens).logits).abs().max())
    if not apart < _NEAR:
        raise ValueError(
            f"model_type {kind!r} has the fields and weights of Llama's architecture, but {type(theirs).__name__} of transformers ({version}) computes "
            f"something else with them (logits of small models of both are {apart:.2g} apart); supported: {', '.join(sorted(FAMILIES))}"
        )


def _small(config: ModelConfig) -> dict[str, Any]:
    """The config's fields, with small sizes."""
    without = ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", *_TOKEN_IDS)
    fields = {key: value for key, value in config.hf.items() if key not in without}
    shared = config.num_query_groups < config.num_attention_heads
    fields |= _SIZES | {"num_key_value_heads": 2 if shared else 4} | dict.fromkeys(_TOKEN_IDS)
    if "head_dim" in fields:
        fields["head_dim"] = 16 if config.head_dim * config.num_attention_heads == config.hidden_size else 24
    if fields.get("layer_types") is not None:
        fields["layer_types"] = ["full_attention"] * _SIZES["num_hidden_layers"]
    return fields


def _class_of(config: ModelConfig) -> Callable[[dict[str, Any]], Any]:
    """The function that makes transformers' model of the architecture as which a type is read."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    if config.qk_norm:
        return lambda values: Qwen3ForCausalLM(Qwen3Config(**values | {"attention_bias": False}))
    if config.qkv_bias:
        return lambda values: Qwen2ForCausalLM(Qwen2Config(**values))
    return lambda values: LlamaForCausalLM(LlamaConfig(**values | {"attention_bias": False}))
