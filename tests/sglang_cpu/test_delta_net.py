"""The operators of gated delta nets equal those of transformers, token by token, in whatever parts and batches prompts come."""

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as oracle

from megarl.sglang_cpu import delta_net

KEY_HEADS, HEADS, KEY, VALUE, WINDOW, SLOTS = 2, 4, 8, 16, 4, 6
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "q": (1, tokens, KEY_HEADS, KEY),
        "k": (1, tokens, KEY_HEADS, KEY),
        "v": (1, tokens, HEADS, VALUE),
        "a": (tokens, HEADS),
        "b": (tokens, HEADS),
        "x": (CHANNELS, tokens),
        "A_log": (HEADS,),
        "dt_bias": (HEADS,),
        "weight": (CHANNELS, WINDOW),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def by_transformers(given: dict[str, torch.Tensor], tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [1, n, heads, value_dim] and last state [1, heads, key_dim, value_dim] of a sequence, as Qwen3NextGatedDeltaNet.forward."""
    q, k = (given[name][:, tokens].repeat_interleave(HEADS // KEY_HEADS, dim=2) for name in "qk")
    g = -given["A_log"].exp() * torch.nn.functional.softplus(given["a"][None, tokens] + given["dt_bias"])
    return oracle.torch_recurrent_gated_delta_rule(
        q, k, given["v"][:, tokens], g, given["b"][None, tokens].sigmoid(), None, True, True
    )


def rule(given: dict[str, torch.Tensor], parts: list[slice], states: torch.Tensor, slots: list[int]):
    """The delta rule over tokens of several requests at a time."""
    index = torch.cat([torch.arange(1000)[part] for part in parts])
    g, beta = delta_net.gates(given["A_log"], given["a"][index], given["b"][index], given["dt_bias"])
    bounds = torch.tensor([0, *(part.stop - part.start for part in parts)]).cumsum(0)
    q, k, v = (given[name][:, index] for name in "qkv")
    out, *_ = delta_net.rule_of_prompts(
        q, k, v, g, beta, states, bounds, torch.tensor(slots, dtype=torch.int32)
    )
    return out.split([part.stop - part.start for part in parts], dim=1)


def test_prompts_in_parts_and_next_tokens() -> None:
    """Two requests: one comes in two parts, the other at once, then one token of each; the bits equal those of the tokens computed alone."""
    given, first, second = inputs(30), slice(0, 13), slice(13, 30)
    states = torch.zeros(SLOTS, HEADS, VALUE, KEY)
    (one,) = rule(given, [slice(0, 5)], states, [4])
    two, other = rule(given, [slice(5, 12), slice(13, 29)], states, [4, 1])
    latest = torch.tensor([12, 29])
    last = delta_net.rule_of_next(
        given["A_log"],
        given["dt_bias"],
        *(given[name][:, latest] for name in "qkv"),
        given["a"][latest],
        given["b"][latest],
        states,
        torch.tensor([4, 1], dtype=torch.int32),
    )
    for tokens, slot, found in (
        (first, 4, [one, two, last[:, :1]]),
        (second, 1, [other, last[:, 1:]]),
    ):
        expected, state = by_transformers(given, tokens)
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot].transpose(1, 2)[None], state, rtol=1e-4, atol=1e-5)
        alone = torch.zeros_like(states)
        assert torch.equal(rule(given, [tokens], alone, [slot])[0], torch.cat(found, dim=1))
        assert torch.equal(alone[slot], states[slot])
    assert not states[[0, 2, 3, 5]].any()


def test_the_convolution_of_prompts_in_parts_and_of_next_tokens() -> None:
    given = inputs(30)
    x, weight = given["x"], given["weight"]
    windows = torch.zeros(SLOTS, CHANNELS, WINDOW - 1)

    def prompts(parts: list[slice], follows: list[bool], slots: list[int]) -> torch.Tensor:
        bounds = torch.tensor([0, *(part.stop - part.start for part in parts)]).cumsum(0)
        return delta_net.convolve_prompts(
            torch.cat([x[:, part] for part in parts], dim=1), weight, None, "silu", windows,
            torch.tensor(follows), torch.tensor(slots), bounds,
        )  # fmt: skip

    windows.normal_()  # left over from other requests
    found = [prompts([slice(0, 2)], [False], [4])]
    both = prompts([slice(2, 12), slice(13, 14)], [True, False], [4, 1])
    last = delta_net.convolve_next(
        x[:, [12, 14]].T, windows, weight, None, "silu", conv_state_indices=torch.tensor([4, 1])
    )
    for tokens, parts in (
        (slice(0, 13), [*found, both[:, :10], last[:1].T]),
        (slice(13, 15), [both[:, 10:], last[1:].T]),
    ):
        own = torch.nn.functional.pad(x[None, :, tokens], (WINDOW - 1, 0))
        expected = torch.nn.functional.silu(
            torch.nn.functional.conv1d(own, weight[:, None], groups=CHANNELS)
        )[0]
        result = torch.cat(parts, dim=1)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        windows.normal_()
        assert torch.equal(prompts([tokens], [False], [2]), result), "bits depend on how a prompt was cut"


@pytest.mark.parametrize("width", [1, 2, 3, 7, 128])
def test_sums_are_sums(width: int) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(delta_net._sum(x), x.sum(-1))


def test_the_norm_with_a_gate() -> None:
    torch.manual_seed(4)
    layer = oracle.Qwen3NextRMSNormGated(VALUE, eps=1e-6)
    torch.nn.init.normal_(layer.weight)
    layer.activation, layer.eps = "silu", layer.variance_epsilon
    x, gate = torch.randn(2, 7, VALUE)
    torch.testing.assert_close(delta_net.gated_norm(layer, x, gate), layer(x, gate))
