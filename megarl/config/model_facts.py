"""The numbers of a model that layouts must fit, and the sizes that must divide them."""

from collections.abc import Iterator, Mapping
from math import gcd, isqrt
from typing import Protocol


class ExpertFacts(Protocol):
    """The numbers of a mixture of experts that a layout must fit; a MoEConfig has them."""

    @property
    def num_experts(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def shared_ffn_hidden_size(self) -> int: ...
    @property
    def dense_layers(self) -> tuple[int, ...]: ...
    @property
    def expert_bias(self) -> bool: ...


class DeltaNetFacts(Protocol):
    """The numbers of gated delta nets that a layout must fit; a DeltaNetConfig has them."""

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def key_heads(self) -> int: ...


class LatentFacts(Protocol):
    """The widths of a head of latent attention that an engine's float8 must fit; an MLAConfig has them."""

    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


class IndexerFacts(Protocol):
    """The fact about sparse attention's indexers that an engine must fit; an IndexerConfig has it."""

    @property
    def interleaved(self) -> bool: ...


class ModelFacts(Protocol):
    """The numbers of a model that a layout must fit; a ModelConfig has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def output_gate(self) -> bool: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def moe(self) -> ExpertFacts | None: ...
    @property
    def mla(self) -> LatentFacts | None: ...
    @property
    def indexer(self) -> IndexerFacts | None: ...
    @property
    def delta_net(self) -> DeltaNetFacts | None: ...
    @property
    def num_mtp_layers(self) -> int: ...
    @property
    def fp8_block(self) -> tuple[int, int] | None: ...
    @property
    def scaled_channels(self) -> bool: ...
    @property
    def data_parallel_attention(self) -> bool: ...
    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def context_length(self) -> tuple[str, int]: ...


def weight_widths(model: ModelFacts) -> dict[str, int]:
    """Sizes that tensor parallelism cuts besides key/value heads, by the model's own names for them."""
    sizes = {"num_attention_heads": model.num_attention_heads}
    if model.moe is None or model.moe.dense_layers:
        sizes["ffn_hidden_size"] = model.ffn_hidden_size
    if model.moe is not None and model.moe.shared_ffn_hidden_size:
        sizes["shared_ffn_hidden_size"] = model.moe.shared_ffn_hidden_size
    if model.delta_net is not None:
        sizes["linear_num_key_heads"] = model.delta_net.key_heads
    return sizes


def undivided(key: str, size: int, sizes: Mapping[str, int]) -> Iterator[str]:
    """The problems of a layout's `key` of `size` with `sizes` that it must divide, by name."""
    possible = divisors(gcd(*sizes.values()))
    for name, total in sizes.items():
        if total % size:
            yield f"{key}={size} does not divide {name}={total}; possible: {listed(possible)}"


def expert_problems(model: ModelFacts, ep: tuple[str, int], etp: tuple[str, int]) -> Iterator[str]:
    """Problems of the layouts of experts; `ep`, `etp`: key and size of the groups that share the experts, and of those that cut each expert."""
    if model.moe is not None:
        yield from undivided(*ep, {"num_experts": model.moe.num_experts})
        yield from undivided(*etp, {"the experts' ffn_hidden_size": model.moe.ffn_hidden_size})
        return
    for key, size in (ep, etp):
        if size > 1:
            yield f"{key}={size}: the model has no experts; leave it out"


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def listed(numbers: list[int]) -> str:
    """Numbers as a message has them."""
    return ",".join(map(str, numbers)) if numbers else "none"
