"""Planned activations equal the bytes that autograd keeps on real ranks, to a few percent."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema.models import LoraConfig
from tests.costs.measure import measure_rank
from tests.costs.models import FAMILIES, LORA, PREDICTING, make_models
from tests.ranks import RankPool

TOLERANCE = 0.05


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(Path(tmp_path_factory.mktemp("models")), [*FAMILIES, PREDICTING])


def check(ranks: RankPool, folder: str, world: int, sizes: dict[str, Any], **options: Any) -> None:
    for found, planned in ranks.run(measure_rank, folder, sizes, options, world=world):
        assert planned["activations"] == pytest.approx(found["activations"], rel=TOLERANCE)


NARROW = "deepseek_v3 with narrow values"


@pytest.mark.parametrize(
    ("family", "recompute", "lora"),
    [
        pytest.param(
            family, recompute, lora, id=f"{family}-{recompute}-{'whole' if lora is None else 'lora'}",
            marks=pytest.mark.slow if family == NARROW and lora is not None else (),
        )
        for family in ("qwen2", "deepseek_v3", NARROW) for recompute in (None, "selective", "full") for lora in (None, LORA)
    ],
)  # fmt: skip
def test_one_rank(
    ranks: RankPool, folders: dict[str, str], family: str, recompute: str | None, lora: LoraConfig | None
) -> None:
    check(ranks, folders[family], 1, {}, lora=lora, recompute=recompute)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "glm4_moe",
        "minimax_m2",
        "deepseek_v3 without low rank queries",
        "gpt_oss",
        "glm_moe_dsa",
    ],
)
def test_every_kind_of_layer(ranks: RankPool, folders: dict[str, str], family: str) -> None:
    check(ranks, folders[family], 1, {})


@pytest.mark.parametrize("recompute", [None, "full"])
def test_layers_of_multi_token_prediction(
    ranks: RankPool, folders: dict[str, str], recompute: str | None
) -> None:
    check(ranks, folders[PREDICTING], 1, {}, recompute=recompute, mtp=True)


@pytest.mark.parametrize(
    ("sizes", "lora"),
    [
        pytest.param(
            sizes, lora, id=f"{sizes}-{'whole' if lora is None else 'lora'}",
            marks=pytest.mark.slow if lora is not None and "sp" not in sizes and "vpp" not in sizes else (),
        )
        for sizes in ({"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}) for lora in (None, LORA)
    ],
)  # fmt: skip
def test_layouts(
    ranks: RankPool, folders: dict[str, str], sizes: dict[str, Any], lora: LoraConfig | None
) -> None:
    check(ranks, folders["qwen2"], 2, sizes, lora=lora)


@pytest.mark.parametrize(
    "sizes", [{"ep": 2}, {"tp": 2, "sp": True, "etp": 2}, {"tp": 2, "sp": True, "ep": 2}], ids=str
)
def test_layouts_of_experts(ranks: RankPool, folders: dict[str, str], sizes: dict[str, Any]) -> None:
    """Summed over all ranks, since the router decides how many tokens each rank's experts get."""
    results = ranks.run(measure_rank, folders["glm4_moe"], sizes, {}, world=2)
    found, planned = (sum(terms["activations"] for terms in column) for column in zip(*results, strict=True))
    assert planned == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, use_dora=True),
        LoraConfig(rank=4, shared_a=True, target_modules=("q_proj", "v_proj", "down_proj")),
    ],
    ids=["dora", "shared_a"],
)
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_kinds_of_adapters(ranks: RankPool, folders: dict[str, str], family: str, lora: LoraConfig) -> None:
    if family == "deepseek_v3":
        lora = LoraConfig(rank=4, use_dora=lora.use_dora)
    check(ranks, folders[family], 1, {}, lora=lora)


def test_adapters_of_routers(ranks: RankPool, folders: dict[str, str]) -> None:
    lora = LoraConfig(rank=4, target_modules=("all-linear", "gate"))
    check(ranks, folders["deepseek_v3"], 1, {}, lora=lora)
