"""The training of indexers, against losses and gradients of section 2.1 of arXiv:2512.02556, in torch on Hugging Face's modules."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from megarl.layout import Piece
from megarl.megatron.build import gather_parameters, local_parameters, unwrap
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import PackedBatch
from megarl.megatron.sparse import selection
from megarl.megatron.sparse.learning import IndexerLoss, Lesson, _Learnt
from megarl.megatron.sparse.selection import Run
from megarl.megatron.step import train_step, with_predictions
from tests.fixtures.indexers import CHOOSING
from tests.megatron.hf import Rank, check_gradients, place_model
from tests.megatron.parity import OPTIM, VOCAB, batches_of, half_counted
from tests.megatron.test_families import FAMILIES, hugging_face
from tests.megatron.test_prediction import DEPTH, LAYERS, Oracle
from tests.ranks import RankPool

TOPK = CHOOSING["index_topk"]
COEF, MTP_COEF = 0.7, 0.3
LENGTHS = (31, 12, 40, 23, 6, 9, 7, 3)  # three are too short to teach, two in a micro-batch of their own
SHARING = {"indexer_types": ["full", "shared", "shared", "full"]}

Result = tuple[dict[str, float], list[tuple[Piece, torch.Tensor]]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """From a family to the folder of its tiny model; DeepSeek's has two multi-token prediction layers."""

    @cache
    def make(name: str) -> str:
        folder, family = tmp_path_factory.mktemp("learning"), FAMILIES[name]
        make_tiny_model(
            folder,
            ["two words"],
            vocab_size=VOCAB,
            hidden_size=64,
            ffn_hidden_size=96,
            num_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            family=family.name,
            num_mtp_layers=DEPTH if name == "deepseek_v32" else 0,
            fields={"initializer_range": 0.1, **family.fields, **(SHARING if name == "glm_moe_dsa" else {})},
            seed=5,
        )
        return str(folder)

    return make


