"""An actor of gpt-oss on Transformer Engine's layers, executed without a GPU: sinks, windows and biases of experts, against the plan."""

from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.costs.flops import causal_pairs, model_flops
from megarl.models import read_model_config
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory
from megarl.shadow.comparison import compare
from megarl.shadow.dry_run import run_ranks
from tests.shadow.conftest import RECIPE, expert_overrides

TOKENS = 2048
ACTOR = "actor_rollout_ref.actor"


def test_an_actor_takes_and_computes_what_was_planned(machine: None, tmp_path: Path) -> None:
    """TP2 EP2, all layers recomputed. A micro-batch is one text of 2,048 tokens; every second layer has a window of 128 tokens."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 1024, "num_layers": 4, "num_attention_heads": 8}
    fields = {"sliding_window": 128, "num_key_value_heads": 4}
    long = {"max_position_embeddings": 4 * TOKENS}
    make_tiny_model(tmp_path / "model", ["two words"], family="gpt_oss", fields=fields, **sizes, **long)
    keys = [
        *expert_overrides(tmp_path / "model"),
        "trainer.n_gpus_per_node=2",
        f"data.max_response_length={TOKENS - 48}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={TOKENS}",
        f"{ACTOR}.megatron.recompute_granularity=full",
    ]
    config, inputs = read_inputs(str(RECIPE), keys, check=False)
    plan = plan_memory(config, inputs, 80 * GIB, 0)
    (report,) = run_ranks(str(RECIPE), keys, [("actor", 1)], micro_batches=2, num_processes=1)
    rows = [row for row in compare(plan, report) if row.phase in ("always", "evaluate", "update")]
    assert {row.phase for row in rows} == {"always", "evaluate", "update"}
    for row in rows:
        assert abs(row.difference) < 0.05, row
    # On each of two ranks: policy and reference, two micro-batches.
    token = model_flops(read_model_config(str(tmp_path / "model"))).forward(causal_pairs(TOKENS))
    assert report["flops"]["evaluate"] == pytest.approx(2 * 2 * token * TOKENS / 2, rel=0.05)
