"""Operations per token equal torch's count in Hugging Face's own models, forward and backward, for every family."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megarl.costs.flops import causal_pairs, model_flops, prediction_flops
from megarl.megatron.cpu.delta_net import chunk_gated_delta_rule
from megarl.models import read_model_config
from megarl.models.config import QWEN_HYBRIDS
from tests.costs.models import FAMILIES, make_models

LENGTH = 24
MODELS = Path(__file__).resolve().parents[2] / "recipes/models"
# transformers has Kimi-K2 only as deepseek_v3; gated delta nets are compared below.
KNOWN = [family for family in FAMILIES if family not in ("kimi_k2", *QWEN_HYBRIDS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"), [*KNOWN, *QWEN_HYBRIDS])


def counted(model: torch.nn.Module, trained: bool) -> tuple[int, int]:
    """Operations of a text: forward only, and with the backward pass, which computes weights' gradients only where they are `trained`."""
    vectors = model.get_input_embeddings()(torch.arange(LENGTH)[None]).detach().requires_grad_()
    model.requires_grad_(trained)
    with FlopCounterMode(display=False) as counter:
        output = model(inputs_embeds=vectors, use_cache=False).logits
        forward = counter.get_total_flops()
        output.sum().backward()
    return forward, counter.get_total_flops()


