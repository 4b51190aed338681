"""The modules of a model's layers: Megatron's GPU specification, from Transformer Engine or from its stand-ins in torch.

Written against megatron-core 0.19.2, which silently takes any ImportError of Transformer Engine for its absence
(extensions/transformer_engine.py). A broken installation, such as one with a flash-attn-4 that its attention does not know, would
then train several times slower, with other kernels: it is refused here (`layers_text`).
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel, experimental_attention_variant_module_specs, gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl import platform
from megarl.megatron.all_heads_norm import norm_all_heads
from megarl.megatron.cpu import rotary, torch_te
from megarl.megatron.sparse.attention import SparseSelfAttention
from megarl.megatron.transformer_config import has_transformer_engine


class DirectQueryAttention(MLASelfAttention):
    """Latent attention whose queries are projected directly from the layer's normed input.

    Megatron-core 0.19.2 would norm that input once more, with a weight that no checkpoint has.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return super()._resolve_qk_norm_config(submodules) | {"linear_q_proj": submodules.linear_q_proj}


class PlainNorm:
    """Makes the norm of a gated delta net's output, whose factor is its weight where a model's other norms have 1 + weight.

    Megatron-core 0.19.2 would make it like the others.
    """

    def __new__(cls, norm: Any, config: TransformerConfig, **options: Any) -> Any:
        plain = copy(config)
        plain.layernorm_zero_centered_gamma = False
        return norm(config=plain, **options)


class PackedDeltaNet(GatedDeltaNet):
    """A gated delta net that takes the bounds of packed sequences as they are.

    Megatron-core 0.19.2 has the host wait for the device four times in each layer, to check that sequences end with the tokens and can be cut
    over context parallel ranks. `PackedBatch` ensures both.
    """

    def _resolve_cu_seqlens(self, cu_seqlens_padded: Tensor, *unused: Any, **more: Any) -> Tensor:
        return cu_seqlens_padded


class LiveLayer(TransformerLayer):
    """A model's last layer. Its MLP is computed at a batch's live positions alone where only these are asked for
    (`PackedBatch.packed_seq_params`): its output for a prompt is used nowhere. Attention has all positions' keys and values.

    An MoE layer has all positions, since its balance counts them.
    """

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        live = getattr(packed_seq_params, "live", None)
        if live is not None and not self.is_moe_layer:
            hidden_states = hidden_states.index_select(0, live)
        return super()._forward_mlp(hidden_states, inference_context, padding_mask, packed_seq_params)


class OutputLayer(ColumnParallelLinear):
    """Megatron's output layer for use with Transformer Engine's layers, whose products add weights' gradients to the float32 ones.

    Megatron-core 0.19.2 refuses such settings where apex is not installed, for its own layers' sake (tensor_parallel/layers.py). This
    layer's product is never computed: heads read its weight.
    """

    def __init__(self, *args: Any, config: TransformerConfig, **options: Any) -> None:
        unfused = copy(config)
        unfused.gradient_accumulation_fusion = False
        super().__init__(*args, config=unfused, **options)


@contextlib.contextmanager
def layer_modules() -> Iterator[None]:
    """While this is active, specifications and models are made of modules that this machine has.

    They are Transformer Engine's, or their stand-ins in torch. With either, rotations of packed sequences for which Megatron has no kernel (yarn's of
    grouped-query attention, all but yarn's of latent attention) are megarl's for good: Megatron's own (0.19.2) has the host wait for the
    lengths in each layer, and rotates one sequence after the other.
    """
    if not has_transformer_engine():
        with torch_te.standing_in():
            yield
        return
    rotary.install()
    original = tensor_parallel.ColumnParallelLinear
    tensor_parallel.ColumnParallelLinear = OutputLayer
    try:
        yield
    finally:
        tensor_parallel.ColumnParallelLinear = original


