"""Adapters in Megatron's shards and in PEFT's folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.hf.adapters import AdapterExport, write_peft_adapter
from megarl.checkpoints.hf.peft import PeftReader
from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from tests.checkpoints.hf.peft_folders import (
    base_model,
    load,
    load_with_peft,
    merged,
    save_with_peft,
    tensors_in,
    write,
    write_random,
)
from tests.weight_sync.megatron_adapters import TOKENS, log_probs_with_adapters, peft_log_probs
from tests.weight_sync.serve_adapter import greedy, target_modules

LORA = LoraConfig(rank=4, alpha=12)
DORA = LoraConfig(rank=4, alpha=12, use_dora=True)
ONE, TWO = ParallelLayout(world=1), ParallelLayout(world=2, tp=2)
WIDE = ParallelLayout(world=8, tp=2, pp=2, vpp=2)
EXPERTS = ParallelLayout(world=8, tp=2, pp=2, ep=2, etp=2, sp=True)


# Every family with every layout; the two kinds of adapters alternate.
@pytest.mark.parametrize(
    ("family", "lora", "layout"),
    [
        pytest.param(family, [LORA, DORA][(at + turn) % 2], layout, id=f"{family}-{name}")
        for at, family in enumerate(("llama", "qwen2", "qwen3"))
        for turn, (name, layout) in enumerate((("one", ONE), ("tp2", TWO), ("tp2pp2vpp2dp2", WIDE)))
    ],
)
def test_what_peft_wrote_comes_back_bit_for_bit(tmp_path, tiny_model, family, lora, layout):
    model = tiny_model(family).folder
    save_with_peft(model, lora, tmp_path / "peft")
    write(model, lora, tmp_path / "ours", load(tmp_path / "peft", model, lora, layout), layout)
    expected, written = tensors_in(tmp_path / "peft"), tensors_in(tmp_path / "ours")
    assert written.keys() == expected.keys() and len(written) > 4 * 7 * 2 - 1
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_all_linear_layers_of_gpt_oss_are_those_of_peft(tmp_path, tiny_model):
    """Only attention's projections have adapters: to PEFT, experts are parameters."""
    model = tiny_model("gpt_oss").folder
    save_with_peft(model, LORA, tmp_path / "peft")
    write_random(model, LORA, tmp_path / "ours")
    assert tensors_in(tmp_path / "peft").keys() == tensors_in(tmp_path / "ours").keys()
    found = load_with_peft(model, tmp_path / "ours")
    plain = base_model(model)
    plain.load_state_dict(merged(plain.state_dict(), tensors_in(tmp_path / "ours"), model, LORA))
    with torch.no_grad():
        torch.testing.assert_close(found(TOKENS).logits, plain(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """The number of elements of each read of a tensor in a folder."""
    found, read = [], PeftReader.read

    def counted(self, name, box=None):
        values = read(self, name, box)
        found.append(values.numel())
        return values

    monkeypatch.setattr(PeftReader, "read", counted)
    return found


@pytest.mark.parametrize("layout", [TWO, WIDE], ids=["tp2", "tp2pp2vpp2dp2"])
def test_each_rank_reads_its_slices_alone(tmp_path, tiny_model, reads, layout):
    model = tiny_model("llama").folder
    write_random(model, LORA, tmp_path / "a")
    ranks = load(tmp_path / "a", model, LORA, layout)
    assert sum(reads) == sum(tensor.numel() for tensors in ranks for tensor in tensors.values())
    per_rank = [sum(tensor.numel() for tensor in tensors.values()) for tensors in ranks]
    whole = sum(tensor.numel() for tensor in tensors_in(tmp_path / "a").values())
    assert max(per_rank) < 0.8 * whole  # a rank reads either A or B of a weight unsharded


def test_a_folder_that_does_not_fit_is_refused_before_it_is_read(tmp_path, tiny_model, reads):
    model = tiny_model("llama").folder
    write_random(model, LORA, tmp_path / "a")
    with pytest.raises(ValueError, match="does not fit section lora"):
        load(tmp_path / "a", model, DORA, ONE)
    assert not reads


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        DORA,
        LoraConfig(rank=8, alpha=3, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj")),
        LoraConfig(rank=2, target_modules=("model.layers.[02].*", "o_proj"), exclude_modules=("k_proj",)),
        LoraConfig(rank=4, alpha=8, shared_a=True),
    ],
    ids=["lora", "dora", "rslora", "patterns", "shared_a"],
)
def test_peft_computes_what_the_formulas_say(tmp_path, tiny_model, lora):
    """PEFT loads the adapters that megarl wrote; tests/megatron/lora/test_lora.py compares Megatron's computation with PEFT's."""
    model = tiny_model("qwen2").folder
    write_random(model, lora, tmp_path / "ours")
    found = load_with_peft(model, tmp_path / "ours")
    plain = base_model(model)
    plain.load_state_dict(merged(plain.state_dict(), tensors_in(tmp_path / "ours"), model, lora))
    with torch.no_grad():
        logits, expected = found(TOKENS).logits, plain(TOKENS).logits
        without = base_model(model)(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - without).abs().max() > 0.05


KINDS = {
    "dora": LoraConfig(rank=2, alpha=6, use_dora=True),
    "shared_a": LoraConfig(rank=2, alpha=6, shared_a=True),
    "groups": LoraConfig(rank=2, alpha=6, expert_groups=4),
}
OF_EXPERTS = ("qwen3_moe", "deepseek_v3", "glm4_moe", "minimax_m2")


# Every kind with every family; the two layouts alternate.
@pytest.mark.parametrize(
    ("lora", "family", "layout"),
    [
        pytest.param(lora, family, layout, id=f"{kind}-{family}-{name}")
        for turn, (kind, lora) in enumerate(KINDS.items())
        for at, family in enumerate(OF_EXPERTS)
        for name, layout in [[("one", ONE), ("tp2pp2ep2etp2", EXPERTS)][(turn + at) % 2]]
    ],
)
def test_adapters_of_experts_are_the_same_from_every_layout(tmp_path, tiny_model, family, lora, layout):
    model = tiny_model(family).folder
    write_random(model, lora, tmp_path / "first")
    write(model, lora, tmp_path / "again", load(tmp_path / "first", model, lora, layout), layout)
    first, again = tensors_in(tmp_path / "first"), tensors_in(tmp_path / "again")
    assert first.keys() == again.keys() and any(".experts.7." in name for name in first)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_shared_adapters_are_written_for_each_that_shares_them(tmp_path, tiny_model):
    model = tiny_model("qwen3_moe").folder
    write_random(model, LoraConfig(rank=2, shared_a=True, expert_groups=4), tmp_path / "a")
    found = tensors_in(tmp_path / "a")
    layer = "model.layers.1."
    a = found[layer + "self_attn.q_proj.lora_A.weight"]
    assert torch.equal(a, found[layer + "self_attn.v_proj.lora_A.weight"])
    for name in ("gate_proj.lora_A", "gate_proj.lora_B", "down_proj.lora_B"):
        four, five, six = (found[f"{layer}mlp.experts.{expert}.{name}.weight"] for expert in (4, 5, 6))
        assert torch.equal(four, five) and not torch.equal(five, six)


def test_adapters_that_differ_are_not_loaded_as_shared_ones(tmp_path, tiny_model):
    model = tiny_model("qwen3_moe").folder
    write_random(model, LoraConfig(rank=2), tmp_path / "a")
    for lora in (LoraConfig(rank=2, shared_a=True), LoraConfig(rank=2, expert_groups=4)):
        with pytest.raises(ValueError, match=r"lora_A.weight and .*lora_A.weight differ; by lora.shared_a"):
            load(tmp_path / "a", model, lora, ONE)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3_moe", LoraConfig(rank=2, alpha=3, use_rslora=True, dropout=0.1)),
        ("deepseek_v3", LoraConfig(rank=2, alpha=6)),
        ("glm4_moe", LoraConfig(rank=2, alpha=3, use_rslora=True)),
        ("glm4_moe", LoraConfig(rank=2, exclude_modules=("*.experts.*", "model.layers.2.*"))),
        ("deepseek_v3", LoraConfig(rank=2, target_modules=("model.layers.[02].mlp.*", "q_b_proj"))),
        ("minimax_m2", LoraConfig(rank=2, alpha=3, use_rslora=True)),
        ("glm_moe_dsa", LoraConfig(rank=2, alpha=6)),
        # PEFT 0.21 wraps the routers of other families such that their models cannot read the router's bias
        ("qwen3_moe", LoraConfig(rank=2, target_modules=("all-linear", "gate"))),
    ],
    ids=[
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
        "without_experts",
        "some_layers",
        "minimax_m2",
        "glm_moe_dsa",
        "routers",
    ],
)
def test_peft_makes_of_mixtures_of_experts_what_the_formulas_say(tmp_path, tiny_model, family, lora):
    model = tiny_model(family).folder
    write_random(model, lora, tmp_path / "ours")
    found = load_with_peft(model, tmp_path / "ours")
    folder = shutil.copytree(model, tmp_path / "merged")
    state = merged(load_file(model / "model.safetensors"), tensors_in(tmp_path / "ours"), model, lora)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        logits, expected = found(TOKENS).logits, base_model(folder)(TOKENS).logits
        without = base_model(model)(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - without).abs().max() > 0.01
    load(tmp_path / "ours", model, lora, ONE)


