"""Plans between random Megatron layouts, random SGLang layouts and files, checked element by element.

The oracle does not intersect boxes: every logical element has a number of its own, each source rank's
tensors are filled with these numbers, and copies are made one by one.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from megarl.layout import RankPlace, make_plan, place_engines
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import ModelConfig, logical_tensors
from megarl.models.config import MLAConfig, MoEConfig
from megarl.weight_sync.layouts import (
    EngineLayout,
    best_device_order,
    hf_layout,
    megatron_layout,
    sglang_layout,
)


def model(kind: str, layers: int, tied: bool) -> ModelConfig:
    """A tiny model, with a vocabulary that no layout divides evenly."""
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=4, shared_ffn_hidden_size=4, dense_layers=(0,))
    mla = MLAConfig(q_lora_rank=3, kv_lora_rank=2, qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=2)
    families = {"dense": "qwen3", "moe": "qwen3_moe", "mla": "deepseek_v3"}
    return ModelConfig(
        family=families[kind], architecture="", num_layers=layers, hidden_size=8, num_attention_heads=4,
        num_query_groups=2, head_dim=2, ffn_hidden_size=8, vocab_size=141, norm_epsilon=1e-6, rope_theta=1e4,
        rope_scaling=None, qkv_bias=kind == "dense", qk_norm=kind == "moe", tie_word_embeddings=tied,
        max_position_embeddings=16, dtype="bfloat16", hf={}, moe=None if kind == "dense" else moe,
        mla=mla if kind == "mla" else None,
    )  # fmt: skip


@st.composite
def parallel_layouts(draw, config):
    """Any Megatron layout of up to 16 ranks that fits the model."""
    tp = draw(st.sampled_from([1, 2] if config.mla is None else [1, 2, 4]))
    pp, cp, dp = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4])),
    )
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))) if config.moe else (1, 1)
    vpp = draw(st.sampled_from([None, 2])) if pp > 1 else None
    first, last = (draw(st.sampled_from([None, 1, 2])) for _ in range(2)) if pp > 1 else (None, None)
    try:
        layout = ParallelLayout(
            tp * pp * cp * dp, tp, pp, vpp, cp, ep=ep, etp=etp, first_layers=first, last_layers=last
        )
        layers_of(layout, config.num_layers, 0)
    except ValueError:
        reject()
    if layout.world > 16:
        reject()
    return layout


@st.composite
def engine_layouts(draw, config):
    tp = draw(st.sampled_from([1, 2, 4]))
    divisors = [size for size in (1, 2, 4) if tp % size == 0]
    ep = draw(st.sampled_from(divisors)) if config.moe else 1
    return EngineLayout(tp, ep, draw(st.sampled_from(divisors)), draw(st.integers(1, 3)))


@st.composite
def transitions(draw):
    config = model(
        draw(st.sampled_from(["dense", "moe", "mla"])), draw(st.integers(2, 5)), draw(st.booleans())
    )
    parallel, engines = draw(parallel_layouts(config)), draw(engine_layouts(config))
    node = draw(st.sampled_from([2, 4, 8]))
    source_places = tuple(
        RankPlace(f"node{rank // node}", str(rank % node)) for rank in range(parallel.world)
    )
    shift = draw(st.sampled_from([0, 1, parallel.world]))  # colocated, partly colocated, or apart
    target_places = tuple(
        RankPlace(f"node{rank // node}", str(rank % node)) for rank in range(shift, shift + engines.num_ranks)
    )
    source = megatron_layout(config, parallel, "lm", draw(st.sampled_from([source_places, None])))
    target = sglang_layout(config, engines, draw(st.sampled_from([target_places, None])))
    files = hf_layout(config)
    pair = draw(st.sampled_from([(source, target)] * 4 + [(files, source), (files, target), (source, files)]))
    return config, *pair, draw(st.sampled_from([None, 7, 64]))


def numbered(config: ModelConfig) -> dict[str, np.ndarray]:
    """The model's tensors, with a different number in every element."""
    weights, first = {}, 0
    for name, shape in logical_tensors(config).items():
        count = int(np.prod(shape))
        weights[name] = np.arange(first, first + count).reshape(shape)
        first += count
    return weights


def local_tensors(pieces, fill):
    """Arrays just large enough for a rank's pieces."""
    shapes = {}
    for piece in pieces:
        ends = [a + n for a, n in zip(*piece.local_box, strict=True)]
        shapes[piece.local] = [max(pair) for pair in zip(shapes.get(piece.local, ends), ends, strict=True)]
    return {name: np.full(shape, fill) for name, shape in shapes.items()}


def held(layout, rank, weights, tensors):
    """A rank's local tensors, filled with its part of the weights, and the numbers of these elements."""
    elements = set()
    for piece in layout.pieces(rank):
        values = weights[piece.tensor][piece.box.slices]
        tensors[piece.local][piece.local_box.slices] = values.reshape(piece.local_box.size)
        elements.update(values.ravel().tolist())
    return tensors, elements


def itemsize(tensor: str) -> int:
    return 4 if tensor.endswith("bias") else 2


