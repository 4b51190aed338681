"""SGLang's classes for DeepSeek-V3.2 and GLM-5, and their stand-in for an engine without a GPU.

SGLang 0.5.21 has sparse attention (layers/attention/dsa, dsa_backend.py) in compiled kernels for GPUs alone. Without one, an engine is told
that the model is DeepSeek-V2's (`megarl.rollout.sglang.start`), whose class is the same but for that. The class below holds the indexers' weights,
by SGLang's names, so that they come with every sync and are verified as all others are, and has them say which keys a new token attends to:
the attention of megarl's CPU engines asks for it (megarl/sglang_cpu/chosen_keys.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.models import deepseek_v2, glm4_moe
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True, eq=False)
class Index:
    """What an indexer says of a batch's new tokens, for the attention of its layer and of the layers that take its choice.

    Attributes:
        queries: [tokens, heads, dim]. weights: [tokens, heads], float32.
        keys: [slots, dim], of all tokens in the cache.
        topk: how many keys are chosen for a query.
        choices: the masks that attention has made of it.
    """

    queries: Tensor
    weights: Tensor
    keys: Tensor
    topk: int
    choices: dict[int, Tensor] = field(default_factory=dict)


class Indexer(torch.nn.Module):
    """An indexer: its weights, and the keys of the tokens in the cache."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, width = config.index_n_heads, config.index_head_dim
        self.interleaved, self.topk = getattr(config, "indexer_rope_interleave", False), config.index_topk
        self.kept: list[
            Tensor
        ] = []  # [slots, width], the keys of the tokens in the cache; a part of SGLang's cache, not of the model
        rows = {"wq_b": (heads * width, config.q_lora_rank)}
        if getattr(config, "indexer_rope_interleave", False):
            rows["wk_weights_proj"] = (width + heads, config.hidden_size)
        else:
            rows |= {"wk": (width, config.hidden_size), "weights_proj": (heads, config.hidden_size)}
        for name, shape in rows.items():
            self.add_module(name, torch.nn.Module())
            self.get_submodule(name).weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
        self.k_norm = torch.nn.LayerNorm(width, eps=1e-6, dtype=torch.float32).requires_grad_(False)

    def index(self, x: Tensor, low_rank: Tensor, rotary: Tensor, slots: Tensor) -> Index:
        """The `Index` of new tokens, whose keys are put into the cache.

        Args:
            x: [tokens, hidden], the layer's normed input. low_rank: [tokens, low rank], the normed queries before their up-projection.
            rotary: [tokens, rotated], cosines, then sines, of the tokens' positions.
            slots: [tokens], the tokens' places in the cache.
        """
        (kept,) = self.kept
        width = len(self.k_norm.weight)
        if hasattr(self, "wk_weights_proj"):
            keys, weights = linear(x, self.wk_weights_proj.weight).split(
                [width, len(self.wk_weights_proj.weight) - width], dim=1
            )
        else:
            keys, weights = linear(x, self.wk.weight), linear(x, self.weights_proj.weight)
        keys = self.k_norm(keys.float()).to(x.dtype)
        kept[slots] = self._rotate(keys[:, None], rotary)[:, 0]
        queries = self._rotate(linear(low_rank, self.wq_b.weight).unflatten(1, (-1, width)), rotary)
        return Index(queries, weights.float() * (weights.shape[1] * width) ** -0.5, kept, self.topk)

    def _rotate(self, x: Tensor, rotary: Tensor) -> Tensor:
        """Rotates the first dimensions of [tokens, heads, width], pairs of neighbours or of the lower and the upper ones."""
        cos, sin = (part[:, None].to(x.dtype) for part in rotary.chunk(2, dim=-1))
        turned, rest = x.split([rotary.shape[1], x.shape[2] - rotary.shape[1]], dim=-1)
        first, second = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, dim=-1)
        # Queries and keys may have the dimensions in another order, as long as they have the same.
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def load(self, name: str, values: torch.Tensor) -> None:
        """Take a tensor of the model's files, by its name after the indexer's."""
        if name in ("wk.weight", "weights_proj.weight") and hasattr(self, "wk_weights_proj"):
            weight = self.wk_weights_proj.weight
            part = (
                weight[: len(self.k_norm.weight)]
                if name == "wk.weight"
                else weight[len(self.k_norm.weight) :]
            )
        else:
            part = self.get_parameter(name)
        part.data.copy_(values)


class DeepseekV2ForCausalLM(deepseek_v2.DeepseekV2ForCausalLM):
    """The name is the one that an engine without a GPU is told."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        if config.rope_parameters["rope_type"] == "default":
            # The only rotary embedding that SGLang has for latent attention there is yarn's, which by a factor of 1 changes nothing.
            config.rope_parameters = {**config.rope_parameters, "rope_type": "yarn", "factor": 1.0}
        super().__init__(config, *args, **options)
        self.index_topk: int = config.index_topk
        kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        source = None
        for kind, layer in zip(kinds, self.model.layers, strict=True):
            attention = layer.self_attn
            if kind == "full":
                attention.indexer = indexer = Indexer(config)
                _ask_indexer(attention, indexer)
                source = attention.attn_mqa
            else:
                _take_choice(attention, source)

    def keep_index_keys(self, pool: Any) -> None:
        """Give each indexer a cache of keys, for as many tokens as SGLang's cache, and released with it."""
        indexers = [module for module in self.modules() if isinstance(module, Indexer)]
        with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            pool.index_keys = [
                torch.zeros((pool.size + pool.page_size, len(indexer.k_norm.weight)), dtype=pool.dtype)
                for indexer in indexers
            ]
        for indexer, keys in zip(indexers, pool.index_keys, strict=True):
            indexer.kept = [keys]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any) -> None:
        """Load weights as SGLang's class does; indexers take their own."""
        super().load_weights(self._others(weights), *args, **options)

    def _others(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        modules = dict(self.named_modules())
        for name, values in weights:
            module, found, rest = name.partition(".indexer.")
            if not found:
                yield name, values
            elif (indexer := modules.get(f"{module}.indexer")) is not None:  # not a layer that no engine has
                indexer.load(rest, values)


def _ask_indexer(attention: Any, indexer: Indexer) -> None:
    """Have a layer's indexer leave its `Index` with the layer's attention.

    Its inputs are the layer's, and the normed queries, which SGLang has inside of its function alone.
    """
    given: dict[str, Any] = {}

    def begin(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert not args
        given.update(options)

    def ask(norm: torch.nn.Module, args: tuple[Any, ...], low_rank: Tensor) -> None:
        cache = attention.rotary_emb.cos_sin_cache
        attention.attn_mqa.index = indexer.index(
            given["hidden_states"],
            low_rank,
            cache[given["positions"]],
            given["forward_batch"].out_cache_loc,
        )
        given.clear()

    attention.register_forward_pre_hook(begin, with_kwargs=True)
    attention.q_a_layernorm.register_forward_hook(ask)


def _take_choice(attention: Any, source: Any) -> None:
    """Have a layer's attention take the keys that an earlier layer chose."""

    def take(module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        attention.attn_mqa.index = source.index

    attention.register_forward_pre_hook(take, with_kwargs=True)


EntryClass = [DeepseekV2ForCausalLM, deepseek_v2.DeepseekV32ForCausalLM, glm4_moe.GlmMoeDsaForCausalLM]
