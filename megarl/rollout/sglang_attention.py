"""Plugs `batched_attention` into SGLang's CPU engine.

Takes the place of `torch_native` in SGLang's registry, so that whatever SGLang decides by that name
still holds. Latent attention (DeepSeek) is attention to one key head here, in prefill and decode. Sliding
windows and cross attention are SGLang's own (sglang 0.5.21).
"""

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from megarl.rollout.batched_attention import (
    Group,
    Prefill,
    attend,
    attend_prompts,
    make_groups,
    plan_prompts,
    take_slots,
)


class BatchedTorchAttention(TorchNativeAttnBackend):
    def __init__(self, model_runner) -> None:
        super().__init__(model_runner)
        self._same_bits = model_runner.server_args.enable_deterministic_inference
        self._groups: list[Group] | None = None  # of a decode batch
        self._plan: tuple[list[Group], list[Prefill]] | None = None  # of a prefill batch

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = self._plan = None  # of another batch

    def _run_sdpa_forward_extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):
        """query: [tokens, heads, dim]; caches: [slots, key heads, dim]; output: [tokens, heads, value dim]."""
        if encoder_lens is not None or sliding_window_size is not None or not causal:
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        if self._plan is None:  # by the first layer, for all layers
            self._plan = plan_prompts(seq_lens, extend_seq_lens, req_to_token, req_pool_indices, query.dtype)
        groups, prompts = self._plan
        self._attend_groups(groups, query, output, k_cache, v_cache, scaling)
        for prompt in prompts:
            keys, values = (take_slots(cache, prompt.slots).to(query.dtype) for cache in (k_cache, v_cache))
            output[prompt.tokens] = attend_prompts(query[prompt.tokens], keys, values, scaling)
        return output

    def _run_sdpa_forward_decode(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):
        """query: [batch, heads, dim]; caches: [slots, key heads, dim]; output: [batch, heads, value dim]."""
        if encoder_lens is not None or sliding_window_size is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        if self._groups is None:  # by the first layer, for all layers
            self._groups = make_groups(seq_lens, req_to_token, req_pool_indices, query.dtype)
        self._attend_groups(self._groups, query, output, k_cache, v_cache, scaling)
        return output

    def _attend_groups(self, groups, query, output, k_cache, v_cache, scaling) -> None:
        """Attend one new token of each sequence; arguments as of `_run_sdpa_forward_decode`."""
        for group in groups:
            keys, values = (take_slots(cache, group.slots).to(query.dtype) for cache in (k_cache, v_cache))
            output[group.rows] = attend(query[group.rows], keys, values, group.mask, scaling, self._same_bits)


def register() -> None:
    """Have SGLang's `torch_native` be this backend, in this process."""
    register_attention_backend("torch_native")(BatchedTorchAttention)
    # SGLang has no entry for torch_native and would take Triton's, which prefills with uncompressed keys: those do not
    # fit the one latent key of the cache that torch_native attends to.
    AttentionBackendRegistry.register("torch_native", lambda layer, batch: AttnForwardMethod.MLA)
