"""Hugging Face -> Megatron -> Hugging Face and -> SGLang, over a grid of layouts, on simulated ranks.

The oracle of SGLang's shards, in fusions.py, is written from SGLang's model files, not from the weight tables.
"""

from functools import lru_cache

import pytest
import torch

from megarl.layout import make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models.config import QWEN_HYBRIDS
from megarl.weight_sync.layouts import EngineLayout, hf_layout, megatron_layout, sglang_layout
from tests.fixtures.tiny_models import MTP_FAMILIES
from tests.weight_sync.fusions import Rank, expected_sglang
from tests.weight_sync.shards import empty_shards, empty_tensors, load_all, num_empty, run_plan

DENSE_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5")
TIED_FAMILIES = (*DENSE_FAMILIES, "deepseek_v3", "kimi_k2")
FAMILIES = (
    *DENSE_FAMILIES,
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "minimax_m2",
    "gpt_oss",
)

LAYOUTS = {
    "tp1": ParallelLayout(world=1),
    "tp2": ParallelLayout(world=2, tp=2),
    "tp4": ParallelLayout(world=4, tp=4),
    "pp4": ParallelLayout(world=4, pp=4),
    "tp2pp2": ParallelLayout(world=4, tp=2, pp=2),
    "pp2vpp2": ParallelLayout(world=2, pp=2, vpp=2),
    "tp2pp2vpp2dp2": ParallelLayout(world=8, tp=2, pp=2, vpp=2),
    "tp2cp2dp2": ParallelLayout(world=8, tp=2, cp=2),
    "pp3uneven": ParallelLayout(world=3, pp=3, first_layers=1, last_layers=1),
    "ep2": ParallelLayout(world=2, ep=2),
    "tp2ep4dp2": ParallelLayout(world=4, tp=2, ep=4),
    "tp2etp2ep2": ParallelLayout(world=4, tp=2, ep=2, etp=2),
    "etp2": ParallelLayout(world=2, etp=2),
    "tp2pp2ep2uneven": ParallelLayout(world=4, tp=2, pp=2, ep=2, first_layers=1),
    "pp2vpp2ep2dp2": ParallelLayout(world=4, pp=2, vpp=2, ep=2),
}
CASES = [
    (name, family)
    for name, layout in LAYOUTS.items()
    for family in FAMILIES
    if family not in DENSE_FAMILIES or (layout.ep, layout.etp) == (1, 1)
]
# Every third case of each layout and of each family; the other cases run with --slow.
OFTEN = [
    (name, family)
    for name, family in CASES
    if family == "deepseek_v3" or (list(LAYOUTS).index(name) + FAMILIES.index(family)) % 3 == 0
]
MARKED = [
    pytest.param(case, id="-".join(case), marks=() if case in OFTEN else pytest.mark.slow) for case in CASES
]
ENGINES = ((1, 1, 1), (2, 1, 1), (2, 2, 1), (8, 1, 1), (8, 4, 1), (4, 2, 2))  # tp, ep, dp of attention


def engines_of(family):
    return [engine for engine in ENGINES if family not in DENSE_FAMILIES or engine[1] == 1]


