"""Hooks in SGLang's scheduler: the samples of a prompt share its prefill, and the engine's owner learns when it last computed, for how
many requests.

Prefix sharing. SGLang's cache shares prefixes that an earlier batch has computed. All requests that wait when a batch is made would be put
into it, each with its complete prompt: n samples of a prompt prefill it n times (0.5.21; its policy `lpm` sorts them, but leaves
them in one batch). Here one of them goes first. The others stay in SGLang's queue until the next batch, which finds all
but the last token of their prompt in the cache.

Guarantees: a request is put off only for one that is in the batch at hand, so every batch that SGLang can make is made, and
one without equal prompts is the same as without this. Where the cache does not keep a prompt, samples go one after the other,
a batch each. Where SGLang makes the next batch before the last one is done (on GPUs) two are prefilled, not one.

Heartbeat. The scheduler of an engine's first rank writes a time that the owner reads. Answers alone do not tell an engine that works from
one that hangs: long answers that begin together end together, after any time. SGLang's own snapshots of its load do not either: it
writes them also while requests only wait (0.5.21). So the time is written whenever the tokens of a step have come back from the
device. It is read from the machine's monotonic clock, which all of its processes share. With it comes the number of requests that the
scheduler decodes at the time: the owner knows how many it has sent, and so how many wait for a place or for room in the cache.

Temperature. The log-probs that SGLang gives of a request's input are those at temperature 1, whatever the request says (0.5.21). So an engine
that judges texts has its logits divided where they are made.
"""

import mmap
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FEW_TOKENS = 16  # so few remaining prompt tokens are not worth another batch
# A time and a number of requests, in the machine's own form, which is written and read at once.
_BEAT = struct.Struct("dq")


def experts_as_bytes(result: Any, processor: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """After SGLang's own, which collects the experts of a finished request's tokens: as bytes, 2 for an expert.

    SGLang would send integers of 4 bytes and, to the program that asked, write them as text (0.5.21, tokenizer_manager.py).
    """
    experts = request.routed_experts
    if experts is not None:
        request.routed_experts = experts.numpy().astype("<u2").tobytes()
    return result


def one_goes_first(original: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's own, which adds a request to the batch at hand and says whether others may follow.

    A request that is neither added nor ends the batch stays in the queue: in this way SGLang itself passes over requests whose adapter
    has no slot yet.
    """
    if waits_for_another(adder, request):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.CONTINUE
    return original(adder, request, *args, **kwargs)


def waits_for_another(adder: Any, request: Any) -> bool:
    """Whether the batch has a request with the same prompt, so that it pays to wait for its keys and values.

    request.prefix_indices: cache slots of the tokens that need not be computed.
    """
    if adder.tree_cache.disable or adder.is_hybrid_ssm_cache:  # SGLang has given it a recurrent state by now
        return False
    rest = len(request.full_untruncated_fill_ids) - len(request.prefix_indices)
    if rest <= max(FEW_TOKENS, adder.page_size):
        return False
    return any(other.origin_input_ids == request.origin_input_ids for other in adder.can_run_list)


class Heartbeat:
    """A time and a number of requests in a file that processes map."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BEAT.size)

    @classmethod
    def make(cls, path: Path) -> "Heartbeat":
        path.write_bytes(_BEAT.pack(0.0, 0))
        return cls(path)

    def beat(self, running: int) -> None:
        _BEAT.pack_into(self._memory, 0, time.monotonic(), running)

    def beat_after(self, result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """After a step of SGLang's scheduler: write the time, and how many requests it decodes.

        With data parallel attention its batch has the number of tokens of each group; where no group computes a prompt, these are numbers
        of requests.
        """
        counts = batch.global_num_tokens
        if counts is None:
            self.beat(len(scheduler.running_batch.reqs))
        else:
            self.beat(self.running() if batch.is_extend_in_batch else sum(counts))
        return result

    def last(self) -> float:
        """The time of the last step, by `time.monotonic`; 0: there was none."""
        return _BEAT.unpack_from(self._memory)[0]

    def running(self) -> int:
        """The number of requests that were decoded at that time, without requests whose prompts that step computed."""
        return _BEAT.unpack_from(self._memory)[1]


LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits"
TEMPERATURE = (
    "megarl_judging_temperature"  # among the fields that an engine's arguments override in its model's config
)


def divided_by(temperature: float) -> Callable[..., Any]:
    """A hook after SGLang's function that makes logits, which divides them, as the trainer does, in float32."""

    def divide(logits: Any, *args: Any, **kwargs: Any) -> Any:
        return logits.float().div_(temperature)

    return divide