class Watched:
    """The last probabilities of one of Hugging Face's attention modules, and its indexer's last inputs."""

    def __init__(self, attention: torch.nn.Module) -> None:
        self.attention, self.indexer = attention, attention.indexer
        attention.config._attn_implementation = "eager"  # only this one returns the probabilities
        attention.register_forward_hook(lambda module, inputs, output: setattr(self, "weights", output[1]))
        self.indexer.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        (self.x, self.low, angles), self.chosen = inputs[:3], output[0]
        self.cos, self.sin = angles

    def divergence(self, counts: torch.Tensor) -> torch.Tensor:
        """KL(p || softmax(I)) over the chosen keys, summed over the queries that count."""
        own, length = self.indexer, len(counts)
        queries = (self.low.detach()[0] @ own.wq_b.weight.T).view(length, own.n_heads, own.head_dim)
        keys = own.k_norm(self.x.detach()[0] @ own.wk.weight.T)
        products = torch.einsum("qhd,kd->qhk", self._rotated(queries), self._rotated(keys[:, None])[:, 0])
        weights = self.x.detach()[0] @ own.weights_proj.weight.T
        scores = (weights[..., None] * products.relu()).sum(1) * (own.n_heads * own.head_dim) ** -0.5
        p = self.weights.detach()[0].sum(0)
        p = p / p.sum(-1, keepdim=True)
        total = torch.zeros(())
        for query in range(length):
            keys_of_query = [key for key in self.chosen[query].tolist() if key <= query]
            assert len(keys_of_query) == min(query + 1, TOPK)
            log_q = scores[query, keys_of_query].log_softmax(-1)
            target = p[query, keys_of_query]
            if counts[query]:
                total = total + (target * (target.log() - log_q)).sum()
        return total

    def _rotated(self, part: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] with the first dimensions rotated, in pairs of neighbours or of dimensions that are half of them apart."""
        size = self.cos.shape[-1]
        cos, sin = (values[0, :, None, : size // 2] for values in (self.cos, self.sin))
        rotated, rest = part[..., :size], part[..., size:]
        neighbours = getattr(self.indexer.config, "indexer_rope_interleave", False)
        first, second = (rotated[..., ::2], rotated[..., 1::2]) if neighbours else rotated.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def learn_by_hand(folder: str, name: str) -> tuple[torch.nn.Module, float, int]:
    """The oracle with the gradients of all losses, the sum of the divergences without their coefficient, and the number of their queries."""
    depth = DEPTH if name == "deepseek_v32" else 0
    oracle = Oracle(folder, name) if depth else hugging_face(folder, FAMILIES[name])
    main = oracle.main if depth else oracle
    watched = [Watched(layer.self_attn) for layer in main.model.layers if layer.self_attn.indexer is not None]
    ahead = [0] * len(watched)
    if depth:
        watched += [Watched(layer.own.self_attn) for layer in oracle.layers]
        ahead += range(1, depth + 1)
    total, taught = 0.0, 0
    for ids, mask in zip(
        *(half_counted(LENGTHS)[column].to_pylist() for column in ("input_ids", "loss_mask")), strict=True
    ):
        tokens, counts = torch.tensor(ids), torch.tensor(mask)
        if depth:
            losses = oracle.losses(tokens, counts, detached=True)
            loss = losses[0] + MTP_COEF / depth * losses[1:].sum()
        else:
            log_p = main(tokens[None]).logits[0, :-1].log_softmax(-1)
            loss = -(log_p.gather(1, tokens[1:, None])[:, 0] * counts[1:]).sum()
        if len(ids) > TOPK:
            for attention, places in zip(watched, ahead, strict=True):
                live = counts[1 + places :]  # at the position that predicts the token
                live = torch.cat([live, torch.zeros(len(ids) - places - len(live), dtype=torch.bool)])
                own = attention.divergence(live)
                loss, total, taught = loss + COEF * own, total + own.item(), taught + int(live.sum())
        loss.backward()
    return oracle, total, taught


def _loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -output.sum(), {"loss": -output.sum()}


def _place(
    rank: int, world: int, sizes: dict, folder: str, options: dict, clip_grad: float
) -> tuple[Rank, IndexerLoss | None, Callable]:
    """A model on this rank, the loss of its indexers, and a function that takes a step."""
    place = place_model(rank, world, sizes, folder, **options)
    added = IndexerLoss(unwrap(place.chunks)) if options.get("indexers") else None
    optimizer, scheduler = build_optimizer(place.chunks, replace(OPTIM, clip_grad=clip_grad))
    depth = place.chunks[0].config.mtp_num_layers or 0
    both = with_predictions(_loss, depth, MTP_COEF, "") if depth else _loss
    head, batches = (
        lm_head(vocab_size=VOCAB, chunk_tokens=16),
        batches_of(half_counted(LENGTHS), place.layout, depth),
    )

    def step(order: int = 1) -> float:
        if added is not None:
            added.begin(COEF)
        result = train_step(place.chunks, optimizer, scheduler, batches[::order], head, both)
        assert result.ok
        return result.grad_norm

    return place, added, step


def _gradients(rank: int, world: int, sizes: dict, folder: str, options: dict, limit: int) -> Result:
    """The sums and gradients of a step. `limit`: bytes of scores at a time."""
    place, added, step = _place(rank, world, sizes, folder, options, clip_grad=1e9)
    with mock.patch.object(selection, "LIMIT", limit):
        step()
    return {} if added is None else added.sums(""), place.gradients()


GRID = {
    "one": (1, {}),
    "tp2_sp_ep2": (2, {"tp": 2, "sp": True, "ep": 2}),
    "cp2_ep2": (2, {"cp": 2, "ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "dp2": (2, {"ep": 2}),
    "tp2_sp_cp2_ep4": (4, {"tp": 2, "sp": True, "cp": 2, "ep": 4}),
}
OVERLAP = {"overlap_grad_reduce": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
CASES = [
    ("deepseek_v32", "one", {}),
    ("deepseek_v32", "tp2_sp_cp2_ep4", {}),
    ("glm_moe_dsa", "tp2_sp_ep2", {"recompute_granularity": "full"}),
    ("deepseek_v32", "dp2", OVERLAP),
    ("deepseek_v32", "pp2", SELECTIVE),
    ("deepseek_v32", "tp2_sp_ep2", SELECTIVE),
    ("deepseek_v32", "cp2_ep2", {"recompute_granularity": "full"}),
    ("glm_moe_dsa", "one", {}),
    ("glm_moe_dsa", "cp2_ep2", {}),
    ("deepseek_v32", "pp2_vpp2", {}),
]
OFTEN = 4  # the others run with --slow: these cover their special features, too


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        pytest.param(*case, marks=pytest.mark.slow if number >= OFTEN else ())
        for number, case in enumerate(CASES)
    ],
)
def test_losses_and_gradients_are_the_papers(
    ranks: RankPool, folder_of: Callable[[str], str], name: str, layout: str, options: dict[str, Any]
) -> None:
    """Indexers get gradients from their own loss only, and all other weights none from it."""
    (world, sizes), folder = GRID[layout], folder_of(name)
    oracle, total, taught = learn_by_hand(folder, name)
    options = {**options, "indexers": True, "mtp": "detached" if name == "deepseek_v32" else None}
    limit = 2000 if layout == "tp2_sp_cp2_ep4" else selection.LIMIT  # in parts of few queries, and at once
    results = ranks.run(_gradients, sizes, folder, options, limit, world=world)
    for sums, _ in results:
        assert sums["indexer_loss"] == pytest.approx(total, rel=1e-4)
        assert sums["indexer_tokens"] == taught
    check_gradients(oracle, [gradients for _, gradients in results])
    for name, parameter in oracle.named_parameters():
        assert ".indexer." not in name or parameter.grad.abs().max() > 1e-3, "too small to compare"


def _update(
    rank: int, world: int, sizes: dict, folder: str, options: dict
) -> tuple[float, dict[str, torch.Tensor]]:
    """A step with clipping. Returns: its gradient's norm, and the weights after it."""
    place, _, step = _place(rank, world, sizes, folder, options, clip_grad=0.01)
    norm = step()
    return norm, {name: weight.clone() for name, weight in local_parameters(place.chunks).items()}


