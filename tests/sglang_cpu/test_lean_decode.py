"""Rotary embedding, Qwen2's layers and sampling: against Hugging Face's, SGLang's formulas, and a real engine."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from megarl.rollout.engine import EngineConfig, SamplingParams
from megarl.rollout.sglang.requests import request_seed
from megarl.sglang_cpu import lean_decode
from megarl.sglang_cpu.lean_decode import rotate, sample, uniforms
from tests.rollout.conftest import make_qwen2
from tests.rollout.runner import EngineProcess

ROTARY_DIM, POSITIONS = 32, torch.tensor([3, 0, 60, 7, 7])


def layer(**changes):
    """A rotary layer like SGLang's: angles of positions and frequencies as in RoFormer (arXiv:2104.09864), equation 15."""
    frequencies = 10000.0 ** (-torch.arange(0, ROTARY_DIM, 2) / ROTARY_DIM)
    angles = torch.outer(torch.arange(64.0), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    facts = {"cos_sin_cache": table, "is_neox_style": True, "rotary_dim": ROTARY_DIM, "head_size": ROTARY_DIM}
    return SimpleNamespace(**(facts | changes))


def sglang_rotary(rotary, positions, query, key, *args, **kwargs):
    return "SGLang's own"


def queries_and_keys():
    """[tokens, 4 heads * ROTARY_DIM] and [tokens, 2 heads * ROTARY_DIM], parts of one product as in SGLang."""
    drawn = torch.randn(len(POSITIONS), 8 * ROTARY_DIM, generator=torch.Generator().manual_seed(0))
    return drawn.split([4 * ROTARY_DIM, 2 * ROTARY_DIM, 2 * ROTARY_DIM], dim=-1)[:2]


def test_equals_transformers():
    rotary, (query, key) = layer(), queries_and_keys()
    found = rotate(sglang_rotary, rotary, POSITIONS, query, key, None, None)  # as SGLang calls it
    cos, sin = rotary.cos_sin_cache[POSITIONS].chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    heads = [x.reshape(1, len(POSITIONS), -1, ROTARY_DIM).transpose(1, 2) for x in (query, key)]
    for ours, theirs in zip(found, apply_rotary_pos_emb(*heads, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs.transpose(1, 2).reshape(ours.shape), rtol=0, atol=1e-6)


def test_has_the_bits_of_sglangs_formula():
    rotary, (query, key) = layer(), queries_and_keys()
    before = query.clone(), key.clone()
    cos, sin = (half[:, None] for half in rotary.cos_sin_cache[POSITIONS].chunk(2, dim=-1))
    for x, found in zip((query, key), rotate(sglang_rotary, rotary, POSITIONS, query, key), strict=True):
        first, second = x.reshape(len(POSITIONS), -1, ROTARY_DIM).chunk(2, dim=-1)
        expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        assert torch.equal(found, expected.view(x.shape))
    assert torch.equal(query, before[0]) and torch.equal(key, before[1])


@pytest.mark.parametrize("more", [0, 2000])
def test_each_step_turns_by_its_own_positions(more):
    """For one layer after another, and with a tensor of positions that the next step overwrites."""
    rotary, positions = layer(), torch.arange(5 + more) % 64
    x = torch.ones(len(positions), ROTARY_DIM)
    for _ in range(3):
        found = rotate(sglang_rotary, rotary, positions, x, x)
        for again in (found, rotate(sglang_rotary, rotary, positions.clone(), x, x)):
            for one, fresh in zip(again, rotate(sglang_rotary, layer(), positions, x, x), strict=True):
                assert torch.equal(one, fresh)
        positions.add_(1).remainder_(64)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_neox_style": False},
        {"rotary_dim": ROTARY_DIM // 2},
        {"cos_sin_cache": layer().cos_sin_cache.bfloat16()},
        {"sin_cos_cache": None},
    ],
)
def test_leaves_the_rest_to_sglang(changes):
    query, key = queries_and_keys()
    assert rotate(sglang_rotary, layer(**changes), POSITIONS, query, key) == "SGLang's own"
    assert rotate(sglang_rotary, layer(), POSITIONS, query, key, offsets=POSITIONS) == "SGLang's own"


LAYERS, HEADS, KEY_HEADS, DIM = 2, 4, 2, 8  # of make_qwen2
PROMPTS = [[5, 6, 7], [9, 8, 20, 30, 40, 50], [329, 328, 200], [11] * 20, [100, 150, 191, 192, 193], [3]]
NUM_TOKENS = 24


class OneByOne:
    """Attention of new tokens to their sequences' earlier tokens, one sequence at a time."""

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
    """A Hugging Face layer with SGLang's fused weights and names."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)

    def linear(*parts, bias=None):
        return SimpleNamespace(weight=torch.cat([part.weight.data for part in parts]), bias=bias)

    def norm(module):
        return SimpleNamespace(weight=module.weight.data, variance_epsilon=module.variance_epsilon)

    return SimpleNamespace(
        input_layernorm=norm(layer.input_layernorm),
        self_attn=SimpleNamespace(
            qkv_proj=linear(*projections, bias=torch.cat([part.bias.data for part in projections])),
            o_proj=linear(attention.o_proj),
            num_heads=HEADS,
            num_kv_heads=KEY_HEADS,
            head_dim=DIM,
        ),
        post_attention_layernorm=norm(layer.post_attention_layernorm),
        mlp=SimpleNamespace(gate_up_proj=linear(mlp.gate_proj, mlp.up_proj), down_proj=linear(mlp.down_proj)),
    )


@torch.inference_mode()
def test_a_layer_equals_hugging_faces(model):
    """For sequences of different lengths; keys and values of the tokens before the last one come from Hugging Face's projections."""
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
        by = lean_decode.rotation_of(SimpleNamespace(cos_sin_cache=table), torch.arange(length))
        heads = (
            part.view(length, KEY_HEADS, DIM).transpose(0, 1)
            for part in (lean_decode.apply_rotation(keys, *by), values)
        )
        past.append(tuple(heads))
        last.append(x[0, -1])
    rotation = lean_decode.rotation_of(SimpleNamespace(cos_sin_cache=table), torch.tensor(lengths))
    found = lean_decode.through_layer(
        as_sglang_has_it(layer), torch.stack(last), rotation, OneByOne(past).attend
    )
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)


