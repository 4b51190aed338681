"""`megarl plan`: the plan's own figures, and a full gather's figures by its formula; from a recipe and from options, as a table and as JSON; mistakes
are named."""

import json
import re
from dataclasses import replace
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch

from megarl.cli.main import main
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors, read_model_config
from megarl.plan.sync import best_places, full_gather, pool_places, report
from megarl.weight_sync.layouts import EngineLayout
from megarl.weight_sync.sync_plan import SyncPlan

MODELS = Path(__file__).resolve().parents[2] / "recipes/models"
GB = {"local": 1e9, "intra_node": 1e9, "inter_node": 1e9}


def dense(layers: int = 4) -> ModelConfig:
    """A dense model whose vocabulary is cut alike by Megatron (multiples of 128 x tp) and by SGLang (multiples of 64)."""
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
    """Bytes (2 an element) of the layers' cut tensors, of their norms, and of the tensors that only the first or last stage has."""
    sizes = {name: 2 * prod(shape) for name, shape in logical_tensors(config).items()}
    norms = sum(size for name, size in sizes.items() if "layers" in name and "norm" in name)
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    return layers - norms, norms, sum(sizes.values()) - layers


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "engine_tp"),
    [(4, 1, 2, 2), (8, 1, 1, 2), (8, 1, 1, 4), (4, 2, 1, 4), (2, 2, 2, 1), (2, 4, 1, 2)],
)
def test_bytes_of_a_real_table_are_the_papers_but_for_what_is_not_cut(tp, pp, dp, engine_tp) -> None:
    """arXiv 2409.19256, section 5.4: (t p - t_g p_g) / (t_g p_g t p) M, here with p_g = 1, for the tensors that are cut evenly."""
    config = dense()
    sync = sync_of(
        config,
        ParallelLayout(tp * pp * dp, tp, pp),
        EngineLayout(engine_tp, num_engines=tp * pp * dp // engine_tp),
    )
    cut, norms, ends = cut_bytes(config)
    share = Fraction(tp * pp - engine_tp, engine_tp * tp * pp)
    received = sync.plan.account().received_from_others
    if pp == 1:  # norms are on every device already; the ends are cut like layers
        final_norm = 2 * config.hidden_size
        assert set(received) == {share * (cut + ends - final_norm)}
    else:
        assert all(
            share * cut <= nbytes <= share * cut + norms + Fraction(ends, engine_tp) for nbytes in received
        )


def test_the_full_gather_receives_all_but_what_the_device_holds() -> None:
    config, parallel = dense(), ParallelLayout(8, 2, 2)  # DP2; each stage is a node of 4
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
        assert received["inter_node"] == (total - sum(mine.values())) // 4  # a quarter of what the node lacks
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
        sum(sync.plan.bytes_of(copy) for bucket in pair for copy in bucket if rank in copy.target_ranks)
        for pair in zip(sync.buckets, sync.buckets[1:], strict=False)
        for rank in range(8)
    )
    assert figures.in_flight[0] == by_hand


