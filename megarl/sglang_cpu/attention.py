"""An attention backend for SGLang's CPU engine, by the functions of batched_attention.py and running_batch.py.

It takes the place of `torch_native` in SGLang's registry, so that SGLang's decisions by that name
still hold. Latent attention (DeepSeek) is attention to one key head here, in prefill and decode. Cross attention is
left to SGLang (sglang 0.5.21). The keys that indexers choose (DeepSeek-V3.2, GLM-5) are those of chosen_keys.py. Sinks and windows (gpt-oss) are here, since SGLang's backend has no sinks and is refused for that model.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

from megarl.sglang_cpu.batched_attention import (
    Group,
    Prefill,
    attend,
    attend_prompts,
    make_groups,
    plan_prompts,
    take_slots,
    within,
)
from megarl.sglang_cpu.chosen_keys import of_next_tokens, of_prompts
from megarl.sglang_cpu.running_batch import RunningBatch


class BatchedTorchAttention(TorchNativeAttnBackend):
    def __init__(self, model_runner) -> None:
        super().__init__(model_runner)
        self._dtype = model_runner.dtype
        self._same_bits = model_runner.server_args.enable_deterministic_inference
        self._groups: list[Group] | None = None  # of a decode batch
        self._plan: tuple[list[Group], list[Prefill]] | None = None  # of a prefill batch
        self._running: RunningBatch | None = None
        self._runs_on = False  # whether `_running` attends this step's sequences
        self._chooses = False  # whether a sequence of this step has more keys than an indexer chooses
        self._sinks: torch.Tensor | None = None  # of the layer that attends
        self._index: Any = None  # the same, where an indexer chooses its keys
        model = model_runner.model
        self._topk: int | None = getattr(model, "index_topk", None)
        if self._topk is not None:
            model.keep_index_keys(self.token_to_kv_pool)

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self._groups = self._plan = None  # of another batch
        self._runs_on = False
        self._chooses = self._topk is not None and _longest(forward_batch) > self._topk
        if forward_batch.forward_mode.is_target_verify():
            self._plan = self._plan_drafted(forward_batch)
        if not forward_batch.forward_mode.is_decode() or self._chooses:
            self.forget()
        elif not self._same_bits:
            if self._running is None:
                self._running = RunningBatch(self._bytes_per_token())
            self._runs_on = self._running.step(
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                self.req_to_token_pool.req_to_token,
            )

    def _plan_drafted(self, forward_batch) -> tuple[list[Group], list[Prefill]]:
        """The plan for drafted tokens that are checked, as for new tokens of a prompt. They follow each other; where SGLang drafts
        fewer than it checks, the fill-up tokens are never accepted, and it makes no difference what they attend to."""
        number = torch.full_like(forward_batch.seq_lens, forward_batch.spec_info.draft_token_num)
        return plan_prompts(
            forward_batch.seq_lens + number,
            number,
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            self._dtype,
        )

    @property
    def runs_on(self) -> bool:
        """Whether this step has the sequences of the last one, whose keys and values are kept in order."""
        return self._runs_on

    def attend_running(self, layer, forward_batch, query, keys, values) -> torch.Tensor:
        """Attention of a layer in float32, in a step that runs on.

        Args:
            layer, forward_batch: SGLang's RadixAttention and batch.
            query: [n, heads, dim]; keys, values: [n, key heads, dim], of the new tokens.

        Returns:
            [n, heads, value dim].
        """
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), keys, values)
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return self._running.attend(query, *caches, layer.scaling, (keys, values))

    def forward_extend(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **options
    ) -> torch.Tensor:
        """As SGLang's. sinks: [heads], logits in the heads' softmax that no value belongs to."""
        self._sinks, self._index = sinks, layer.index if self._chooses else None
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def forward_decode(
        self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None, **options
    ) -> torch.Tensor:
        self._sinks, self._index = sinks, layer.index if self._chooses else None
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **options)

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Tokens of each sequence that pads a batch of data parallel attention to the other groups' length: one, of slot 0."""
        return 1

    def forget(self) -> None:
        """Free the keys and values that were kept of a decode batch."""
        if self._running is not None:
            self._running.forget()

    def _bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, in float32."""
        # Of models that have attention in some layers alone, these layers' pool is a part of SGLang's.
        pool = getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool)
        caches = pool.get_key_buffer(pool.start_layer), pool.get_value_buffer(pool.start_layer)
        return pool.layer_num * 4 * sum(cache[0].numel() for cache in caches)

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
        *,
        causal,
        sliding_window_size,
        **options,
    ):
        """query: [tokens, heads, dim]; caches: [slots, key heads, dim]; output: [tokens, heads, value dim]."""
        if encoder_lens is not None or not causal:
            return super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, causal=causal, sliding_window_size=sliding_window_size, **options,
            )  # fmt: skip
        scaling = options["scaling"]
        if self._plan is None:  # by the first layer, for all layers
            self._plan = plan_prompts(seq_lens, extend_seq_lens, req_to_token, req_pool_indices, query.dtype)
        groups, prompts = self._plan
        self._attend_groups(groups, query, output, k_cache, v_cache, scaling, sliding_window_size)
        for prompt in prompts:
            keys, values = (take_slots(cache, prompt.slots).to(query.dtype) for cache in (k_cache, v_cache))
            output[prompt.tokens] = attend_prompts(
                *(query[prompt.tokens], keys, values, scaling, sliding_window_size, self._sinks),
                chosen=None if self._index is None else of_prompts(self._index, prompt),
            )
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
        *,
        sliding_window_size,
        **options,
    ):
        """query: [batch, heads, dim]; caches: [slots, key heads, dim]; output: [batch, heads, value dim]."""
        if encoder_lens is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                sliding_window_size=sliding_window_size, **options,
            )  # fmt: skip
        scaling = options["scaling"]
        plain = self._sinks is None and sliding_window_size is None
        if self._runs_on and query.dtype == torch.float32 and plain:
            return output.copy_(self._running.attend(query, k_cache, v_cache, scaling))
        if self._groups is None:  # by the first layer, for all layers
            self._groups = make_groups(seq_lens, req_to_token, req_pool_indices, query.dtype)
        self._attend_groups(self._groups, query, output, k_cache, v_cache, scaling, sliding_window_size)
        return output

    def _attend_groups(self, groups, query, output, k_cache, v_cache, scaling, window) -> None:
        """Attend one new token of each sequence; arguments as of `_run_sdpa_forward_decode`."""
        for group in groups:
            keys, values = (take_slots(cache, group.slots).to(query.dtype) for cache in (k_cache, v_cache))
            mask = group.mask if window is None else within(group, window)
            if self._index is not None:
                mask = of_next_tokens(self._index, group)
            output[group.rows] = attend(
                query[group.rows], keys, values, mask, scaling, self._same_bits, self._sinks
            )


def _longest(forward_batch) -> int:
    """Tokens of the longest sequence, 0 in a batch of none."""
    return max(forward_batch.seq_lens.tolist(), default=0)


def _forget_running(result, scheduler, *args, **kwargs):
    """After SGLang has emptied its cache, which it does before its memory is released."""
    backend = scheduler.tp_worker.model_runner.attn_backend
    getattr(backend, "full_attn_backend", backend).forget()
    return result


HOOKS = {"sglang.srt.managers.scheduler.Scheduler.flush_cache": ("AFTER", _forget_running)}


def take_the_place_of_torch_native() -> None:
    """Make this backend SGLang's `torch_native` in this process."""
    register_attention_backend("torch_native")(BatchedTorchAttention)
    # SGLang has no entry for torch_native and would take Triton's, which prefills with uncompressed keys: those do not
    # fit the one latent key of the cache that torch_native attends to.
    AttentionBackendRegistry.register("torch_native", lambda layer, batch: AttnForwardMethod.MLA)