@pytest.mark.parametrize("layout", ["one", pytest.param("tp2_sp_ep2", marks=pytest.mark.slow)])
def test_other_weights_learn_the_same_bits(
    ranks: RankPool, folder_of: Callable[[str], str], layout: str
) -> None:
    """Although gradients are clipped; and frozen indexers keep the weights of the file."""
    (world, sizes), folder = GRID[layout], folder_of("deepseek_v32")
    frozen = ranks.run(_update, sizes, folder, {}, world=world)
    trained = ranks.run(_update, sizes, folder, {"indexers": True}, world=world)
    read = load_file(f"{folder}/model.safetensors")
    for (norm, before), (other, after) in zip(frozen, trained, strict=True):
        assert norm == other > 0.01
        assert before.keys() == after.keys()
        moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
        indexers = {name for name in before if ".indexer." in name}
        assert moved == indexers and len(indexers) == 5 * LAYERS
        for name in indexers:
            layer, own = name.removeprefix("0:decoder.layers.").split(".self_attention.")
            assert torch.equal(before[name], read[f"model.layers.{layer}.self_attn.{own}"])


def test_short_texts_teach_nothing(ranks: RankPool, folder_of: Callable[[str], str]) -> None:
    """A step with only short texts is a valid step, with zero gradients for indexers."""
    ((sums, gradients),) = ranks.run(_short, folder_of("deepseek_v32"), world=1)
    assert sums == {"indexer_loss": 0.0, "indexer_tokens": 0.0}
    found = [gradient for piece, gradient in gradients if ".indexer." in piece.tensor]
    assert len(found) == 5 * LAYERS and not any(gradient.any() for gradient in found)


def _short(rank: int, world: int, folder: str) -> Result:
    with mock.patch.object(sys.modules[__name__], "LENGTHS", (TOPK, 3, 5, TOPK)):
        return _gradients(
            rank, world, {}, folder, {"indexers": True, "overlap_grad_reduce": True}, selection.LIMIT
        )


def _buckets(rank: int, world: int, folder: str, overlaps: bool) -> dict[str, torch.Tensor]:
    """The weights after three steps; the second step ends with a micro-batch that teaches indexers. `overlaps`: gradients are reduced during
    a backward pass, and weights gathered during the next forward pass, in small buckets."""
    ddp = {"overlap_param_gather": overlaps, "overrides": {"bucket_size": 5000}}
    options = {
        "indexers": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": overlaps,
        "ddp": ddp,
    }
    place, _, step = _place(rank, world, {"ep": 2}, folder, options, 1e9)
    for order in (1, -1, 1):
        step(order)
    gather_parameters(place.chunks)
    return {name: weight.clone() for name, weight in local_parameters(place.chunks).items()}


def test_overlaps_change_nothing(ranks: RankPool, folder_of: Callable[[str], str]) -> None:
    """Weights that are gathered late are up to date, and gradients are reduced only when all of them are there."""
    folder = folder_of("deepseek_v32")
    found = [ranks.run(_buckets, folder, overlaps, world=2) for overlaps in (False, True)]
    for plain, overlapping in zip(*found, strict=True):
        for name, weight in plain.items():
            torch.testing.assert_close(overlapping[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_small_gradients_of_float16() -> None:
    """Gradients are not scaled yet when the indexers' loss computes them."""

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        tokens, heads = 200, 2
        queries, keys = (
            torch.randn(*shape, 8, generator=generator) for shape in ((tokens, heads), (tokens,))
        )
        inputs = [
            part.half().to(kind).requires_grad_()
            for part, kind in (
                (queries, dtype),
                (keys, dtype),
                (torch.rand(tokens, heads, generator=generator) * 1e-4, torch.float32),
            )
        ]
        part = Run(0, 0, tokens, 0)
        lesson = Lesson(
            *(given.detach() for given in inputs),
            own=range(tokens),
            chosen=torch.zeros(tokens, tokens // 8, dtype=torch.uint8),
            counts=torch.ones(tokens, dtype=torch.bool),
            texts=frozenset({0}),
            topk=tokens,
            heads=1,
            group=SimpleNamespace(size=lambda: 1),
        )
        scores = torch.randn(1, tokens, tokens, generator=generator)
        lesson.add(
            part, scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
        )
        return list(torch.autograd.grad(1024 * _Learnt.apply(*inputs, lesson), inputs))

    for half, whole in zip(gradients(torch.float16), gradients(torch.float32), strict=True):
        torch.testing.assert_close(half.float(), whole, rtol=2e-2, atol=2e-2 * whole.abs().mean().item())
