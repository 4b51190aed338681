"""MiniMax-M2's norm of queries and keys over all heads on a CPU: SGLang 0.5.21 has Triton's and AMX's kernels for it alone."""

import torch


def _norm(self, q, k):
    """As `MiniMaxM2QKRMSNorm._forward_naive`: sums of squares in float32, added up over the ranks that cut attention.

    q, k: [tokens, this rank's heads * width of a head].
    """
    from sglang.srt.layers.dp_attention import attn_tp_all_reduce

    parts = (q.float(), k.float())
    sums = torch.stack([part.square().sum(-1) for part in parts])
    if self._world_size > 1:
        sums = attn_tp_all_reduce(sums)
    normed = []
    for part, total, norm in zip(parts, sums, (self._q_norm, self._k_norm), strict=True):
        scale = torch.rsqrt(total / (part.shape[-1] * self._world_size) + self._eps)
        normed.append((part * scale[:, None] * norm.weight.float()).to(q.dtype))
    return normed[0], normed[1]


HOOKS = {"sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm._forward_naive": ("REPLACE", _norm)}
