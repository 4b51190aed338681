"""Checks of an engine's layout and options against the numbers of a model."""

from collections.abc import Iterator, Mapping
from math import gcd

from megarl.config.model_facts import ModelFacts, divisors, expert_problems, listed, undivided, weight_widths
from megarl.config.schema.commands import RolloutConfig


def engine_problems(
    key: str, rollout: RolloutConfig, model: ModelFacts, loads: bool = False
) -> Iterator[str]:
    """Problems of the engines' section `key` with a model.

    Args:
        loads: The engines load the model's folder themselves, and are sent no weights.
    """
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    yield from _head_problems(key, rollout, model)
    yield from _block_problems(key, rollout, model, loads)
    yield from _draft_problems(key, rollout, model)
    if model.delta_net is not None:
        unknown = {
            f"quantization={rollout.quantization}": rollout.quantization is not None,
            f"speculative.algorithm={rollout.speculative.algorithm}": rollout.speculative.algorithm
            not in (None, "mtp"),
            f"attention_data_parallel_size={rollout.attention_data_parallel_size}": rollout.attention_data_parallel_size
            > 1,
        }
        for name in (name for name, there in unknown.items() if there):
            yield f"{key}.{name}: not supported with gated delta nets ({model.family}); leave it out"
    if model.indexer is not None and rollout.kv_cache_dtype is not None:
        yield f"{key}.kv_cache_dtype={rollout.kv_cache_dtype}: not supported with sparse attention ({model.family}); leave it out"
    if model.indexer is not None and model.indexer.interleaved and rollout.quantization is not None:
        yield (
            f"{key}.quantization={rollout.quantization}: SGLang (0.5.21) has a part of the indexers of {model.family} in bfloat16 even then, "
            "which no sync knows; leave it out"
        )
    if model.family == "gpt_oss":
        for name, allowed in (
            ("quantization", (None,)),
            ("moe_a2a_backend", (None,)),
            ("moe_runner_backend", (None, "triton")),
        ):
            if (found := getattr(rollout, name)) not in allowed:
                yield (
                    f"{key}.{name}={found}: the weight sync knows the experts of gpt-oss in SGLang with Triton's kernels in the engine's own type "
                    "alone; leave it out"
                )
    if ep > 1 and (model.moe is None or tp % ep):
        reason = (
            "the model has no experts"
            if model.moe is None
            else f"it does not divide {key}.tensor_model_parallel_size={tp}"
        )
        yield f"{key}.expert_parallel_size={ep}: {reason}"
    elif model.moe is not None:
        cut = (f"{key}.tensor_model_parallel_size / expert_parallel_size", tp // ep)
        yield from expert_problems(model, (f"{key}.expert_parallel_size", ep), cut)


def _draft_problems(key: str, rollout: RolloutConfig, model: ModelFacts) -> Iterator[str]:
    """A draft's weights come from a folder as they are there, so the engines' type must be the folder's."""
    algorithm, name = rollout.speculative.algorithm, f"{key}.speculative.algorithm"
    if algorithm == "mtp" and model.num_mtp_layers != 1:
        yield (
            f"{name}=mtp: the model has {model.num_mtp_layers} layers for further tokens (num_nextn_predict_layers), and SGLang drafts with one; "
            "use ngram, or eagle3 with a draft model"
        )
    if algorithm == "mtp" and model.family == "glm4_moe_lite":
        # A shadow run of it fails in post_load_weights, which reads model.start_layer; Glm4MoeLiteModelNextN has none (sglang 0.5.21).
        yield f"{name}=mtp: SGLang's class of this family's own layer fails after loading weights; use ngram, or eagle3 with a draft model"
    served = rollout.quantization_block_size if rollout.quantization == "fp8" else None
    if (
        algorithm == "mtp"
        and model.num_mtp_layers == 1
        and (model.scaled_channels or served != model.fp8_block)
    ):
        stored = "float8 by rows" if model.scaled_channels else _blocks(model.fp8_block)
        yield (
            f"{name}=mtp: the engines hold weights in {_blocks(served)}, the model's folder in {stored}, from which the layers "
            f"that draft are loaded; change {key}.quantization or quantization_block_size"
        )
    if algorithm == "eagle3" and served is not None:
        yield f"{name}=eagle3 with {key}.quantization=fp8: SGLang would take the draft model's weights for float8, too; leave one out"


def _blocks(block: tuple[int, int] | None) -> str:
    return "its own type" if block is None else f"float8 by blocks of {block[0]},{block[1]}"


def _block_problems(key: str, rollout: RolloutConfig, model: ModelFacts, loads: bool) -> Iterator[str]:
    """In float8 the blocks that share a scale must not be cut by a rank's part of a weight, as SGLang (0.5.21) asks."""
    tp, moe = rollout.tensor_model_parallel_size, model.moe
    if rollout.quantization == "fp8":
        block, cause = rollout.quantization_block_size, f"{key}.quantization=fp8"
        blocks = f"blocks of quantization_block_size={block[0]},{block[1]}"
    elif loads and model.fp8_block is not None:
        block, cause = model.fp8_block, f"{key}.tensor_model_parallel_size={tp}"
        blocks = f"the blocks of {block[0]},{block[1]} that the model's folder has"
    else:
        return
    if min(block) < 1:  # told already
        return
    whole = rollout.moe_a2a_backend is not None  # each rank then has the shared experts as a whole
    widths = [
        (name, size, 1 if whole and name.startswith("shared") else tp)
        for name, size in weight_widths(model).items()
        if name.endswith("ffn_hidden_size")
    ]
    if moe is not None:
        widths.append(
            ("the experts' ffn_hidden_size", moe.ffn_hidden_size, tp // rollout.expert_parallel_size)
        )
    for name, size, ranks in widths:
        if ranks < 1 or size % ranks:  # told already
            continue
        part = size // ranks
        if part % block[0] or (tp > 1 and part % block[1]):
            yield (
                f"{cause}: each of {ranks} ranks has {part} of {name}={size}, which cuts {blocks}; change {key}.tensor_model_parallel_size or "
                "expert_parallel_size"
            )
    parts = _attention_parts(model, tp // rollout.attention_data_parallel_size)
    if uneven := [f"{size} {name}" for name, size in parts if size % block[name.startswith("columns")]]:
        otherwise = " or leave quantization out" if rollout.quantization == "fp8" else ""
        yield f"{cause}: a rank has {', '.join(uneven)}, which cuts {blocks}; change {key}.tensor_model_parallel_size{otherwise}"


def _attention_parts(model: ModelFacts, ranks: int) -> Iterator[tuple[str, int]]:
    """The rows and columns of attention's weights on each of the `ranks` ranks that cut it, if SGLang (0.5.21) counts them in blocks of float8.

    It does where a weight is cut, and always where queries, keys and values are one tensor.
    """
    groups, mla = model.num_query_groups, model.mla
    if ranks < 1 or model.num_attention_heads % ranks or (mla is None and groups % ranks and ranks % groups):
        return  # told already
    heads = model.num_attention_heads // ranks
    if mla is None or ranks > 1:
        yield "rows of queries", heads * model.head_dim * (1 + model.output_gate)
    if mla is None:
        yield "rows of keys", max(1, groups // ranks) * model.head_dim
    elif ranks > 1:
        yield "rows of keys and values", heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if ranks > 1:
        yield "columns of o_proj", heads * (model.head_dim if mla is None else mla.v_head_dim)


def _head_problems(key: str, rollout: RolloutConfig, model: ModelFacts) -> Iterator[str]:
    tp, dp = rollout.tensor_model_parallel_size, rollout.attention_data_parallel_size
    if dp == 1:
        yield from _undivided_heads(f"{key}.tensor_model_parallel_size={tp}", tp, weight_widths(model), model)
    elif tp % dp == 0:  # else told with the keys alone
        yield from _group_problems(key, rollout, model)


def _group_problems(key: str, rollout: RolloutConfig, model: ModelFacts) -> Iterator[str]:
    """Of data parallel attention: the heads are cut by the ranks of a group, all else by all ranks."""
    tp, dp, sizes = (
        rollout.tensor_model_parallel_size,
        rollout.attention_data_parallel_size,
        weight_widths(model),
    )
    if not model.data_parallel_attention:
        yield f"{key}.attention_data_parallel_size={dp}: SGLang has no data parallel attention for {model.family} models; set it to 1"
        return
    if rollout.data_parallel_lm_head and model.family == "minimax_m2":
        yield (
            f"{key}.data_parallel_lm_head=true: SGLang's class for minimax_m2 models (0.5.21) cuts the output layer over all ranks; set it to false"
        )
    heads, ranks = {"num_attention_heads": sizes.pop("num_attention_heads")}, tp // dp
    name = f"{key}.tensor_model_parallel_size / attention_data_parallel_size={ranks}"
    yield from _undivided_heads(name, ranks, heads, model)
    yield from undivided(f"{key}.tensor_model_parallel_size", tp, sizes)
    tied, rows = model.tie_word_embeddings, model.vocab_size
    if (tied or rollout.data_parallel_lm_head) and ranks > 1 and (rows % 64 or rows % ranks):
        head = "the output layer is the embedding" if tied else f"{key}.data_parallel_lm_head=true"
        yield (
            f"{name}, and {head}: the ranks of a group pad the vocabulary of {rows} rows, to equal parts and a multiple of 64, and SGLang "
            f"(0.5.21) gathers logits there without padding; set {key}.attention_data_parallel_size={tp}"
        )


def _undivided_heads(key: str, ranks: int, sizes: Mapping[str, int], model: ModelFacts) -> Iterator[str]:
    """`key`: with its value, of the number of ranks that cut `sizes` and share the key/value heads."""
    groups = model.num_query_groups

    def shares_heads(size: int) -> bool:
        return model.mla is not None or not (groups % size and size % groups)

    causes = [f"{name}={size}" for name, size in sizes.items() if size % ranks]
    if not causes and shares_heads(ranks):
        return
    text = f"does not divide {' and '.join(causes)}" if causes else ""
    if not shares_heads(ranks):
        text += f"{' and ' if text else ''}neither divides num_query_groups={groups} nor is a multiple of it"
    possible = [size for size in divisors(gcd(*sizes.values())) if shares_heads(size)]
    yield f"{key} {text}; possible: {listed(possible)}"
