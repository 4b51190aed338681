"""Which adapters SGLang is given to serve."""

import re

import pytest

from megarl.config.schema.models import LoraConfig
from megarl.examples.tiny_model import make_tiny_model
from megarl.models import read_model_config
from megarl.models.lora import adapted_weights
from megarl.models.sglang_lora import adapted_layers, why_not_served


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("qwen2", {}, None),
        ("llama", {"use_rslora": True, "shared_a": True}, None),
        ("qwen3", {"use_dora": True}, "DoRA"),
        ("qwen3_moe", {}, "qwen3_moe: for experts SGLang has adapters in compiled GPU kernels only"),
        ("glm4_moe", {"target_modules": ("o_proj",)}, "glm4_moe: for experts"),
        ("deepseek_v3", {"target_modules": ("o_proj",)}, "deepseek_v3: .*latent attention"),
    ],
)
def test_what_sglang_cannot_serve_is_known(tmp_path, family, kind, reason):
    folder = make_tiny_model(tmp_path / "model", ["some text"], family=family)
    found = why_not_served(read_model_config(str(folder)), LoraConfig(rank=2, **kind))
    assert found is None if reason is None else re.search(reason, found or "served")


def test_layers_are_named_once_and_by_their_last_part(tmp_path):
    config = read_model_config(str(make_tiny_model(tmp_path / "model", ["some text"], family="llama")))
    lora = LoraConfig(rank=2, target_modules=("model.layers.1.*",), exclude_modules=("o_proj",))
    layers = adapted_layers(adapted_weights(config, lora))
    assert sorted(layers) == ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
