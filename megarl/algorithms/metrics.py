"""Logged metrics from sums over tokens and ranks, and how much responses repeat themselves and each other.

`policy_loss` and `value_loss` return sums under metric names. Add them over micro-batches and over ranks that
hold different tokens (data and context parallel ranks of the last pipeline stage, one tensor parallel rank
each), over mini-batches and epochs too if one number a step is wanted, then reduce them once here.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.ragged import check_ragged, segment_sum

_AT_ONCE = 1 << 18  # tokens whose differences stay in a processor's cache
TEACHER_KL, TEACHER_TOKENS = "actor/teacher_kl/", "actor/teacher_tokens/"  # before a teacher's name
DIFFERENCE = "rollout/"  # begins the names of the sums of `RolloutDifference`
# Already divided by one mini-batch's denominator: their sum counts the updates.
_PER_UPDATE = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "critic/vf_loss")
# Plain sums over live tokens, and the logged name of each; other sums of the actor (a policy loss's own) keep theirs.
_PER_TOKEN = {
    "actor/ppo_kl": "actor/ppo_kl",
    "actor/ratio": "actor/ratio_mean",
    "actor/log_ratio_abs": "actor/log_ratio_abs",
    "actor/pg_clipfrac": "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower": "actor/pg_clipfrac_lower",
    "actor/entropy": "actor/entropy",
    "critic/vf_clipfrac": "critic/vf_clipfrac",
    "critic/vpred": "critic/vpred_mean",
}
# Means over tokens of their own: a sum, and the sum that counts them.
_RATIOS = {
    "actor/ptx_loss": "actor/ptx_tokens",
    "actor/given_kl": "actor/given_tokens",
    "actor/routing_changed": "actor/routing_replayed",
    "actor/mtp_loss": "actor/mtp_tokens",
    "actor/indexer_loss": "actor/indexer_tokens",
}


def add_sums(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Add the sums of disjoint parts, in the order given; a part may be empty (a rank without a micro-batch)."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


def reduce_metrics(sums: Mapping[str, Tensor | float], num_updates: int = 1) -> dict[str, float]:
    """Logged metrics from the sums of `num_updates` mini-batches (losses are their mean, the rest token means).

    actor/teacher_kl/<name> is a mean over the tokens that one of several teachers judges.
    actor/given_kl is a mean over the tokens of given responses, actor/own_kl, like the other token means, over the policy's own.
    actor/ptx_loss is a mean over the learnt tokens of the auxiliary texts (PPO-ptx). actor/routing_changed is the share of tokens,
    in layers with replayed experts, whose own choice of experts was another one. actor/mtp_loss, actor/indexer_loss: see `layer_metrics`.
    critic/vf_explained_var is 1 - Var(R - V_old) / Var(R) over live tokens: 1 is a perfect critic, 0 one no
    better than a constant, below 0 a harmful one; left out where the returns do not vary.
    Without live tokens only the losses (0) are reported.
    """
    values = {name: float(value) for name, value in sums.items()}
    out = {name: values[name] / num_updates for name in _PER_UPDATE if name in values}
    teachers = [name for name in values if name.startswith(TEACHER_KL)]
    ratios = _RATIOS | {name: name.replace(TEACHER_KL, TEACHER_TOKENS) for name in teachers}
    out |= {name: values[name] / values[of] for name, of in ratios.items() if values.get(of, 0.0) > 0}
    counted = (*_PER_UPDATE, "actor/tokens", *ratios, *ratios.values())
    own = [name for name in values if name.startswith("actor/") and name not in counted]
    for name in dict.fromkeys([*_PER_TOKEN, *own]):
        tokens = values.get(name.split("/")[0] + "/tokens", 0.0)
        if name in values and tokens > 0:
            out[_PER_TOKEN.get(name, name)] = values[name] / tokens
    explained = _explained_variance(values)
    if explained is not None:
        out["critic/vf_explained_var"] = explained
    return out


def layer_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """train/mtp_loss: -log p in nats, a mean over multi-token prediction layers and the tokens that each of them predicts and that count.
    train/indexer_loss: the divergence of the indexers' scores from attention in nats, a mean over layers with an indexer and the tokens that
    teach. Without tokens there are no such layers, or nothing taught.
    """
    counts = {kind: sums.get(f"{kind}_tokens", 0.0) for kind in ("mtp", "indexer")}
    return {f"train/{kind}_loss": sums[f"{kind}_loss"] / count for kind, count in counts.items() if count > 0}


def _explained_variance(values: Mapping[str, float]) -> float | None:
    tokens = values.get("critic/tokens", 0.0)
    if tokens == 0:
        return None

    def variance(name: str) -> float:
        mean = values[f"critic/{name}_sum"] / tokens
        return values[f"critic/{name}_square_sum"] / tokens - mean * mean

    # A difference of squares: for a constant return it is rounding, to be measured against the square.
    returns = variance("returns")
    if returns <= 1e-12 * values["critic/returns_square_sum"] / tokens:
        return None
    return 1.0 - variance("residual") / returns


def batch_metrics(
    scores: Tensor,
    token_level_rewards: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    truncated: Tensor,
    returns: Tensor | None = None,
    values: Tensor | None = None,
) -> dict[str, float]:
    """The metrics of a train batch, on the controller.

    Args: scores: of the trajectories that have one; the others flat [tokens] with offsets [n + 1]; truncated
    bool [n]: ended by length.
    Returns mean/max/min of critic/score and critic/rewards (per trajectory; rewards: of trajectories with a live token), of
    critic/advantages, critic/returns and critic/values (per live token), of response_length (tokens), and
    response_length/clip_ratio.
    """
    check_ragged(offsets, token_level_rewards, advantages, mask)
    out = _spread("critic/score", scores)
    trained = segment_sum(mask, offsets) > 0
    out |= _spread("critic/rewards", segment_sum(token_level_rewards.double(), offsets)[trained])
    out |= _spread("critic/advantages", advantages[mask])
    if returns is not None:
        out |= _spread("critic/returns", returns[mask])
    if values is not None:
        out |= _spread("critic/values", values[mask])
    out |= _spread("response_length", offsets.diff())
    if truncated.numel() > 0:
        out["response_length/clip_ratio"] = float(truncated.double().mean())
    return out


@dataclass
class RolloutDifference:
    """`rollout_difference` of log-probs that come in parts, on several ranks.

    Attributes:
        largest: of the two differences, so far.
    """

    largest: Tensor | None = None

    def add(self, log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Note a part (flat [tokens]); returns its sums, to be added up."""
        zero = torch.zeros((), dtype=torch.double, device=mask.device)
        trainer, engine = (torch.where(mask, x.double(), zero) for x in (log_probs, rollout_log_probs))
        each = torch.stack([(trainer - engine).abs(), (trainer.exp() - engine.exp()).abs()])
        most = each.amax(1) if mask.numel() else each.new_zeros(2)
        self.largest = most if self.largest is None else torch.maximum(self.largest, most)
        sums = each.sum(1)
        return {
            f"{DIFFERENCE}abs": sums[0],
            f"{DIFFERENCE}probs_abs": sums[1],
            f"{DIFFERENCE}k1": (engine - trainer).sum(),
            f"{DIFFERENCE}k3": kl_estimate(engine, trainer, "k3").sum(),
        }


