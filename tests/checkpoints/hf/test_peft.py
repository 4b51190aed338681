"""Folders of adapters in PEFT's format: folders that PEFT saves are read, and adapters that do not fit are refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import compare, convert
from megarl.checkpoints.hf.adapters import adapter_layout, load_adapters
from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from tests.checkpoints.hf.peft_folders import base_model, load, tensors_in, write, write_random
from tests.weight_sync.megatron_adapters import log_probs_with_adapters, peft_log_probs
from tests.weight_sync.shards import empty_shards

LORA, DORA = LoraConfig(rank=4, alpha=12), LoraConfig(rank=4, alpha=12, use_dora=True)
ONE, WIDE = ParallelLayout(world=1), ParallelLayout(world=8, tp=2, pp=2, ep=2, etp=2, sp=True)


@pytest.fixture
def adapter(tmp_path, tiny_model) -> tuple[Path, Path]:
    """A folder of adapters, and the folder of the model that they belong to."""
    model = tiny_model("llama").folder
    write_random(model, LORA, tmp_path / "a")
    return tmp_path / "a", model


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=8, alpha=12), r"adapter_config.json has r=4, lora.rank is 8"),
        (
            LoraConfig(rank=4),
            r"multiplied with 3 \(lora_alpha=12, use_rslora=False\), with 1 by lora.alpha=4",
        ),
        (LoraConfig(rank=4, alpha=12, use_rslora=True), r"with 3 .*with 6 by .*lora.use_rslora=True"),
        (DORA, r"use_dora=False, lora.use_dora is True"),
        (
            LoraConfig(rank=4, alpha=12, target_modules=("q_proj",)),
            r"left over: model.layers.0.mlp.down_proj",
        ),
        (
            LoraConfig(rank=4, alpha=12, exclude_modules=("q_proj",)),
            r"left over: model.layers.0.self_attn.q_proj.lora_A.weight, .* and 2 more",
        ),
    ],
    ids=["rank", "alpha", "rslora", "dora", "target_modules", "exclude_modules"],
)
def test_what_differs_from_the_section_is_named_with_both_values(adapter, lora, message):
    with pytest.raises(ValueError, match=message):
        load(*adapter, lora, ONE)


def change(folder: Path, **keys: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config.json: peft_type 'IA3' is not supported"),
        ({"r": 0}, r"adapter_config.json: r must be a whole number from 1 on, found 0"),
        ({"r": True}, r"r must be a whole number from 1 on, found True"),
        ({"lora_alpha": float("nan")}, r"lora_alpha must be a number above 0, found nan"),
        ({"lora_alpha": -12}, r"lora_alpha must be a number above 0, found -12"),
        ({"lora_alpha": "12"}, r"lora_alpha must be a number above 0, found '12'"),
        ({"use_rslora": "no"}, r"use_rslora must be true or false, found 'no'"),
        ({"modules_to_save": "score"}, r"modules_to_save must be a list of texts, found 'score'"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern must be an object"),
        (
            {"rank_pattern": {"q_proj": -8}},
            r"rank_pattern: q_proj must be a whole number from 1 on, found -8",
        ),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern lacks q_proj"),
        ({"alpha_pattern": {"q_(proj": 8}}, r"alpha_pattern: 'q_\(proj' is no regular expression"),
        (
            {"bias": "all", "use_qalora": True},
            r"not supported: bias='all', use_qalora=True",
        ),
        ({"init_lora_weights": "pissa"}, r"not supported: init_lora_weights='pissa'"),
        ({"rank_pattern": {"q_proj": 8}}, r"has r=4, by rank_pattern up to 8, lora.rank is 4"),
        (
            {"rank_pattern": {"q_proj": 2}},
            r"q_proj.lora_A.weight has shape \(4, 32\), it should be \(2, 32\)",
        ),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save=\['embed_tokens'\]"),
        ({"a_new_kind": True}, r"not supported: a_new_kind=True"),
    ],
)
def test_keys_that_ask_for_more_are_refused(adapter, keys, message):
    change(adapter[0], **keys)
    with pytest.raises(ValueError, match=message):
        load(*adapter, LORA, ONE)


def test_files_that_are_missing_or_damaged_are_named(adapter):
    folder, model = adapter
    file = folder / "adapter_model.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    short = name.removeprefix("base_model.model.")

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            load(folder, model, LORA, ONE)

    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    refused(f"missing: {short}")
    save_file({**tensors, name: tensors[name][1:].contiguous()}, file)
    refused(rf"{short} has shape \(63, 4\), it should be \(64, 4\)")
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    refused(f"{short} is of type I8")
    save_file({**tensors, "model.q_proj.lora_A.weight": tensors[name].clone()}, file)
    refused(r"names begin with 'base_model.model.' in PEFT's format, found model.q_proj.lora_A")
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, file)
    refused(rf"adapter '{folder}': {short} has values that are no finite numbers")
    file.write_bytes(content[:-100])
    refused(r"adapter_model.safetensors is no complete safetensors file")
    file.rename(folder / "adapter_model.bin")
    refused(r"has no adapter_model.safetensors; adapter_model.bin is not read")
    (folder / "adapter_config.json").write_text("{")
    refused(r"adapter_config.json is not JSON")
    (folder / "adapter_config.json").write_text('["LORA"]')
    refused(r"adapter_config.json should hold a JSON object, found list")
    (folder / "adapter_config.json").unlink()
    refused(r"is no folder of adapters in PEFT's format: it has no adapter_config.json")


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# All sizes of a layer differ: hidden 32, experts' width 24.
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 96}
KINDS = {
    "parameters": {"target_modules": [], "target_parameters": EXPERTS},
    "one_parameter": {"target_modules": ["o_proj"], "target_parameters": EXPERTS[:1]},
    "other_parameter": {"target_modules": [], "target_parameters": EXPERTS[1:]},
    "all_linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "names": {"target_modules": ["gate_proj", "up_proj", "down_proj", "o_proj"]},
    "patterns": {
        "target_modules": ["q_proj", "q_b_proj", "o_proj"],
        "target_parameters": EXPERTS,
        "rank_pattern": {r"experts\.down_proj": 6, r".*\.2\.self_attn\..*": 2},
        "alpha_pattern": {"o_proj": 5.0, "gate_up_proj": 7},
    },
}
FAMILIES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "minimax_m2")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny_model(root / family, ["one two"], family=family, **SIZES) for family in FAMILIES
    }


def save(model: Path, target: Path, rank: int = 4, **keys: Any) -> Any:
    """Save random adapters with PEFT; returns PEFT's model."""
    torch.manual_seed(5)
    peft = get_peft_model(base_model(model), PeftConfig(r=rank, lora_alpha=12, task_type="CAUSAL_LM", **keys))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1)
    peft.save_pretrained(target)
    return peft.eval()


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}


