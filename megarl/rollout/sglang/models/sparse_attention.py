"""SGLang's classes for DeepSeek-V3.2 and GLM-5, and their stand-in for an engine without a GPU.

SGLang 0.5.21 has sparse attention (layers/attention/dsa, dsa_backend.py) in compiled kernels for GPUs alone. Without one, an engine is told
that the model is DeepSeek-V2's (`megarl.rollout.sglang.start`), whose class is the same but for that: with as many tokens as an indexer
chooses keys, which are the most that megarl asks of it, queries attend to all keys. The class below holds the indexers' weights, by SGLang's
names, so that they come with every sync and are verified as all others are.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.models import deepseek_v2, glm4_moe


class Indexer(torch.nn.Module):
    """The weights of an indexer, which choose nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, width = config.index_n_heads, config.index_head_dim
        rows = {"wq_b": (heads * width, config.q_lora_rank)}
        if getattr(config, "indexer_rope_interleave", False):
            rows["wk_weights_proj"] = (width + heads, config.hidden_size)
        else:
            rows |= {"wk": (width, config.hidden_size), "weights_proj": (heads, config.hidden_size)}
        for name, shape in rows.items():
            self.add_module(name, torch.nn.Module())
            self.get_submodule(name).weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
        self.k_norm = torch.nn.LayerNorm(width, dtype=torch.float32).requires_grad_(False)

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
        kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
        for kind, layer in zip(kinds, self.model.layers, strict=True):
            if kind == "full":
                layer.self_attn.indexer = Indexer(config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any) -> None:
        """As SGLang calls it; indexers take their own."""
        super().load_weights(self._others(weights), *args, **options)

    def _others(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        modules = dict(self.named_modules())
        for name, values in weights:
            module, found, rest = name.partition(".indexer.")
            if not found:
                yield name, values
            elif (indexer := modules.get(f"{module}.indexer")) is not None:  # not a layer that no engine has
                indexer.load(rest, values)


EntryClass = [DeepseekV2ForCausalLM, deepseek_v2.DeepseekV32ForCausalLM, glm4_moe.GlmMoeDsaForCausalLM]
