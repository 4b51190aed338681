"""Models of a `model_type` that megarl has no family for, read as Llama's architecture where their config and weights are entirely of it:
with biases of queries, keys and values, and norms of queries and keys, where the files have them.

Promises:

- a field of config.json that no decoder reads, and that is not known to have no part in the computation, is refused by name;
- the tensors in the folder's files, but for heads, are those of the table of weights, by name and shape.

Neither tells a rotation of neighbouring dimensions from one of halves: `megarl.doctor.computation` compares what is computed.
"""

from collections.abc import Mapping

from megarl.models.config import DECODER, FULL_ATTENTION, ModelConfig, decoder_facts, refuse_unsupported
from megarl.models.families import FAMILIES, refuse_layer_types
from megarl.models.fields import Fields, short
from megarl.models.table import logical_tensors
from megarl.models.weight_files import some, stored_tensors

_READ = frozenset(
    [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "dtype",
        "torch_dtype",
    ]
)
_ACCEPTED = (
    DECODER | FULL_ATTENTION | {"mlp_bias": (False,), "sliding_window": (None,), "pretraining_tp": (1,)}
)
# Fields of transformers 4 and 5 for bookkeeping, training from scratch, generation and heads of labels. Biases of attention show in the weights.
_NO_PART = frozenset(
    [
        "model_type",
        "architectures",
        "transformers_version",
        "_name_or_path",
        "attention_bias",
        "layer_types",
        "max_window_layers",
        "initializer_range",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
    ]
)
_FIRST = "model.layers.0.self_attn."
# One or none of them, by the class that wrote the files.
_HEADS = ("lm_head.weight", "score.weight", "score.bias")


def llama_alike(hf: Fields, path: str, parts: Mapping[str, bool] | None = None) -> ModelConfig:
    """The facts of the model in the folder `path`, whose config.json is `hf`.

    Args:
        parts: `qkv_bias` and `qk_norm` of a model whose weights are not in this folder, such as that of a Megatron checkpoint's config;
            None: the folder's files tell, and are compared with the table of weights.

    Raises:
        ValueError: names the fields or the tensors that Llama's architecture does not have; the folder has no weights.
    """
    kind, known = hf.text("model_type"), ", ".join(sorted(FAMILIES))
    read = _READ | _NO_PART | _ACCEPTED.keys()
    others = [
        f"{key}={short(value)}" for key, value in hf.values.items() if key not in read and value is not None
    ]
    if others:
        raise ValueError(
            f"{hf.file}: model_type {kind!r} is not supported, since unknown types are read as Llama's architecture, whose computation "
            f"these fields may change: {some(others)}; supported: {known}"
        )
    refuse_unsupported(hf, _ACCEPTED)
    refuse_layer_types(hf)
    if parts is not None:
        return ModelConfig(family="llama", **parts, **decoder_facts(hf))
    try:
        shapes = {name: tensor.shape for name, tensor in stored_tensors(path).items()}
    except ValueError as error:
        raise ValueError(
            f"{hf.file}: model_type {kind!r} is not supported without its weights, which tell whether it is Llama's architecture ({error}); "
            f"supported: {known}"
        ) from None
    parts = {"qkv_bias": f"{_FIRST}q_proj.bias" in shapes, "qk_norm": f"{_FIRST}q_norm.weight" in shapes}
    config = ModelConfig(family="llama", **parts, **decoder_facts(hf))
    expected = logical_tensors(config)
    differing = [
        f"{name} {list(shapes[name]) if name in shapes else 'missing'}"
        for name in dict.fromkeys((*expected, *shapes))
        if shapes.get(name) != expected.get(name) and name not in _HEADS
    ]
    if differing:
        raise ValueError(
            f"{hf.file}: model_type {kind!r} is not supported, since unknown types are read as Llama's architecture, whose weights its files do not "
            f"have: {some(differing)}; supported: {known}"
        )
    return config
