"""Speculative decoding: how drafted tokens are checked in SGLang's schedulers (sglang 0.5.21).

A pass of the model gives logits after the newest token of a request and after each drafted one. SGLang accepts a drafted token with its
probability, by a coin of the request, and draws what follows the last accepted one from what is left of the distribution. Which
coin decides on which token depends on the drafted tokens, and so on other requests and on time.

Here a token is drawn after every drafted one, with the request's own noise at that position, just as it would be drawn if it were the
next one. A drafted token is accepted if it is the one that was drawn in its place: with its probability, too.

SGLang's attention kernels take drafted tokens as a chain. Where it drafts fewer than it checks, it fills up with tokens 0. By its
position, each of them follows the newest token; the kernels let it attend to the tokens before it, too. They are never accepted here.

Guarantees, each asserted by a test:

- a response has the tokens that it has without speculation, whatever was drafted, but for the rounding of logits in other kernels; so it
  is distributed as the model says, and its noise depends on (seed, uid) only;
- log-probs are those of the model's distribution after temperature, as without speculation, each computed in the pass that drew its token;
- drafted tokens are accepted up to the first one that was not drawn, which the drawn one replaces.
"""

import copy
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from megarl.weight_sync import served_model


def draw_and_check(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In place of SGLang's `eagle_sample`: draw a token after each one that is to be checked, and accept those that were drawn.

    Args:
        verify_input: SGLang's: tokens and positions of what is to be checked, `draft_token_num` for each request, the newest token first.
        logits_output: SGLang's; next_token_logits: [requests * draft_token_num, vocabulary]. Gets the log-probs of all drawn tokens.

    Returns:
        the token drawn after each [requests * draft_token_num], how many tokens each request gets [requests], and the numbers of accepted
        tokens [requests, draft_token_num], the newest one's first, -1 behind them; all int32.
    """
    from sglang.srt.layers.sampler import create_sampler

    requests, number = len(batch.seq_lens), verify_input.draft_token_num
    assert verify_input.max_tree_depth == number, "tokens are drafted in chains"
    info = repeated(batch.sampling_info, number)
    drawn = create_sampler()(logits_output, info, batch.return_logprob, [], [], verify_input.positions)
    drawn = drawn.to(torch.int32)
    places = torch.arange(number, device=drawn.device)
    checked, positions = (
        x.view(requests, number) for x in (verify_input.draft_token, verify_input.positions)
    )
    # Where SGLang drafts fewer tokens than it checks, it fills up with tokens 0 that all follow the newest token.
    right = (checked[:, 1:] == drawn.view(requests, number)[:, :-1]) & (
        positions == positions[:, :1] + places
    )[:, 1:]
    accepted = right.cumprod(1).sum(1, dtype=torch.int32)
    numbers = torch.arange(requests * number, dtype=torch.int32, device=drawn.device).view(requests, number)
    return drawn, accepted + 1, numbers.masked_fill_(places > accepted[:, None], -1)


def repeated(info: Any, times: int) -> Any:
    """SGLang's sampling parameters of a batch, with each request `times` times."""
    result = copy.copy(info)
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        value = getattr(info, name)
        setattr(result, name, None if value is None else value.repeat_interleave(times, 0))
    return result


def pick_log_probs(
    batch: Any, logits_output: Any, predict: torch.Tensor, *, accept_index: torch.Tensor
) -> None:
    """In place of SGLang's `compute_spec_logprobs`: keep the log-probs of accepted tokens, [requests, depth], of those computed when the
    tokens were drawn; the entries behind them may be any."""
    of_drawn = logits_output.next_token_logprobs
    logits_output.next_token_logprobs = of_drawn[accept_index.clamp(min=0).long()]


# Where drafted tokens are checked; for drafts of a model, also where that model is made.
HOOKS = {
    "sglang.srt.speculative.eagle_utils.eagle_sample": (HookType.REPLACE, draw_and_check),
    "sglang.srt.layers.logprob_processor.compute_spec_logprobs": (HookType.REPLACE, pick_log_probs),
}
DRAFT_HOOKS = {
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.__init__": (
        HookType.AFTER,
        served_model.remember_draft,
    ),
}
