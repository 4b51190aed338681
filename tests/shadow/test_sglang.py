"""SGLang's own models and pool on the CUDA branch, executed without a GPU, against the table of weights and the plan."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.tiny_model import make_tiny_model
from megarl.models.config import QWEN_HYBRIDS
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, MemoryPlan, plan_memory
from megarl.shadow import engine
from megarl.shadow.comparison import Comparison, compare
from megarl.shadow.dry_run import run_ranks
from tests.shadow.conftest import RECIPE, expert_overrides, overrides
from tests.test_recipes import ON_GPUS, header

ROOT = RECIPE.parents[1]
ROLLOUT = "actor_rollout_ref.rollout"
EP2 = f"{ROLLOUT}.expert_parallel_size=2"
SPARSE = ("deepseek_v32", "glm_moe_dsa")
# The published models' sizes: SGLang's kernels support no others.
SPARSE_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64}
FP8 = [f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization_block_size=[16,16]"]


def shadow(
    recipe: Path, keys: list[str], rank: int, memory: int = 80 * GIB, **card: object
) -> tuple[MemoryPlan, dict]:
    """A recipe's plan, and the report of a rank of its engines, on cards with `memory` bytes."""
    config, inputs = read_inputs(str(recipe), keys, check=False)
    plan = plan_memory(config, inputs, memory, 0)
    (report,) = run_ranks(
        str(recipe),
        keys,
        [(engine.ROLE, rank)],
        card={"memory": memory, **card},
        engine_environment=engine.environment(config),
    )
    return plan, report


def check(plan: MemoryPlan, report: dict, tolerance: float) -> None:
    assert report["problems"] == []
    rows = list(compare(plan, report))
    assert [row.owner for row in rows] == ["rollout_weights", "rollout_kv_cache"]
    for row in rows:
        assert abs(row.difference) < tolerance, row
    assert report["kv_tokens"] == pytest.approx(plan.kv_tokens, rel=tolerance)


@pytest.mark.parametrize(("cache", "tolerance"), [("null", 0.02), ("fp8_e5m2", 0.04)])
def test_a_dense_engine_has_the_parameters_and_the_cache_that_were_planned(
    machine, model: Path, cache: str, tolerance: float
) -> None:
    keys = [
        f"{ROLLOUT}.max_total_tokens=null",
        f"{ROLLOUT}.kv_cache_dtype={cache}",
        f"{ROLLOUT}.engine_kwargs.chunked_prefill_size=512",
    ]
    plan, report = shadow(RECIPE, [*overrides(model), *keys], 1)
    assert (report["model"], report["world_size"]) == ("Qwen2ForCausalLM", 2)
    check(plan, report, tolerance)  # in a tiny model the list of free tokens, 8 bytes each, is noticeable


def test_experts_in_float8_have_the_scales_that_a_sync_fills(cold, experts: Path) -> None:
    """A tiny DeepSeek-V3 with TP2 EP2 over two nodes; its scales are sharded as its weights are."""
    keys = [
        *expert_overrides(experts),
        *FP8,
        f"{ROLLOUT}.expert_parallel_size=2",
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.nodes_per_engine=2",
    ]
    plan, report = shadow(RECIPE, keys, 1)
    assert report["model"] == "DeepseekV3ForCausalLM"
    check(plan, report, 0.05)


