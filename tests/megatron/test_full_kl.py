"""The exact divergence from another model's distribution, against Hugging Face's unsharded logits, TRL's divergence and torch's autograd."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.megatron.build import build_model, local_parameters
from megarl.megatron.heads.divergence import token_divergence
from megarl.megatron.heads.outputs import head_weight, hidden_head, lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import OtherHead, PackedBatch
from megarl.megatron.parallel import coords
from megarl.megatron.step import forward_only, train_step
from megarl.models import read_model_config
from tests.megatron.hf import (
    VOCAB,
    check_gradients,
    make_table,
    optimizer_settings,
    place_model,
    save_model,
)
from tests.megatron.test_logprobs import TOKENS, LargestTensor, hugging_face_head, share_of
from tests.megatron.test_step import PLANS, TEMPERATURE
from tests.ranks import RankPool
from tests.trl import trl_function


def other_head() -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, hidden] and output weight [vocab, hidden] of a model close to that of `hugging_face_head`."""
    hidden, weight, _ = hugging_face_head()
    generator = torch.Generator().manual_seed(13)
    near = [tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for tensor in (hidden, weight)]
    return near[0], near[1]


def generalized_jsd_loss() -> Callable[..., Tensor]:
    return trl_function("experimental/gkd/gkd_trainer.py", "generalized_jsd_loss")


def expected(temperature: float, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [tokens, 2], gradients of hidden and weight, from unsharded logits in float64 and TRL's divergence."""
    hidden, weight, labels = hugging_face_head()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    other_hidden, other_weight = (tensor.double() for tensor in other_head())
    p, q = hidden @ weight.t(), other_hidden @ other_weight.t()
    log_q = (q / temperature).log_softmax(-1)
    # TRL's function reduces over all tokens, so it gets one token at a time.
    kl = torch.stack(
        [
            generalized_jsd_loss()(p[None, row], q[None, row], beta=beta, temperature=temperature)
            for row in (slice(number, number + 1) for number in range(TOKENS))
        ]
    )
    (kl * upstream().double()).sum().backward()
    output = torch.stack([kl, log_q.gather(1, labels[:, None])[:, 0]], dim=1)
    return output.detach(), hidden.grad, weight.grad


def upstream() -> Tensor:
    """Some loss's gradient with respect to the KL, [tokens]."""
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(8))


