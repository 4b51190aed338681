"""Multi-token prediction (MTP): the layers after a model's last one, which predict tokens after the next one.

DeepSeek-V3's technical report (arXiv:2412.19437), section 2.2. Layer k (from 1) computes a position's state from layer k - 1's state there
and the embedding of the token k places later; from the new state the model's own head gives the probabilities of the token k + 1 places
later. The state of layer 0 is the model's last one, after its final norm, as in Megatron-core, SGLang and vLLM.

Written against megatron-core 0.19.2, whose layers these are. What is different here:

- Which token lies k places later is arranged on the host (`megarl.megatron.packing`), where the bounds of sequences and the parts of
  context parallel ranks are known. Megatron's `roll_tensor` asks the device for the bounds, and sends a message for each sequence.
- The log-probs come from the head that gives the policy's, so that no logits are held, and the loss is added to the policy's
  (`megarl.megatron.step.with_predictions`). Megatron would make all logits.
- Layers are run in training alone, where a batch has such tokens; not where log-probs are computed.

Guarantees:
- Detached (the default) the layers learn and nothing else does: their input, the embedding and the head are constants for them, and all
  other gradients are the same bits as without them. Their gradient has a norm of its own, by which it is clipped.
- Losses and gradients are the paper's in every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megarl.megatron.packing import PackedBatch, PackedBounds


class PredictingModel(GPTModel):
    """A model, or the chunk of one, whose head is given the states of its MTP layers, too, as `predicted`."""

    def _postprocess(
        self,
        *,
        hidden_states: Tensor,
        output_processor: Callable[..., Tensor],
        output_processor_context: tuple[PackedBatch, Any],
        **given: Any,
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        shared = self.share_embeddings_and_output_weights
        return output_processor(
            hidden_states=hidden_states,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight() if shared else None,
            context=output_processor_context,
            predicted=self._predicted(hidden_states, output_processor_context[0], given),
        )

    def _predicted(self, states: Tensor, batch: PackedBatch, given: dict[str, Any]) -> list[Tensor]:
        """The states of each MTP layer, as `states`, [tokens (/tp with sequence parallelism), 1, hidden]; none where the batch has no later tokens."""
        if batch.later is None:
            return []
        own = batch.num_tokens // (
            self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        )
        assert states.shape[0] == own, "attention of MTP layers needs the states of all positions"
        if self.config.mtp_detach_heads:
            states = states.detach()
        passed = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        found = []
        for layer in self.mtp.layers:
            states, *_ = layer(
                input_ids=None,
                position_ids=given["position_ids"],
                hidden_states=states,
                embedding=self.embedding,
                **{name: given[name] for name in passed},
            )
            found.append(states)
        return found


class PackedPredictionLayer(MultiTokenPredictionLayer):
    """An MTP layer that is given its tokens by the batch (`PackedBounds.later`)."""

    def _get_embeddings(
        self,
        input_ids: None,
        position_ids: Tensor,
        embedding: torch.nn.Module,
        hidden_states: Tensor,
        packed_seq_params: PackedBounds,
        padding_mask: None = None,
    ) -> tuple[None, Tensor, None, Tensor, Tensor]:
        assert packed_seq_params.later is not None
        tokens, detached = packed_seq_params.later[self.layer_number - 1][None], self.config.mtp_detach_heads
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            embedded = embedding(input_ids=tokens, position_ids=position_ids)
        if detached and torch.is_grad_enabled():
            weight = embedding.word_embeddings.weight
            if getattr(weight, "shared", False) and weight.requires_grad:
                embedded = _WithoutGradient.apply(embedded, weight)
            if not hidden_states.requires_grad:  # or a layer that is computed again would not learn
                hidden_states = hidden_states.detach().requires_grad_(True)
        return None, position_ids, None, embedded, hidden_states


class _WithoutGradient(torch.autograd.Function):
    """Has the last stage's copy of the embedding take part in the backward pass, without adding to its gradient.

    Megatron reduces the gradients of a bucket when all of its weights have had theirs (`overlap_grad_reduce`), and this weight has no
    other use. The tensor that autograd is given has no values, and is not read (`grad_added_to_main_grad`).
    """

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, weight: torch.nn.Parameter) -> Tensor:
        ctx.weight = weight
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.weight.grad_added_to_main_grad = True
        return None, torch.empty_like(ctx.weight)


def prediction_spec(
    config: TransformerConfig, layers: TransformerBlockSubmodules, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of a chunk's MTP layers, within `layer_modules`; None: it has none.

    Args:
        layers: of the chunk's own layers, the last of which MTP layers are like.
    """
    if not config.mtp_num_layers:
        return None
    spec = gpt_layer_specs.get_gpt_mtp_block_spec(
        config, layers, use_transformer_engine=True, vp_stage=vp_stage
    )
    if spec is None:
        return None
    return replace(
        spec, layer_specs=[replace(layer, module=PackedPredictionLayer) for layer in spec.layer_specs]
    )
