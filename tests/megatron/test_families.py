"""Every family has the results of Hugging Face's model, in every kind of layout that it supports."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import (
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaForCausalLM,
    GptOssForCausalLM,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3NextForCausalLM,
)

from examples.tiny_model import make_tiny_model
from megarl.layout.grid import ParallelLayout
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import arrange_sequences
from megarl.megatron.step import train_step
from megarl.megatron.transformer_config import check_layout
from megarl.models import read_model_config
from megarl.models.config import QWEN_HYBRIDS
from tests.fixtures.indexers import CHOOSING, choose_alike
from tests.megatron.hf import check_gradients, place_model
from tests.megatron.parity import (
    LENGTHS,
    OPTIM,
    VOCAB,
    Case,
    batches,
    check,
    load_model,
    loss_and_gradients,
    loss_of,
    sequences,
    train_hugging_face,
)
from tests.ranks import RankPool

# The first step divides by a gradient's size + eps. Where a gradient is only rounding, the default eps would let the step
# grow until it changes the choice of experts.
STEADY = replace(OPTIM, eps=1e-6)


@dataclass(frozen=True)
class Family:
    """A tiny model to build: its family, Hugging Face class, and fields that differ from the defaults; `vision`: with a vision tower."""

    name: str
    model_class: type[PreTrainedModel]
    fields: dict[str, Any]
    vision: bool = False


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
FAMILIES = {
    "qwen3": Family("qwen3", Qwen3ForCausalLM, {}),
    "qwen3 with yarn": Family("qwen3", Qwen3ForCausalLM, {"rope_parameters": YARN}),
    "qwen3_moe": Family("qwen3_moe", Qwen3MoeForCausalLM, {"num_experts_per_tok": 3}),
    "qwen3_moe with plain scores": Family("qwen3_moe", Qwen3MoeForCausalLM, {"norm_topk_prob": False}),
    "qwen3_next": Family("qwen3_next", Qwen3NextForCausalLM, {"num_experts_per_tok": 3}),
    "qwen3_5": Family("qwen3_5", Qwen3_5ForCausalLM, {}),
    "qwen3_5 with vision": Family(
        "qwen3_5", Qwen3_5ForConditionalGeneration, {"tie_word_embeddings": True}, vision=True
    ),
    "qwen3_5_moe": Family("qwen3_5_moe", Qwen3_5MoeForCausalLM, {"num_experts_per_tok": 4}),
    "qwen3_5_moe with vision": Family("qwen3_5_moe", Qwen3_5MoeForConditionalGeneration, {}, vision=True),
    "glm4_moe": Family("glm4_moe", Glm4MoeForCausalLM, {"rms_norm_eps": 1e-5, "n_shared_experts": 2}),
    "deepseek_v3": Family(
        "deepseek_v3",
        DeepseekV3ForCausalLM,
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3 without low rank queries": Family(
        "deepseek_v3",
        DeepseekV3ForCausalLM,
        {"q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "kimi_k2": Family("kimi_k2", DeepseekV3ForCausalLM, {}),
    # a large epsilon, so that a norm with another one shows
    "glm4_moe_lite": Family("glm4_moe_lite", Glm4MoeLiteForCausalLM, {"rms_norm_eps": 1e-2}),
    # texts have up to 40 tokens, and a query attends to 8 of them
    "deepseek_v32": Family("deepseek_v32", DeepseekV32ForCausalLM, CHOOSING),
    "deepseek_v32 without a choice": Family(
        "deepseek_v32", DeepseekV32ForCausalLM, {"index_topk": max(LENGTHS)}
    ),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        GlmMoeDsaForCausalLM,
        {**CHOOSING, "rms_norm_eps": 1e-2, "indexer_types": ["full", "full", "shared", "shared"]},
    ),
    "minimax_m2": Family("minimax_m2", MiniMaxM2ForCausalLM, {"num_experts_per_tok": 3}),
    "gpt_oss": Family("gpt_oss", GptOssForCausalLM, {"num_experts_per_tok": 3}),
}


def make_family(folder: Path, family: Family) -> None:
    """Write a tiny model of the family, with random weights, to `folder`."""
    make_tiny_model(
        folder,
        ["two words"],
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_hidden_size=96,
        num_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        family=family.name,
        fields={"initializer_range": 0.1, **family.fields},
        seed=5,
        vision=family.vision,
    )


def hugging_face(folder: str, family: Family) -> PreTrainedModel:
    config = json.loads(Path(folder, "config.json").read_text())
    if family.name == "kimi_k2":  # DeepSeek-V3's model, under a name that transformers does not have
        known = Path(folder, "known")
        shutil.copytree(folder, known, ignore=shutil.ignore_patterns("known"), dirs_exist_ok=True)
        (known / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
        folder = str(known)
    model = family.model_class.from_pretrained(folder, dtype=torch.float32)
    if family.name in ("glm4_moe_lite", "glm_moe_dsa"):
        # SGLang's norms of latent vectors have the config's epsilon, and so had the published run's (in Megatron they cannot have
        # another one); transformers' norms have 1e-6.
        for name, module in model.named_modules():
            if name.endswith("_a_layernorm"):
                assert module.variance_epsilon == 1e-6
                module.variance_epsilon = config["rms_norm_eps"]
    return choose_alike(model)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """From a family to the folder of its tiny model, made once."""

    @cache
    def make(name: str) -> str:
        folder = tmp_path_factory.mktemp("family")
        make_family(folder, FAMILIES[name])
        return str(folder)

    return make


@pytest.fixture(scope="module")
def case_of(folder_of: Callable[[str], str]) -> Callable[[str], Case]:
    """From a family to its tiny model and Hugging Face's results, made once."""

    @cache
    def make(name: str) -> Case:
        folder = folder_of(name)
        case = Case(folder, train_hugging_face(hugging_face(folder, FAMILIES[name]), STEADY), STEADY)
        assert case.expected[0][1] > STEADY.clip_grad, "a wrong norm must show in the next loss"
        return case

    return make


