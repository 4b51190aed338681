"""One request to SGLang: what may be asked, how it is asked, and what the answer says."""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from megarl.rollout.engine import EngineError, Generation, SamplingParams


def request_seed(seed: int, uid: str) -> int:
    """The seed of one response: 63 bits of (seed, uid)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{uid}".encode()).digest()[:8]) >> 1


def check_prompt(uid: str, ids: Sequence[int], max_new_tokens: int, context: int, vocab_size: int) -> None:
    """Refuse what SGLang answers by dying.

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
) -> dict[str, Any]:
    """SGLang's answer to a prompt. A task of this that is cancelled aborts the request.

    Args:
        manager: SGLang's TokenizerManager.
        adapter: the name of the adapter that answers; None: the model without any.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(
        input_ids=list(ids),
        sampling_params=sglang_sampling(sampling, uid, stop_token_ids),
        return_logprob=True,
        lora_path=adapter,
    )
    # Closed at once: until then it holds the lock that an update of the weights waits for (0.5.21).
    async with aclosing(manager.generate_request(request, None)) as answers:
        return await anext(answers)


def sglang_sampling(sampling: SamplingParams, uid: str, stop_token_ids: Sequence[int]) -> dict[str, object]:
    """The arguments of SGLang's SamplingParams."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "stop_token_ids": list(stop_token_ids),
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": request_seed(sampling.seed, uid),
    }


def read_answer(uid: str, answer: dict[str, Any], version: int | None) -> Generation:
    """The generation of an answer.

    Args:
        version: of the weights that are served.

    Raises:
        EngineError: it was aborted, or served by other weights.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    versions = {int(span["version"]) for span in meta["weight_versions"]}
    if version is None or reason not in ("stop", "length") or versions != {version}:
        raise EngineError(f"{uid}: finished by {meta['finish_reason']}, served by versions {versions}")
    log_probs = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    return Generation(uid, answer["output_ids"], log_probs, reason, version)
