"""Muon in every kind of layout, against its definition on Hugging Face's models; and its states when they are saved and moved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.config.schema.models import MuonConfig, OptimConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import named_parameters
from megarl.megatron.checkpoint.states import fragments, set_num_steps
from megarl.megatron.parallel import init_parallel
from tests.costs.models import build, make_models
from tests.megatron.muon import PlainMuon
from tests.megatron.parity import OPTIM, Case, check, loss_and_gradients, train_gathering
from tests.megatron.states import Setting, Trainee
from tests.ranks import RankError, RankPool

EXACT = MuonConfig(ns_dtype="float32")
MUON = replace(OPTIM, optimizer="muon", muon=EXACT)


def train_with_muon(model: PreTrainedModel, optim: OptimConfig) -> list[tuple[float, float]]:
    """Three steps, each over all sequences."""
    plain, history = PlainMuon(model, optim), []
    for _ in range(3):
        model.zero_grad()
        total = loss_and_gradients(model)
        history.append((total, plain.step()))
    return history


FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folders = make_models(Path(tmp_path_factory.mktemp("models")), FAMILIES)
    found = {}
    for family, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found[family] = Case(folder, train_with_muon(model, MUON), MUON)
    return found


LAYOUTS = [
    ("qwen3", 4, {"tp": 2, "sp": True, "pp": 2}, {}, True),
    ("qwen3", 4, {"pp": 2, "vpp": 2}, {}, True),
    ("deepseek_v3", 4, {"tp": 2, "sp": True, "ep": 2}, {}, True),
    ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, {"distributed": False}, True),
    ("qwen3", 1, {}, {}, False),
    ("qwen3", 4, {"tp": 2, "sp": True}, {"overlap": True}, False),
    ("qwen3", 2, {"cp": 2}, {}, False),
    ("qwen3", 2, {}, {"distributed": False}, False),
    ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2}, {}, False),
    ("qwen3_moe", 4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}, {}, False),
    ("deepseek_v3", 4, {"ep": 2}, {}, False),
]


@pytest.mark.parametrize(
    ("family", "world", "sizes", "options"),
    [pytest.param(*case, marks=() if often else pytest.mark.slow) for *case, often in LAYOUTS],
    ids=str,
)
def test_steps_are_those_of_the_definition(
    ranks: RankPool, cases: dict[str, Case], family: str, world: int, sizes: dict, options: dict
) -> None:
    """Over three steps: gradients of later steps depend on the direction and the size of earlier updates."""
    check(ranks, cases[family], world, sizes, 2e-5, **options)


def test_parts_of_matrices_by_themselves_are_other_steps(ranks: RankPool, cases: dict[str, Case]) -> None:
    """With tp_mode=distributed steps are equal, so the difference with blockwise comes from the iteration, not from the order of sums."""
    case, sizes = cases["qwen3"], {"tp": 2, "sp": True}
    check(ranks, _with(case, tp_mode="distributed"), 2, sizes, 2e-5)
    with pytest.raises(AssertionError):
        check(ranks, _with(case, tp_mode="blockwise"), 2, sizes, 1e-4)


def test_bfloat16_comes_close(ranks: RankPool, cases: dict[str, Case]) -> None:
    """Only the iteration is in bfloat16: 8 bits of mantissa in each of its products."""
    check(ranks, _with(cases["qwen3"], ns_dtype="bfloat16"), 2, {}, 5e-3)


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, optim=replace(MUON, muon=replace(EXACT, **changes)))


def test_weights_that_are_gathered_late_are_the_same_bits(ranks: RankPool, cases: dict[str, Case]) -> None:
    for late, early in zip(
        ranks.run(train_gathering, cases["qwen3"], {}, True, world=2),
        ranks.run(train_gathering, cases["qwen3"], {}, False, world=2),
        strict=True,
    ):
        assert late.history == early.history and late.weights == early.weights
        assert late.incomplete > 0 and early.incomplete == 0


def _step_both(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix after three steps of Megatron's Muon and of torch's, with the same gradients."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megarl.megatron.muon import settings  # after megarl's seam is installed

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(48, 80, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = settings(MuonConfig(coefficients="simple"))
    own = {key.removeprefix("muon_"): value for key, value in options.items() if key.startswith("muon_")}
    own["tp_mode"] = "blockwise"  # there are no tensor parallel ranks
    optimizers = (
        TensorParallelMuon([ours], lr=0.05, weight_decay=0.1, **own),
        torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        gradient = torch.randn(start.shape, generator=generator)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    return ours.detach() - start, theirs.detach() - start


def test_a_step_with_one_set_of_coefficients_is_torchs(ranks: RankPool) -> None:
    """Both compute in bfloat16; torch's Muon rounds before it divides by the norm."""
    ((ours, theirs),) = ranks.run(_step_both, world=1)
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


