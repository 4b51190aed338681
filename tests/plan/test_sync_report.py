"""What `megarl plan` says: the plan's own figures, and those of the full-gather way by its formula."""

from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch

from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors, read_model_config
from megarl.plan.sync_report import best_places, full_gather, pool_places, report
from megarl.weight_sync.layouts import EngineLayout
from megarl.weight_sync.sync_plan import SyncPlan

MODELS = Path(__file__).resolve().parents[2] / "recipes/models"
GB = {"local": 1e9, "intra_node": 1e9, "inter_node": 1e9}


def dense(layers: int = 4) -> ModelConfig:
    """Its vocabulary is cut alike by Megatron (multiples of 128 x tp) and by SGLang (of 64)."""
    return ModelConfig(
        family="qwen2", architecture="", num_layers=layers, hidden_size=16, num_attention_heads=8,
        num_query_groups=8, head_dim=2, ffn_hidden_size=32, vocab_size=1024, norm_epsilon=1e-6, rope_theta=1e4,
        rope_scaling=None, qkv_bias=True, qk_norm=False, tie_word_embeddings=False, max_position_embeddings=16,
        dtype="bfloat16", hf={},
    )  # fmt: skip


def sync_of(config, parallel, engines, per_node=8, engine_devices=None, bucket=1 << 20) -> SyncPlan:
    devices = pool_places(parallel.world, per_node)
    sync = SyncPlan(config, parallel, engines, torch.bfloat16, bucket, source_places=devices)
    return replace(sync, target_places=best_places(sync, engine_devices or devices))


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("deepseek-v3", 671_026_419_200),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_the_tables_have_as_many_parameters_as_was_published(model: str, parameters: int) -> None:
    assert sum(map(prod, logical_tensors(read_model_config(str(MODELS / model))).values())) == parameters


def cut_bytes(config: ModelConfig) -> tuple[int, int, int]:
    """Bytes (2 an element) of the layers' cut tensors, of their norms, and of what first and last stage have."""
    sizes = {name: 2 * prod(shape) for name, shape in logical_tensors(config).items()}
    norms = sum(size for name, size in sizes.items() if "layers" in name and "norm" in name)
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    return layers - norms, norms, sum(sizes.values()) - layers


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "engine_tp"),
    [(4, 1, 2, 2), (8, 1, 1, 2), (8, 1, 1, 4), (4, 2, 1, 4), (2, 2, 2, 1), (2, 4, 1, 2)],
)
def test_bytes_of_a_real_table_are_the_papers_but_for_what_is_not_cut(tp, pp, dp, engine_tp) -> None:
    """arXiv 2409.19256, section 5.4: (t p - t_g p_g) / (t_g p_g t p) M, here with p_g = 1, of what is cut evenly."""
    config = dense()
    sync = sync_of(
        config,
        ParallelLayout(tp * pp * dp, tp, pp),
        EngineLayout(engine_tp, num_engines=tp * pp * dp // engine_tp),
    )
    cut, norms, ends = cut_bytes(config)
    share = Fraction(tp * pp - engine_tp, engine_tp * tp * pp)
    received = sync.plan.account().received_from_others
    if pp == 1:  # norms are on every device already, and the ends are cut as layers are
        final_norm = 2 * config.hidden_size
        assert set(received) == {share * (cut + ends - final_norm)}
    else:
        assert all(
            share * cut <= nbytes <= share * cut + norms + Fraction(ends, engine_tp) for nbytes in received
        )


def test_the_full_gather_receives_all_but_what_the_device_holds() -> None:
    config, parallel = dense(), ParallelLayout(8, 2, 2)  # DP2; nodes of 4 are the stages
    sync = sync_of(config, parallel, EngineLayout(2, num_engines=4), per_node=4)
    sizes = {name: 2 * prod(shape) for name, shape in logical_tensors(config).items()}
    total = sum(sizes.values())
    gathered = full_gather(sync)
    for rank, received in enumerate(gathered.received):
        tp_rank, stage = rank % 2, rank // 4
        names = [f"layers.{layer}." for layer in range(2 * stage, 2 * stage + 2)]
        names += ["embed_tokens"] if stage == 0 else ["model.norm", "lm_head"]
        mine = {name: size for name, size in sizes.items() if any(part in name for part in names)}
        held = sum(size if "norm" in name else size // 2 for name, size in mine.items())
        assert received["local"] == held, (rank, tp_rank)
        assert gathered.received_from_others[rank] == total - held
        assert (
            received["inter_node"] == (total - sum(mine.values())) // 4
        )  # each a quarter of what the node lacks
    separate = sync_of(config, parallel, EngineLayout(2, num_engines=1), 4, pool_places(2, 4, first=8))
    assert full_gather(separate).received_from_others == (total, total)
    assert full_gather(separate).received[0]["inter_node"] == total // 2


def test_figures_are_those_of_the_plan_that_runs() -> None:
    sync = sync_of(dense(), ParallelLayout(8, 4, 2), EngineLayout(2, num_engines=4), per_node=4, bucket=4096)
    figures = report(sync, {"local": 4e9, "intra_node": 2e9, "inter_node": 1e9})
    account, moved = sync.plan.account(), sync.account()
    assert {link: cost.total for link, cost in figures.reshard.links.items()} == account.by_link
    assert sum(account.by_link.values()) == moved["bytes_total"]
    inter = figures.reshard.links["inter_node"]
    assert inter.seconds == max(inter.max_received, inter.max_sent) / 1e9
    assert figures.reshard.seconds == max(cost.seconds for cost in figures.reshard.links.values())
    assert figures.most.serves == account.received[figures.most.rank]["local"] + max(
        account.received_from_others
    )
    assert figures.least.rank == account.received_from_others.index(min(account.received_from_others))
    assert figures.num_buckets == len(sync.buckets) > 1
    assert figures.num_copies == sum(map(len, sync.buckets))
    assert max(figures.in_flight) <= 2 * figures.bucket_bytes
    by_hand = max(
        sum(sync.plan.bytes_of(copy) for bucket in pair for copy in bucket if copy.target_rank == rank)
        for pair in zip(sync.buckets, sync.buckets[1:], strict=False)
        for rank in range(8)
    )
    assert figures.in_flight[0] == by_hand