# Every kind with qwen3_moe, and with qwen3_5_moe, whose experts are in one tensor; the other families have every second kind.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        (family, kind)
        for turn, family in enumerate(FAMILIES)
        for at, kind in enumerate(KINDS)
        if family in ("qwen3_moe", "qwen3_5_moe") or (kind != "rslora" and (turn + at) % 2)
    ],
)
def test_a_merged_model_is_what_peft_makes_of_both(tmp_path, models, family, kind):
    model = models[family]
    peft = save(model, tmp_path / "adapter", **KINDS[kind])
    convert(str(model), str(tmp_path / "merged"), adapter=str(tmp_path / "adapter"), shard_bytes=60_000)
    peft.merge_and_unload().save_pretrained(tmp_path / "expected")
    found, expected = weights(tmp_path / "merged"), weights(tmp_path / "expected")
    base = weights(model)
    assert found.keys() == expected.keys()
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, base[name])}
    every = "all-linear" in KINDS[kind].values()
    # Where a file has all experts in one tensor, PEFT (0.21.2) adapts them only as parameters, and never their router. The names of
    # projections are not those of MiniMax-M2's experts (w1, w2, w3).
    fused = family == "qwen3_5_moe"
    named = "target_parameters" in KINDS[kind] or not (fused or (family, kind) == ("minimax_m2", "names"))
    assert any(".experts." in name for name in changed) == named
    assert any(name.endswith(".gate.weight") for name in changed) == (every and not fused)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
        assert name in changed or torch.equal(found[name], tensor)
    assert compare(str(tmp_path / "adapter"), str(tmp_path / "adapter")).equal


