"""One request to SGLang: its arguments, its answer, and the socket on which requests go out together."""

import asyncio
import hashlib
import pickle
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import zmq

from megarl.config.schema.rollout import MOST_KEPT
from megarl.data.kept import KeptTokens
from megarl.data.routing import RoutingShape
from megarl.rollout.engine import EngineError, Generation, SamplingParams


def request_seed(seed: int, uid: str) -> int:
    """The seed of one response: 63 bits of (seed, uid)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{uid}".encode()).digest()[:8]) >> 1


def check_prompt(uid: str, ids: Sequence[int], max_new_tokens: int, context: int, vocab_size: int) -> None:
    """Refuse prompts that would crash SGLang.

    Raises:
        ValueError: an empty prompt, one that leaves no room in the context, an unknown token id.
    """
    if len(ids) == 0:
        raise ValueError(f"{uid}: the prompt is empty")
    if len(ids) + max_new_tokens > context:
        raise ValueError(
            f"{uid}: {len(ids)} prompt tokens and max_new_tokens={max_new_tokens} "
            f"do not fit the context of {context} tokens"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"{uid}: token ids {min(ids)} to {max(ids)}, the vocabulary has {vocab_size}")


async def ask(
    manager: Any,
    ids: Sequence[int],
    sampling: SamplingParams,
    uid: str,
    stop_token_ids: Sequence[int],
    adapter: str | None = None,
    experts_from: int | None = None,
    group: int | None = None,
    heard: Callable[[Sequence[int]], None] | None = None,
) -> dict[str, Any]:
    """SGLang's answer to a prompt. Cancelling the task aborts the request.

    Args:
        manager: SGLang's TokenizerManager.
        adapter: the name of the adapter that answers; None: the model without any.
        experts_from: the first token, of prompt and response, whose experts the answer has; None: it has none.
        group: the data parallel group that answers; None: there is one.
        heard: called with the tokens of the answer as they come.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=list(ids),
        sampling_params=sglang_sampling(sampling, uid, stop_token_ids),
        return_logprob=True,
        lora_path=adapter,
        return_routed_experts=experts_from is not None,
        routed_experts_start_len=experts_from or 0,
        return_sampling_mask=sampling.return_kept,
        routed_dp_rank=group,
        stream=heard is not None,
    )
    # Closed at once: until it is closed, the generator holds the lock that an update of the weights waits for (0.5.21).
    async with aclosing(manager.generate_request(request, None)) as answers:
        if heard is None:
            return await anext(answers)
        told = 0
        async for answer in answers:  # each has all tokens so far
            heard(answer["output_ids"][told:])
            told = len(answer["output_ids"])
        return answer


def sglang_sampling(sampling: SamplingParams, uid: str, stop_token_ids: Sequence[int]) -> dict[str, object]:
    """The arguments of SGLang's SamplingParams; but for the seed, megarl's parameters have SGLang's names."""
    arguments = asdict(sampling)
    if arguments.pop("return_kept") and sampling.top_k == -1:
        arguments["top_k"] = MOST_KEPT  # SGLang refuses to return kept tokens without a number of them
    del arguments["return_experts"]
    seed = request_seed(arguments.pop("seed"), uid)
    return {**arguments, "stop_token_ids": list(stop_token_ids), "sampling_seed": seed}


@dataclass(frozen=True)
class CapturedRouting:
    """The experts in SGLang's answers: for all layers of the model, as integers of 2 bytes (scheduler_hooks.py).

    Attributes:
        num_layers: of the model.
        layers: numbers of the layers that have experts.
    """

    num_layers: int
    layers: tuple[int, ...]
    shape: RoutingShape

    def read(self, captured: bytes) -> np.ndarray:
        """[tokens, layers, top_k], in the type of `shape`."""
        experts = np.frombuffer(captured, "<u2").reshape(-1, self.num_layers, self.shape.top_k)
        return experts[:, list(self.layers)].astype(self.shape.dtype)


KEPT = "output_token_sampling_mask"  # of an answer's `meta_info`


def kept_as_arrays(original: Callable[..., Any], chunk: Any, support_logprobs: bool) -> tuple[list, list]:
    """Around SGLang's own, which turns the kept tokens of a part of an answer into lists of Python integers: here they stay arrays."""
    return [chunk], []


def read_kept(chunks: Sequence[Any]) -> tuple[KeptTokens, list[float]]:
    """The kept tokens in an answer of SGLang's, and the log-prob of each token among its own kept tokens.

    Args:
        chunks: SGLang's `SamplingMaskChunk`s of the answer, one after the other.
    """
    parts = [KeptTokens(np.asarray(part.token_ids), np.asarray(part.lengths)) for part in chunks]
    return KeptTokens.joined(parts), [value for part in chunks for value in part.logprobs.tolist()]


