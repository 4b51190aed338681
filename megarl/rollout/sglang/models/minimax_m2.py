"""SGLang's class for MiniMax-M2, whose choices of experts know their layers.

In SGLang 0.5.21 they do not (srt/models/minimax_m2.py), so that an engine which returns the experts of tokens (`enable_return_routed_experts`)
ends at its first batch, on any device.
"""

from typing import Any

from sglang.srt.models import minimax_m2


class MiniMaxM2ForCausalLM(minimax_m2.MiniMaxM2ForCausalLM):
    """The name is the one that SGLang looks for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for layer in self.model.layers:
            if isinstance(layer, minimax_m2.MiniMaxM2DecoderLayer):  # not one of another pipeline stage
                layer.block_sparse_moe.topk.layer_id = layer.layer_id


EntryClass = [MiniMaxM2ForCausalLM]
