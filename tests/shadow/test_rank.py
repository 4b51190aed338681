"""The CUDA branch of tiny ranks, executed without a GPU, with Transformer Engine's layers."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.costs.flops import causal_pairs, model_flops
from megarl.costs.speed import BACKWARD_RULE
from megarl.models import read_model_config
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory
from megarl.shadow.comparison import Comparison, compare
from megarl.shadow.dry_run import run_ranks
from megarl.shadow.fla import backward_operations, forward_operations
from tests.shadow.conftest import RECIPE, expert_overrides, overrides

WORKSPACE = "transformer_engine.pytorch.cpp_extensions.gemm"
LAYERS = (
    *(
        "megarl.megatron.cpu.attention",
        "megarl.megatron.cpu.rotary",
        "megarl.megatron.cpu.torch_te",
        "megarl.megatron.cpu.torch_te",
    ),
    *("megatron.core.transformer", "megatron.core.models", "megatron.core.tensor_parallel"),
)
RESIDENT = ("weights", "gradients", "optimizer")


def test_ranks_run_to_their_end_on_the_cuda_branch(reports) -> None:
    for report in reports.values():
        assert report["transformer_engine"]
        sends = {"sync"} if report["role"] == "actor" else set()
        assert set(report["phases"]) == {"evaluate", "first_update", "update", "save", "load"} | sends
        assert report["flops"]["update"] == pytest.approx(3 * report["flops"]["first_update"])
        assert report["phases"]["update"]["left"] == 0


def test_what_stays_on_the_device_is_what_was_planned_to_the_byte(reports, model: Path) -> None:
    config, inputs = read_inputs(str(RECIPE), overrides(model), check=False)
    plan = plan_memory(config, inputs, 80 * GIB, 0)
    compared = set()
    for report in reports.values():
        for row in compare(plan, report):
            if row.phase == "always":
                # These are sums of the parts' own bytes; the tracker's are rounded as torch's allocator does.
                assert row.planned == row.found, row
                compared.add(row.owner)
    roles = {f"{role}_{part}" for role in ("actor", "critic") for part in RESIDENT}
    assert compared == roles | {"ref_weights"}


def test_passes_take_what_was_planned(reports, model: Path) -> None:
    rows = peaks(reports.values(), overrides(model))
    assert len(rows) == 2 * len(reports)
    for row in rows:
        assert abs(row.difference) < 0.05, row


def peaks(reports: Iterable[dict], keys: list[str]) -> list[Comparison]:
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    plan = plan_memory(config, inputs, 80 * GIB, 0)
    return [row for report in reports for row in compare(plan, report) if row.phase in ("evaluate", "update")]


MODULES = ["recompute_granularity=selective", "recompute_modules=[layernorm,mla_up_proj,moe_act]"]


@pytest.mark.parametrize(
    "recompute",
    [
        ["recompute_granularity=full"],
        # slow as in `test_layers_of_multi_token_prediction_take_what_was_planned`
        pytest.param(["recompute_granularity=null"], marks=pytest.mark.slow),
        pytest.param(MODULES, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_and_latent_attention_take_what_was_planned(
    machine, experts: Path, recompute: list[str]
) -> None:
    """Routed tokens are copied several times; packed values are padded to the width of queries."""
    keys = [*expert_overrides(experts), *(f"actor_rollout_ref.actor.megatron.{key}" for key in recompute)]
    reports = run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=2, num_processes=1)
    (report,) = reports
    kept = sum(size for (_, _, line), size in report["kept_by"] if line.startswith(WORKSPACE))
    # Only workspaces and tables of rotary angles stay: a single layer's input would have half a megabyte.
    assert report["released"] - kept < 1 << 18, report["kept_by"]
    rows = peaks(reports, keys)
    assert [row.phase for row in rows] == ["evaluate", "update"]
    # The plan counts all recomputed parts of a layer as if they existed at once.
    most = 0.12 if recompute == MODULES else 0.05
    for row in rows:
        assert -0.05 < row.difference < most, row


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "null"])
@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_mixtures_with_grouped_attention_take_what_was_planned(
    machine, tmp_path: Path, family: str, recompute: str
) -> None:
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4, "num_attention_heads": 8}
    model = make_tiny_model(tmp_path / "model", ["two words"], family=family, **sizes)
    keys = [
        *expert_overrides(model),
        f"actor_rollout_ref.actor.megatron.recompute_granularity={recompute}",
    ]
    rows = peaks(run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=2, num_processes=1), keys)
    assert [row.phase for row in rows] == ["evaluate", "update"]
    for row in rows:
        assert abs(row.difference) < 0.05, row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "longest", "indexer"),
    [
        ("full", 64, "freeze"),
        ("null", 512, "freeze"),
        ("full", 1024, "freeze"),
        ("full", 2048, "freeze"),
        ("full", 64, "train"),
        ("null", 512, "train"),
        ("full", 2048, "train"),
    ],
)
def test_attention_to_chosen_keys_takes_what_was_planned(
    machine, choosing: Path, recompute: str, longest: int, indexer: str
) -> None:
    """In memory and in operations: actor and reference, one micro-batch each, on one of two tensor parallel ranks."""
    keys = [
        *expert_overrides(choosing),
        f"actor_rollout_ref.actor.megatron.recompute_granularity={recompute}",
        f"data.max_response_length={longest - 48}",
        f"actor_rollout_ref.model.indexer={indexer}",
    ]
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=1, num_processes=1)
    for row in peaks([report], keys):
        assert abs(row.difference) < 0.05, row
    if longest > 64:
        return  # where the scores of all pairs of tokens fit into memory, they are all computed, causal or not: up to twice the pairs
    token = model_flops(read_model_config(str(choosing))).forward(causal_pairs(longest))
    assert report["flops"]["evaluate"] == pytest.approx(2 * 2048 * token / 2, rel=0.05)


@pytest.mark.parametrize(
    ("stages", "recompute"),
    [
        (2, "full"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "null"), (1, "full"), (2, "null"))),
    ],
)
def test_layers_of_multi_token_prediction_take_what_was_planned(
    machine, predicting: Path, stages: int, recompute: str
) -> None:
    """A rank of the last stage, with TP2 EP2."""
    megatron = "actor_rollout_ref.actor.megatron"
    keys = [
        *expert_overrides(predicting),
        f"{megatron}.pipeline_model_parallel_size={stages}",
        f"{megatron}.recompute_granularity={recompute}",
        "actor_rollout_ref.model.mtp=train",
    ]
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 2 * (stages - 1))], micro_batches=2, num_processes=1)
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    plan = plan_memory(config, inputs, 80 * GIB, 0)
    rows = list(compare(plan, report))
    resident = [row for row in rows if row.phase == "always"]
    assert {row.owner.removeprefix("actor_") for row in resident} == {*RESIDENT, "ref_weights"}
    # Routers' biases are no parameters, and the report does not count them.
    assert all(abs(row.difference) < 1e-4 for row in resident), resident
    passes = [row for row in rows if row.phase in ("evaluate", "update")]
    assert len(passes) == 2
    for row in passes:
        assert abs(row.difference) < 0.05, row


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rollout", "trainer"])
def test_routers_replay_experts_without_waiting_for_the_device(machine, experts: Path, mode: str) -> None:
    keys = [
        *expert_overrides(experts),
        f"actor_rollout_ref.actor.router_replay={mode}",
        "algorithm.rollout_correction.rollout_is=token",
    ]
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=2, num_processes=1)
    for phase in ("evaluate", "update"):
        assert not [line for line in report["waits"][phase] if "get_replay_topk" in line or "_give" in line]
    for row in peaks([report], keys):
        assert -0.02 < row.difference < 0.3, row


def test_a_released_rank_leaves_nothing_but_workspaces(reports) -> None:
    for (role, rank), report in reports.items():
        workspaces = sum(size for (_, _, line), size in report["kept_by"] if line.startswith(WORKSPACE))
        assert workspaces == 32 * 1024**2 + 1024, (role, rank)
        assert report["released"] - workspaces < 1024**2, (role, rank, report["kept_by"])
        assert not any("get_dummy_wgrad" in line for (_, _, line), _ in report["kept_by"])


@pytest.mark.parametrize(
    ("delta_nets", "recompute", "mtp"),
    [
        ("qwen3_next", "null", "train"),
        pytest.param("qwen3_5", "full", "drop", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "full", "drop", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "null", "train", marks=pytest.mark.slow),
    ],
    indirect=["delta_nets"],
)
def test_gated_delta_nets_take_what_was_planned(machine, delta_nets: Path, recompute: str, mtp: str) -> None:
    """With flash-linear-attention's own code, which allocates its kernels' outputs."""
    keys = [
        *expert_overrides(delta_nets),
        f"actor_rollout_ref.actor.megatron.recompute_granularity={recompute}",
        f"actor_rollout_ref.model.mtp={mtp}",
    ]
    if read_model_config(str(delta_nets)).moe is None:
        keys.append("actor_rollout_ref.actor.megatron.expert_model_parallel_size=1")
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 0)], micro_batches=2, num_processes=1)
    for row in peaks([report], keys):
        assert abs(row.difference) < 0.05, row
    flops, net = model_flops(read_model_config(str(delta_nets))), read_model_config(str(delta_nets)).delta_net
    assert net is not None
    # Actor and reference have two micro-batches of 2,016 tokens each; each of two ranks computes half of each product.
    tokens = 2 * 2 * 2016 / 2
    assert report["flops"]["evaluate"] == pytest.approx(tokens * flops.forward(pairs=32), rel=0.01)
    assert flops.layers[0].state == net.value_heads * forward_operations(net.key_dim, net.value_dim)
    forward, backward = (operations(128, 128) for operations in (forward_operations, backward_operations))
    assert pytest.approx(backward / forward, rel=0.01) == BACKWARD_RULE


def test_layers_in_torch_run_on_the_cuda_branch_too(cold, model: Path) -> None:
    """The machine is treated as one without Transformer Engine."""
    (report,) = run_ranks(
        str(RECIPE), overrides(model), [("actor", 3)], transformer_engine=False, num_processes=1
    )
    assert not report["transformer_engine"] and report["phases"]["update"]["left"] == 0
    made_by = [operation for (_, operation, _), _ in report["phases"]["update"]["largest"]]
    assert "torch_attn._varlen_attn.default" in made_by  # one kernel for all sequences
    for phase in ("evaluate", "update"):
        lines = list(report["waits"][phase])
        assert lines and not [line for line in lines if line.startswith(LAYERS)], (
            "the host waits for the device within a layer"
        )


def test_a_rank_that_fails_is_told_with_its_role_and_rank(machine, model: Path) -> None:
    broken = [*overrides(model), "actor_rollout_ref.actor.megatron.recompute_granularity=nonsense"]
    with pytest.raises(RuntimeError, match=r"the shadow of actor rank 1 failed:(.|\n)*nonsense"):
        run_ranks(str(RECIPE), broken, [("actor", 1)], num_processes=1)


def test_weights_gradients_are_added_to_the_float32_ones_within_the_products(reports) -> None:
    """Transformer Engine then gives autograd a dummy in place of a gradient, one for each shape of a weight; dummies are freed with the
    gradients (`test_a_released_rank_leaves_nothing_but_workspaces`)."""
    for report in reports.values():
        lines = [line for (_, _, line), _ in report["phases"]["update"]["largest"]]
        assert any("get_dummy_wgrad" in line for line in lines), lines
