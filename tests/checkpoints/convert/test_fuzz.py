"""Random changes of every file that a user supplies: a conversion writes what the source says, or its error names the wrong file.

It raises no other error, and it leaves no incomplete output.
"""

import copy
import dataclasses
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import convert
from megarl.config.schema.models import LoraConfig
from megarl.models import read_model_config
from tests.checkpoints.hf.peft_folders import save_with_peft, tensors_in

EXAMPLES = 25
SIZES = {
    "vocab_size": 280,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
    "num_layers": 2,
}
JUNK = [None, True, False, 0, -1, 3, 2**31, 10**30, -(10**400), 0.5, 1e308, math.nan, math.inf, -math.inf, "", "3", "../x",
        "\0", "\ud800", "a" * 5000, [], [1], ["x"], [[]], {}, {"a": 1}, {"rope_type": "yarn"}]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A sharded model, a mixture of experts, the Megatron checkpoint of the latter, and adapters of the former."""
    root = tmp_path_factory.mktemp("fuzz")
    plain = make_tiny_model(root / "plain", ["one two"], **SIZES)
    convert(str(plain), str(root / "sharded"), to="hf", shard_bytes=20_000)
    sizes = {**SIZES, "ffn_hidden_size": 32}
    moe = make_tiny_model(root / "moe", ["one"], family="deepseek_v3", num_mtp_layers=1, **sizes)
    convert(str(moe), str(root / "megatron"))
    save_with_peft(root / "sharded", LoraConfig(rank=2, alpha=3), root / "adapter")
    return {name: root / name for name in ("sharded", "moe", "megatron", "adapter")}


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """The paths to all values within a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix] * bool(prefix) + [path for key, inner in items for path in paths(inner, (*prefix, key))]


def change_json(file: Path, draw: random.Random) -> None:
    """Change one or two values or keys, or remove them; sometimes make the file invalid JSON."""
    document = json.loads(file.read_text())
    if draw.random() < 0.15:
        return change_bytes(file, draw, len(file.read_bytes()))
    if draw.random() < 0.05:
        document = copy.deepcopy(draw.choice(JUNK))
    for _ in range(draw.randint(1, 2)):
        places = paths(document)
        if not places:
            break
        *way, last = draw.choice(places)
        inside = document
        for key in way:
            inside = inside[key]
        if draw.random() < 0.15:
            del inside[last]
        elif isinstance(inside, dict) and draw.random() < 0.1:
            inside[f"{last}x"] = inside.pop(last)
        else:
            inside[last] = copy.deepcopy(draw.choice(JUNK))
    file.write_text(json.dumps(document))
    return None


def change_bytes(file: Path, draw: random.Random, within: int) -> None:
    """Change some of the first bytes, or cut off the end."""
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(0, 3)):
        content[draw.randrange(min(within, len(content)))] = draw.randrange(256)
    if draw.random() < 0.3:
        content = content[: draw.randrange(len(content))]
    file.write_bytes(content)


def change_header(file: Path, draw: random.Random) -> None:
    change_bytes(file, draw, 8 + int.from_bytes(file.read_bytes()[:8], "little"))


def attempt(changed: Path, tmp_path: Path, source: str, **options: Any) -> bool:
    """Whether the conversion succeeds; if not, its error must name the file or the file's checkpoint, and no output may be left."""
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    try:
        convert(source, str(out), **options)
    except (ValueError, OSError) as error:
        text = f"{error} {getattr(error, 'filename', '')}"
        assert changed.name in text or str(tmp_path / "copy") in text, text
        assert "\n" not in text and type(error) in (ValueError, OSError, *OSError.__subclasses__()), repr(
            error
        )
        assert sorted(os.listdir(tmp_path)) == ["copy"]
        return False
    return True


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def facts(folder: Path) -> Any:
    """The config's facts without the type of the weights."""
    return dataclasses.replace(read_model_config(str(folder)), dtype="")


CASES = {
    "config": ("sharded", "config.json", change_json),
    "index": ("sharded", "model.safetensors.index.json", change_json),
    "tokenizer": ("sharded", "tokenizer_config.json", change_json),
    "generation": ("sharded", "generation_config.json", change_json),
    "header": ("sharded", "model-00002-of-*.safetensors", change_header),
    "mixture": ("moe", "config.json", change_json),
    "megatron_config": ("megatron", "release/hf/config.json", change_json),
    "metadata": ("megatron", "release/.metadata", lambda file, draw: change_bytes(file, draw, 1 << 20)),
    "about": ("megatron", "release/metadata.json", change_json),
    "tracker": (
        "megatron",
        "latest_checkpointed_iteration.txt",
        lambda file, draw: change_bytes(file, draw, 8),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_changed_file_is_named_or_its_conversion_is_right(tmp_path_factory, folders, case):
    kind, pattern, change = CASES[case]
    original = folders["moe" if kind == "megatron" else kind]
    expected = weights(original)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        tmp_path = tmp_path_factory.mktemp("run")
        changed = Path(shutil.copytree(folders[kind], tmp_path / "copy"))
        (file,) = changed.glob(pattern)
        change(file, random.Random(seed))
        if attempt(file, tmp_path, str(changed), to="hf"):
            found = weights(tmp_path / "out")
            config = facts(file.parent if "config" in case or case == "mixture" else original)
            assert facts(tmp_path / "out") == config
            assert all(torch.equal(found[name], expected[name]) for name in found)
            assert found.keys() == expected.keys() or config.num_mtp_layers == 0 or config.tie_word_embeddings
        shutil.rmtree(tmp_path)

    run()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_changed_adapter_is_named_or_merged_as_it_says(tmp_path_factory, folders, name):
    change: Callable = change_json if name.endswith("json") else change_header
    model, module = folders["sharded"], "model.layers.1.mlp.up_proj"
    tensors, base = tensors_in(folders["adapter"]), weights(folders["sharded"])[f"{module}.weight"]
    delta = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**32))
    def run(seed: int) -> None:
        tmp_path = tmp_path_factory.mktemp("run")
        changed = Path(shutil.copytree(folders["adapter"], tmp_path / "copy"))
        change(changed / name, random.Random(seed))
        if attempt(changed / name, tmp_path, str(model), adapter=str(changed)):
            keys = json.loads((changed / "adapter_config.json").read_text())
            if not keys.get("alpha_pattern"):
                factor = (
                    keys["lora_alpha"] / math.sqrt(2) if keys.get("use_rslora") else keys["lora_alpha"] / 2
                )
                found = weights(tmp_path / "out")[f"{module}.weight"]
                torch.testing.assert_close(found, base + factor * delta, rtol=1e-5, atol=1e-5)
        shutil.rmtree(tmp_path)

    run()
