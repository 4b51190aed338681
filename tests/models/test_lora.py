"""The weights that have adapters, the ranks that hold them, and the adapters that SGLang is given to serve."""

import re
import time

import pytest

from examples.tiny_model import make_tiny_model
from megarl.config.schema.models import LoraConfig
from megarl.layout.boxes import Box, Piece
from megarl.layout.grid import ParallelLayout, coords_of, layers_of
from megarl.models import MegatronPlace, ModelConfig, megatron_pieces, read_model_config
from megarl.models.float8 import check_base_block
from megarl.models.lora import (
    adapted_layers,
    adapted_weights,
    adapter_pieces,
    adapter_slots,
    check_expert_groups,
    logical_adapters,
    scaling,
    why_not_served,
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Two layers, the second with eight experts and shared ones; latent attention."""
    folder = tmp_path_factory.mktemp("mixture")
    make_tiny_model(folder, ["a"], vocab_size=300, hidden_size=64, num_layers=2, family="deepseek_v3")
    return read_model_config(str(folder))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Two layers: hidden size 32, four heads of 8 in two groups, an MLP of 48."""
    folder = tmp_path_factory.mktemp("dense")
    make_tiny_model(folder, ["a"], vocab_size=300, hidden_size=32, ffn_hidden_size=48, num_layers=2)
    return read_model_config(str(folder))


def pieces_of(config: ModelConfig, layout: ParallelLayout, rank: int) -> list[Piece]:
    place = coords_of(layout, rank)
    return megatron_pieces(
        config,
        MegatronPlace(layout.tp, place.tp, layout.ep, place.ep, layout.etp, place.etp),
        layers=layers_of(layout, config.num_layers, place.pp),
        first_stage=place.pp == 0,
        last_stage=place.pp == layout.pp - 1,
    )


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """gpt-oss, whose files have all experts of a layer in one parameter, with biases."""
    folder = tmp_path_factory.mktemp("biased")
    make_tiny_model(folder, ["a"], vocab_size=300, hidden_size=64, num_layers=2, family="gpt_oss")
    return read_model_config(str(folder))


def test_scaling() -> None:
    assert scaling(LoraConfig(rank=4)) == 1
    assert scaling(LoraConfig(rank=4, alpha=16)) == 4
    assert scaling(LoraConfig(rank=4, alpha=16, use_rslora=True)) == 8


def test_all_linear_layers_but_heads_and_routers(mixture: ModelConfig) -> None:
    found = adapted_weights(mixture, LoraConfig(rank=2))
    first = {name.split(".layers.0.")[1] for name in found if ".layers.0." in name}
    assert first == {
        f"{part}.weight"
        for part in (
            *(
                f"self_attn.{name}"
                for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
            ),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
    }
    assert sum(".layers.1.mlp.experts." in name for name in found) == 8 * 3
    assert sum(".layers.1.mlp.shared_experts." in name for name in found) == 3
    assert not [name for name in found if "mlp.gate.weight" in name or "embed" in name or "lm_head" in name]


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        (("q_proj",), (), {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        (
            ("model.layers.1.self_attn.*",),
            ("o_proj", "*.k_proj"),
            {"1.self_attn.q_proj", "1.self_attn.v_proj"},
        ),
        (
            ("all-linear",),
            ("*.self_attn.*", "model.layers.0.*", "down_proj"),
            {"1.mlp.gate_proj", "1.mlp.up_proj"},
        ),
        (("model.layers.?.mlp.[du]*",), ("*.1.*",), {"0.mlp.down_proj", "0.mlp.up_proj"}),
    ],
)
def test_patterns(
    dense: ModelConfig, targets: tuple[str, ...], excluded: tuple[str, ...], expected: set[str]
) -> None:
    found = adapted_weights(dense, LoraConfig(rank=2, target_modules=targets, exclude_modules=excluded))
    assert set(found) == {f"model.layers.{name}.weight" for name in expected}


def test_one_pattern_need_be_no_list(dense: ModelConfig) -> None:
    """PEFT and other trainers write it so."""
    for one in ("all-linear", "q_proj", "model.layers.1.*"):
        text, listed = LoraConfig(rank=2, target_modules=one), LoraConfig(rank=2, target_modules=(one,))
        assert text == listed and adapted_weights(dense, text) == adapted_weights(dense, listed)
    rest = adapted_weights(dense, LoraConfig(rank=2, exclude_modules="*.mlp.*"))
    assert rest == adapted_weights(dense, LoraConfig(rank=2, target_modules="*.self_attn.*"))


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (("all-linear",), 0),
        (("*",), 0),
        (("*.mlp.*",), 0),
        (("gate",), 1),
        (("*.gate",), 1),
        (("all-linear", "gate"), 1),
        (("all-linear", "model.layers.1.mlp.gate"), 1),
    ],
)
def test_routers_are_chosen_by_patterns_that_end_in_their_name_alone(
    mixture: ModelConfig, patterns: tuple[str, ...], chosen: int
) -> None:
    found = adapted_weights(mixture, LoraConfig(rank=2, target_modules=patterns))
    assert [name for name in found if name.endswith("mlp.gate.weight")] == [
        "model.layers.1.mlp.gate.weight"
    ] * chosen


