"""Speculative decoding in plans: the memory of a draft, and seconds for an assumed number of accepted tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.cli.main import main
from megarl.config import RolloutConfig
from megarl.config.schema.rollout import SpeculativeConfig
from megarl.costs.hardware import TABLE, Assumptions
from megarl.costs.speed import Machine
from megarl.models import DRAFT
from megarl.plan.drafts import DraftFolder, draft_folder
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, MemoryPlan, plan_memory, served_bytes
from megarl.plan.seconds import generate
from megarl.plan.sync import configured_sync, kept_draft
from tests.weight_sync.shards import TinyModel

ROOT = Path(__file__).resolve().parents[2]
RECIPE, GLM = (str(ROOT / f"recipes/{name}.yaml") for name in ("deepseek_v3_grpo_512x80gb", "glm_4.7_grpo"))
SMALL = str(ROOT / "recipes/bases/math_grpo.yaml")
DRAFTING = "actor_rollout_ref.rollout.speculative"
MTP = f"{DRAFTING}.algorithm=mtp"
# The parameters of DeepSeek-V3's module without the embedding and head that it shares, from its README_WEIGHTS.md.
UNIQUE = 11.5e9


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def memory(*keys: str) -> MemoryPlan:
    config, inputs = read_inputs(RECIPE, [*keys], check=False)
    return plan_memory(config, inputs, 80 * GIB, 0)


def weights(plan: MemoryPlan) -> int:
    (found,) = (owner.stages[0] for owner in plan.owners if owner.name == "rollout_weights")
    return found


def test_the_layer_that_drafts_is_planned_with_its_cache() -> None:
    rollout = "actor_rollout_ref.rollout"
    whole = [f"{rollout}.{name}_parallel_size=1" for name in ("tensor_model", "expert")]
    found = weights(memory(*whole, MTP)) - weights(memory(*whole))
    assert found / 2 == pytest.approx(UNIQUE, rel=0.02)
    without, drafting = memory(), memory(MTP)
    assert drafting.kv_token_bytes == pytest.approx(without.kv_token_bytes * 62 / 61)
    # Each of 32 ranks has its part of the experts, and the complete projection of 14336 x 7168.
    replicated = 31 * 2 * 7168 * 7168
    assert 16 * (weights(drafting) - weights(without)) == pytest.approx(UNIQUE + replicated, rel=0.05)
    assert memory(f"{DRAFTING}.algorithm=ngram").owners == without.owners


def test_a_pass_has_logits_of_all_tokens_that_it_checks() -> None:
    def sampling(*keys: str) -> int:
        config, inputs = read_inputs(RECIPE, [*keys], check=False)
        return dict(plan_memory(config, inputs, 80 * GIB, None).reserved)["sampling"]

    assert sampling(f"{DRAFTING}.algorithm=ngram", f"{DRAFTING}.num_draft_tokens=3") == 4 * sampling()


def test_tokens_that_are_left_out_are_sorted_out() -> None:
    """SGLang's sampler does this; it takes more memory and more time than megarl's kernels."""
    cut = "actor_rollout_ref.rollout.top_p=0.9"
    config, inputs = read_inputs(RECIPE, [cut], check=False)
    found = dict(plan_memory(config, inputs, 80 * GIB, None).reserved)["sampling"]
    config, inputs = read_inputs(RECIPE, [], check=False)
    assert 32 * found == 44 * dict(plan_memory(config, inputs, 80 * GIB, None).reserved)["sampling"]
    assert 1.0 < seconds(cut) / seconds() < 2.0


def seconds(*keys: str) -> float:
    config, inputs = read_inputs(RECIPE, [*keys], check=False)
    machine = Machine(TABLE["H100"], Assumptions(), 8)
    return generate(config, inputs, machine, 2_000_000).decode


def test_generation_is_as_fast_as_is_assumed_of_accepted_tokens() -> None:
    without = seconds()
    assert seconds(MTP) == pytest.approx(without, rel=0.03)  # no accept length is given: no gain
    three = [MTP, f"{DRAFTING}.num_draft_tokens=3"]
    found = [seconds(*three, f"{DRAFTING}.accept_length={length}") for length in (1.0, 2.0, 3.0)]
    assert found[0] > without and found[2] < without
    assert found[1] == pytest.approx(found[0] / 2) and found[2] == pytest.approx(found[0] / 3)
    drafted = [f"{DRAFTING}.num_draft_tokens=3", f"{DRAFTING}.accept_length=2"]
    assert seconds(f"{DRAFTING}.algorithm=ngram", *drafted) < found[1]  # n-grams read no weights


def test_a_draft_model_is_planned_from_its_folder(tmp_path: Path) -> None:
    speculative = SpeculativeConfig(algorithm="eagle3", draft_path=str(tmp_path))
    rollout = RolloutConfig(tensor_model_parallel_size=2, speculative=speculative)
    assert draft_folder(RolloutConfig()) == DraftFolder()
    with pytest.raises(ValueError, match=r"draft_path: .* has no config\.json and files of weights"):
        draft_folder(rollout)
    parts = {"lm_head.weight": (100, 50), "fc.weight": (50, 150), "norm.weight": (50,)}
    shared = {"model.embed_tokens.weight": (200, 50), "d2t": (100,)}
    save_file(
        {name: torch.zeros(shape) for name, shape in (parts | shared).items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ValueError, match=r"config\.json lacks num_attention_heads, num_hidden_layers"):
        draft_folder(rollout)
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    found = draft_folder(rollout)
    whole = 50 * 150 + 50
    assert found.weights == 2 * (whole + 100 * 50 // 2)  # engines serve it in bfloat16
    assert found.token == 2 * 2 * 8  # keys and values of two heads of 8
    (tmp_path / "model.safetensors").unlink()
    torch.save({name: torch.zeros(shape) for name, shape in parts.items()}, tmp_path / "pytorch_model.bin")
    assert draft_folder(rollout) == found


def test_a_trained_layer_reaches_the_engines_that_draft_with_it() -> None:
    for mtp, there in (("train", True), ("keep", False)):
        config, inputs = read_inputs(RECIPE, [MTP, f"actor_rollout_ref.model.mtp={mtp}"], check=False)
        sync = configured_sync(config, inputs.model, config.actor_rollout_ref.rollout)
        assert (sync.mtp, sync.engines.draft) == (there, there)
        source, target = sync._layouts()
        filled = {piece.tensor for piece in target.pieces(0) if piece.local.startswith(DRAFT)}
        assert bool(filled) == there
        sent = {piece.tensor for shard in source.shards for piece in shard.pieces}
        assert filled <= sent


def test_a_sync_says_what_it_only_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model: Callable[[str], TinyModel]
) -> None:
    """These are a layer that is kept, with the bytes of the memory plan, or a draft's folder; never a layer that is trained."""

    def verified(*keys: str, recipe: str = GLM) -> int:
        config, inputs = read_inputs(recipe, [*keys], check=False)
        return kept_draft(config, inputs.model, config.actor_rollout_ref.rollout)

    config, inputs = read_inputs(GLM, [MTP], check=False)
    rollout = config.actor_rollout_ref.rollout
    kept = verified(MTP, "actor_rollout_ref.model.mtp=keep")
    assert kept == served_bytes(rollout, inputs) - served_bytes(rollout, inputs, draft=False) > 0
    assert verified(MTP, "actor_rollout_ref.model.mtp=train") == verified() == 0
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    save_file({"lm_head.weight": torch.zeros(100, 64)}, tmp_path / "model.safetensors")
    folder = [f"{DRAFTING}.algorithm=eagle3", f"{DRAFTING}.draft_path={tmp_path}"]
    tp = rollout.tensor_model_parallel_size
    assert tp * verified(*folder) == 2 * 100 * 64
    keeps = [
        f"actor_rollout_ref.model.path={tiny_model('glm4_moe').folder}",
        "data.max_prompt_length=60",
        "data.max_response_length=64",
        "actor_rollout_ref.model.mtp=keep",
        MTP,
    ]
    plan = ["plan", "sync", SMALL, *keeps]
    assert main(plan) == main([*plan, "--json"]) == 0
    said, _, figures = capsys.readouterr().out.partition("\n{")
    assert json.loads("{" + figures)["draft"] == verified(*keeps, recipe=SMALL) > 0
    assert "a draft of" in said and "each sync verifies it" in said
