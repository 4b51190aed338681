"""Planned weights, adapters, gradients and optimizer states equal the allocations of real ranks, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema.models import LoraConfig
from megarl.costs.muon import packed
from tests.costs.measure import measure_rank
from tests.costs.models import FAMILIES, LORA, PREDICTING, make_models
from tests.ranks import RankPool

TERMS = ("weights", "gradients", "optimizer", "buffers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(Path(tmp_path_factory.mktemp("models")), [*FAMILIES, PREDICTING])


def check(ranks: RankPool, folder: str, world: int, sizes: dict[str, Any], **options: Any) -> None:
    for found, planned in ranks.run(measure_rank, folder, sizes, options, world=world):
        assert {term: found[term] for term in TERMS} == {term: planned[term] for term in TERMS}
        assert found["weights"] > found["gradients"] // 4
        # On the host each weight's states are aligned to 64 elements; nearly all sizes here are multiples of 64.
        assert planned["host"] <= found["host"] <= 1.05 * planned["host"]


DENSE = ("llama", "qwen2", "qwen3", "qwen3_5")
LAYOUTS = {
    "dense": {
        "one": (1, {}),
        "tp2_sp_pp2": (4, {"tp": 2, "sp": True, "pp": 2}),
        "pp2_vpp2_dp2": (4, {"pp": 2, "vpp": 2}),
        "cp2_dp2": (4, {"cp": 2}),
    },
    "experts": {
        "ep2": (2, {"ep": 2}),
        "tp2_sp_etp2_pp2": (4, {"tp": 2, "sp": True, "etp": 2, "pp": 2}),
        "tp2_sp_ep2_dp2": (4, {"tp": 2, "sp": True, "ep": 2}),
        "pp2_vpp2_ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
    },
}
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS["dense" if family in DENSE else "experts"]
    if family != "gpt_oss" or "etp2" not in layout  # its experts are not sharded
]
OFTEN = {
    ("qwen2", "tp2_sp_pp2"),
    ("llama", "pp2_vpp2_dp2"),
    ("qwen3", "cp2_dp2"),
    ("deepseek_v3", "tp2_sp_ep2_dp2"),
    ("glm4_moe", "tp2_sp_etp2_pp2"),
    ("glm_moe_dsa", "tp2_sp_etp2_pp2"),
    ("qwen3_next", "tp2_sp_etp2_pp2"),
    ("qwen3_5", "tp2_sp_pp2"),
    ("qwen3_5_moe", "pp2_vpp2_ep2"),
    ("qwen3_moe", "pp2_vpp2_ep2"),
    ("minimax_m2", "tp2_sp_etp2_pp2"),
    ("gpt_oss", "tp2_sp_ep2_dp2"),
}


@pytest.mark.parametrize(
    ("family", "layout"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow) for case in CASES],
)
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
def test_what_is_planned_is_what_a_rank_holds(
    ranks: RankPool, folders: dict[str, str], family: str, layout: str, lora: LoraConfig | None
) -> None:
    world, sizes = LAYOUTS["dense" if family in DENSE else "experts"][layout]
    check(ranks, folders[family], world, sizes, lora=lora, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "world", "sizes", "options"),
    [
        ("qwen2", 4, {"pp": 2, "vpp": 2}, {"dtype": torch.bfloat16}),
        ("deepseek_v3", 4, {"tp": 2, "sp": True, "ep": 2}, {"dtype": torch.bfloat16, "head": "value"}),
        pytest.param("qwen3_moe", 4, {"ep": 2}, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 4, {"tp": 2, "sp": True}, {"distributed": False}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 4, {"ep": 2}, {"distributed": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_muon(
    ranks: RankPool, folders: dict[str, str], family: str, world: int, sizes: dict, options: dict
) -> None:
    """Matrices are not split between data parallel ranks and have one state; AdamW updates the other weights."""
    check(ranks, folders[family], world, sizes, muon=True, **options)


def test_buckets_of_matrices() -> None:
    """Worked out by hand: two ranks, buckets of 200 elements a rank; the largest matrix first, to the rank with the least so far."""
    buckets, spans = packed([100, 130, 200, 90, 70], 2, 200)
    # From the last matrix on, 70 + 90 + 200 reach 0.9 x 2 x 200; then 130 and 100. Ranks get 256 elements, 200 rounded up to a multiple of
    # 64, and then 192.
    assert buckets == [(0, 512), (512, 512 + 2 * 192)]
    assert spans == [(0, 200), (256, 346), (256 + 128, 256 + 198), (512, 642), (512 + 192, 512 + 292)]


@pytest.mark.parametrize("layout", ["tp2_sp_etp2_pp2", "tp2_sp_ep2_dp2"])
def test_layers_of_multi_token_prediction(ranks: RankPool, folders: dict[str, str], layout: str) -> None:
    """With these layers the last stage has a copy of the embedding."""
    world, sizes = LAYOUTS["experts"][layout]
    check(ranks, folders[PREDICTING], world, sizes, mtp=True, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("glm_moe_dsa", "tp2_sp_ep2_dp2", {}),
        pytest.param("glm_moe_dsa", "pp2_vpp2_ep2", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", "tp2_sp_etp2_pp2", {"on_host": True}, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", "ep2", {"distributed": False}, marks=pytest.mark.slow),
    ],
)
def test_indexers_that_are_trained(
    ranks: RankPool, folders: dict[str, str], family: str, layout: str, options: dict[str, Any]
) -> None:
    """The norms of indexers' keys are in float32, in a buffer of their own, and need no master copy."""
    world, sizes = LAYOUTS["experts"][layout]
    check(ranks, folders[family], world, sizes, indexers=True, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"distributed": False, "dtype": torch.bfloat16},
        {"distributed": False, "lora": LORA},
        {"on_host": True, "dtype": torch.bfloat16},
        {"on_host": True, "lora": LORA},
        {"head": "value", "dtype": torch.bfloat16},
        {"head": "value", "lora": LORA, "dtype": torch.bfloat16},
        {"lora": LoraConfig(rank=3, use_dora=True, target_modules=("q_proj", "up_proj")), "dtype": torch.bfloat16},
        {"lora": LoraConfig(rank=2, shared_a=True)},
    ],
    ids=str,
)  # fmt: skip
def test_however_it_is_trained(ranks: RankPool, folders: dict[str, str], options: dict[str, Any]) -> None:
    check(ranks, folders["qwen2"], 4, {"tp": 2, "sp": True}, **options)


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=8, expert_groups=2),
        LoraConfig(rank=8, base_dtype="float8", base_block=8, exclude_modules=("down_proj",)),
    ],
    ids=["expert_groups", "float8"],
)
def test_adapters_of_experts(ranks: RankPool, folders: dict[str, str], lora: LoraConfig) -> None:
    check(ranks, folders["deepseek_v3"], 2, {"ep": 2}, lora=lora, dtype=torch.bfloat16)
