"""Training in float8 blocks: Transformer Engine's own quantisers and modules on the CUDA branch, over kernels that only compute shapes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.costs.flops import model_flops
from megarl.models import read_model_config
from megarl.shadow.dry_run import run_ranks
from tests.shadow.conftest import RECIPE, expert_overrides, overrides
from tests.shadow.test_rank import MODULES, WORKSPACE, peaks

ACTOR = "actor_rollout_ref.actor.megatron"


def test_a_dense_model_quantises_all_but_its_first_layer(machine, model: Path) -> None:
    """The first stage has two of four layers, and one of the two stays in bfloat16; the last stage also has the head."""
    keys = [*overrides(model), f"{ACTOR}.fp8=hybrid", f"{ACTOR}.num_layers_at_start_in_bf16=1"]
    reports = run_ranks(str(RECIPE), keys, [("actor", 0), ("actor", 2)], micro_batches=3, num_processes=1)
    for row in peaks(reports, keys):
        assert abs(row.difference) < 0.05, row
    # Three micro-batches on one of two tensor parallel ranks, each of 2,016 tokens, padded to a multiple of 128 per rank.
    layer = 3 * 2 * model_flops(read_model_config(str(model))).layers[0].dense * 2048 // 2
    for report, layers in zip(reports, (1, 2), strict=True):
        # An update: forward, backward for inputs, backward for weights. An evaluation: policy and reference, forward.
        assert report["float8_flops"]["update"] == 3 * layers * layer
        assert report["float8_flops"]["evaluate"] == 2 * layers * layer
        nothing_stays(report)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with twelve experts, whose numbers of tokens are no multiples of 16."""
    fields = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
    fields |= {"v_head_dim": 32, "n_routed_experts": 12}
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4, "num_attention_heads": 8}
    folder = tmp_path_factory.mktemp("float8") / "model"
    make_tiny_model(folder, ["two words"], family="deepseek_v3", fields=fields, **sizes)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [["recompute_granularity=full"], MODULES], ids=str)
def test_experts_and_latent_attention(machine, uneven: Path, recompute: list[str]) -> None:
    """Experts' rows are padded; engines in float8 get the weights, which are in bfloat16."""
    keys = [
        *(*expert_overrides(uneven), f"{ACTOR}.fp8=e4m3", *(f"{ACTOR}.{key}" for key in recompute)),
        *(
            "actor_rollout_ref.rollout.quantization=fp8",
            "actor_rollout_ref.rollout.quantization_block_size=[32,32]",
        ),
    ]
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=2, num_processes=1)
    assert 0 < report["float8_flops"]["update"] < report["flops"]["update"]
    assert any("fp8_padding" in line for (_, _, line), _ in report["phases"]["evaluate"]["largest"])
    most = (
        0.12 if recompute == MODULES else 0.05
    )  # the plan counts all recomputed parts as if they existed at once
    for row in peaks([report], keys):
        assert -0.05 < row.difference < most, row
    nothing_stays(report)


def nothing_stays(report: Mapping) -> None:
    """After a release only workspaces stay on the device: no float8 copies of weights."""
    workspaces = sum(size for (_, _, line), size in report["kept_by"] if line.startswith(WORKSPACE))
    assert report["released"] - workspaces < 1 << 19, report["kept_by"]
    assert not any("float8_blockwise" in line for (_, _, line), _ in report["kept_by"])