def test_sglang_finds_all_modules_in_what_is_written(tmp_path, tiny_model):
    named, adapted = [], []
    for family in ("qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe"):
        write_random(tiny_model(family).folder, LORA, tmp_path / family)
        config = json.loads((tmp_path / family / "adapter_config.json").read_text())
        named.append(config["target_modules"])
        adapted.append(
            sorted({name.split(".lora_")[0].split(".")[-1] for name in tensors_in(tmp_path / family)})
        )
    assert named[0] != named[2]
    found = target_modules([*named, *adapted])
    assert found[:4] == found[4:]


@pytest.mark.parametrize(
    ("family", "lora", "world", "sizes"),
    [
        ("qwen2", DORA, 4, {"tp": 2, "sp": True, "pp": 2}),
        ("qwen3_moe", LoraConfig(rank=2, alpha=3, use_rslora=True), 2, {"tp": 2, "sp": True, "ep": 2}),
    ],
    ids=["qwen2", "qwen3_moe"],
)
def test_megatron_and_peft_compute_the_same_from_each_others_files(
    ranks, tmp_path, tiny_model, family, lora, world, sizes
):
    model = str(tiny_model(family).folder)
    write_random(model, lora, tmp_path / "a")
    results = ranks.run(log_probs_with_adapters, model, str(tmp_path / "a"), lora, sizes, world=world)
    expected = peft_log_probs(load_with_peft(model, tmp_path / "a"))
    found = [log_probs for log_probs, _ in results if log_probs is not None]
    assert found
    for log_probs in found:
        torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    plan = AdapterExport(read_model_config(model), ParallelLayout(world=world, **sizes), lora, torch.float32)
    write_peft_adapter(str(tmp_path / "b"), model, plan, [bundle for _, bundle in results])
    for name, tensor in tensors_in(tmp_path / "a").items():
        assert torch.equal(tensors_in(tmp_path / "b")[name], tensor), name


