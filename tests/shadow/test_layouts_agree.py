"""All ranks of tiny models in many layouts: their collectives fit together on uneven data."""

from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.plan.inputs import read_inputs
from megarl.shadow.agreement import agreements, all_ranks
from tests.shadow.conftest import RECIPE, overrides
from tests.shadow.test_together import WITHOUT_CRITIC, run
from tests.shadow.together_cases import Case

KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "sp": "sequence_parallel",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "recompute": "recompute_granularity",
    "overlap": "overlap_grad_reduce",
    "sharded": "use_distributed_optimizer",
    "dtype": "dtype",
    "fp8": "fp8",
    "fsdp": "fsdp",
}
MUON = ["actor_rollout_ref.actor.optim.optimizer=muon"]
DENSE = {
    # name: layers, ranks, micro-batches, layout
    "critic": (4, 8, 3, {"tp": 2, "pp": 2}),
    "interleaved": (4, 4, 4, {"tp": 2, "pp": 2, "vpp": 2}),
    "context": (4, 8, 3, {"tp": 2, "pp": 2, "cp": 2}),
    "context-4": (2, 8, 3, {"tp": 2, "pp": 1, "cp": 4}),
    "uneven-stages": (6, 8, 5, {"tp": 1, "pp": 4, "first": 1, "last": 1}),
    "few-micro-batches": (4, 4, 2, {"tp": 1, "pp": 4}),
    "interleaved-4": (8, 4, 4, {"tp": 1, "pp": 4, "vpp": 2}),
    "no-sequence-parallel": (2, 4, 3, {"tp": 2, "pp": 2, "sp": "false"}),
    "overlap": (4, 8, 3, {"tp": 2, "pp": 2, "overlap": "true"}),
    "interleaved-context-overlap": (4, 8, 4, {"tp": 1, "pp": 2, "vpp": 2, "cp": 2, "overlap": "true"}),
    "float16": (2, 4, 3, {"tp": 2, "pp": 2, "dtype": "float16"}),
    "float8-context": (4, 8, 3, {"tp": 2, "pp": 2, "cp": 2, "fp8": "hybrid"}),
    "fsdp": (3, 4, 3, {"tp": 2, "pp": 1, "fsdp": "optim_grads_params"}),
    "fsdp-context": (3, 8, 2, {"tp": 2, "pp": 1, "cp": 2, "fsdp": "optim_grads", "recompute": "full"}),
    "muon": (4, 8, 4, {"tp": 2, "pp": 2, "vpp": 2, "overlap": "true"}),
    "whole-optimizer": (2, 8, 3, {"tp": 1, "pp": 2, "sharded": "false"}),
}
EXPERTS = {
    "experts-pipeline": (4, 8, 3, {"tp": 2, "pp": 2, "ep": 2}),
    "experts-4": (2, 8, 2, {"tp": 2, "pp": 1, "ep": 4, "recompute": "full"}),
    "experts-tensor": (2, 8, 2, {"tp": 2, "pp": 1, "ep": 2, "etp": 2}),
    "experts-context": (4, 8, 3, {"tp": 1, "pp": 2, "ep": 2, "cp": 2}),
    "experts-float8": (2, 4, 2, {"tp": 2, "pp": 1, "ep": 2, "fp8": "e4m3"}),
    "experts-muon": (2, 8, 2, {"tp": 2, "pp": 1, "ep": 2}),
    "experts-interleaved": (4, 4, 4, {"tp": 1, "pp": 2, "ep": 2, "vpp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_a_layout_agrees(machine, name: str, tmp_path: Path) -> None:
    layers, ranks, micro_batches, layout = {**DENSE, **EXPERTS}[name]
    sizes = {"num_layers": layers}
    if name in EXPERTS:
        sizes |= {"hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 8}
    family = "deepseek_v3" if name in EXPERTS else "qwen2"
    model = make_tiny_model(tmp_path / "model", ["two words"], family=family, **sizes)
    keys = [
        *overrides(model),
        *([] if name == "critic" else WITHOUT_CRITIC),
        *(f"actor_rollout_ref.actor.megatron.{KEYS[key]}={value}" for key, value in layout.items()),
        f"trainer.n_gpus_per_node={ranks}",
        *(MUON if name.endswith("muon") else []),
    ]
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    roles = ["actor", "critic"] if name == "critic" else ["actor"]
    case = Case(str(RECIPE), keys, all_ranks(config, inputs, roles), micro_batches)
    (reports,) = run([case], tmp_path / "reports.json")
    for role, found in agreements(reports).items():
        assert found.problems == [], role
        assert len(found.ranks) == ranks and found.open_ended == 0 and found.matched > 100
