"""Log-probabilities over kept tokens, against a plain loop of truncated log-softmaxes and torch's autograd."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.heads.kept import kept_log_probs
from megarl.megatron.heads.log_probs import token_log_probs
from megarl.megatron.packing import KeptVocabulary
from tests.megatron.test_logprobs import (
    TOKENS,
    VOCAB,
    LargestTensor,
    hugging_face_head,
    share_of,
    upstream,
)
from tests.ranks import RankPool


def kept_sets(everything: bool = False) -> list[Tensor]:
    """For each position one to sixty tokens in random order, including the label; or (`everything`) all tokens."""
    _, _, labels = hugging_face_head()
    generator = torch.Generator().manual_seed(3)
    sets = []
    for number, label in enumerate(labels.tolist()):
        others = torch.randperm(VOCAB, generator=generator)
        others = others[others != label][: VOCAB if everything else (0, 1, 59)[number % 3]]
        own = torch.cat([others, torch.tensor([label])])
        sets.append(own[torch.randperm(len(own), generator=generator)])
    return sets


def packed(sets: list[Tensor]) -> KeptVocabulary:
    counts = torch.tensor([len(own) for own in sets], dtype=torch.int64)
    bounds = np.concatenate([[0], counts.cumsum(0).numpy()])
    return KeptVocabulary(torch.cat([*sets, torch.empty(0)]).int(), counts, bounds)


def plain_loop(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the gradients of hidden and weight, computed position by position in float64."""
    hidden, weight, labels = hugging_face_head()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    rows = []
    for state, label, own in zip(hidden, labels, kept_sets(), strict=True):
        log_p = (state @ weight[own].t() / temperature).log_softmax(-1)
        rows.append(torch.stack([log_p[own == label].sum(), -(log_p.exp() * log_p).sum()]))
    output = torch.stack(rows)
    output.backward(upstream().double())
    return output.detach(), hidden.grad, weight.grad


def _outputs_and_gradients(
    rank: int, world: int, temperature: float, chunk_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    hidden, weight, labels = hugging_face_head()
    hidden = hidden.to(dtype).requires_grad_()
    share = share_of(weight, rank, world).to(dtype).requires_grad_()
    settings = {
        "vocab_size": VOCAB,
        "temperature": temperature,
        "chunk_tokens": chunk_tokens,
        "tp_group": dist.group.WORLD,
    }
    kept = packed(kept_sets())
    output = kept_log_probs(hidden, share, labels, kept, **settings, with_entropy=True)
    output.backward(upstream())
    dist.all_reduce(hidden.grad)
    with torch.no_grad():
        alone = kept_log_probs(hidden, share, labels, kept, **settings, with_entropy=False)
        complete = kept_log_probs(
            hidden, share, labels, packed(kept_sets(True)), **settings, with_entropy=True
        )
        of_all = token_log_probs(hidden, share, labels, **settings, with_entropy=True)
    return output.detach(), hidden.grad, share.grad, alone, complete, of_all


@pytest.mark.parametrize(
    ("world", "chunk_tokens", "temperature"),
    [(1, 1000, 1.0), (1, 1, 0.7), (2, 7, 1.3), (4, 5, 0.5)],  # with 4, one rank has only padding
)
def test_equals_a_plain_loop(ranks: RankPool, world: int, chunk_tokens: int, temperature: float) -> None:
    """A pass without entropies has the same bits; if all tokens are kept, the results are those of `token_log_probs`."""
    results = ranks.run(_outputs_and_gradients, temperature, chunk_tokens, torch.float32, world=world)
    wanted, grad_hidden, grad_weight = plain_loop(temperature)
    for output, own_grad_hidden, _, alone, complete, of_all in results:
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), wanted, rtol=1e-5, atol=1e-5)
        assert not output[::3].any()  # positions with a single kept token
        torch.testing.assert_close(own_grad_hidden.double(), grad_hidden, rtol=1e-5, atol=1e-5)
        assert torch.equal(alone[:, 0], output[:, 0])
        torch.testing.assert_close(complete, of_all, rtol=1e-5, atol=1e-5)
    found = torch.cat([result[2] for result in results])
    torch.testing.assert_close(found[:VOCAB].double(), grad_weight, rtol=1e-5, atol=1e-5)
    assert not found[VOCAB:].any()


def test_bfloat16_is_close(ranks: RankPool) -> None:
    ((*found, _, _, _),) = ranks.run(_outputs_and_gradients, 1.0, 7, torch.bfloat16, world=1)
    assert [tensor.dtype for tensor in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for one, wanted in zip(found, plain_loop(1.0), strict=True):
        one = one[:VOCAB] if one.shape[0] > TOKENS else one
        torch.testing.assert_close(one.double(), wanted, rtol=0, atol=0.02 * wanted.abs().max().item())


def _largest(rank: int, world: int, tokens: int) -> int:
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(1024 // world, 4, requires_grad=True)
    labels = torch.randint(0, 1000, (tokens,))
    kept = packed([label + torch.arange(3) for label in labels])
    settings = {"vocab_size": 1024, "temperature": 1.0, "chunk_tokens": 16, "tp_group": dist.group.WORLD}
    with LargestTensor() as largest:
        kept_log_probs(hidden, weight, labels, kept, **settings, with_entropy=True).sum().backward()
    return largest.numel


@pytest.mark.parametrize("tokens", [64, 512])
def test_no_tensor_exceeds_a_chunk_of_logits_of_a_rank(ranks: RankPool, tokens: int) -> None:
    assert ranks.run(_largest, tokens, world=2) == [16 * 512] * 2


def _nothing(rank: int, world: int) -> tuple[Tensor, Tensor]:
    hidden, weight, _ = hugging_face_head()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    settings = {"vocab_size": VOCAB, "temperature": 1.0, "chunk_tokens": 4, "tp_group": dist.group.WORLD}
    labels = torch.empty(0, dtype=torch.int64)
    output = kept_log_probs(hidden, weight, labels, packed([]), **settings, with_entropy=True)
    output.sum().backward()
    return output.detach(), weight.grad


def test_a_part_without_live_tokens_gives_nothing(ranks: RankPool) -> None:
    ((output, grad),) = ranks.run(_nothing, world=1)
    assert output.shape == (0, 2) and not grad.any()