def engines_with(layout, family):
    """Two of the engine layouts; over all cases, every engine layout meets every layout and every family."""
    engines, turn = engines_of(family), (list(LAYOUTS).index(layout) + FAMILIES.index(family)) // 3
    return [engines[(turn + step) % len(engines)] for step in (0, len(engines) // 2)]


def test_each_engine_meets_each_layout_and_each_family():
    met = [(name, family, engine) for name, family in OFTEN for engine in engines_with(name, family)]
    for name in LAYOUTS:
        assert {engine for layout, _, engine in met if layout == name} == set(ENGINES)
    for family in FAMILIES:
        assert {engine for _, other, engine in met if other == family} == set(engines_of(family))


@lru_cache(maxsize=4)
def loaded(folder, layout):
    """The tensors of each rank after it has read the checkpoint."""
    return load_all(folder, LAYOUTS[layout])


@pytest.fixture(scope="module", params=MARKED)
def case(request):
    """The fixture has module scope: all tests of a case follow each other, and its ranks are loaded once."""
    return request.param


def test_hugging_face_to_megatron_and_back(tiny_model, case):
    name, family = case
    for tied in (True, False) if family in TIED_FAMILIES else (False,):
        model = tiny_model(family, tie_word_embeddings=tied) if tied else tiny_model(family)
        ranks, written = loaded(model.folder, name), empty_shards(hf_layout(model.config))
        run_plan(
            make_plan(megatron_layout(model.config, LAYOUTS[name]), hf_layout(model.config)), ranks, written
        )
        assert written[0].keys() == model.decoder.keys()
        for tensor, values in model.decoder.items():
            assert torch.equal(written[0][tensor], values), (tied, tensor)


def test_hugging_face_to_megatron_to_sglang(tiny_model, case):
    """The first of the case's two engine layouts is tested with two engines of it."""
    name, family = case
    model = tiny_model(family)
    source = megatron_layout(model.config, LAYOUTS[name])
    for num_engines, (tp, ep, dp) in zip((2, 1), engines_with(name, family), strict=True):
        target = sglang_layout(model.config, EngineLayout(tp=tp, ep=ep, dp=dp, num_engines=num_engines))
        engines = empty_shards(target)
        run_plan(make_plan(source, target), loaded(model.folder, name), engines)
        for first in range(tp):
            expected = expected_sglang(model.decoder, model.config.hf, Rank(first, tp, ep, dp))
            for rank in range(first, num_engines * tp, tp):
                assert engines[rank].keys() == expected.keys()
                for tensor, values in expected.items():
                    assert torch.equal(engines[rank][tensor], values), (tp, ep, dp, rank, tensor)


def test_a_tied_head_and_queries_without_a_latent_space_reach_sglang(tiny_model):
    for family, fields in (("qwen3", None), ("deepseek_v3", {"q_lora_rank": None})):
        model = tiny_model(family, tie_word_embeddings=family == "qwen3", fields=fields)
        target = sglang_layout(model.config, EngineLayout(tp=2))
        engine = empty_shards(target)
        plan = make_plan(megatron_layout(model.config, LAYOUTS["tp2pp2"]), target)
        run_plan(plan, loaded(model.folder, "tp2pp2"), engine)
        for rank in range(2):
            expected = expected_sglang(model.decoder, model.config.hf, Rank(rank, 2))
            assert engine[rank].keys() == expected.keys()
            assert all(torch.equal(engine[rank][tensor], values) for tensor, values in expected.items())


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe"]
)
@pytest.mark.parametrize("name", ["tp1", "tp2pp2ep2uneven", "tp2etp2ep2"])
def test_prediction_layers_come_along_if_asked_for(tiny_model, family, name):
    model = tiny_model(family)
    layout = megatron_layout(model.config, LAYOUTS[name], mtp=True)
    checkpoint = hf_layout(model.config, mtp=True)
    ranks, written = empty_shards(layout), empty_shards(checkpoint)
    run_plan(make_plan(checkpoint, layout), [model.state], ranks)
    last = ranks[-1]
    norm = "mtp.pre_fc_norm_embedding" if family in QWEN_HYBRIDS else "model.layers.4.enorm"
    assert torch.equal(last["0:mtp.layers.0.enorm.weight"], model.state[f"{norm}.weight"])
    run_plan(make_plan(layout, checkpoint), ranks, written)
    assert written[0].keys() == model.state.keys()
    for tensor, values in model.state.items():
        assert torch.equal(written[0][tensor], values), tensor


@pytest.mark.parametrize(
    "family, mtp",
    [(family, mtp) for family in FAMILIES for mtp in (False, True) if not mtp or family in MTP_FAMILIES],
)
def test_pieces_fill_their_tensors_once(tiny_model, family, mtp):
    """Each element of a rank's parameters belongs to one weight, except the vocabulary's padding."""
    config = tiny_model(family).config
    layouts = [megatron_layout(config, LAYOUTS[name], mtp=mtp) for name, other in CASES if other == family]
    layouts += [sglang_layout(config, EngineLayout(*engine)) for engine in engines_of(family)]
    for layout in layouts:
        ranks = {
            shards: rank for rank, shards in enumerate(layout.shards_of)
        }  # replicas have the same pieces
        for rank in ranks.values():
            pieces = layout.pieces(rank)
            tensors = empty_tensors(pieces)
            for piece in pieces:
                tensors[piece.local][piece.local_box.slices].zero_()
            assert num_empty(tensors) == 0, (layout.name, rank)
            # If an element belonged to two weights, the pieces would have more elements than there are.
            elements = sum(tensor.numel() for tensor in tensors.values())
            assert elements == sum(piece.local_box.numel for piece in pieces), (layout.name, rank)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MTP_FAMILIES])
def test_a_model_without_prediction_layers_has_none_to_ask_for(tiny_model, family):
    config, layout = tiny_model(family).config, LAYOUTS["tp2pp2"]
    with_them, without = (megatron_layout(config, layout, mtp=mtp) for mtp in (True, False))
    assert [with_them.pieces(rank) for rank in range(4)] == [without.pieces(rank) for rank in range(4)]
