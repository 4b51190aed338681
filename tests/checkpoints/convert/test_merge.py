"""Adapters merged into a model, and folders of adapters compared."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import compare, convert
from megarl.cli.main import main
from megarl.config.schema.models import LoraConfig
from tests.checkpoints.convert.rss import peak_growth_mb
from tests.checkpoints.hf.peft_folders import load_with_peft, merged, save_with_peft, tensors_in, write_random
from tests.weight_sync.shards import quantise

LORA, DORA = LoraConfig(rank=4, alpha=12), LoraConfig(rank=4, alpha=12, use_dora=True)
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}


def make(folder: Path, family: str = "qwen2", **options) -> str:
    return str(make_tiny_model(folder, ["one two"], family=family, **SIZES, **options))


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in Path(folder).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2", LORA),
        ("llama", DORA),
        ("qwen3", LoraConfig(rank=8, alpha=3, use_rslora=True, target_modules=("q_proj", "v_proj"))),
    ],
    ids=["lora", "dora", "rslora"],
)
def test_a_merged_model_is_what_peft_makes_of_both(tmp_path, family, lora):
    model = make(tmp_path / "base", family, tie_word_embeddings=family == "qwen2")
    peft = save_with_peft(model, lora, tmp_path / "adapter")
    convert(model, str(tmp_path / "merged"), adapter=str(tmp_path / "adapter"), shard_bytes=40_000)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    expected = peft.merge_and_unload()
    for name, tensor in weights(tmp_path / "merged").items():
        torch.testing.assert_close(tensor, expected.state_dict()[name], rtol=1e-6, atol=1e-6)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(served(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
    names = {file.name for file in Path(model).iterdir() if "safetensors" not in file.name}
    assert all((tmp_path / "merged" / name).is_file() for name in names)


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("lora", [LoraConfig(rank=2, alpha=3, use_rslora=True), DORA], ids=["rslora", "dora"])
def test_experts_and_latent_attention_are_merged_by_the_formulas(tmp_path, family, lora, to):
    model = make(tmp_path / "base", family, num_mtp_layers=int(family == "deepseek_v3"))
    write_random(model, lora, tmp_path / "adapter")
    convert(model, str(tmp_path / "merged"), to=to, adapter=str(tmp_path / "adapter"))
    if to == "megatron":
        convert(str(tmp_path / "merged"), str(tmp_path / "hf"))
    found = weights(tmp_path / ("hf" if to == "megatron" else "merged"))
    expected = merged(weights(model), tensors_in(tmp_path / "adapter"), model, lora)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)


def test_merged_experts_compute_what_peft_computes(tmp_path):
    model = make(tmp_path / "base", "qwen3_moe")
    write_random(model, LORA, tmp_path / "adapter")
    convert(model, str(tmp_path / "merged"), adapter=str(tmp_path / "adapter"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
        expected = load_with_peft(model, tmp_path / "adapter")(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_float8_model_is_merged_in_float32_and_rounded_once(tmp_path):
    model = make(tmp_path / "base", "deepseek_v3", dtype="bfloat16")
    state = quantise(Path(model), (16, 16))
    write_random(model, LORA, tmp_path / "adapter")
    convert(model, str(tmp_path / "merged"), adapter=str(tmp_path / "adapter"))
    wide = merged(state, tensors_in(tmp_path / "adapter"), model, LORA)
    found = weights(tmp_path / "merged")
    for name, tensor in wide.items():
        if not name.endswith("e_score_correction_bias"):
            assert found[name].dtype == torch.bfloat16
            # half a unit in the last place of 8 bits; the sum itself is correct to float32's rounding
            torch.testing.assert_close(found[name].float(), tensor.float(), rtol=2**-8, atol=1e-6)


def test_value_heads_are_taken_from_the_adapter(tmp_path):
    model = make(tmp_path / "base", "qwen3", head="score")
    save_with_peft(model, LORA, tmp_path / "adapter", "value")
    convert(model, str(tmp_path / "merged"), adapter=str(tmp_path / "adapter"))
    head = weights(tmp_path / "merged")["score.weight"]
    assert torch.equal(head, tensors_in(tmp_path / "adapter")["score.weight"])
    assert not torch.equal(head, weights(model)["score.weight"])
    policy = make(tmp_path / "policy", "qwen3")
    with pytest.raises(ValueError, match=r"has a value head \(score.weight\), .* is a language model"):
        convert(policy, str(tmp_path / "no"), adapter=str(tmp_path / "adapter"))


def test_memory_is_bounded_by_a_file_and_twice_the_largest_tensor(tmp_path):
    """A file has 10 MB, or only the embedding, which is the largest tensor."""
    model = str(
        make_tiny_model(
            tmp_path / "base", ["one"], vocab_size=8000, hidden_size=512, ffn_hidden_size=2048, num_layers=8
        )
    )
    write_random(model, LORA, tmp_path / "adapter")
    size = sum(tensor.nbytes for tensor in weights(model).values()) / 1e6
    grown = peak_growth_mb(model, str(tmp_path / "merged"), 10_000_000, str(tmp_path / "adapter"))
    largest = 8000 * 512 * 4 / 1e6
    assert grown < 3 * largest < size / 2, (grown, largest, size)


def test_mistakes_are_named_and_leave_nothing(tmp_path):
    model, other = make(tmp_path / "base"), make(tmp_path / "other", num_layers=2)
    write_random(model, LORA, tmp_path / "adapter")
    adapter = str(tmp_path / "adapter")
    convert(model, str(tmp_path / "megatron"))
    wide = str(make_tiny_model(tmp_path / "wide", ["one"], **{**SIZES, "hidden_size": 64}))

    def refused(message: str, source: str, merge: str | None = adapter) -> None:
        with pytest.raises(ValueError, match=message):
            convert(source, str(tmp_path / "out"), adapter=merge)
        assert not (tmp_path / "out").exists()

    refused(
        r"is not of this model: left over: model.layers.2.mlp.down_proj.lora_A.weight, .* and 22 more", other
    )
    refused(r"model.layers.0.mlp.down_proj.lora_B.weight has shape \(32, 4\), it should be \(64, 4\)", wide)
    refused(r"--merge needs a Hugging Face folder, found the Megatron checkpoint", str(tmp_path / "megatron"))
    refused(
        r"is a folder of adapters; to merge it into its base model: megarl convert BASE NEW --merge",
        adapter,
        None,
    )
    refused(r"is no folder of adapters in PEFT's format", model, model)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused(r"adapter_model.safetensors is no complete safetensors file", model)


def test_the_command_merges_and_verifies(tmp_path, capsys):
    model, adapter, out = make(tmp_path / "base"), str(tmp_path / "adapter"), str(tmp_path / "merged")
    write_random(model, LORA, adapter)
    assert main(["convert", model, out, "--merge", adapter, "--dtype", "bfloat16"]) == 0
    assert main(["convert", "--verify", model, out, "--merge", adapter]) == 1  # its tensors have another type
    shutil.rmtree(out)
    assert main(["convert", model, out, "--merge", adapter]) == 0
    assert main(["convert", "--verify", model, out, "--merge", adapter]) == 0
    assert "tensors are equal bit for bit" in capsys.readouterr().out
    assert main(["convert", "--verify", model, out]) == 1
    assert main(["convert", "--verify", adapter, out]) == 2


def test_folders_of_adapters_are_compared_by_values_and_by_what_they_are_multiplied_with(tmp_path, capsys):
    model, a, b = make(tmp_path / "base"), tmp_path / "a", tmp_path / "b"
    write_random(model, LORA, a)
    shutil.copytree(a, b)
    assert compare(str(a), str(b)).equal and compare(str(a), str(b)).num_equal == 4 * 7 * 2

    config = json.loads((a / "adapter_config.json").read_text())
    same = {**config, "lora_alpha": 6, "use_rslora": True}  # 6 / sqrt(4) = 12 / 4
    (b / "adapter_config.json").write_text(json.dumps(same))
    assert compare(str(a), str(b)).equal
    (b / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 6}))
    tensors = load_file(b / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name][5, 2] += 0.25
    gone = tensors.pop(name.replace("lora_B", "lora_A"))
    save_file({**tensors, "base_model.model.new.lora_A.weight": gone}, b / "adapter_model.safetensors")
    found = compare(str(a), str(b))
    scaling, changed = found.different
    assert (scaling.tensor, scaling.a, scaling.b) == ("scaling", "3.0", "1.5")
    assert changed.max_abs == pytest.approx(0.25) and found.num_equal == 54
    assert found.only_in_a == ("model.layers.1.mlp.up_proj.lora_A.weight",)
    assert found.only_in_b == ("new.lora_A.weight",)
    assert main(["convert", "--verify", str(a), str(b)]) == 1
    assert "scaling" in capsys.readouterr().out
    assert main(["convert", "--verify", str(a), model]) == 2