def _kl(
    rank: int, world: int, temperature: float, chunk_tokens: int, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = hugging_face_head()
    other_hidden, other_weight = other_head()
    hidden, share = hidden.requires_grad_(), share_of(weight, rank, world).requires_grad_()
    output = token_divergence(
        hidden,
        share,
        other_hidden,
        share_of(other_weight, rank, world),
        labels,
        vocab_size=weight.shape[0],
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        tp_group=dist.group.WORLD,
        beta=beta,
    )
    (output[:, 0] * upstream()).sum().backward()
    dist.all_reduce(hidden.grad)
    return output.detach(), hidden.grad, share.grad


@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3, 0.9])
@pytest.mark.parametrize(
    ("world", "chunk_tokens", "temperature"),
    [(1, 1000, 1.0), (1, 1, 0.7), (2, 7, 1.3), (4, 5, 0.5)],  # with 4, one rank has only padding
)
def test_equals_whole_logits_and_autograd(
    ranks: RankPool, world: int, chunk_tokens: int, temperature: float, beta: float
) -> None:
    results = ranks.run(_kl, temperature, chunk_tokens, beta, world=world)
    output, grad_hidden, grad_weight = expected(temperature, beta)
    assert output[:, 0].min() > 0.01
    whole = torch.cat([grad for _, _, grad in results])
    for local_output, local_grad_hidden, _ in results:
        assert local_output.dtype == torch.float32
        torch.testing.assert_close(local_output.double(), output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(local_grad_hidden.double(), grad_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[: len(grad_weight)].double(), grad_weight, rtol=1e-5, atol=1e-5)
    assert not whole[len(grad_weight) :].any()


def _by_hand(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Two tokens with a vocabulary of two; the hidden states are the logits."""
    hidden = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], requires_grad=True)
    other = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    weight = torch.eye(2).chunk(world)[rank]
    settings = {"vocab_size": 2, "temperature": 1.0, "chunk_tokens": 9, "tp_group": dist.group.WORLD}
    output = token_divergence(hidden, weight, other, weight, torch.tensor([0, 1]), **settings)
    output[:, 0].sum().backward()
    dist.all_reduce(hidden.grad)
    return output.detach(), hidden.grad


@pytest.mark.parametrize("world", [1, 2])
def test_by_hand(ranks: RankPool, world: int) -> None:
    """p = (3/4, 1/4) against q = (1/2, 1/2): KL = 3/4 log(3/2) + 1/4 log(1/2); its gradient is p (log p - log q - KL)."""
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    gradient = [0.75 * (math.log(1.5) - kl), 0.25 * (math.log(0.5) - kl)]
    for output, grad in ranks.run(_by_hand, world=world):
        torch.testing.assert_close(output, torch.tensor([[kl, math.log(0.5)], [0.0, math.log(0.5)]]))
        torch.testing.assert_close(grad, torch.tensor([gradient, [0.0, 0.0]]))


def _same(rank: int, world: int) -> tuple[Tensor, Tensor]:
    hidden, weight, labels = hugging_face_head()
    hidden, share = hidden.half().requires_grad_(), share_of(weight, rank, world).half()
    settings = {"vocab_size": VOCAB, "temperature": 0.9, "chunk_tokens": 4, "tp_group": dist.group.WORLD}
    output = token_divergence(hidden, share, hidden, share, labels, **settings)
    output[:, 0].sum().backward()
    return output[:, 0].detach(), hidden.grad


def test_equal_models_have_no_kl_and_no_gradient(ranks: RankPool) -> None:
    for kl, gradient in ranks.run(_same, world=2):
        assert not kl.any() and not gradient.any()


def _largest(rank: int, world: int) -> int:
    vocab, tokens = 1024, 512
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocab // world, 4, requires_grad=True)
    other = torch.randn(tokens, 4), torch.randn(vocab // world, 4)
    labels = torch.zeros(tokens, dtype=torch.long)
    settings = {"vocab_size": vocab, "temperature": 1.0, "chunk_tokens": 16, "tp_group": dist.group.WORLD}
    with LargestTensor() as largest:
        token_divergence(hidden, weight, *other, labels, **settings)[:, 0].sum().backward()
    return largest.numel


def test_no_tensor_exceeds_a_chunk_of_local_logits(ranks: RankPool) -> None:
    assert ranks.run(_largest, world=2) == [16 * 512] * 2


# Complete models in layouts: a policy and a reference of the same shape.

HEAD = lm_head(vocab_size=VOCAB, temperature=TEMPERATURE, chunk_tokens=16, with_entropy=True)
LAYOUTS = {"tp2-sp": ({"tp": 2, "sp": True}, 2), "pp2": ({"pp": 2}, 2), "cp2": ({"cp": 2}, 2)}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request, tmp_path_factory) -> list[tuple[str, PreTrainedModel]]:
    found = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("model")
        model = save_model(folder, tied=request.param)
        if seed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            model.save_pretrained(folder)
        found.append((str(folder), model))
    return found


def _train(rank: int, world: int, layout: dict, folders: list[str], table: pa.Table) -> tuple[dict, list]:
    place = place_model(rank, world, layout, folders[0])
    config = read_model_config(folders[1])
    reference = build_model(config, place.layout, dtype=torch.float32, trainable=False)
    load_hf_weights(folders[1], config, place.layout, rank, local_parameters(reference))
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    batches = [place.pack(table, rows, ("advantages",)) for rows in PLANS[1][0][coords().dp]]
    hidden = forward_only(reference, batches, hidden_head)
    if hidden[0] is not None:
        weight = head_weight(reference[-1])
        batches = [
            replace(batch, other=OtherHead(states, weight))
            for batch, states in zip(batches, hidden, strict=True)
        ]

    def loss(outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.shape == (batch.num_tokens, 4) and not outputs[~batch.mask].any()
        kl, ref_log_probs = outputs[:, 2], outputs[:, 3]
        loss = (batch.fields["advantages"] * kl)[batch.mask].sum() - outputs[:, 0][batch.mask].sum()
        return loss, {"kl": kl.sum(), "ref_log_probs": ref_log_probs.sum()}

    result = train_step(place.chunks, optimizer, scheduler, batches, HEAD, loss)
    return result.stats, place.gradients()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_with_it_has_hugging_faces_gradient(ranks: RankPool, models, name: str) -> None:
    layout, world = LAYOUTS[name]
    (_, policy), (_, reference) = models
    table = make_table()
    policy.zero_grad()
    total, sums = torch.zeros(()), np.zeros(2)
    for row in table.to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        first, labels = len(row["prompt_ids"]) - 1, torch.tensor(row["response_ids"])[:, None]
        mask = torch.tensor(row["response_mask"])
        log_p = (policy(ids).logits[0, first:-1] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            log_q = (reference(ids).logits[0, first:-1] / TEMPERATURE).log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        total = total + (torch.tensor(row["advantages"]) * kl - log_p.gather(1, labels)[:, 0])[mask].sum()
        sums += [kl[mask].sum().item(), log_q.gather(1, labels)[:, 0][mask].sum().item()]
    total.backward()
    results = ranks.run(_train, layout, [folder for folder, _ in models], table, world=world)
    for stats, _ in results:
        assert stats == {
            "kl": pytest.approx(sums[0], rel=1e-4),
            "ref_log_probs": pytest.approx(sums[1], rel=1e-5),
        }
    check_gradients(policy, [gradients for _, gradients in results])
