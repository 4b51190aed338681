"""Vocab-parallel log-probabilities and entropies against Hugging Face's unsharded logits and torch's autograd."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.megatron.heads.log_probs import token_log_probs

VOCAB, PADDED, HIDDEN, TOKENS = 300, 512, 32, 23


def hugging_face_head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [tokens, hidden], output weight [vocab, hidden] and labels [tokens] of a tiny Qwen2."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        hidden = model.model(torch.randint(0, VOCAB, (1, TOKENS))).last_hidden_state[0]
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[:2] = torch.tensor([0, VOCAB - 1])
    return hidden, model.lm_head.weight.detach(), labels


def upstream() -> torch.Tensor:
    """Some loss's gradient with respect to log-probability and entropy, [tokens, 2]."""
    return torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(8))


def expected(temperature: float, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and the gradients of hidden and weight, from unsharded logits in float64."""
    hidden, weight, labels = hugging_face_head()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    outputs = [log_p.gather(1, labels[:, None])[:, 0]]
    if with_entropy:
        outputs.append(-(log_p.exp() * log_p).sum(-1))
    output = torch.stack(outputs, 1)
    output.backward(upstream()[:, : output.shape[1]].double())
    return output.detach(), hidden.grad, weight.grad


def share_of(weight: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    # Padding rows have values that would dominate every softmax if they were included.
    padding = torch.full((PADDED - VOCAB, HIDDEN), 50.0)
    return torch.cat([weight, padding]).chunk(world)[rank].clone()


def _outputs_and_gradients(
    rank: int, world: int, temperature: float, chunk_tokens: int, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, labels = hugging_face_head()
    share = share_of(weight, rank, world).requires_grad_()
    hidden = hidden.requires_grad_()
    output = token_log_probs(
        hidden,
        share,
        labels,
        vocab_size=VOCAB,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        tp_group=dist.group.WORLD,
        with_entropy=with_entropy,
    )
    output.backward(upstream()[:, : output.shape[1]])
    dist.all_reduce(hidden.grad)
    return output.detach(), hidden.grad, share.grad


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(
    ("world", "chunk_tokens", "temperature"),
    [(1, 1000, 1.0), (1, 1, 0.7), (2, 7, 1.0), (2, TOKENS, 1.3), (4, 5, 0.5)],  # of 4, one has only padding
)
def test_equals_whole_logits(
    ranks, world: int, chunk_tokens: int, temperature: float, with_entropy: bool
) -> None:
    results = ranks.run(_outputs_and_gradients, temperature, chunk_tokens, with_entropy, world=world)
    output, grad_hidden, grad_weight = expected(temperature, with_entropy)
    whole = torch.cat([grad for _, _, grad in results])
    for local_output, local_grad_hidden, _ in results:
        assert local_output.dtype == torch.float32
        torch.testing.assert_close(local_output.double(), output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(local_grad_hidden.double(), grad_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[:VOCAB].double(), grad_weight, rtol=1e-5, atol=1e-5)
    assert not whole[VOCAB:].any()


def _bfloat16(rank: int, world: int, chunk_tokens: int) -> tuple[torch.Tensor, ...]:
    hidden, weight, labels = hugging_face_head()
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    settings = {"vocab_size": VOCAB, "temperature": 1.0, "tp_group": dist.group.WORLD, "with_entropy": True}
    output = token_log_probs(hidden, weight, labels, chunk_tokens=chunk_tokens, **settings)
    output.backward(upstream())
    return output.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [3, 1000])
def test_bfloat16_is_close(ranks, chunk_tokens: int) -> None:
    (results,) = ranks.run(_bfloat16, chunk_tokens, world=1)
    assert [tensor.dtype for tensor in results] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for found, wanted in zip(results, expected(1.0, True), strict=True):
        # bfloat16 keeps 8 bits: errors are about 1% of the largest values.
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.02 * wanted.abs().max().item())


def _extreme(rank: int, world: int) -> torch.Tensor:
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0], [math.nan]]).chunk(world)[rank].clone().requires_grad_()
    settings = {"vocab_size": 3, "temperature": 1.0, "chunk_tokens": 2, "tp_group": dist.group.WORLD}
    output = token_log_probs(hidden, weight, torch.tensor([0, 0, 1]), with_entropy=True, **settings)
    output.sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    return output.detach()


@pytest.mark.parametrize("world", [1, 2])
def test_extreme_logits_stay_finite(ranks, world: int) -> None:
    third = math.log(3)
    for output in ranks.run(_extreme, world=world):
        torch.testing.assert_close(output, torch.tensor([[0.0, 0.0], [-2e4, 0.0], [-third, third]]))


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def _largest(rank: int, world: int, tokens: int, chunk_tokens: int) -> int:
    vocab, hidden_size = 1024, 4
    share = vocab // world
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(share, hidden_size, requires_grad=True)
    with LargestTensor() as largest:
        output = token_log_probs(
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.long),
            vocab_size=vocab,
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            tp_group=dist.group.WORLD,
            with_entropy=True,
        )
        output.sum().backward()
    return largest.numel


@pytest.mark.parametrize("tokens", [64, 512])
def test_no_tensor_exceeds_a_chunk_of_local_logits(ranks, tokens: int) -> None:
    assert ranks.run(_largest, tokens, 16, world=2) == [16 * 512] * 2