def layer_spec(
    config: TransformerConfig,
    vp_stage: int | None,
    last: bool,
    all_heads: bool = False,
    sparse: bool = False,
) -> TransformerBlockSubmodules:
    """The specification of this rank's layers, for a model chunk; within `layer_modules`.

    Args:
        last: whether the chunk has the model's last layer.
        all_heads: whether norms of queries and keys are over all heads together.
        sparse: whether indexers choose the keys of queries.
    """
    if config.experimental_attention_variant == "gated_delta_net":
        return _with_delta_nets(config, vp_stage)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    if config.multi_latent_attention and (sparse or config.q_lora_rank is None):
        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = SparseSelfAttention if sparse else DirectQueryAttention
    if all_heads:
        norm_all_heads(spec)
    # With sequence parallelism all ranks must have equally many positions. Transformer Engine's kernels restrict their number
    # (multiples of 8 or 16 for FP8, at least one), and have not been tried.
    if last and spec.layer_specs and not config.sequence_parallel and not has_transformer_engine():
        spec.layer_specs[-1] = replace(spec.layer_specs[-1], module=LiveLayer)
    return spec


def _with_delta_nets(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layers of which most have a gated delta net in place of attention."""
    make = experimental_attention_variant_module_specs.get_transformer_block_with_experimental_attention_variant_spec
    spec = make(config, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is GatedDeltaNet:  # one specification may be that of several layers
            attention.module = PackedDeltaNet
            norm = {"norm": attention.submodules.out_norm}
            attention.submodules.out_norm = ModuleSpec(module=PlainNorm, params=norm)
    return spec


# Tensors that the token dispatchers of megatron-core 0.19.2 keep from their last pass: probabilities with their graph, and the pass's maps.
_OF_A_PASS = (
    *("probs", "routing_map", "tokens_per_expert", "reversed_local_input_permutation_mapping"),
    *("token_probs", "token_indices", "dispatched_probs", "dispatched_indices", "dispatched_routing_map"),
)


def forget_routings(model: GPTModel) -> None:
    """Have each layer of experts release the tensors of a forward pass that its dispatcher keeps, as soon as the pass is over.

    Otherwise each layer's would stay until its next pass. With recomputation the graph of the probabilities keeps a layer's input and its gradient:
    at the end of a backward pass two inputs of every layer, where one layer's are needed.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            # No hook of the layer: where it alone is computed again (`recompute_modules` has moe) the second pass is no call of it.
            module.postprocess = partial(_postprocess, module, module.postprocess)


def _postprocess(layer: MoELayer, postprocess: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The last part of a layer's pass, after which its dispatcher needs nothing of the pass."""
    output = postprocess(*arguments)
    dispatcher = layer.token_dispatcher
    for holder in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        for name in _OF_A_PASS:
            if getattr(holder, name, None) is not None:
                setattr(holder, name, None)
    return output


PACKAGE = "transformer_engine"
# The modules that megatron-core imports of it.
_MODULES = (PACKAGE, f"{PACKAGE}.pytorch", f"{PACKAGE}.pytorch.fp8")


def layers_text() -> str:
    """The layers that are used here, and why, in words.

    Raises:
        ValueError: there is a CUDA device, and Transformer Engine is installed but cannot be imported.
    """
    if has_transformer_engine():
        return f"Transformer Engine's ({_version()})"
    if not platform.is_cuda():
        return "megarl's own in torch (there is no CUDA device)"
    if importlib.util.find_spec(PACKAGE) is None:
        return "megarl's own in torch (Transformer Engine is not installed): slower, and without context parallelism"
    for module in _MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"Transformer Engine ({_version()}) is installed, but {module} cannot be imported: {error}. Mend the installation "
                "(requirements/gpu.txt has versions that belong together) or uninstall it; megarl's own layers in torch are used "
                "where it is not installed"
            ) from error
    raise ValueError(
        f"Transformer Engine ({_version()}) can be imported now, but could not when megatron-core was: some of what megatron-core "
        "imports from it is missing"
    )


def drop_dummy_gradients() -> None:
    """Free the tensors that Transformer Engine (2.18, module/base.py) keeps for each shape of a weight where its products add to the float32
    gradients: each is as large as the weight, and autograd is given it in place of a gradient. The next step makes them anew."""
    if has_transformer_engine():
        importlib.import_module(f"{PACKAGE}.pytorch.module.base")._dummy_wgrads.clear()


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