def test_patterns_that_cannot_be(dense: ModelConfig, mixture: ModelConfig) -> None:
    with pytest.raises(
        ValueError, match=r"target_modules: 'c_attn' fits no linear layer of the model; there are q_proj"
    ):
        adapted_weights(dense, LoraConfig(rank=2, target_modules=("q_proj", "c_attn")))
    for pattern, advice in (
        ("qproj", "down_proj; did you mean q_proj?"),
        ("all_linear", "down_proj; did you mean all-linear?"),
        ("q_proj,v_proj", r"down_proj; several are a list: \[q_proj, v_proj\]"),
        (r".*\.(q_proj|v_proj)", r"down_proj; it is no regular expression: \* stands for any"),
        ("self_attn.q_proj", r"down_proj; a pattern is of the whole name: \*\.self_attn\.q_proj"),
    ):
        with pytest.raises(ValueError, match=advice):
            adapted_weights(dense, LoraConfig(rank=2, target_modules=pattern))
    with pytest.raises(ValueError, match=r"exclude_modules: 'lm_head' fits no"):
        adapted_weights(dense, LoraConfig(rank=2, exclude_modules=("lm_head",)))
    with pytest.raises(ValueError, match="leaves no linear layer"):
        adapted_weights(
            dense, LoraConfig(rank=2, target_modules=("q_proj",), exclude_modules=("*.self_attn.*",))
        )
    with pytest.raises(
        ValueError, match=r"up_proj of 1 of the 8 experts in model.layers.1.mlp; either all .* or none"
    ):
        adapted_weights(mixture, LoraConfig(rank=2, target_modules=("q_a_proj", "*.experts.3.up_proj")))


@pytest.mark.parametrize("pattern", ["gate_proj", "down_proj", "*.mlp.experts.*"])
def test_experts_that_are_no_layers_have_no_adapters(biased: ModelConfig, pattern: str) -> None:
    found = adapted_weights(biased, LoraConfig(rank=2))
    projections = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    assert [name.split(".", 3)[3] for name in found] == projections * 2
    with pytest.raises(
        ValueError, match="fits experts alone, and gpt_oss models have no adapters of experts"
    ):
        adapted_weights(biased, LoraConfig(rank=2, target_modules=("q_proj", pattern)))
    with pytest.raises(ValueError, match=r"lora\.base_dtype: a base in float8 is not supported for gpt_oss"):
        check_base_block(biased, ParallelLayout(world=1), 16)


def test_expert_groups_that_cannot_be(dense: ModelConfig, mixture: ModelConfig) -> None:
    check_expert_groups(mixture, LoraConfig(rank=2, expert_groups=4), ep=4)
    for config, groups, ep in ((mixture, 3, 1), (mixture, 2, 4), (dense, 2, 1)):
        with pytest.raises(ValueError, match=f"lora.expert_groups={groups}"):
            check_expert_groups(config, LoraConfig(rank=2, expert_groups=groups), ep)


def test_names_and_shapes_are_pefts(dense: ModelConfig) -> None:
    found = logical_adapters(dense, LoraConfig(rank=2, target_modules=("up_proj",), use_dora=True))
    assert found["model.layers.1.mlp.up_proj.lora_A.weight"] == (2, 32)
    assert found["model.layers.1.mlp.up_proj.lora_B.weight"] == (48, 2)
    assert found["model.layers.1.mlp.up_proj.lora_magnitude_vector"] == (48,)
    assert len(found) == 6


def test_rows_of_a_fused_layer(dense: ModelConfig) -> None:
    """Rank 1 of 2 has query group 1: heads 2 and 3 of q, head 1 of k (rows 8 to 16), and head 1 of v."""
    lora = LoraConfig(rank=2, target_modules=("q_proj", "v_proj"))
    weights = adapted_weights(dense, lora)
    pieces = pieces_of(dense, ParallelLayout(world=2, tp=2), 1)
    (slot, _) = adapter_slots(pieces, weights)
    assert slot.module == "0:decoder.layers.0.self_attention.linear_qkv"
    assert slot.rows == ((0, 0, 16), (1, 24, 8)) and slot.num_rows == 24 and slot.number is None
    found = {
        piece.tensor.split("self_attn.")[1]: piece for piece in adapter_pieces(pieces, weights, lora)[:4]
    }
    local = slot.module + ".lora."
    name = "model.layers.0.self_attn."
    assert found == {
        "q_proj.lora_A.weight": Piece(name + "q_proj.lora_A.weight", Box((0, 0), (2, 32)), local + "a", Box((0, 0), (2, 32))),
        "v_proj.lora_A.weight": Piece(name + "v_proj.lora_A.weight", Box((0, 0), (2, 32)), local + "a", Box((2, 0), (2, 32))),
        "q_proj.lora_B.weight": Piece(name + "q_proj.lora_B.weight", Box((16, 0), (16, 2)), local + "b", Box((0, 0), (16, 2))),
        "v_proj.lora_B.weight": Piece(name + "v_proj.lora_B.weight", Box((8, 0), (8, 2)), local + "b", Box((16, 0), (8, 2))),
    }  # fmt: skip