def test_value_heads_are_saved_whole(tmp_path, tiny_model):
    model = tiny_model("qwen3", head="score").folder
    peft = save_with_peft(model, LORA, tmp_path / "peft", "value")
    ranks = load(tmp_path / "peft", model, LORA, WIDE, "value")
    write(model, LORA, tmp_path / "ours", ranks, WIDE, "value")
    assert torch.equal(
        tensors_in(tmp_path / "ours")["score.weight"], tensors_in(tmp_path / "peft")["score.weight"]
    )
    ours = load_with_peft(model, tmp_path / "ours", "value")
    with torch.no_grad():
        assert torch.equal(ours(TOKENS).logits, peft(TOKENS).logits)
    load(tmp_path / "ours", model, LORA, ONE)  # a policy does not read the head
    file = tmp_path / "ours" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.score.weight"] = torch.zeros(3, 32)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"score.weight has shape \(3, 32\), it should be \(1, 32\)"):
        load(tmp_path / "ours", model, LORA, ONE, "value")


def test_a_damaged_slice_is_named_and_nothing_is_written(tmp_path, tiny_model):
    model = tiny_model("llama").folder
    write_random(model, LORA, tmp_path / "a")
    ranks = load(tmp_path / "a", model, LORA, TWO)
    plan = AdapterExport(read_model_config(str(model)), TWO, LORA, torch.float32)
    bundles = [plan.pack(0, rank, tensors) for rank, tensors in enumerate(ranks)]
    bundles[1].data[-1] ^= 1
    with pytest.raises(ValueError, match=r"lora_[AB].weight from rank 1 arrived damaged"):
        write_peft_adapter(str(tmp_path / "b"), str(model), plan, bundles)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_sglang_serves_what_was_written(tmp_path, tiny_model):
    """One folder has all linear layers with rsLoRA, whose scaling factor SGLang computes without it; the other has some of the layers."""
    model = tiny_model("qwen2").folder
    kinds = {
        "all": LoraConfig(rank=4, alpha=16, use_rslora=True),
        "some": LoraConfig(rank=2, alpha=8, target_modules=("model.layers.[12].*",)),
    }
    folders = {name: str(tmp_path / name) for name in kinds}
    for name, lora in kinds.items():
        write_random(model, lora, folders[name])
    prompts = [[3, 141, 59, 26, 5], [97, 93, 238], [46, 264, 33, 83, 279, 50]]
    served = greedy(str(model), folders, prompts, 12)
    expected = {"": base_model(model)} | {
        name: load_with_peft(model, folder) for name, folder in folders.items()
    }
    for name, peft in expected.items():
        for prompt, found in zip(prompts, served[name], strict=True):
            ids = torch.tensor([prompt])
            tokens = peft.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12,
                                   do_sample=False, eos_token_id=None)  # fmt: skip
            assert tokens[0, len(prompt) :].tolist() == found, name
    assert len({json.dumps(tokens) for tokens in served.values()}) == 3
