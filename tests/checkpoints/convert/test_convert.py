"""Conversions without ranks: refused inputs (such as values that a type cannot hold), contents that are kept, what a failed conversion leaves, and
its memory."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import compare, convert
from megarl.checkpoints.convert.command import parse_size
from megarl.checkpoints.convert.targets import narrow_into
from megarl.checkpoints.dcp import DCPReader, DCPWriter
from megarl.cli.main import main
from megarl.layout import Box
from megarl.trainer.stages.reward_model import AS_IT_IS, read_normalization
from megarl.util.files import whole_folder
from tests.checkpoints.convert.rss import peak_growth_mb
from tests.disks import small_disk
from tests.fixtures.tiny_models import as_type
from tests.megatron.hf import save_model
from tests.weight_sync.shards import quantise


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model") / "hf", ["one two"], vocab_size=300, hidden_size=64
    )


def change(model: Path, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of the model with other tensors ("__" stands for "."); None: without that tensor."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    state = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_there_and_back_keeps_weights_config_and_tokenizer(tmp_path, model):
    there, back = str(tmp_path / "there"), tmp_path / "back"
    assert convert(str(model), there).num_files == 1
    done = convert(there, str(back), shard_bytes=300_000)
    assert done.num_files == len(list(back.glob("*.safetensors"))) > 2
    assert compare(str(model), str(back)).equal and compare(there, str(back)).equal
    names = {file.name for file in model.iterdir()} - {"model.safetensors"}
    kept = {file.name for file in back.iterdir() if "safetensors" not in file.name}
    assert (
        {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names == kept
    )
    for name in names - {"config.json"}:
        assert (back / name).read_bytes() == (model / name).read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((model / "config.json").read_text())


def test_further_chat_templates_and_files_of_tokenizers_come_along(tmp_path, model):
    names = ("additional_chat_templates/tool_use.jinja", "tekken.json", "vocab.txt", "qwen.tiktoken")
    source = change(model, tmp_path / "hf")
    (source / "additional_chat_templates").mkdir()
    for name in names:
        (source / name).write_text("{}")
    convert(str(source), str(tmp_path / "there"))
    convert(str(tmp_path / "there"), str(tmp_path / "back"))
    assert [(tmp_path / "back" / name).read_text() for name in names] == ["{}"] * len(names)
    assert set(AutoTokenizer.from_pretrained(tmp_path / "back").chat_template) == {"default", "tool_use"}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_type_without_a_family_goes_there_and_back(tmp_path, family):
    """Its config does not say whether it has biases or norms of queries and keys; the checkpoint's tensors do."""
    model = make_tiny_model(tmp_path / "hf", ["one two"], vocab_size=300, hidden_size=64, family=family)
    as_type(model, "mistral", "MistralForCausalLM")
    convert(str(model), str(tmp_path / "there"))
    convert(str(tmp_path / "there"), str(tmp_path / "back"))
    assert compare(str(model), str(tmp_path / "back")).equal
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "mistral"