def _logits(rank: int, world: int, folder: str, sizes: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """This rank's part of the logits [tokens, vocabulary/tp], and the bounds of the packed sequences."""
    layout = ParallelLayout(world=world, **sizes)
    _, (model,) = load_model(rank, folder, layout, trainable=False)
    tokens = sequences()
    table = pa.table({"input_ids": tokens, "loss_mask": [[True] * len(ids) for ids in tokens]})
    batch = arrange_sequences(
        table, range(len(tokens)), tp=layout.tp, sequence_parallel=layout.sp
    ).on_device()
    with torch.no_grad():
        logits = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params(),
        )
    return logits[0], batch.cu_seqlens.tolist()


# Tested on one rank, too: these have each kind of attention and experts, where sharding could hide an error.
ALONE = ("qwen3", "qwen3_5 with vision", "qwen3_next", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if world == 2 or name in ALONE else pytest.mark.slow)
        for name in FAMILIES
        for world in (1, 2)
    ],
)
def test_logits_are_hugging_faces(
    ranks: RankPool, folder_of: Callable[[str], str], name: str, world: int
) -> None:
    folder = folder_of(name)
    sizes: dict[str, Any] = {"tp": 2, "sp": True} if world == 2 else {}
    if world == 2 and read_model_config(folder).moe is not None:
        sizes["ep"] = 2
    results = ranks.run(_logits, folder, sizes, world=world)
    logits, bounds = torch.cat([part for part, _ in results], dim=-1), results[0][1]
    assert 0.5 < logits[:, :VOCAB].std() < 10, "too weak or too strong to compare"
    model = hugging_face(folder, FAMILIES[name])
    for start, tokens in zip(bounds, sequences(), strict=False):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0]
        found = logits[start : start + len(tokens), :VOCAB]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