ROOT = Path(__file__).resolve().parents[2]
PPO = str(ROOT / "recipes/quickstart_ppo.yaml")
TINY = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 64, "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with nothing but a config."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    assert main(["plan", "sync", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def sizes(train: str = "tp2-pp2", rollout: str = "tp2", devices: str = "8") -> list[str]:
    return ["--train", train, "--rollout", rollout, "--devices", devices]


def test_a_recipe_and_the_same_sizes_as_options_give_the_same_plan(model, capsys) -> None:
    recipe = plan(
        capsys,
        PPO,
        f"actor_rollout_ref.model.path={model}",
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.num_engines=4",
    )
    options = plan(
        capsys, "--model", f"{model}/config.json", *sizes(), "--devices-per-node", "4", "--engines", "4"
    )
    assert recipe == options
    assert recipe["dtype"] == "bfloat16"
    assert recipe["train"] == {"world": 8, "tp": 2, "pp": 2, "cp": 1, "sp": True, "ep": 1, "etp": 1}
    layout = {
        "tp": 2,
        "ep": 1,
        "dp": 1,
        "num_engines": 4,
        "whole_shared": False,
        "draft": False,
        "dp_head": False,
    }
    assert recipe["rollout"] == layout
    assert [place.partition(":")[0] for place in recipe["engine_places"]] == ["node0"] * 4 + ["node1"] * 4
    assert (
        0 < recipe["reshard"]["max_received"] < recipe["full_gather"]["max_received"] < recipe["model_bytes"]
    )


def test_engines_on_devices_of_their_own_get_everything_from_other_nodes_and_pass_it_on(
    model, capsys
) -> None:
    report = plan(capsys, "--model", model, *sizes(), "--engines", "2", "--separate", "--dtype", "float32")
    # One engine from the trainer's nodes, the other one from the engine on its node.
    totals = {link: cost["total"] for link, cost in report["reshard"]["links"].items()}
    assert totals["local"] == 0 < totals["inter_node"] == totals["intra_node"] >= report["model_bytes"]
    assert (report["way"], report["communicators"], report["chain"]) == ("apart", 1, 2)
    assert report["full_gather"]["max_received"] == report["model_bytes"] == 4 * report["num_parameters"]
    pools = [
        "resource_pools={global: {nnodes: 1, n_gpus_per_node: 8}, serve: {nnodes: 1, n_gpus_per_node: 4}}"
    ]
    pools += ["actor_rollout_ref.rollout.resource_pool=serve", "actor_rollout_ref.rollout.num_engines=2"]
    pools += ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    recipe = plan(capsys, PPO, f"actor_rollout_ref.model.path={model}", *pools, "--dtype", "float32")
    assert recipe == report


def test_bandwidths_and_buckets_are_used(model, capsys) -> None:
    slow = plan(
        capsys, "--model", model, *sizes(), "--separate", "--bandwidth-inter", "0.001", "--bucket-mb", "1"
    )
    fast = plan(capsys, "--model", model, *sizes(), "--separate", "--bandwidth-inter", "1")
    assert slow["reshard"]["seconds"] == pytest.approx(1000 * fast["reshard"]["seconds"])
    assert slow["bucket_bytes"] == 1 << 20


def test_in_float8_projections_are_a_byte_and_have_scales(model, capsys) -> None:
    config = TINY | {"hidden_size": 512, "intermediate_size": 1024}
    Path(model, "config.json").write_text(json.dumps(config))
    report = plan(capsys, "--model", model, *sizes(rollout="tp1"), "--fp8")
    keys = 2 * 128  # two heads of keys, and two of values
    projections = 2 * 512 * 512 + 2 * keys * 512 + 3 * 512 * 1024
    others = 2 * 512 + 512 + 2 * keys  # norms, biases
    scales = 4 * projections // (128 * 128)
    assert report["dtype"] == "float8 and bfloat16"
    assert report["model_bytes"] == 4 * (projections + 2 * others + scales) + 2 * (2 * 512 * 512 + 512)
    recipe = (
        "actor_rollout_ref.rollout.quantization=fp8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    )
    again = plan(
        capsys,
        PPO,
        f"actor_rollout_ref.model.path={model}",
        *recipe,
        "actor_rollout_ref.rollout.num_engines=4",
    )
    assert again["model_bytes"] == report["model_bytes"]
    with_scales = sum(link["total"] for link in report["reshard"]["links"].values())
    assert with_scales == 8 * report["model_bytes"]  # TP1 engines: each rank serves the complete model


def test_the_table_has_both_ways(model, capsys) -> None:
    assert main(["plan", "sync", "--model", model, *sizes()]) == 0
    out = capsys.readouterr().out
    for words in ("Qwen2ForCausalLM", "8 ranks: TP2 PP2 CP1 DP2", "4 engines: TP2", "shard to shard", "full gather",
                  "same node", "other nodes", "buckets"):  # fmt: skip
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model, --train, --rollout, --devices missing: give a recipe, or"),
        ([PPO, "--train", "tp2"], r"--train beside the recipe .*: give key=value instead"),
        (["--model", "{}", *sizes("tp2-xp2")], r"--train tp2-xp2: 'xp2' is not right there; .*tp, pp, vpp.*such as tp2-pp2"),
        (["--model", "{}", *sizes("tp3", devices="9")], r"--train.*=3 does not divide num_attention_heads=4"),
        (["--model", "{}", *sizes("tp2-pp2", devices="6")], r"--train tp2-pp2: 6 devices cannot hold .* multiple of 4"),
        (["--model", "{}", *sizes(rollout="tp8-ep4")], r"--rollout.*=8 does not divide num_attention_heads=4"),
        (["--model", "{}", *sizes(rollout="tp2-dp4")], r"--rollout tp2-dp4: .*cannot have dp=4; it must divide tp"),
        (["--model", "{}", *sizes(rollout="tp2-dp2")], r"--rollout tp2-dp2: SGLang has no data parallel attention"),
        (["--model", "{}", *sizes(), "--engines", "5"], r"--rollout tp2: 5 engines of 2 devices .* 8; give fewer --engines"),
        (["--model", "{}", *sizes(), "--devices-per-node", "0"], "--devices-per-node is 0; it must be at least 1"),
        (["--model", "{}", *sizes(), "--bandwidth-intra", "0"], "--bandwidth-intra is 0 GB/s; it must be above 0"),
        (["--model", "{}", *sizes(), "--bucket-mb", "0"], "--bucket-mb is 0; it must be at least 1"),
        (["--model", "{}/none", *sizes()], r"--model .*/none: .*is not a folder"),
        (["--model", __file__, *sizes()], "is a file; a Hugging Face folder or its config.json is needed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments, message, model, capsys) -> None:
    assert main(["plan", "sync", *(argument.replace("{}", model) for argument in arguments)]) == 2
    assert re.search(message, capsys.readouterr().err)
