"""Which modules a model's layers are made of: Megatron's GPU specification, on any machine.

Written against megatron-core 0.19.2.
"""

import contextlib
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.megatron import torch_te
from megarl.megatron.transformer_config import has_transformer_engine


class DirectQueryAttention(MLASelfAttention):
    """Latent attention whose queries are projected directly from the layer's normed input.

    Megatron-core 0.19.2 would norm that input once more, with a weight that no checkpoint has.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return super()._resolve_qk_norm_config(submodules) | {"linear_q_proj": submodules.linear_q_proj}


def layer_modules() -> contextlib.AbstractContextManager[None]:
    """While this is active, specifications and models are made of modules that this machine has.

    They are Transformer Engine's, or their doubles in torch.
    """
    return contextlib.nullcontext() if has_transformer_engine() else torch_te.standing_in()


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specification of this rank's layers, for a model chunk; within `layer_modules`."""
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.multi_latent_attention and config.q_lora_rank is None:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = DirectQueryAttention
    return spec