class EveryKey(torch.nn.Module):
    """Takes the place of an indexer, which would choose all of so few keys."""

    def forward(self, states: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        return torch.arange(LENGTH).expand(*states.shape[:2], LENGTH)


@pytest.mark.parametrize("family", KNOWN)
def test_operations_are_those_that_torch_counts(family: str, folders: dict[str, str]) -> None:
    """Hugging Face computes all pairs of tokens, also the ones that are masked, and the rotary angles as a matrix product."""
    config = read_model_config(folders[family])
    flops = model_flops(config)
    model = AutoModelForCausalLM.from_pretrained(
        folders[family], attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for layer in model.model.layers if config.indexer else ():
        layer.self_attn.indexer = None if layer.self_attn.indexer is None else EveryKey()
    rotated = config.head_dim * config.rotary_percent if config.mla is None else config.mla.qk_rope_head_dim
    angles = int(rotated) * LENGTH
    matrices = 2 * flops.active * LENGTH
    attention = sum(layer.pair for layer in flops.layers) * LENGTH * LENGTH
    everywhere = replace(flops, layers=tuple(replace(layer, window=None) for layer in flops.layers))
    assert everywhere.forward(LENGTH) * LENGTH == matrices + attention
    assert flops.pair_share * matrices == pytest.approx(attention / LENGTH)
    forward = matrices + attention + angles
    assert counted(model, True) == (forward, 3 * (matrices + attention) + angles)
    assert counted(model, False) == (forward, 2 * matrices + 3 * attention + angles)


def test_operations_of_a_choice_of_keys() -> None:
    """An indexer's three matrices, and its scores for the keys of each query that has more than 2,048 keys."""
    (layer, *_) = model_flops(read_model_config(str(MODELS / "deepseek-v3.2"))).layers
    assert layer.index == 64 * 128 * 1536 + 128 * 7168 + 64 * 7168
    assert layer.indexing(causal_pairs(2048)) == 0
    length = 3000
    keys = sum(position + 1 for position in range(2048, length))
    expected = 2 * layer.index * length + 2 * 64 * 129 * keys
    assert layer.indexing(causal_pairs(length)) * length == pytest.approx(expected)
    # The indexer's loss: scores of all pairs once more, two products of the same size for gradients, and its weights' gradients.
    assert layer.learning(causal_pairs(2048)) == 0
    learnt = 2 * layer.index * length + 3 * 2 * 64 * 129 * length * (length + 1) / 2
    assert layer.learning(causal_pairs(length)) * length == pytest.approx(learnt)
    more = layer.forward(causal_pairs(length)) - layer.forward(causal_pairs(2048))
    assert more == pytest.approx(layer.pair * (length - 2048) / 2 + expected / length)
    assert layer.decode(2048) == layer.decode_pair * 2048
    assert layer.decode(length) == layer.decode_pair * 2048 + 2 * layer.index + 2 * 64 * 129 * length


@pytest.mark.parametrize("family", QWEN_HYBRIDS)
def test_operations_of_gated_delta_nets(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Hugging Face's operations around the delta rule; within it megarl's, which solves equations where fla's kernels multiply."""
    config = read_model_config(folders[family])
    net, flops = config.delta_net, model_flops(config)
    assert net is not None
    model = AutoModelForCausalLM.from_pretrained(
        folders[family],
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):
            monkeypatch.setattr(module, "chunk_gated_delta_rule", lambda q, k, v, **rest: (v, None))
    state = sum(layer.state for layer in flops.layers)
    matrices = (flops.forward(LENGTH) - state) * LENGTH
    positions = 1 if family == "qwen3_next" else 3  # M-RoPE computes three, which are equal for text
    angles = positions * int(config.head_dim * config.rotary_percent) * LENGTH
    convolution = 2 * (2 * net.keys + net.values) * net.conv * (LENGTH + net.conv - 1) * len(net.layers)
    assert counted(model, False)[0] == matrices + angles + convolution

    chunks, size = 3, 64
    keys, values = (
        torch.rand(1, chunks * size, net.value_heads, width) for width in (net.key_dim, net.value_dim)
    )
    rates = torch.rand(1, chunks * size, net.value_heads)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        chunk_gated_delta_rule(keys, keys, values, g=-rates, beta=rates)
    solved = 2 * size * (net.key_dim + net.value_dim) * net.value_heads
    first = size * net.value_heads * 2 * 2 * net.key_dim * net.value_dim  # no state precedes the first chunk
    assert counter.get_total_flops() == chunks * size * (flops.layers[0].state - solved) - first


def test_published_layers_of_multi_token_prediction() -> None:
    """DeepSeek-V3's README_WEIGHTS.md: one module of 11.5B parameters, 2.4B of them active with the shared embedding and head of 0.9B
    each. Both numbers are the layer's without the projection before it, the first to three digits, the second to 2 %."""
    config = read_model_config(str(MODELS / "deepseek-v3"))
    (layer,) = prediction_flops(config)
    projection, shared = 2 * config.hidden_size**2, 2 * config.vocab_size * config.hidden_size
    assert layer.dense + layer.experts - projection == pytest.approx(11.5e9, rel=2e-3)
    assert layer.dense + layer.active - projection + shared == pytest.approx(2.4e9, rel=2e-2)
    assert layer.is_moe and layer.shared and layer.pair == model_flops(config).layers[-1].pair
    assert prediction_flops(read_model_config(str(MODELS / "qwen3-30b-a3b"))) == ()


def test_published_models() -> None:
    """Active parameters as published: 37B of DeepSeek-V3 (arXiv:2412.19437), 22B of Qwen3-235B, 3B (3.3) of Qwen3-30B."""
    for name, active in (("deepseek-v3", 37e9), ("qwen3-235b-a22b", 22e9), ("qwen3-30b-a3b", 3.3e9)):
        config = read_model_config(str(MODELS / name))
        embedding = config.vocab_size * config.hidden_size  # a lookup, but the published numbers count it
        assert model_flops(config).active + embedding == pytest.approx(active, rel=0.03)


def test_a_generated_token_of_latent_attention_works_on_latent_keys() -> None:
    layer = model_flops(read_model_config(str(MODELS / "deepseek-v3"))).layers[0]
    assert layer.pair == 2 * 128 * (192 + 128)
    assert layer.decode_pair == 2 * 128 * (576 + 512)


def test_a_value_head_is_a_row() -> None:
    config = read_model_config(str(MODELS / "qwen2.5-0.5b"))
    assert model_flops(config, "value").head == 896
    assert model_flops(config).head == 151936 * 896  # the tied embedding


def test_pairs_of_a_causal_text() -> None:
    assert 7 * causal_pairs(7) == sum(range(1, 8))


@pytest.mark.parametrize("length", [1, 7, 128, 129, 1000])
def test_pairs_within_a_window(length: int) -> None:
    """In every second layer of gpt-oss a token attends to 128 tokens, itself included."""
    layers = model_flops(read_model_config(str(MODELS / "gpt-oss-120b"))).layers
    everywhere, within = ([min(n, most) for n in range(1, length + 1)] for most in (length, 128))
    for number, layer in enumerate(layers):
        expected = everywhere if number % 2 else within
        assert layer.attended(causal_pairs(length)) * length == pytest.approx(sum(expected))


def test_active_parameters_of_gpt_oss() -> None:
    """arXiv:2508.10925, table 1: 5.13B parameters, with the head and without the embedding; norms, sinks and biases belong to no matrix."""
    assert model_flops(read_model_config(str(MODELS / "gpt-oss-120b"))).active == pytest.approx(
        5.13e9, rel=2e-3
    )
