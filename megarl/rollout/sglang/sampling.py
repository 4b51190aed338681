"""Sampling by a seed for each request on a GPU: tokens and their log-probs by one pass over the logits.

SGLang's sampler (0.5.21, layers/sampler.py) makes several tensors of all logits for them: the softmax, its logarithm twice, a hash, and
the noise in float64. A decode step of a small model takes little longer than that.

Guarantees:

- the token is the one that SGLang's `multinomial_with_seed` draws from the logits over the temperature, with the same noise;
- the log-prob is that of the softmax of the logits over the temperature, to 1e-6 of its size and 1e-6;
- no tensor of the logits' size is made, the logits are left as they are, and the host does not wait;
- a row's token and log-prob depend on nothing but its logits, temperature, seed and position: not on the other rows.

SGLang draws from the logarithm of the softmax in float32, which differs in its last bits. Where the two best
scores of a row differ by less than that (a few 1e-6 for a token of log-prob -10), the token may be the other one: about one
token in a million. Rows that are no distribution (with NaN or infinity, or without a finite logit) have token 0 and log-prob NaN, as in SGLang.

Requests with top_k, top_p, min_p or temperature 0, and batches that have one of these, are left to SGLang's own sampler. The kernels
(`sampling_kernels`) are imported and compiled with the first launch. They were interpreted on a CPU, and an H100 has run
them (docs/gpu.md).
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

BLOCK = 4096  # columns of a program: at 152k columns a row has 38 programs, and 4 rows fill an H100
WARPS = 8  # 16 columns a thread: with more the code, which is unrolled, outgrows the caches of instructions


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row, and its log-prob in nats.

    Args:
        logits: [rows, vocabulary] in float32, bfloat16 or float16, at least one row; rows may lie apart.
        temperatures: float32, one a row, above 0.
        seeds: int64 [rows]. positions: [rows], integers: of the token before the one that is drawn.

    Returns:
        int32 [rows], float32 [rows].
    """
    rows, vocabulary = logits.shape
    assert (
        rows > 0 and logits.stride(1) == 1 and logits.dtype.is_floating_point and logits.element_size() <= 4
    )
    for one in (temperatures, seeds, positions):
        assert one.numel() == rows and one.is_contiguous(), (one.shape, one.stride())
    blocks = -(-vocabulary // BLOCK)
    maxima, sums = logits.new_empty((2, rows, blocks), dtype=torch.float32)
    scores = logits.new_empty((rows, blocks), dtype=torch.float64)
    columns = logits.new_empty((rows, blocks), dtype=torch.int32)
    tokens = logits.new_empty(rows, dtype=torch.int32)
    log_probs = logits.new_empty(rows, dtype=torch.float32)
    made = kernels()
    made.score_blocks[(blocks, rows)](
        logits, logits.stride(0), temperatures, seeds, positions, maxima, sums, scores, columns, vocabulary,
        BLOCK, num_warps=WARPS,
    )  # fmt: skip
    made.choose[(rows,)](
        logits, logits.stride(0), temperatures, maxima, sums, scores, columns, tokens, log_probs, blocks, vocabulary,
        1 << (blocks - 1).bit_length(), num_warps=1,
    )  # fmt: skip
    return tokens, log_probs


def kernels() -> ModuleType:
    from megarl.rollout.sglang import sampling_kernels

    return sampling_kernels


def sample(
    original: Callable[..., torch.Tensor],
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: Sequence[int],
    token_ids_logprobs: Sequence[Sequence[int] | None],
    positions: torch.Tensor,
) -> torch.Tensor:
    """Around SGLang's `Sampler.forward` (0.5.21), which still handles batches that `draw` cannot (`_draws_all`).

    SGLang leaves probabilities in place of the logits, and nothing reads them afterwards; here they stay logits.
    """
    logits = logits_output.next_token_logits
    more_log_probs = return_logprob and (
        any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs)
    )
    if more_log_probs or not _draws_all(sampling_info) or len(logits) == 0:
        return original(
            sampler, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
        )  # fmt: skip
    logits = sampler._preprocess_logits(logits, sampling_info)
    tokens, log_probs = draw(logits, sampling_info.temperatures, sampling_info.sampling_seed, positions)
    if return_logprob:
        logits_output.next_token_logprobs = log_probs
    sampler._sync_token_ids_across_tp(tokens, sampling_info)
    return tokens


def _draws_all(info: Any) -> bool:
    """Whether every request of a batch has a seed and draws from all tokens, and none wants the tokens that it could have drawn."""
    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return (
        info.sampling_seed is not None
        and not (info.is_all_greedy or cut)
        and info.sampling_mask_batch_indices is None
    )
