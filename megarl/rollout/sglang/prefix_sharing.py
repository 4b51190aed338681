"""The samples of a prompt share its prefill, also when they come to SGLang together.

SGLang's cache shares what an earlier batch has computed. Requests that wait when a batch is made would all be put into
it, each with its whole prompt: n samples of a prompt prefill it n times (0.5.21; its policy `lpm` sorts them, but leaves
them in one batch). Here one of them goes first. The others stay in SGLang's queue until the next batch, which finds all
but the last token of their prompt in the cache.

Guarantees: a request is put off only for one that is in the batch at hand, so every batch that SGLang can make is made, and
one without equal prompts is the same as without this. Where the cache does not keep a prompt, samples go one after the other,
a batch each. Where SGLang makes the next batch before the last one is done (on GPUs) two are prefilled, not one.
"""

from collections.abc import Callable
from typing import Any

FEW_TOKENS = 16  # that are still to be computed: another batch would cost more than it saves


def register() -> None:
    """Called in each scheduler process before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", one_goes_first, HookType.AROUND
    )


def one_goes_first(original: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's own, which adds a request to the batch at hand and says whether others may follow.

    What is neither added nor an end of the batch stays in the queue: so SGLang itself passes over requests whose adapter has no
    place yet.
    """
    if waits_for_another(adder, request):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(adder, request, *args, **kwargs)


def waits_for_another(adder: Any, request: Any) -> bool:
    """Whether the batch has a request with the same prompt, whose keys and values are worth waiting for.

    request.prefix_indices: cache slots of the tokens that need not be computed.
    """
    if adder.tree_cache.disable or adder.is_hybrid_ssm_cache:  # SGLang has given it a recurrent state by now
        return False
    rest = len(request.full_untruncated_fill_ids) - len(request.prefix_indices)
    if rest <= max(FEW_TOKENS, adder.page_size):
        return False
    return any(other.origin_input_ids == request.origin_input_ids for other in adder.can_run_list)