SECTIONS = {
    "parameters": LoraConfig(rank=4, alpha=12, target_modules=("*.experts.*",)),
    "other_parameter": LoraConfig(rank=4, alpha=12, target_modules=("*.experts.*.down_proj",)),
    "all_linear": LoraConfig(rank=8, alpha=24, target_modules=("all-linear", "gate")),
    "rslora": LoraConfig(rank=8, alpha=24, use_rslora=True, target_modules=("all-linear", "gate")),
    "names": LoraConfig(rank=8, alpha=24, target_modules=("*.experts.*", "o_proj")),
    "patterns": LoraConfig(rank=6, alpha=12, target_modules=("*.experts.*", "o_proj", "q_proj")),
}


def fill(
    adapter: Path, model: Path, lora: LoraConfig, layout: ParallelLayout
) -> list[dict[str, torch.Tensor]]:
    """The adapters of each rank after it has read the folder into new adapters."""
    config = read_model_config(str(model))
    ranks = empty_shards(adapter_layout(config, layout, lora))
    for rank, tensors in enumerate(ranks):
        for name, tensor in tensors.items():
            tensor.fill_(0.25 if name.rpartition(".")[2].startswith("a") else 0.0)
        load_adapters(str(adapter), config, lora, layout, rank, tensors)
    return ranks


@pytest.mark.parametrize("layout", [ONE, WIDE], ids=["one", "tp2pp2ep2etp2"])
@pytest.mark.parametrize("kind", SECTIONS)
def test_what_training_begins_with_is_what_peft_saved(tmp_path, models, kind, layout):
    """Ranks read the adapters of single experts from PEFT's adapters of parameters; the adapters that they then write compute the same."""
    model, lora = models["qwen3_moe"], SECTIONS[kind]
    peft = save(model, tmp_path / "adapter", **KINDS[kind])
    ranks = fill(tmp_path / "adapter", model, lora, layout)
    write(model, lora, tmp_path / "ours", ranks, layout)
    convert(str(model), str(tmp_path / "merged"), adapter=str(tmp_path / "ours"))
    peft.merge_and_unload().save_pretrained(tmp_path / "expected")
    found, expected = weights(tmp_path / "merged"), weights(tmp_path / "expected")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_adapters_of_one_rank_are_the_saved_ones_bit_for_bit(tmp_path, models):
    model, lora = models["qwen3_moe"], SECTIONS["parameters"]
    save(model, tmp_path / "adapter", **KINDS["parameters"])
    write(model, lora, tmp_path / "ours", fill(tmp_path / "adapter", model, lora, WIDE), WIDE)
    ours, theirs = tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "adapter")
    layer, count = "model.layers.2.mlp.experts.", read_model_config(str(model)).moe.num_experts
    # PEFT's own layout: A has the experts one after another, B has the columns of all experts next to each other.
    a, b = (theirs[f"{layer}base_layer.lora_{kind}.weight"] for kind in "AB")
    assert b.shape == (48, 4 * count)
    for expert in (0, 3, count - 1):
        gate, up = (f"{layer}{expert}.{name}_proj.lora_" for name in ("gate", "up"))
        assert torch.equal(ours[gate + "A.weight"], a[4 * expert : 4 * expert + 4])
        assert torch.equal(ours[up + "A.weight"], ours[gate + "A.weight"])
        assert torch.equal(ours[gate + "B.weight"], b[:24, expert::count])
        assert torch.equal(ours[up + "B.weight"], b[24:, expert::count])
    shared = dataclasses.replace(lora, shared_a=True)  # these adapters can share A
    fill(tmp_path / "adapter", model, shared, WIDE)