def reported_difference(
    sums: Mapping[str, float], largest: Sequence[float], tokens: float
) -> dict[str, float]:
    """The metrics of `rollout_difference`, from the sums and the largest of all parts."""
    if not tokens:
        return {}
    k1 = sums[f"{DIFFERENCE}k1"] / tokens
    return {
        "training/rollout_log_prob_diff_mean": sums[f"{DIFFERENCE}abs"] / tokens,
        "training/rollout_log_prob_diff_max": largest[0],
        "training/rollout_probs_diff_mean": sums[f"{DIFFERENCE}probs_abs"] / tokens,
        "training/rollout_probs_diff_max": largest[1],
        "training/rollout_kl": k1,
        "training/rollout_k3_kl": sums[f"{DIFFERENCE}k3"] / tokens,
        "training/rollout_ppl_ratio": math.exp(k1) if k1 < 700 else math.inf,
    }


def rollout_difference(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs are from the engine's on live tokens (flat [tokens]).

    training/rollout_log_prob_diff_{mean,max}: |difference| in nats; training/rollout_probs_diff_{mean,max}:
    |difference| of the probabilities; training/rollout_kl and training/rollout_k3_kl: the k1 and k3 estimates of
    KL(engine || trainer), means of d and exp(-d) - 1 + d with d = engine - trainer log-prob; training/rollout_ppl_ratio:
    the trainer's perplexity of the responses / the engine's. Beyond the precision's rounding they mean that the engine
    serves other weights.
    """
    parts = zip(*(x.split(_AT_ONCE) for x in (old_log_probs, rollout_log_probs, mask)), strict=True)
    difference = RolloutDifference()
    sums = add_sums([difference.add(*part) for part in parts])
    largest = difference.largest.tolist() if difference.largest is not None else ()
    return reported_difference(sums, largest, int(mask.sum()))


def first_difference(sums: Mapping[str, float]) -> dict[str, float]:
    """As `rollout_difference`, as far as it can be told, where the engine's log-probs are the old ones: from the sums of a step's first
    mini-batch, whose policy is still the one that was sampled."""
    tokens = sums["actor/tokens"]
    if tokens == 0:
        return {}
    kl, ratio = sums["actor/ppo_kl"] / tokens, sums["actor/ratio"] / tokens
    return {
        "training/rollout_log_prob_diff_mean": sums["actor/log_ratio_abs"] / tokens,
        "training/rollout_kl": kl,
        "training/rollout_k3_kl": ratio - 1.0 + kl,
        "training/rollout_ppl_ratio": math.exp(kl),
    }


def _spread(name: str, x: Tensor) -> dict[str, float]:
    if x.numel() == 0:
        return {}
    mean = x.mean(dtype=torch.float64)
    return {f"{name}/mean": float(mean), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())}


NGRAM = 4
# Odd numbers that mix the tokens of an n-gram: two different n-grams of a batch collide with probability 2^-64.
_MIXERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)


def duplicate_share(responses: Sequence[np.ndarray], prompts: Sequence[Hashable]) -> float | None:
    """(n - u) / (n - 1) for n responses to a prompt with u different ones: 0 where all differ, 1 where all are equal.
    The mean over prompts with several responses; None without any.

    Args:
        responses: token ids, each [length]; prompts: whose response each one is.
    """
    groups: dict[Hashable, list[bytes]] = {}
    for response, prompt in zip(responses, prompts, strict=True):
        groups.setdefault(prompt, []).append(np.ascontiguousarray(response).tobytes())
    shares = [
        (len(group) - len(set(group))) / (len(group) - 1) for group in groups.values() if len(group) > 1
    ]
    return float(np.mean(shares)) if shares else None


def ngram_repetition(responses: Sequence[np.ndarray]) -> float | None:
    """The share of the runs of `NGRAM` tokens in a response that occurred earlier in it; the mean over responses that
    are long enough to have one, None without any.

    Args:
        responses: token ids, each [length].
    """
    rates = []
    for response in responses:
        count = len(response) - NGRAM + 1
        if count < 1:
            continue
        tokens = np.asarray(response).astype(np.uint64)
        mixed = sum(tokens[offset : offset + count] * _MIXERS[offset] for offset in range(NGRAM))
        mixed.sort()  # np.unique (NumPy 2.4) takes ten times as long: seconds of each step of a large job
        rates.append(1.0 - (1 + np.count_nonzero(mixed[1:] != mixed[:-1])) / count)
    return float(np.mean(rates)) if rates else None