def test_another_type_is_that_of_weights_and_config(tmp_path, model):
    convert(str(model), str(tmp_path / "there"), dtype="bfloat16")
    convert(str(tmp_path / "there"), str(tmp_path / "back"))
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert all(torch.equal(after[name], tensor.bfloat16()) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    compared = compare(str(model), str(tmp_path / "back"))
    assert not compared.equal and compared.num_equal == 0 and len(compared.different) == len(before)
    largest = max((tensor - after[name].float()).abs().max().item() for name, tensor in before.items())
    assert max(found.max_abs for found in compared.different) == pytest.approx(largest)


def test_a_folder_is_resharded(tmp_path, model):
    convert(str(model), str(tmp_path / "small"), to="hf", shard_bytes=100_000)
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    files = list((tmp_path / "small").glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {file.name for file in files} and len(files) > 5
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(f).values())
    assert compare(str(model), str(tmp_path / "small")).equal


def test_a_distributed_checkpoint_is_written_anew(tmp_path, model):
    convert(str(model), str(tmp_path / "there"))
    convert(str(tmp_path / "there" / "release"), str(tmp_path / "again"), to="megatron")
    assert compare(str(tmp_path / "there"), str(tmp_path / "again")).equal


@pytest.mark.parametrize(
    ("family", "via"), [("deepseek_v3", "hf"), ("deepseek_v3", "megatron"), ("deepseek_v32", "megatron")]
)
def test_float8_becomes_what_it_stands_for(tmp_path, family, via):
    folder = make_tiny_model(
        tmp_path / "hf", ["one"], vocab_size=300, hidden_size=64, family=family, dtype="bfloat16"
    )
    original = json.loads((folder / "config.json").read_text())
    expected = quantise(folder, (24, 24))

    convert(str(folder), str(tmp_path / "out"), to=via)
    out = tmp_path / "out"
    if via == "megatron":
        out = tmp_path / "back"
        convert(str(tmp_path / "out"), str(out))
    written = load_file(out / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        dtype = torch.float32 if "correction_bias" in name or ".k_norm." in name else torch.bfloat16
        assert written[name].dtype == dtype and torch.equal(written[name], tensor.to(dtype)), name
    assert json.loads((out / "config.json").read_text()) == original
    assert compare(str(folder), str(out)).equal


def test_multi_token_prediction_layers_are_kept_or_dropped(tmp_path):
    fields = {"vocab_size": 300, "hidden_size": 64, "family": "glm4_moe", "num_mtp_layers": 2}
    model = make_tiny_model(tmp_path / "hf", ["one"], **fields)
    weights = load_file(model / "model.safetensors")
    convert(str(model), str(tmp_path / "kept"))
    done = convert(str(model), str(tmp_path / "dropped"), mtp=False)
    assert done.left_out == ("multi-token prediction layers",)
    convert(str(tmp_path / "kept"), str(tmp_path / "kept_hf"))
    convert(str(tmp_path / "dropped"), str(tmp_path / "dropped_hf"))
    assert load_file(tmp_path / "kept_hf" / "model.safetensors").keys() == weights.keys()
    assert compare(str(model), str(tmp_path / "kept_hf")).equal
    ordinary = {name for name in weights if ".layers.4." not in name and ".layers.5." not in name}
    assert len(ordinary) < len(weights)
    assert load_file(tmp_path / "dropped_hf" / "model.safetensors").keys() == ordinary
    config = json.loads((tmp_path / "dropped_hf" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 0
    found = compare(str(model), str(tmp_path / "dropped"))
    assert set(found.only_in_a) == weights.keys() - ordinary and found.only_in_b == found.different == ()
    convert(str(tmp_path / "kept"), str(tmp_path / "dropped_later"), mtp=False)
    assert compare(str(tmp_path / "dropped_hf"), str(tmp_path / "dropped_later")).equal
    # a model that was trained without these layers cannot be told from one that lost them
    with pytest.raises(ValueError, match=r"mtp\.layers\.0\.enorm\.weight is missing.*mtp drop"):
        convert(str(tmp_path / "dropped"), str(tmp_path / "back"), companions=str(model))


def test_what_multi_token_prediction_layers_repeat_must_be_equal(tmp_path):
    fields = {"vocab_size": 300, "hidden_size": 64, "family": "deepseek_v3", "num_mtp_layers": 1}
    model = make_tiny_model(tmp_path / "hf", ["one"], **fields)
    other = change(model, tmp_path / "other", model__layers__4__embed_tokens__weight=torch.ones(300, 64))
    with pytest.raises(
        ValueError, match=r"model\.layers\.4\.embed_tokens\.weight should be equal to model\.embed_tokens"
    ):
        convert(str(other), str(tmp_path / "there"))
    convert(str(other), str(tmp_path / "there"), mtp=False)
    without = change(model, tmp_path / "without", model__layers__4__enorm__weight=None)
    with pytest.raises(ValueError, match=r"model\.layers\.4\.enorm\.weight is missing.*mtp drop"):
        convert(str(without), str(tmp_path / "back"))


def test_a_critic_keeps_its_head(tmp_path):
    expected = save_model(tmp_path / "hf", head="value").state_dict()
    convert(str(tmp_path / "hf"), str(tmp_path / "there"))
    stored = DCPReader(tmp_path / "there" / "release").tensors
    assert stored["value_head.weight"].shape == (1, 32) and "output_layer.weight" not in stored
    convert(str(tmp_path / "there"), str(tmp_path / "back"))
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_a_reward_model_keeps_the_shift_of_its_rewards(tmp_path):
    """But not of another folder, which only names the model of a checkpoint."""
    save_model(tmp_path / "hf", head="value")
    (tmp_path / "hf" / "reward_normalization.json").write_text('{"mean": 2.0, "std": 1.0, "num_answers": 3}')
    assert convert(str(tmp_path / "hf"), str(tmp_path / "half"), to="hf", dtype="bfloat16").left_out == ()
    convert(str(tmp_path / "half"), str(tmp_path / "there"))
    convert(str(tmp_path / "there"), str(tmp_path / "back"))
    assert read_normalization(tmp_path / "half").mean == read_normalization(tmp_path / "back").mean == 2.0
    done = convert(str(tmp_path / "there"), str(tmp_path / "named"), companions=str(tmp_path / "hf"))
    assert done.left_out == ("reward_normalization.json, which was measured on other weights",)
    assert read_normalization(tmp_path / "named") == AS_IT_IS


@pytest.mark.parametrize(
    ("ends", "pad"),
    [({"eos_token_id": 2, "pad_token_id": 0}, 0), ({"eos_token_id": [2, 0], "pad_token_id": 0}, None)],
)
def test_a_language_model_with_a_head_of_one_label_becomes_a_classifier(tmp_path, model, ends, pad):
    """A critic's or reward model's checkpoint has the config of the language model that it began as."""
    score = torch.randn(1, 64)
    change(model, tmp_path / "hf", lm_head__weight=None, score__weight=score)
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **ends}))
    convert(str(tmp_path / "hf"), str(tmp_path / "there"))
    convert(str(tmp_path / "there"), str(tmp_path / "back"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert torch.equal(loaded.score.weight, score) and loaded.config.pad_token_id == pad
    assert loaded.config.architectures == [type(loaded).__name__]


def test_names_shapes_and_values_that_differ_are_told(tmp_path, model):
    norm = torch.ones(64)
    norm[3] = 1.5
    other = change(model, tmp_path / "other", model__norm__weight=norm)
    found = compare(str(model), str(other))
    (different,) = found.different
    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    assert different.tensor == "model.norm.weight"
    assert different.max_abs == pytest.approx((weight - norm).abs().max().item())
    fewer = make_tiny_model(tmp_path / "fewer", ["one"], vocab_size=320, hidden_size=64, num_layers=3)
    found = compare(str(model), str(fewer))
    assert {name.split(".")[2] for name in found.only_in_a} == {"3"} and found.only_in_b == ()
    assert {(d.a, d.b, d.max_abs) for d in found.different if "embed" in d.tensor} == {
        ("(300, 64)", "(320, 64)", None)
    }


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, "model.norm.weight is missing"),
        (
            {"model__norm__weight": torch.ones(65)},
            r"model.norm.weight has shape \(65,\), config.json makes it \(64,\)",
        ),
        ({"score__weight": torch.ones(1, 64)}, "has both lm_head.weight and score.weight"),
        ({"model__extra": torch.ones(2)}, "model.extra is not a tensor of this model"),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int32)}, "model.norm.weight is of type I32"),
        (
            {"model__layers__1__input_layernorm__weight": torch.ones(64, dtype=torch.bfloat16)},
            r"choose one with --dtype: decoder.layers.self_attention.linear_qkv.layer_norm_weight \(torch.bfloat16, torch.float32\)",
        ),
    ],
)
def test_a_folder_that_does_not_fit_its_config_is_refused(tmp_path, model, tensors, message):
    wrong = change(model, tmp_path / "wrong", **tensors)
    with pytest.raises(ValueError, match=message):
        convert(str(wrong), str(tmp_path / "there"))
    assert os.listdir(tmp_path) == ["wrong"]