@dataclass
class Response:
    """A response in progress, in one piece or several; each piece comes from the weights that were served at its time.

    Attributes:
        ends: tokens that end the response.
        room: most tokens with which the response can still be continued after an interruption; None: any number.
        routing: how answers name the experts of tokens; None: they do not.
        experts_start: the first token, of prompt and response, whose experts are asked for.
        experts: the experts of the tokens from there on, by piece; each from the weights of its piece.
        kept: tokens that the response's tokens were drawn from, by piece, where they are asked for.
        versions: versions of the weights that chose the first token and the last one.
    """

    uid: str
    sampling: SamplingParams
    ends: frozenset[int] = frozenset()
    room: int | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: tuple[int, int] | None = None
    routing: CapturedRouting | None = None
    experts_start: int = 0
    experts: list[np.ndarray] = field(default_factory=list)
    kept: list[KeptTokens] = field(default_factory=list)

    @property
    def rest(self) -> SamplingParams:
        """The sampling parameters of the remaining tokens. The noise of a token depends on its position in prompt and response."""
        return replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - len(self.ids))

    @property
    def experts_from(self) -> int | None:
        """The first token whose experts are not known yet; None: they are not asked for."""
        return None if self.routing is None else self.experts_start + sum(map(len, self.experts))

    def add(self, answer: dict[str, Any], version: int | None, interrupted: bool) -> Generation | None:
        """Take SGLang's answer to the last request; returns the complete response if the answer ended it, else None.

        Args:
            version: version of the served weights.
            interrupted: whether SGLang was told to abort all requests.

        Raises:
            EngineError: the request was aborted for another reason, or answered by other weights.
        """
        meta = answer["meta_info"]
        reason, ids = meta["finish_reason"]["type"], answer["output_ids"]
        versions = {int(span["version"]) for span in meta.get("weight_versions") or []}
        known = ("stop", "length", "abort") if interrupted else ("stop", "length")
        # A request that was interrupted before its first token may name no version.
        if version is None or reason not in known or not (versions == {version} or not (ids or versions)):
            raise EngineError(
                f"{self.uid}: finished by {meta['finish_reason']}, served by versions {versions} instead of {version}"
            )
        assert [token for _, token, _ in meta.get("output_token_logprobs", [])] == ids
        returned = {"routed_experts": self.routing is not None, KEPT: self.sampling.return_kept}
        if ids and any(wanted and name not in meta for name, wanted in returned.items()):
            # SGLang put the request back into its queue, and forgot its experts or kept tokens: it is asked for these tokens again.
            assert reason == "abort", meta["finish_reason"]
            ids = []
        if ids:
            log_probs = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
            if self.routing is not None:
                self.experts.append(self.routing.read(meta["routed_experts"]))
            if self.sampling.return_kept:
                kept, log_probs = read_kept(meta[KEPT])
                assert len(kept.counts) == len(log_probs) == len(ids), (kept.counts, ids)
                self.kept.append(kept)
            self.ids += ids
            self.log_probs += log_probs
            self.versions = (version if self.versions is None else self.versions[0], version)
        if reason == "abort":
            reason = self._end()
        if reason is None:
            return None
        assert self.versions is not None, "a response has a token"
        first, last = self.versions
        experts = np.concatenate(self.experts) if self.routing is not None else None
        return Generation(
            self.uid,
            self.ids,
            self.log_probs,
            reason,
            first,
            last_weight_version=last,
            routed_experts=experts,
            kept=KeptTokens.joined(self.kept) if self.sampling.return_kept else None,
        )

    def _end(self) -> str | None:
        """Why an interrupted response has ended all the same (SGLang 0.5.21 reports "abort" also at a response's end); None: it goes on."""
        if self.ids and not self.sampling.ignore_eos and self.ids[-1] in self.ends:
            return "stop"
        if len(self.ids) == self.sampling.max_new_tokens:
            return "length"
        # Penalties count tokens of the response, and SGLang would take this piece for a part of the prompt: begin anew.
        if self.sampling.has_penalties:
            self.ids, self.log_probs, self.versions, self.experts, self.kept = [], [], None, [], []
        return "length" if self.room is not None and len(self.ids) > self.room else None


class BatchingSocket:
    """SGLang's socket to its schedulers, which sends all messages of one pass of the event loop together.

    They are parts of one ZeroMQ message: SGLang receives each part as a message of its own, but ZeroMQ delivers none before all have
    arrived. Otherwise the scheduler would compute the first of many requests alone, while the others are still being prepared.
    """

    def __init__(self, socket: zmq.Socket, loop: asyncio.AbstractEventLoop) -> None:
        self._socket, self._loop = socket, loop
        self._waiting: list[tuple[bytes, int]] = []

    def send(self, message: bytes, flags: int = 0) -> asyncio.Future:
        self._waiting.append((message, flags))
        if not self._loop.is_running():
            self._flush()
        elif len(self._waiting) == 1:
            self._loop.call_soon(self._flush)
        sent = self._loop.create_future()  # as SGLang's own socket returns one
        sent.set_result(None)
        return sent

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int | None = None) -> asyncio.Future:
        """Pickled at once: SGLang changes objects that it has sent."""
        return self.send(pickle.dumps(message, protocol), flags)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for number, (message, flags) in enumerate(waiting, start=1):
            self._socket.send(message, flags=flags if number == len(waiting) else flags | zmq.SNDMORE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)
