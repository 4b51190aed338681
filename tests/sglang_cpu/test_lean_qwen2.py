"""Steps without SGLang's layers: a layer against Hugging Face's; a real engine's tokens and log-probs against its model's."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.rollout.engine import EngineConfig, SamplingParams
from megarl.rollout.sglang.requests import request_seed
from megarl.sglang_cpu import lean_qwen2
from megarl.sglang_cpu import rotary as cpu_rotary
from megarl.sglang_cpu import sampling as cpu_sampling
from tests.rollout.conftest import make_qwen2
from tests.rollout.runner import EngineProcess

LAYERS, HEADS, KEY_HEADS, DIM = 2, 4, 2, 8  # of make_qwen2
PROMPTS = [[5, 6, 7], [9, 8, 20, 30, 40, 50], [329, 328, 200], [11] * 20, [100, 150, 191, 192, 193], [3]]
NUM_TOKENS = 24


class OneByOne:
    """Attention of new tokens to what came before, a sequence at a time."""

    def __init__(self, past: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.past = past  # keys and values of each sequence: [key heads, tokens, dim]

    def attend(self, query, keys, values):
        out = []
        for row, (k, v) in enumerate(self.past):
            k, v = (torch.cat((old, new[row][:, None]), 1) for old, new in ((k, keys), (v, values)))
            k, v = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (k, v))
            weights = (k @ query[row][:, :, None] * DIM**-0.5).softmax(1)
            out.append((weights * v).sum(1))
        return torch.stack(out)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_qwen2(tmp_path_factory.mktemp("lean"), seed=5)


def as_sglang_has_it(layer):
    """SGLang's fused weights of a Hugging Face layer, as a LeanLayer."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)

    def linear(*parts, bias=None):
        return SimpleNamespace(weight=torch.cat([part.weight.data for part in parts]), bias=bias)

    def norm(module):
        return SimpleNamespace(weight=module.weight.data, variance_epsilon=module.variance_epsilon)

    return lean_qwen2.LeanLayer(
        attention_norm=norm(layer.input_layernorm),
        qkv=linear(*projections, bias=torch.cat([part.bias.data for part in projections])),
        attention=None,
        output=linear(attention.o_proj),
        mlp_norm=norm(layer.post_attention_layernorm),
        gate_up=linear(mlp.gate_proj, mlp.up_proj),
        down=linear(mlp.down_proj),
        heads=HEADS,
        key_heads=KEY_HEADS,
        dim=DIM,
    )


@torch.inference_mode()
def test_a_layer_equals_hugging_faces(model):
    """Of sequences of different lengths; those before the last token are Hugging Face's, too."""
    hf, lengths = model.hf.model, [1, 7, 20]
    layer, rotary = hf.layers[0], hf.rotary_emb
    table = torch.cat([half[0, :, : DIM // 2] for half in rotary(torch.ones(1), torch.arange(64)[None])], -1)
    expected, last, past = [], [], []
    for length in lengths:
        x = torch.randn(1, length + 1, HEADS * DIM, generator=torch.Generator().manual_seed(length))
        cos_sin = rotary(x, torch.arange(length + 1)[None])
        causal = torch.full((length + 1, length + 1), float("-inf")).triu(1)[None, None]
        expected.append(layer(x, attention_mask=causal, position_embeddings=cos_sin)[0, -1])
        before = layer.input_layernorm(x[:, :-1])
        keys, values = layer.self_attn.k_proj(before)[0], layer.self_attn.v_proj(before)[0]
        by = cpu_rotary.turn(SimpleNamespace(cos_sin_cache=table), torch.arange(length))
        heads = (
            part.view(length, KEY_HEADS, DIM).transpose(0, 1)
            for part in (cpu_rotary.turned(keys, *by), values)
        )
        past.append(tuple(heads))
        last.append(x[0, -1])
    turn = cpu_rotary.turn(SimpleNamespace(cos_sin_cache=table), torch.tensor(lengths))
    found = lean_qwen2.through_layer(as_sglang_has_it(layer), torch.stack(last), turn, OneByOne(past).attend)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)


def count_layers(engine, file: Path) -> None:
    """In the engine's owner, before its scheduler is copied from it: note each layer of a step that goes this way."""
    through_layer = lean_qwen2.through_layer

    def counted(*args):
        with file.open("a") as out:
            out.write(f"{len(args[1])}\n")
        return through_layer(*args)

    lean_qwen2.through_layer = counted


def drawn_from(probs: torch.Tensor, seed: int, first: int) -> list[int]:
    """The tokens that `cpu_sampling` takes at rows of probabilities [tokens, vocabulary]; the one before the first is at `first`."""
    seeds = torch.full((len(probs),), seed)
    return cpu_sampling.sample(None, probs, seeds, torch.arange(len(probs)) + first).tolist()


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_steps_this_way_and_its_tokens_are_the_models(model, tmp_path, deterministic):
    config = EngineConfig(
        str(model.path),
        load_format="auto",
        max_num_seqs=8,
        max_total_tokens=1024,
        deterministic=deterministic,
    )
    process = EngineProcess(config, tmp_path / "engine.log")
    uids = [f"p{row}" for row in range(len(PROMPTS))]
    try:
        process.call(count_layers, tmp_path / "steps")
        process.start()
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, seed=3)  # some end before
        found = process.call("generate", PROMPTS, uids, sampling)
    finally:
        process.close()
    steps = [int(line) for line in (tmp_path / "steps").read_text().splitlines()]
    longest = max(len(one.response_ids) for one in found)
    assert steps.count(sum(map(len, PROMPTS))) == LAYERS  # all prompts at once
    assert len(steps) == LAYERS * longest and steps.count(len(PROMPTS)) >= LAYERS
    for uid, prompt, one in zip(uids, PROMPTS, found, strict=True):
        ids = torch.tensor([[*prompt, *one.response_ids]])
        with torch.no_grad():
            log_probs = model.hf(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert drawn_from(log_probs.exp(), request_seed(3, uid), len(prompt) - 1) == one.response_ids
        expected = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(one.log_probs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [8, 30, 256, 688, 2048])
def test_a_rows_bits_are_its_own(width):
    """What a layer computes between its products: norm and activation."""
    norm = SimpleNamespace(weight=torch.randn(width), variance_epsilon=1e-6)
    x, gate_up = torch.randn(200, width), torch.randn(200, 2 * width)
    normed, activated = lean_qwen2.normed(x, norm), lean_qwen2.activated(gate_up)
    for rows in (1, 2, 5, 15, 17, 64):
        for first in (0, 7, 200 - rows):
            part = slice(first, first + rows)
            assert torch.equal(lean_qwen2.normed(x[part].clone(), norm), normed[part])
            assert torch.equal(lean_qwen2.activated(gate_up[part].clone()), activated[part])