def test_megatron_computes_what_peft_does(ranks, tmp_path, models):
    """Gate and up have twice the rank of the other projections, and routers have adapters."""
    model, lora = models["qwen3_moe"], SECTIONS["rslora"]
    peft = save(model, tmp_path / "adapter", **KINDS["rslora"])
    sizes = {"tp": 2, "sp": True, "ep": 2}
    results = ranks.run(log_probs_with_adapters, str(model), str(tmp_path / "adapter"), lora, sizes, world=2)
    for log_probs, _ in results:
        torch.testing.assert_close(log_probs, peft_log_probs(peft), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "lora", "message"),
    [
        (
            "all_linear",
            LoraConfig(rank=8, alpha=24),
            r"left over: model.layers.0.mlp.gate.lora_A.weight, model.layers.0.mlp.gate.lora_B.weight, ",
        ),
        ("names", LoraConfig(rank=4, alpha=12), "has r=4, by rank_pattern up to 8, lora.rank is 4"),
        ("names", LoraConfig(rank=8, alpha=12), r"multiplied with 3 .*with 1.5 by lora.alpha=12"),
        (
            "parameters",
            LoraConfig(rank=4, alpha=12, target_modules=("*.experts.*.down_proj",)),
            r"left over: model.layers.0.mlp.experts.0.gate_proj.lora_A.weight",
        ),
        (
            "names",
            LoraConfig(rank=8, alpha=24, shared_a=True, target_modules=("*.experts.*", "o_proj")),
            "rank_pattern or alpha_pattern makes adapters differ that lora.shared_a",
        ),
        ("parameters", LoraConfig(rank=4, alpha=12, use_dora=True), "use_dora=False, lora.use_dora is True"),
    ],
)
def test_sections_that_are_of_other_adapters_are_told_so(tmp_path, models, kind, lora, message):
    save(models["qwen3_moe"], tmp_path / "adapter", **KINDS[kind])
    with pytest.raises(ValueError, match=message):
        fill(tmp_path / "adapter", models["qwen3_moe"], lora, ONE)


def test_experts_of_another_model_and_tensors_that_contradict_are_refused(tmp_path, models):
    model, adapter = models["qwen3_moe"], tmp_path / "adapter"
    save(model, adapter, **KINDS["parameters"])
    file = adapter / "adapter_model.safetensors"
    original, layer = load_file(file), "base_model.model.model.layers.1.mlp.experts."
    wide = make_tiny_model(
        tmp_path / "wide", ["one"], family="qwen3_moe", **{**SIZES, "ffn_hidden_size": 128}
    )
    dense = make_tiny_model(tmp_path / "dense", ["one"], **SIZES)

    def refused(message: str, base: Path = model, **changes: torch.Tensor | None) -> None:
        changed = original | {layer + name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=message):
            convert(str(base), str(tmp_path / "out"), adapter=str(adapter))
        assert not (tmp_path / "out").exists()

    refused(
        r"is not of this model: .*experts.* has A of shape .*none of the parameters of 8 experts of width 32",
        wide,
    )
    refused(r"is not of this model: left over: model.layers.0.mlp.experts.base_layer.lora_A", dense)
    refused(r"missing: model.layers.1.mlp.experts.lora_B.weight", lora_B__weight=None)
    refused(r"left over: model.layers.1.mlp.experts.lora_B.weight", lora_A__weight=None)
    refused(r"has A of shape \(31, 24\)", lora_A__weight=torch.ones(31, 24))
    refused(r"has A of shape \(32,\)", lora_A__weight=torch.ones(32))
    refused(r"has A of shape \(64, 24\) and B of shape \(32, 32\)", lora_A__weight=torch.ones(64, 24))
    refused(
        r"experts.0.gate_proj has an adapter twice",
        lora_A__weight=torch.ones(32, 32),
        lora_B__weight=torch.ones(48, 32),
    )
    refused(
        r"experts.0.down_proj has an adapter twice, one of them in",
        **{
            "0__down_proj__lora_A__weight": torch.ones(4, 24),
            "0__down_proj__lora_B__weight": torch.ones(32, 4),
        },
    )
    refused(
        r"experts.0.down_proj.lora_A.weight has shape \(2, 24\), it should be \(4, 24\)",
        lora_A__weight=torch.ones(16, 24),
        lora_B__weight=torch.ones(32, 16),
    )


def test_scalings_that_differ_by_patterns_alone_are_compared(tmp_path, models):
    for name, alphas in (("a", {"down_proj": 3}), ("b", {"down_proj": 4})):
        save(models["qwen3_moe"], tmp_path / name, alpha_pattern=alphas, **KINDS["parameters"])
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert {difference.tensor for difference in found.different} == {
        f"model.layers.{layer}.mlp.experts.down_proj (scaling)" for layer in range(4)
    }
    assert {(difference.a, difference.b) for difference in found.different} == {("0.75", "1.0")}