def count_layers(engine, file: Path) -> None:
    """Runs in the engine's owner, before its scheduler is forked: records each layer of a step that takes this path."""
    through_layer = lean_decode.through_layer

    def counted(*args):
        with file.open("a") as out:
            out.write(f"{len(args[1])}\n")
        return through_layer(*args)

    lean_decode.through_layer = counted


def drawn_from(probs: torch.Tensor, seed: int, first: int) -> list[int]:
    """The tokens that `lean_decode.sample` draws from rows of probabilities [tokens, vocabulary]; the token before the first is at `first`."""
    seeds = torch.full((len(probs),), seed)
    return lean_decode.sample(None, probs, seeds, torch.arange(len(probs)) + first).tolist()


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
    """The operations of a layer between its products: norm and activation."""
    norm = SimpleNamespace(weight=torch.randn(width), variance_epsilon=1e-6)
    x, gate_up = torch.randn(200, width), torch.randn(200, 2 * width)
    normed, activated = lean_decode.normed(x, norm), lean_decode.activated(gate_up)
    for rows in (1, 2, 5, 15, 17, 64):
        for first in (0, 7, 200 - rows):
            part = slice(first, first + rows)
            assert torch.equal(lean_decode.normed(x[part].clone(), norm), normed[part])
            assert torch.equal(lean_decode.activated(gate_up[part].clone()), activated[part])


NUM = 4000
PROBS = torch.tensor([0.0, 0.1, 0.4, 0.0, 0.05, 0.25, 0.15, 0.05, 0.0])


def sglang_sampling(*args):
    return "SGLang's own"


def draw(probs, seeds, position=7):
    """probs: [n, vocabulary]."""
    return sample(sglang_sampling, probs, seeds, torch.full((len(seeds),), position))


def test_numbers_are_splitmix64s():
    """The first five of seed 1234567, as Rosetta Code has them ("Pseudo-random numbers/Splitmix64")."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = uniforms(np.full(5, 1234567), np.arange(5))
    assert (found * 2**53).astype(np.uint64).tolist() == [number >> 11 for number in expected]
    assert found.max() < 1


@pytest.mark.parametrize("seeds", [torch.arange(NUM), (torch.arange(NUM) << 40) + 3])
@pytest.mark.parametrize("position", [0, 4096])
def test_tokens_follow_the_probabilities(seeds, position):
    tokens = draw(3.0 * PROBS.repeat(NUM, 1), seeds, position)  # they need not sum to 1
    there, counts = PROBS > 0, torch.bincount(tokens, minlength=len(PROBS))
    assert not counts[~there].any()
    # chi-squared with 5 degrees of freedom, five standard deviations of slack
    expected = NUM * PROBS[there]
    assert ((counts[there] - expected) ** 2 / expected).sum().item() < 5 + 5 * 10**0.5


def test_tokens_of_a_sequence_follow_the_probabilities():
    """Tokens of one seed at consecutive positions: each pair occurs as often as it should."""
    positions = torch.arange(NUM)
    tokens = sample(sglang_sampling, PROBS.repeat(NUM, 1), torch.full((NUM,), 2**62 + 5), positions).long()
    pairs = torch.bincount(tokens[:-1] * len(PROBS) + tokens[1:], minlength=len(PROBS) ** 2)
    expected = torch.outer(PROBS, PROBS).flatten() * (NUM - 1)
    there = expected > 0
    assert not pairs[~there].any()
    chi = ((pairs - expected)[there] ** 2 / expected[there]).sum().item()
    assert chi < 35 + 5 * 70**0.5


def test_a_token_depends_on_its_own_row_alone():
    """In a large vocabulary, where sums in another order would differ."""
    probs = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds = torch.arange(16)
    together = draw(probs, seeds)
    assert together.dtype == torch.int32 and len(set(together.tolist())) > 8
    for row in range(16):
        assert draw(probs[row : row + 1].clone(), seeds[row : row + 1]).item() == together[row]
    assert torch.equal(draw(probs[::2], seeds[::2]), together[::2])


def test_what_is_no_number_is_no_index_either():
    tokens = draw(torch.full((4, 50), float("nan")), torch.arange(4))
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_without_seeds_it_is_sglangs():
    assert sample(sglang_sampling, PROBS[None], None, None) == "SGLang's own"
