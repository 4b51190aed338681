"""`megarl plan`: from a recipe and from options, as a table and as JSON; what is wrong is named."""

import json
import re
from pathlib import Path

import pytest

from megarl.cli.main import main

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
    assert main(["plan", *arguments, "--json"]) == 0
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
    assert recipe["rollout"] == {"tp": 2, "ep": 1, "dp": 1, "num_engines": 4}
    assert [place.partition(":")[0] for place in recipe["engine_places"]] == ["node0"] * 4 + ["node1"] * 4
    assert (
        0 < recipe["reshard"]["max_received"] < recipe["full_gather"]["max_received"] < recipe["model_bytes"]
    )


def test_engines_on_devices_of_their_own_get_everything_from_other_nodes(model, capsys) -> None:
    report = plan(capsys, "--model", model, *sizes(), "--engines", "2", "--separate", "--dtype", "float32")
    assert (
        report["reshard"]["links"]["local"]["total"] == report["reshard"]["links"]["intra_node"]["total"] == 0
    )
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
    keys = 2 * 128  # two heads of keys, and of values
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
    assert with_scales == 8 * report["model_bytes"]  # TP1 engines: each rank serves the whole model


def test_the_table_has_both_ways(model, capsys) -> None:
    assert main(["plan", "--model", model, *sizes()]) == 0
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
    assert main(["plan", *(argument.replace("{}", model) for argument in arguments)]) == 2
    assert re.search(message, capsys.readouterr().err)