def test_experts_of_a_group_share_an_adapter(mixture: ModelConfig) -> None:
    lora = LoraConfig(rank=2, expert_groups=4, shared_a=True)
    pieces = pieces_of(mixture, ParallelLayout(world=2, ep=2), 1)
    found = [
        piece
        for piece in adapter_pieces(pieces, adapted_weights(mixture, lora), lora)
        if piece.local.endswith("experts.linear_fc1.lora.a") and piece.local_box.start[0] == 1
    ]
    assert {piece.tensor.split(".experts.")[1] for piece in found} == {
        f"{expert}.{kind}_proj.lora_A.weight" for expert in (6, 7) for kind in ("gate", "up")
    }
    assert {piece.local_box for piece in found} == {Box((1, 0, 0), (1, 2, 64))}


@pytest.mark.parametrize("sizes", [{"tp": 2, "sp": True, "ep": 4, "etp": 2}, {"pp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("lora", [LoraConfig(rank=2, use_dora=True), LoraConfig(rank=2, expert_groups=4)])
def test_ranks_together_have_every_element(
    mixture: ModelConfig, lora: LoraConfig, sizes: dict[str, int]
) -> None:
    layout, weights = ParallelLayout(world=8, **sizes), adapted_weights(mixture, lora)
    elements = dict.fromkeys(logical_adapters(mixture, lora), 0)
    boxes: set[tuple[str, Box]] = set()
    for rank in range(8):
        for piece in adapter_pieces(pieces_of(mixture, layout, rank), weights, lora):
            if (piece.tensor, piece.box) not in boxes:
                boxes.add((piece.tensor, piece.box))
                elements[piece.tensor] += piece.box.numel
    shapes = logical_adapters(mixture, lora)
    assert elements == {name: Box.whole(shape).numel for name, shape in shapes.items()}


@pytest.mark.parametrize("lora", [LoraConfig(rank=32, use_dora=True), LoraConfig(rank=32, expert_groups=32)])
def test_a_model_of_671_billion_takes_no_time(lora: LoraConfig) -> None:
    """45,000 weights; one rank of 512. Only the time of the process counts, since the machine may do other things."""
    config = read_model_config("recipes/models/deepseek-v3")
    layout = ParallelLayout(world=512, tp=8, sp=True, pp=4, ep=32, first_layers=16, last_layers=15)
    start = time.process_time()
    weights = adapted_weights(config, lora)
    found = adapter_pieces(pieces_of(config, layout, 200), weights, lora)
    assert len(weights) == 61 * 5 + 3 * 3 + 58 * 3 * 257
    assert len(found) > 500
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("qwen2", {}, None),
        ("llama", {"use_rslora": True, "shared_a": True}, None),
        ("qwen3", {"use_dora": True}, "DoRA"),
        ("qwen3_moe", {}, "qwen3_moe: for experts SGLang has adapters in compiled GPU kernels only"),
        ("qwen3_5", {}, "qwen3_5: SGLang has no adapters of gated delta nets' in_proj_ba"),
        ("glm4_moe", {"target_modules": ("o_proj",)}, "glm4_moe: for experts"),
        ("deepseek_v3", {"target_modules": ("o_proj",)}, "deepseek_v3: .*latent attention"),
    ],
)
def test_what_sglang_cannot_serve_is_known(tmp_path, family, kind, reason):
    folder = make_tiny_model(tmp_path / "model", ["some text"], family=family)
    found = why_not_served(read_model_config(str(folder)), LoraConfig(rank=2, **kind))
    assert found is None if reason is None else re.search(reason, found or "served")


def test_layers_are_named_once_and_by_their_last_part(tmp_path):
    config = read_model_config(str(make_tiny_model(tmp_path / "model", ["some text"], family="llama")))
    lora = LoraConfig(rank=2, target_modules=("model.layers.1.*",), exclude_modules=("o_proj",))
    layers = adapted_layers(adapted_weights(config, lora))
    assert sorted(layers) == ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
