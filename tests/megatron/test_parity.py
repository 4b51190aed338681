"""Loss, gradient norm and the loss after one optimizer step: Hugging Face's model and every layout agree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from megarl.config.schema import OptimConfig
from megarl.hybrid_engine import load_hf_weights
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters, wrap_for_training
from megarl.megatron.logprobs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packed import PackedBatch, pack_sequences
from megarl.megatron.parallel import coords, init_parallel
from megarl.megatron.step import train_step
from megarl.models import read_model_config
from tests.ranks import RankPool

TOLERANCE = 1e-5
VOCAB = 500  # Megatron pads it to 512, or to 768 where two ranks share it
LENGTHS = (5, 31, 12, 40, 7, 23, 17, 9)
NUM_TARGETS = sum(LENGTHS) - len(LENGTHS)


OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=0.5)


@dataclass(frozen=True)
class Case:
    """A model's folder and what Hugging Face makes of it."""

    folder: str
    expected: list[tuple[float, float]]  # (loss, gradient norm) of two steps


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def make_case(folder: Path, model_class: type = Qwen2ForCausalLM, **changes: Any) -> Case:
    torch.manual_seed(5)
    config = model_class.config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **changes,
    )
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return Case(str(folder), train_hugging_face(model))


def train_hugging_face(model: PreTrainedModel) -> list[tuple[float, float]]:
    """Two steps over all sequences, one at a time, with torch's own AdamW."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    adam = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": OPTIM.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=OPTIM.lr,
        betas=OPTIM.betas,
        eps=OPTIM.eps,
    )
    history = []
    for _ in range(2):
        adam.zero_grad()
        total = 0.0
        for tokens in sequences():
            ids = torch.tensor([tokens])
            logits = model(ids).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / NUM_TARGETS
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
        adam.step()
        history.append((total, norm.item()))
    return history


def batches(layout: ParallelLayout) -> list[PackedBatch]:
    """This data parallel rank's micro-batches, two sequences each."""
    place = coords()
    tokens = sequences()
    table = pa.table(
        {"input_ids": tokens, "loss_mask": [[False] + [True] * (len(ids) - 1) for ids in tokens]}
    )
    rows = list(range(place.dp, len(tokens), layout.dp))
    return [
        pack_sequences(
            table,
            rows[start : start + 2],
            tp=layout.tp,
            cp=layout.cp,
            cp_rank=place.cp,
            sequence_parallel=layout.sp,
        )
        for start in range(0, len(rows), 2)
    ]


def _loss(log_probs: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(log_probs[:, 0] * batch.mask).sum() / NUM_TARGETS
    return loss, {"loss": loss}


def _train(
    rank: int, world: int, case: Case, sizes: dict[str, Any], options: dict[str, Any]
) -> list[tuple[float, float]]:
    """Two steps on this rank. Returns: (global loss, gradient norm) of each."""
    layout = ParallelLayout(world=world, **sizes)
    init_parallel(layout, rank, world)
    wrapping = {"use_distributed_optimizer": options.pop("distributed", True)}
    wrapping["overlap_grad_reduce"] = options.pop("overlap", False)
    config = read_model_config(case.folder)
    chunks = build_model(config, layout, **{"dtype": torch.float32, **options})
    load_hf_weights(case.folder, config, layout, rank, local_parameters(chunks))
    chunks = wrap_for_training(chunks, **wrapping)
    optimizer, scheduler = build_optimizer(chunks, OPTIM)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    history = []
    for _ in range(2):
        result = train_step(chunks, optimizer, scheduler, batches(layout), head, _loss)
        assert result.ok
        history.append((result.stats["loss"], result.grad_norm))
    return history


def check(
    ranks: RankPool,
    case: Case,
    world: int,
    sizes: dict[str, Any],
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    for history in ranks.run(_train, case, sizes, options, world=world):
        for (loss, norm), (expected_loss, expected_norm) in zip(history, case.expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=tolerance)
            assert norm == pytest.approx(expected_norm, rel=tolerance)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(
        tmp_path_factory.mktemp("llama"), LlamaForCausalLM, tie_word_embeddings=False, rope_theta=100.0
    )


GRID = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp4": (4, {"pp": 4}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2_sp_pp2": (4, {"tp": 2, "sp": True, "pp": 2}),
    "tp2_sp_cp2": (4, {"tp": 2, "sp": True, "cp": 2}),
    "pp2_vpp2_dp2": (4, {"pp": 2, "vpp": 2}),
    "tp2_sp_pp2_dp2": (8, {"tp": 2, "sp": True, "pp": 2}),
}


def test_the_test_clips_gradients(untied: Case) -> None:
    """Otherwise the grids below would not see a wrong norm in the next loss."""
    assert untied.expected[0][1] > OPTIM.clip_grad


@pytest.mark.parametrize("name", GRID)
def test_every_layout_trains_as_hugging_face_does(ranks: RankPool, untied: Case, name: str) -> None:
    world, sizes = GRID[name]
    check(ranks, untied, world, sizes)


@pytest.mark.parametrize("name", ["one", "tp2", "pp2", "pp2_vpp2", "tp2_sp_pp2"])
def test_tied_embeddings_stay_one_weight(ranks: RankPool, tied: Case, name: str) -> None:
    world, sizes = GRID[name]
    check(ranks, tied, world, sizes)


def test_llama_has_no_biases_and_its_own_rotary_base(ranks: RankPool, llama: Case) -> None:
    check(ranks, llama, 2, {"tp": 2, "sp": True})


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_activations_change_nothing(ranks: RankPool, untied: Case, granularity: str) -> None:
    check(ranks, untied, 2, {"tp": 2, "sp": True}, recompute_granularity=granularity)


@pytest.mark.parametrize("distributed", [True, False])
def test_overlapped_reduction_changes_nothing(ranks: RankPool, untied: Case, distributed: bool) -> None:
    check(ranks, untied, 2, {}, overlap=True, distributed=distributed)


def test_plain_optimizer_changes_nothing(ranks: RankPool, untied: Case) -> None:
    check(ranks, untied, 4, {"tp": 2}, distributed=False)


def test_bfloat16_comes_close(ranks: RankPool, untied: Case) -> None:
    """8 bits of mantissa: 2**-8 a rounding; the loss is a mean over all tokens."""
    check(ranks, untied, 2, {"tp": 2, "sp": True}, tolerance=2e-2, dtype=torch.bfloat16)