def _update_of_copies(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The direction of a step of a matrix that both tensor parallel ranks have complete, marked as Transformer Engine's TELinear marks it,
    and that of the same matrix without marks."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megarl.megatron.muon import mark_matrices

    init_parallel(ParallelLayout(world=world, tp=2), rank, world)
    module, gradient = torch.nn.Module(), torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    module.down, module.plain = (torch.nn.Parameter(torch.zeros(6, 10)) for _ in range(2))
    module.down.tensor_model_parallel = False
    module.down.partition_dim, module.down.partition_stride = 0, 1
    mark_matrices([module])
    groups = ProcessGroupCollection.use_mpu_process_groups()
    muon = TensorParallelMuon(module.parameters(), pg_collection=groups)
    return muon.orthogonalize(module.down, gradient), muon.orthogonalize(module.plain, gradient)


def test_a_matrix_that_all_tensor_parallel_ranks_have_is_no_part_of_one(ranks: RankPool) -> None:
    """Such as latent attention's projections down: the ranks' copies, stacked, would have another step."""
    for found, expected in ranks.run(_update_of_copies, world=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _optimizers_of(rank: int, world: int, folder: str, head: str) -> dict[str, set[str]]:
    """For each kind of state, the names of weights that have it after a step."""
    setting = Setting(world, {}, head=head, muon=True, distributed=False)
    trainee = Trainee(rank, world, folder, setting)
    set_num_steps(trainee.optimizer, 1)
    names = {weight: name.split(":")[1] for name, weight in named_parameters(trainee.chunks).items()}
    found: dict[str, set[str]] = {}
    for fragment in fragments(trainee.optimizer):
        for kind in fragment.state:
            found.setdefault(kind, set()).add(names[fragment.parameter])
    return found


@pytest.mark.parametrize("head", ["lm", "value"])
def test_embeddings_heads_and_vectors_have_adam(ranks: RankPool, cases: dict[str, Case], head: str) -> None:
    (found,) = ranks.run(_optimizers_of, cases["qwen3_moe"].folder, head, world=1)
    assert found["exp_avg"] == found["exp_avg_sq"]
    matrices, others = found["momentum_buffer"], found["exp_avg"]
    assert not matrices & others
    assert "decoder.layers.0.mlp.router.weight" in matrices
    top = {"embedding.word_embeddings.weight", "output_layer.weight" if head == "lm" else "value_head.weight"}
    assert {name for name in others if "norm" not in name} == top


def _wrap(rank: int, world: int, folder: str) -> None:
    build(rank, world, folder, {"ep": 2}, muon=True)


def test_biases_of_experts_are_refused_next_to_a_distributed_optimizer(
    ranks: RankPool, tmp_path: Path
) -> None:
    folder = make_models(tmp_path, ["gpt_oss"])["gpt_oss"]
    with pytest.raises(RankError, match="use_distributed_optimizer=false"):
        ranks.run(_wrap, folder, world=2)