@pytest.mark.parametrize(
    ("family", "float8"),
    [
        *(("deepseek_v3", True), ("glm4_moe", False), ("qwen3_next", False)),
        pytest.param("deepseek_v3", False, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", True, marks=pytest.mark.slow),
        ("glm_moe_dsa", False),
        ("qwen3_5_moe with vision", False),
    ],
)
def test_a_model_that_drafts_has_the_parameters_that_a_sync_fills(
    machine, tmp_path: Path, family: str, float8: bool
) -> None:
    """SGLang's model of the multi-token prediction layer, TP2 EP2, next to the model whose embedding and head it shares."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4, "num_attention_heads": 8}
    family, _, vision = family.partition(" with ")
    fields = {"num_nextn_predict_layers": 1}
    if family in ("deepseek_v3", *SPARSE):
        fields |= {
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        }
    if family in SPARSE:
        fields |= SPARSE_SIZES
    more = {"num_mtp_layers": 1} if family in QWEN_HYBRIDS else {"fields": fields}
    make_tiny_model(tmp_path / "model", ["two words"], family=family, vision=bool(vision), **more, **sizes)
    keys = [
        *expert_overrides(tmp_path / "model"),
        *(
            EP2,
            f"{ROLLOUT}.dtype=bfloat16",
            f"{ROLLOUT}.speculative.algorithm=mtp",
        ),
        *([f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.quantization_block_size=[16,16]"] if float8 else []),
    ]
    plan, report = shadow(RECIPE, keys, 1)
    check(plan, report, 0.05)


def make_draft(folder: Path, hidden: int, ffn: int, heads: int, vocabulary: int) -> Path:
    """An EAGLE3 draft under the names of published files, with a head of its own for `vocabulary` tokens."""
    folder.mkdir()
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads}
    more = {"num_key_value_heads": heads, "num_hidden_layers": 1, "draft_vocab_size": vocabulary}
    fixed = {"model_type": "llama", "vocab_size": 2 * vocabulary, "tie_word_embeddings": False}
    config = {"architectures": ["LlamaForCausalLMEagle3"], **sizes, **more, **fixed}
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        **{f"self_attn.{name}_proj": (hidden, 2 * hidden) for name in "qkv"},
        **{"self_attn.o_proj": (hidden, hidden), "mlp.down_proj": (hidden, ffn)},
        **{f"mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")},
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "hidden_norm"), (hidden,)),
    }
    shapes = {f"midlayer.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm": (hidden,), "fc": (hidden, 3 * hidden), "lm_head": (vocabulary, hidden)}
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    tables = {"d2t": torch.zeros(vocabulary, dtype=torch.int64), "t2d": torch.ones(2 * vocabulary) > 0}
    save_file({**weights, **tables}, folder / "model.safetensors")
    return folder


def test_a_draft_model_of_another_folder_is_planned_and_no_sync_fills_it(
    machine, model: Path, tmp_path: Path
) -> None:
    """SGLang's LlamaForCausalLMEagle3, TP2; a sync fills only the model's parameters."""
    draft = make_draft(tmp_path / "draft", hidden=128, ffn=2048, heads=8, vocabulary=1024)
    keys = [*overrides(model), f"{ROLLOUT}.max_total_tokens=null", f"{ROLLOUT}.dtype=bfloat16"]
    drafting = [f"{ROLLOUT}.speculative.algorithm=eagle3", f"{ROLLOUT}.speculative.draft_path={draft}"]
    plan, report = shadow(RECIPE, [*keys, *drafting], 1)
    check(plan, report, 0.02)
    without, other = shadow(RECIPE, keys, 1)
    assert report["num_parameters"] == other["num_parameters"]
    drafted = sum(owner.stages[0] for owner in plan.owners if owner.name == "rollout_weights")
    drafted -= sum(owner.stages[0] for owner in without.owners if owner.name == "rollout_weights")
    assert report["weights"] - other["weights"] == pytest.approx(drafted, rel=0.05)


@pytest.mark.parametrize(
    ("family", "served", "keys"),
    [
        # norms of queries and keys are sharded with the heads
        pytest.param("minimax_m2", "MiniMaxM2ForCausalLM", (EP2,), marks=pytest.mark.slow),
        ("minimax_m2", "MiniMaxM2ForCausalLM", (EP2, *FP8)),
        # indexers are complete on every rank and have a cache of their own
        ("deepseek_v32", "DeepseekV32ForCausalLM", (EP2,)),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", (EP2,)),
        (
            "qwen3_next",
            "Qwen3NextForCausalLM",
            (EP2,),
        ),  # one layer in four has a KV cache, the others have states
        ("qwen3_5", "Qwen3_5ForCausalLM", ()),
        pytest.param("qwen3_5_moe", "Qwen3_5MoeForCausalLM", (EP2,), marks=pytest.mark.slow),
        ("qwen3_5_moe with vision", "Qwen3_5MoeForCausalLM", (EP2,)),
        (
            "gpt_oss",
            "GptOssForCausalLM",
            (),
        ),  # sharded experts, sinks, biases, alternating rows of gate and up
    ],
    ids=[
        "minimax_m2",
        "minimax_m2-float8",
        "deepseek_v32",
        "glm_moe_dsa",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe-vision",
        "gpt_oss",
    ],
)
def test_a_family_has_the_parameters_that_a_sync_fills(
    machine, tmp_path: Path, family: str, served: str, keys: tuple[str, ...]
) -> None:
    """With TP2; KV cache and states are as planned."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4, "num_attention_heads": 8}
    family, _, vision = family.partition(" with ")
    fields = SPARSE_SIZES if family in SPARSE else None
    make_tiny_model(
        tmp_path / "model", ["two words"], family=family, fields=fields, vision=bool(vision), **sizes
    )
    plan, report = shadow(
        RECIPE, [*expert_overrides(tmp_path / "model"), f"{ROLLOUT}.dtype=bfloat16", *keys], 1
    )
    assert report["model"] == served
    check(plan, report, 0.05)


@pytest.mark.parametrize(
    ("family", "head", "more"),
    [
        ("DeepseekV3ForCausalLM", "true", []),
        pytest.param("DeepseekV3ForCausalLM", "false", FP8, marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", "false", [], marks=pytest.mark.slow),
    ],
)
def test_groups_of_data_parallel_attention_have_the_shards_of_the_table(
    machine, experts: Path, tmp_path: Path, family: str, head: str, more: list[str]
) -> None:
    """Two groups of two ranks: heads, embedding and each expert are split in two, all other weights in four."""
    if family == "Qwen3MoeForCausalLM":
        sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 4, "num_attention_heads": 8}
        experts = tmp_path / "model"
        make_tiny_model(experts, ["two words"], family="qwen3_moe", **sizes)
    keys = [
        *expert_overrides(experts),
        "trainer.n_gpus_per_node=4",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        f"{ROLLOUT}.expert_parallel_size=2",
        f"{ROLLOUT}.attention_data_parallel_size=2",
        f"{ROLLOUT}.data_parallel_lm_head={head}",
        f"{ROLLOUT}.max_total_tokens=4096",
        f"{ROLLOUT}.dtype=bfloat16",
        *more,
    ]
    plan, report = shadow(RECIPE, keys, 3)
    assert (report["model"], report["world_size"]) == (family, 4)
    assert report["problems"] == []
    assert report["kv_tokens"] == plan.group_tokens == 2048
    for row in compare(plan, report):
        assert abs(row.difference) < 0.05, row


def test_what_does_not_fit_is_a_finding_of_the_command() -> None:
    report = {"role": "rollout", "rank": 0, "world_size": 1, "model": "M", "num_parameters": 2, "problems": ["a is missing"],
              "num_operations": 1, "kv_tokens": 3, "seconds": 1.0}  # fmt: skip
    assert "    a is missing" in engine.details(report)
    assert (
        Comparison("rollout 0", *next(engine.sizes({"rollout_weights": 5}, {"weights": 10}))).difference
        == -0.5
    )


@pytest.mark.slow
def test_a_sync_in_float8_fits_on_blackwell(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own choice of kernels would pack the scales as soon as weights are loaded."""
    monkeypatch.chdir(ROOT)
    keys = [f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.quantization=fp8"]
    _, report = shadow(
        ROOT / "recipes" / "qwen2.5_7b_dapo.yaml", keys, 0, name="NVIDIA B200", capability=(10, 0)
    )
    assert report["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ON_GPUS)
def test_every_recipe_for_gpus(machine, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.chdir(ROOT)
    config, _ = read_inputs(f"recipe:{recipe}", [], check=False)
    last = config.actor_rollout_ref.rollout.tensor_model_parallel_size - 1
    memory = int(re.search(r"GPUs? of (\d+) GB", header(recipe))[1]) * GIB
    plan, report = shadow(ROOT / "recipes" / f"{recipe}.yaml", [], last, memory)
    check(plan, report, 0.01)
