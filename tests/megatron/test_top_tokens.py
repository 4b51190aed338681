"""The divergence over another model's most likely tokens, against unsharded logits, TRL's divergence and torch's autograd."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.heads.divergence import token_divergence
from megarl.megatron.heads.top_tokens import chosen_log_probs, top_divergence, top_tokens
from tests.megatron.hf import VOCAB
from tests.megatron.test_full_kl import generalized_jsd_loss, other_head, upstream
from tests.megatron.test_logprobs import TOKENS, hugging_face_head, share_of
from tests.ranks import RankPool

COUNT = 5


def with_others(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [tokens, k + 1]: of the tokens `ids`, and of all other tokens together."""
    chosen = log_probs.gather(1, ids)
    rest = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([chosen, rest], dim=1)


def each_divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """TRL's divergence per token. It takes logits, as which log-probabilities will do, and reduces over tokens, so it gets one at a time."""
    rows = [slice(number, number + 1) for number in range(len(log_p))]
    return torch.stack(
        [generalized_jsd_loss()(log_p[None, row], log_q[None, row], beta=beta) for row in rows]
    )


def _learnt(
    rank: int, world: int, temperature: float, chunk_tokens: int, beta: float, count: int
) -> tuple[Tensor, ...]:
    hidden, weight, labels = hugging_face_head()
    other_hidden, other_weight = other_head()
    settings = {
        "vocab_size": weight.shape[0],
        "temperature": temperature,
        "chunk_tokens": chunk_tokens,
        "tp_group": dist.group.WORLD,
    }
    ids, log_q = top_tokens(other_hidden, share_of(other_weight, rank, world), count, **settings)
    hidden, share = hidden.requires_grad_(), share_of(weight, rank, world).requires_grad_()
    log_p = chosen_log_probs(hidden, share, ids, **settings)
    found = top_divergence(log_p, log_q, beta)
    (found * upstream()).sum().backward()
    dist.all_reduce(hidden.grad)
    others = other_hidden, share_of(other_weight, rank, world)
    whole = token_divergence(hidden.detach(), share.detach(), *others, labels, **settings, beta=beta)[:, 0]
    return ids, log_q, log_p.detach(), found.detach(), hidden.grad, share.grad, whole


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
@pytest.mark.parametrize(
    ("world", "chunk_tokens", "temperature"),
    [(1, 1000, 1.0), (1, 1, 0.7), (2, 7, 1.3), (4, 5, 0.5)],  # with 4, one rank has only padding
)
def test_equals_whole_logits_and_autograd(
    ranks: RankPool, world: int, chunk_tokens: int, temperature: float, beta: float
) -> None:
    hidden, weight, _ = hugging_face_head()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    other_hidden, other_weight = (tensor.double() for tensor in other_head())
    all_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    all_q = (other_hidden @ other_weight.t() / temperature).log_softmax(-1)
    best, wanted_ids = all_q.topk(COUNT)
    wanted = each_divergence(with_others(all_p, wanted_ids), with_others(all_q, wanted_ids), beta)
    (wanted * upstream().double()).sum().backward()
    results = ranks.run(_learnt, temperature, chunk_tokens, beta, COUNT, world=world)
    for ids, log_q, log_p, found, grad_hidden, _, whole in results:
        assert torch.equal(ids, wanted_ids) and found.shape == (TOKENS,)
        for one, other in ((log_q, best), (log_p, all_p.gather(1, wanted_ids)), (found, wanted)):
            torch.testing.assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad_hidden.double(), hidden.grad, rtol=1e-5, atol=1e-5)
        assert (found < whole + 1e-6).all() and (found < 0.99 * whole).any()
    grad_weight = torch.cat([result[5] for result in results])
    torch.testing.assert_close(grad_weight[:VOCAB].double(), weight.grad, rtol=1e-5, atol=1e-5)
    assert not grad_weight[VOCAB:].any()


def test_all_tokens_but_one_are_the_whole_vocabulary(ranks: RankPool) -> None:
    for beta in (1.0, 0.0, 0.5):
        for *_, found, _, _, whole in ranks.run(_learnt, 1.0, 9, beta, VOCAB - 1, world=2):
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


def test_by_hand() -> None:
    """p = (1/2, 1/4 | 1/4) and q = (1/4, 1/4 | 1/2): KL(p || q) = 1/2 log 2 - 1/4 log 2."""
    log_p, log_q = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    quarter = torch.tensor([0.25 * math.log(2.0)])
    torch.testing.assert_close(top_divergence(log_p, log_q, 1.0), quarter)
    torch.testing.assert_close(top_divergence(log_p, log_q, 0.0), quarter)


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.5])
def test_tokens_that_leave_nothing_to_others_are_finite(beta: float) -> None:
    """A model that is certain of its tokens, whose probabilities add up to more than 1 by rounding."""
    log_p = torch.tensor([[1e-7, -40.0]], requires_grad=True)
    found = top_divergence(log_p, torch.tensor([[-0.1, -3.0]]), beta)
    found.sum().backward()
    assert found.isfinite().all() and log_p.grad.isfinite().all()