DENSE_GRID = {
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "tp2_sp_cp2": (4, {"tp": 2, "sp": True, "cp": 2}),
    "uneven_pp3": (3, {"pp": 3, "first_layers": 1, "last_layers": 1}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
}
EXPERT_GRID = {
    "one": (1, {}),
    "ep2": (2, {"ep": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "tp2_sp_ep2": (2, {"tp": 2, "sp": True, "ep": 2}),
    "tp2_sp_etp2": (2, {"tp": 2, "sp": True, "etp": 2}),
    "etp2": (2, {"etp": 2}),
    "cp2_ep2": (2, {"cp": 2, "ep": 2}),
    "uneven_pp2": (2, {"pp": 2, "first_layers": 1}),
    "pp2_vpp2_ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
    "ep2_dp4": (4, {"ep": 2}),
    "tp2_sp_ep2_etp2": (4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}),
    "tp2_sp_cp2_ep4": (4, {"tp": 2, "sp": True, "cp": 2, "ep": 4}),
    "tp2_sp_pp2_ep4_dp2": (8, {"tp": 2, "sp": True, "pp": 2, "ep": 4}),
}
TRAINED = [
    *[("qwen3", layout) for layout in ("tp2", "tp2_sp_cp2", "uneven_pp3")],
    ("qwen3 with yarn", "tp2"),
    *[("deepseek_v3", layout) for layout in EXPERT_GRID],
    *[("qwen3_moe", layout) for layout in ("tp2_sp", "tp2_sp_etp2", "pp2_vpp2_ep2", "tp2_sp_cp2_ep4")],
    *[("qwen3_next", layout) for layout in EXPERT_GRID],
    *[("qwen3_5", layout) for layout in DENSE_GRID if layout != "tp2"],
    *[("qwen3_5_moe", layout) for layout in EXPERT_GRID],
    ("qwen3_5_moe with vision", "tp2_sp_ep2"),
    *[("glm4_moe", layout) for layout in ("tp2_sp_ep2", "cp2_ep2", "uneven_pp2")],
    *[("glm4_moe_lite", layout) for layout in ("tp2_sp_ep2", "pp2_vpp2_ep2", "tp2_sp_cp2_ep4")],
    *[("deepseek_v32", layout) for layout in ("tp2_sp_ep2", "pp2_vpp2_ep2", "tp2_sp_cp2_ep4")],
    *[("glm_moe_dsa", layout) for layout in ("tp2_sp_ep2", "uneven_pp2", "tp2_sp_cp2_ep4")],
    *[("minimax_m2", layout) for layout in ("tp2_sp_ep2", "pp2_vpp2_ep2", "tp2_sp_cp2_ep4")],
    *[("gpt_oss", layout) for layout in ("tp2_sp_ep2", "cp2_ep2", "pp2_vpp2_ep2")],
    ("qwen3_moe with plain scores", "ep2"),
    ("deepseek_v3 without low rank queries", "tp2_sp_ep2"),
]


# Cases that run with --slow only: each takes seconds, and together they take a minute.
SELDOM = [
    *[
        ("deepseek_v3", layout)
        for layout in ("one", "tp2_sp", "etp2", "cp2_ep2", "ep2_dp4", "tp2_sp_ep2_etp2")
    ],
    *[("qwen3_moe", layout) for layout in ("tp2_sp", "tp2_sp_etp2", "tp2_sp_cp2_ep4")],
    *[("qwen3_next", layout) for layout in EXPERT_GRID if layout not in ("pp2_vpp2_ep2", "tp2_sp_cp2_ep4")],
    *[("qwen3_5", layout) for layout in ("tp2_sp", "uneven_pp3")],
    *[("qwen3_5_moe", layout) for layout in EXPERT_GRID if layout != "pp2_vpp2_ep2"],
    ("glm4_moe", "tp2_sp_ep2"),
    ("glm4_moe_lite", "tp2_sp_ep2"),
    ("glm4_moe_lite", "tp2_sp_cp2_ep4"),
    *[("deepseek_v32", layout) for layout in ("tp2_sp_ep2", "tp2_sp_cp2_ep4")],
    *[("glm_moe_dsa", layout) for layout in ("tp2_sp_ep2", "tp2_sp_cp2_ep4")],
    ("minimax_m2", "tp2_sp_cp2_ep4"),
    ("gpt_oss", "pp2_vpp2_ep2"),
]


def marked(cases: list[tuple[str, str]], seldom: list[tuple[str, str]]) -> list:
    """The cases as parameters; the cases in `seldom` are marked slow."""
    return [pytest.param(*case, marks=pytest.mark.slow if case in seldom else ()) for case in cases]


@pytest.mark.parametrize(("name", "layout"), marked(TRAINED, SELDOM))
def test_every_layout_trains_as_hugging_face_does(
    ranks: RankPool, case_of: Callable[[str], Case], name: str, layout: str
) -> None:
    """Loss and gradient norm of two steps; experts' biases do not change."""
    world, sizes = {**DENSE_GRID, **EXPERT_GRID}[layout]
    # From one thread to two, the oracle's own norm after an update changes by 2.2e-6 (qwen3_5_moe with vision), the layouts' by 1.1e-5.
    after = 3e-5 if FAMILIES[name].name in QWEN_HYBRIDS else None
    check(ranks, case_of(name), world, sizes, after=after)


def _gradients(rank: int, world: int, sizes: dict[str, Any], folder: str) -> list:
    place = place_model(rank, world, sizes, folder)
    optimizer, scheduler = build_optimizer(place.chunks, replace(OPTIM, clip_grad=1e9))
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    assert train_step(place.chunks, optimizer, scheduler, batches(place.layout), head, loss_of).ok
    return place.gradients()


GRADIENTS = [
    (name, layout)
    for name in (
        *("deepseek_v3", "qwen3_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite", "minimax_m2"),
        *("deepseek_v32", "glm_moe_dsa"),
    )
    for layout in ("tp2_sp_etp2", "ep2_dp4", "tp2_sp_cp2_ep4")
] + [
    ("qwen3_5", "tp2_sp_cp2"),
    ("qwen3_5_moe", "tp2_sp_cp2_ep4"),
    *[("gpt_oss", layout) for layout in ("tp2_sp_ep2", "cp2_ep2", "ep2_dp4")],
]


@pytest.mark.parametrize(
    ("name", "layout"),
    marked(
        GRADIENTS,
        [case for case in GRADIENTS if case[0] not in ("deepseek_v3", "gpt_oss") and case[1] != "ep2_dp4"],
    ),
)
def test_every_gradient_is_hugging_faces(
    ranks: RankPool, folder_of: Callable[[str], str], name: str, layout: str
) -> None:
    """On every rank, for every replica and every shard."""
    world, sizes = {**DENSE_GRID, **EXPERT_GRID}[layout]
    folder = folder_of(name)
    model = hugging_face(folder, FAMILIES[name])
    loss_and_gradients(model)
    check_gradients(model, ranks.run(_gradients, sizes, folder, world=world))


@pytest.mark.parametrize(
    "options",
    [
        {"distributed": False},
        {"overlap": True},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp", "shared_experts", "core_attn")},
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    ],
    ids=str,
)
def test_how_experts_are_trained_changes_nothing(
    ranks: RankPool, case_of: Callable[[str], Case], options: dict[str, Any]
) -> None:
    check(ranks, case_of("deepseek_v3"), 4, {"tp": 2, "sp": True, "ep": 2}, **options)


def test_bfloat16_comes_close(ranks: RankPool, case_of: Callable[[str], Case]) -> None:
    """8 bits of mantissa, 2**-8 per rounding: some tokens go to other experts, but the loss is a mean over all tokens."""
    layout = {"tp": 2, "sp": True, "ep": 2}
    check(ranks, case_of("deepseek_v3"), 2, layout, tolerance=5e-2, dtype=torch.bfloat16)


def test_ranks_that_share_a_delta_nets_heads_need_sequence_parallelism(
    folder_of: Callable[[str], str],
) -> None:
    """Without it each rank would only have its own heads' part of the gradient of the norm that all heads share."""
    config = read_model_config(folder_of("qwen3_5"))
    with pytest.raises(ValueError, match=r"gated delta nets and .*=2 needs megatron\.sequence_parallel=true"):
        check_layout(config, ParallelLayout(world=2, tp=2))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"etp": 2},
            "expert_tensor_parallel_size=2: each rank that has a part of an expert would add the bias",
        ),
        (
            {"tp": 2, "sp": True, "cp": 2},
            "its 2 key/value heads cannot be divided by .*tensor_model_parallel_size=2",
        ),
    ],
)
def test_what_gpt_oss_cannot_be_cut_by_is_refused(
    folder_of: Callable[[str], str], sizes: dict[str, Any], message: str
) -> None:
    config = read_model_config(folder_of("gpt_oss"))
    with pytest.raises(ValueError, match=message):
        check_layout(config, ParallelLayout(world=4, **sizes))