@given(transitions())
@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_every_element_once_from_a_right_source_by_the_nearest_link(case):
    config, source, target, max_copy_bytes = case
    weights = numbered(config)
    width = np.concatenate([np.full(array.size, itemsize(name)) for name, array in weights.items()])
    plan = make_plan(source, target, itemsize, max_copy_bytes)
    account = plan.account()
    shards, elements = zip(
        *(
            held(source, rank, weights, local_tensors(source.pieces(rank), -1))
            for rank in range(source.num_ranks)
        ),
        strict=True,
    )
    sent = [Counter() for _ in range(source.num_ranks)]
    for rank in range(target.num_ranks):
        pieces = target.pieces(rank)
        expected, _ = held(target, rank, weights, local_tensors(pieces, -1))
        written, times = local_tensors(pieces, -1), local_tensors(pieces, 0)
        received = Counter(local=0, intra_node=0, inter_node=0)
        for copy in plan.copies_to(rank):
            values = shards[copy.source_rank][copy.source_local][copy.source_box.slices]
            written[copy.target_local][copy.target_box.slices] = values.reshape(copy.target_box.size)
            times[copy.target_local][copy.target_box.slices] += 1
            link = link_between(source, copy.source_rank, target, rank)
            received[link] += plan.bytes_of(copy)
            sent[copy.source_rank][link] += plan.bytes_of(copy)
            assert max_copy_bytes is None or plan.bytes_of(copy) <= max_copy_bytes
        for name, array in expected.items():
            assert (written[name] == array).all()
            assert (times[name] == (array >= 0)).all()
        assert (
            received
            == account.received[rank]
            == nearest(source, target, rank, pieces, weights, elements, width)
        )
        assert sum(received.values()) == sum(piece.box.numel * itemsize(piece.tensor) for piece in pieces)
    assert [dict.fromkeys(("local", "intra_node", "inter_node"), 0) | by_link for by_link in sent] == list(
        account.sent_by_link
    )


def link_between(source, rank, target, other):
    if (
        source.places is None
        or target.places is None
        or source.places[rank].node != target.places[other].node
    ):
        return "inter_node"
    return "local" if source.places[rank] == target.places[other] else "intra_node"


def nearest(source, target, rank, pieces, weights, elements, width):
    """The bytes that a target rank needs, by link to the nearest rank that holds each element."""
    needed = np.concatenate([weights[piece.tensor][piece.box.slices].ravel() for piece in pieces])
    on = {"local": set(), "intra_node": set()}
    for other in range(source.num_ranks):
        link = link_between(source, other, target, rank)
        if link != "inter_node":
            on[link] |= elements[other]
    local = np.isin(needed, list(on["local"]))
    intra = np.isin(needed, list(on["intra_node"])) & ~local
    parts = {"local": local, "intra_node": intra, "inter_node": ~local & ~intra}
    return {link: int(width[needed[part]].sum()) for link, part in parts.items()}


@given(transitions())
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_one_ranks_part_alone_is_its_part_of_the_whole(case):
    _, source, target, max_copy_bytes = case

    def plan():
        return make_plan(source, target, itemsize, max_copy_bytes)

    copies = plan().copies
    assert copies == plan().copies
    for rank in {0, source.num_ranks // 2, source.num_ranks - 1}:
        assert plan().deliveries_from(rank) == [one for one in plan().deliveries if one.source_rank == rank]
    for rank in {0, target.num_ranks // 2, target.num_ranks - 1}:
        assert plan().copies_to(rank) == [copy for copy in copies if copy.target_rank == rank]
    whole = plan()
    buckets = whole.buckets(1000)
    delivered = [one for bucket in buckets for one in bucket]
    assert sorted((*one[:5], rank, *one[6:]) for one in delivered for rank in one.target_ranks) == sorted(
        copies
    )
    for bucket in buckets:
        filled = Counter()
        for one in bucket:
            for end in (("source", one.source_rank), *(("target", rank) for rank in one.target_ranks)):
                filled[end] += min(1000, whole.bytes_of(one))
        assert max(filled.values()) <= 1000


@st.composite
def colocations(draw):
    """A model of up to twelve layers, a training layout, engines with at most as many ranks, and the devices of both."""
    config = model(
        draw(st.sampled_from(["dense", "moe", "mla"])), draw(st.integers(2, 12)), draw(st.booleans())
    )
    parallel, engines = draw(parallel_layouts(config)), draw(engine_layouts(config))
    if engines.num_ranks > parallel.world:
        reject()
    node = draw(st.sampled_from([2, 4, 8]))
    places = [RankPlace(f"node{rank // node}", str(rank % node)) for rank in range(parallel.world)]
    return config, parallel, engines, tuple(places)


@given(colocations())
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_engines_get_the_devices_that_suit_all_layers(case):
    """Though megarl only considers one layer of each kind in each stage."""
    config, parallel, engines, places = case
    source, served = megatron_layout(config, parallel, "lm", places), sglang_layout(config, engines)
    assert best_device_order(config, parallel, places, engines, places) == place_engines(
        source, served, places, engines.tp
    )


def test_data_parallel_attention_where_sglang_has_none():
    config = replace(model("dense", 2, tied=False), family="llama")
    with pytest.raises(ValueError, match=r"no data parallel attention \(dp=2\) for llama models"):
        sglang_layout(config, EngineLayout(tp=2, dp=2))
