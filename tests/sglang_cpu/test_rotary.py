"""The turned queries and keys against transformers' own, and against SGLang's formula to the bit."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from megarl.sglang_cpu.rotary import rotate

DIM, POSITIONS = 32, torch.tensor([3, 0, 60, 7, 7])


def layer(**changes):
    """As SGLang's: angles of positions and frequencies as in RoFormer (arXiv:2104.09864), equation 15."""
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(64.0), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    facts = {"cos_sin_cache": table, "is_neox_style": True, "rotary_dim": DIM, "head_size": DIM}
    return SimpleNamespace(**(facts | changes))


def original(rotary, positions, query, key, *args, **kwargs):
    return "SGLang's own"


def queries_and_keys():
    """[tokens, 4 heads * DIM] and [tokens, 2 heads * DIM], parts of one product as in SGLang."""
    drawn = torch.randn(len(POSITIONS), 8 * DIM, generator=torch.Generator().manual_seed(0))
    return drawn.split([4 * DIM, 2 * DIM, 2 * DIM], dim=-1)[:2]


def test_equals_transformers():
    rotary, (query, key) = layer(), queries_and_keys()
    found = rotate(original, rotary, POSITIONS, query, key, None, None)  # as SGLang calls it
    cos, sin = rotary.cos_sin_cache[POSITIONS].chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    heads = [x.reshape(1, len(POSITIONS), -1, DIM).transpose(1, 2) for x in (query, key)]
    for ours, theirs in zip(found, apply_rotary_pos_emb(*heads, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs.transpose(1, 2).reshape(ours.shape), rtol=0, atol=1e-6)


def test_has_the_bits_of_sglangs_formula():
    rotary, (query, key) = layer(), queries_and_keys()
    before = query.clone(), key.clone()
    cos, sin = (half[:, None] for half in rotary.cos_sin_cache[POSITIONS].chunk(2, dim=-1))
    for x, found in zip((query, key), rotate(original, rotary, POSITIONS, query, key), strict=True):
        first, second = x.reshape(len(POSITIONS), -1, DIM).chunk(2, dim=-1)
        expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        assert torch.equal(found, expected.view(x.shape))
    assert torch.equal(query, before[0]) and torch.equal(key, before[1])


@pytest.mark.parametrize("more", [0, 2000])
def test_each_step_turns_by_its_own_positions(more):
    """Of one layer after another, and of a tensor of positions that the next step overwrites."""
    rotary, positions = layer(), torch.arange(5 + more) % 64
    x = torch.ones(len(positions), DIM)
    for _ in range(3):
        found = rotate(original, rotary, positions, x, x)
        for again in (found, rotate(original, rotary, positions.clone(), x, x)):
            for one, fresh in zip(again, rotate(original, layer(), positions, x, x), strict=True):
                assert torch.equal(one, fresh)
        positions.add_(1).remainder_(64)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_neox_style": False},
        {"rotary_dim": DIM // 2},
        {"cos_sin_cache": layer().cos_sin_cache.bfloat16()},
        {"sin_cos_cache": None},
    ],
)
def test_leaves_the_rest_to_sglang(changes):
    query, key = queries_and_keys()
    assert rotate(original, layer(**changes), POSITIONS, query, key) == "SGLang's own"
    assert rotate(original, layer(), POSITIONS, query, key, offsets=POSITIONS) == "SGLang's own"