def rewrite(source: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a distributed checkpoint with other tensors ("__" stands for "."), each complete in one chunk."""
    reader = DCPReader(source)
    target.mkdir()
    writer = DCPWriter(target)
    for key, stored in reader.tensors.items():
        if key.replace(".", "__") not in tensors:
            writer.write_file((key, stored.shape, chunk.box, reader.load(chunk)) for chunk in stored.chunks)
    for key, tensor in tensors.items():
        if tensor is not None:
            shape = tuple(tensor.shape)
            writer.write_file([(key.replace("__", "."), shape, Box.whole(shape), tensor)])
    writer.finish()
    (target / "metadata.json").write_bytes((source / "metadata.json").read_bytes())
    return target


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"output_layer__weight": None}, "output_layer.weight is missing"),
        ({"output_layer__weight": torch.ones(299, 64)}, r"output_layer.weight has shape \(299, 64\)"),
        (
            {"decoder__final_layernorm__weight": torch.ones(65)},
            r"decoder.final_layernorm.weight has shape \(65,\), config.json makes it \(64,\)",
        ),
        ({"decoder__extra": torch.ones(2)}, "decoder.extra is not a tensor of this model"),
    ],
)
def test_a_distributed_checkpoint_that_does_not_fit_is_refused(tmp_path, model, tensors, message):
    convert(str(model), str(tmp_path / "there"))
    wrong = rewrite(tmp_path / "there" / "release", tmp_path / "wrong", **tensors)
    with pytest.raises(ValueError, match=message):
        convert(str(wrong), str(tmp_path / "back"), companions=str(model))
    assert not (tmp_path / "back").exists()


def test_a_vocabulary_may_be_padded_further_and_optimizer_states_are_left_out(tmp_path, model):
    convert(str(model), str(tmp_path / "there"))
    states = load_file(model / "model.safetensors")
    padded = torch.cat([states["lm_head.weight"], torch.full((212, 64), torch.nan)])
    more = rewrite(
        tmp_path / "there" / "release",
        tmp_path / "more",
        output_layer__weight=padded,
        optimizer__state__exp_avg__output_layer__weight=padded,
        chained_0__optimizer__state__exp_avg__x=padded,
    )
    done = convert(str(more), str(tmp_path / "back"), companions=str(model))
    assert done.left_out == ("optimizer states",)
    assert compare(str(model), str(tmp_path / "back")).equal


def test_damaged_files_are_named_and_nothing_is_left(tmp_path, model):
    convert(str(model), str(tmp_path / "there"))
    (file,) = (tmp_path / "there" / "release").glob("*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"__0_0.distcp is damaged at byte \d+"):
        convert(str(tmp_path / "there"), str(tmp_path / "back"))
    file.unlink()
    with pytest.raises(ValueError, match=r"lacks its file __0_0.distcp"):
        convert(str(tmp_path / "there"), str(tmp_path / "back"))
    assert os.listdir(tmp_path) == ["there"]


class _Call:
    def __reduce__(self):
        return os.mkdir, ("called",)


def test_metadata_calls_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Call()))
    with pytest.raises(ValueError, match=r"posix\.mkdir has no place in a checkpoint's metadata"):
        DCPReader(tmp_path)
    assert os.listdir(tmp_path) == [".metadata"]


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, model, to):
    with small_disk(tmp_path / "disk", 256) as disk:
        with pytest.raises(OSError, match=str(disk / "out")) as caught:
            convert(str(model), str(disk / "out"), to=to, shard_bytes=100_000)
        assert os.listdir(disk) == []
        assert "No space left" in str(caught.value)


def test_an_older_folder_gives_way_to_a_whole_one_only(tmp_path):
    target = tmp_path / "folder"
    for content in ("first", "second"):
        with whole_folder(target) as folder:
            (folder / "file").write_text(content)
    with pytest.raises(KeyError), whole_folder(target) as folder:
        (folder / "file").write_text("half")
        raise KeyError("not of the file system")
    assert (target / "file").read_text() == "second" and os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("direction", ["there", "back"])
def test_memory_does_not_grow_with_the_model(tmp_path, direction):
    """The peak is below twice the largest tensor plus one file; the model is many times larger."""
    model = make_tiny_model(
        tmp_path / "hf", ["one"], vocab_size=6000, hidden_size=256, num_layers=24, ffn_hidden_size=768
    )
    size = (model / "model.safetensors").stat().st_size / 2**20
    source, target = str(model), str(tmp_path / "there")
    if direction == "back":
        convert(source, target, shard_bytes=6 << 20)
        source, target = target, str(tmp_path / "back")
    largest = 6000 * 256 * 4 / 2**20  # the embedding
    growth = peak_growth_mb(source, target, shard_bytes=6 << 20)
    assert growth < 2 * largest + 6 < size / 4, (growth, largest, size)


def test_the_command(tmp_path, model, capsys):
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", str(model), there, "--shard-size", "200KiB"]) == 0
    assert main(["convert", there, back, "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(["convert", "--verify", str(model), there]) == 0
    assert "tensors are equal bit for bit" in capsys.readouterr().out
    assert main(["convert", "--verify", str(model), back]) == 1
    shown = capsys.readouterr()
    assert "bfloat16" in shown.out and "differ" in shown.err
    assert main(["convert", str(model), there]) == 2
    assert f"'{there}' exists; name a new folder, or remove it first" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), back + "2"]) == 2
    assert "is neither a Hugging Face folder" in capsys.readouterr().err
    assert main(["convert", str(model), back + "2", "--shard-size", "4 apples"]) == 2
    assert "--shard-size must be a size such as 4GiB or 500MB, found '4 apples'" in capsys.readouterr().err
    tool = [sys.executable, "tools/convert_checkpoint.py", "--verify", there, back]
    done = subprocess.run(tool, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "bfloat16" in done.stdout


def test_sizes():
    read = {text: parse_size(text) for text in ("17", "2KB", "2 KiB", "1.5MiB", "4GiB", "1TB", "3B")}
    assert read == {
        "17": 17, "2KB": 2000, "2 KiB": 2048, "1.5MiB": 3 << 19, "4GiB": 4 << 30, "1TB": 10**12, "3B": 3
    }  # fmt: skip
    for text in ("", "GiB", "-1GB", "4XB", "1.2.3MB", "4iB"):
        with pytest.raises(ValueError, match="--shard-size must be"):
            parse_size(text)


UP = "model.layers.1.mlp.up_proj.weight"


def with_value(folder: Path, value: float) -> str:
    """A model whose up projection has the value in one place."""
    make_tiny_model(folder, ["one two"], vocab_size=300, hidden_size=64)
    tensors = load_file(folder / "model.safetensors")
    tensors[UP][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_value_beyond_float16_is_refused_with_its_tensor(tmp_path, to, capsys):
    model = with_value(tmp_path / "hf", -70_000.0)
    assert main(["convert", model, str(tmp_path / "out"), "--to", to, "--dtype", "float16"]) == 2
    assert (
        f"checkpoint {model}: {UP} has values up to 70000, float16 holds none above 65504"
        in capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["hf"]
    convert(model, str(tmp_path / "out"), to=to, dtype="bfloat16")


def test_what_rounds_to_the_largest_value_and_what_was_infinite_before_is_kept(tmp_path):
    model = with_value(tmp_path / "hf", 65_519.0)
    convert(model, str(tmp_path / "out"), to="hf", dtype="float16")
    assert load_file(tmp_path / "out" / "model.safetensors")[UP][3, 5] == 65_504
    target = torch.zeros(3, dtype=torch.float16)
    narrow_into(target, torch.tensor([torch.inf, torch.nan, 2.0]), "here", "w")
    assert target[0].isinf() and target[1].isnan() and target[2] == 2
    with pytest.raises(ValueError, match=r"here: w has values up to 3.4e\+38, bfloat16 holds none above"):
        narrow_into(target.bfloat16(), torch.tensor([0.0, 3.4e38, 1.0]), "here", "w")


def test_a_vision_tower_comes_from_the_folder_that_is_named(tmp_path: Path) -> None:
    """A Megatron checkpoint holds only the language model."""
    model, back = tmp_path / "model", tmp_path / "back"
    make_tiny_model(model, ["one two"], family="qwen3_5_moe", vision=True, num_mtp_layers=1, vocab_size=300)
    convert(str(model), str(tmp_path / "megatron"))
    with pytest.raises(ValueError, match=r"no weights of it \(model\.visual\.\*\) here; .*--hf"):
        convert(str(tmp_path / "megatron"), str(back))
    assert not back.exists()
    convert(str(tmp_path / "megatron"), str(back), companions=str(model))
    expected = load_file(model / "model.safetensors")
    found = {name: tensor for file in back.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert compare(str(model), str(back)).equal
