"""Attention of trajectories that share their prompt, whose tokens are computed once for all of them.

The n samples of a prompt (GRPO and its kin) have the same hidden states on all tokens of the prompt; each sample's gradient on them adds
up. As Liu et al., "Prefix Grouper" (arXiv:2506.05433), do on GPUs: the prompt's tokens go through the model once, and each sample's
queries see the prompt's keys and values and then its own. The prompt's last token, whose successor differs, is computed for each sample.

The results equal those with complete trajectories up to the order of sums. Computations that count tokens or mix them otherwise
(MoE routers' balance, dropout, multi-token prediction) would see each prompt once: such models are refused.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.layout.grid import ParallelLayout
from megarl.megatron.transformer_config import has_transformer_engine

# (query, key, value, sequences, is_causal, mask) -> output; see `PackedAttention`.
Attend = Callable[..., Tensor]


def check_model(key: str, config: TransformerConfig, layout: ParallelLayout, dropout: float) -> None:
    """Refuse settings whose results would differ from the ones with full trajectories.

    Args:
        key: the option that asks for it.
        dropout: of adapters.

    Raises:
        ValueError: names the setting.
    """
    obstacles = {
        "context parallelism": layout.cp > 1,
        "a mixture of experts, whose balance counts tokens": config.num_moe_experts is not None,
        "multi-token prediction": bool(config.mtp_num_layers),
        "dropout": dropout > 0,
        "Transformer Engine's attention": has_transformer_engine(),
    }
    found = [name for name, there in obstacles.items() if there]
    if found:
        raise ValueError(f"{key}=true: prompts cannot be shared with {' and '.join(found)}; set it to false")


def attend_shared(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], shared: Sequence[int]
) -> Tensor:
    """Causal attention of packed sequences [tokens, heads, dim] of `lengths`, each of which also sees the first `shared` tokens of
    the nearest earlier one that shares none."""
    groups: list[tuple[tuple[int, int], ...]] = []  # (length, shared) of its sequences
    for sequence in zip(lengths, shared, strict=True):
        if sequence[1]:
            groups[-1] = (*groups[-1], sequence)
        else:
            groups.append((sequence,))
    runs = [(group, len(list(alike))) for group, alike in groupby(groups)]
    sizes = [count * sum(length for length, _ in group) for group, count in runs]
    parts = (part.split(sizes) for part in (query, key, value))
    outputs = [
        _attend_groups(attend, tuple(part.unflatten(0, (count, -1)) for part in qkv), group)
        for *qkv, (group, count) in zip(*parts, runs, strict=True)
    ]
    return torch.cat([output.flatten(0, 1) for output in outputs])


def _attend_groups(attend: Attend, qkv: tuple[Tensor, ...], group: tuple[tuple[int, int], ...]) -> Tensor:
    """Attention of groups with equal lengths. qkv: [groups, tokens, heads, dim] each -> the same as query."""
    runs = [(sequence, len(list(alike))) for sequence, alike in groupby(group[1:])]
    first = group[0][0]
    sizes = [first, *(length * count for (length, _), count in runs)]
    query, key, value = (part.split(sizes, dim=1) for part in qkv)
    heads = [part.flatten(0, 1) for part in (query[0], key[0], value[0])]
    outputs = [attend(*heads, len(qkv[0]), is_causal=True).unflatten(0, (-1, first))]
    for number, ((length, prompt), count) in enumerate(runs, 1):
        before = [part[0][:, None, :prompt].expand(-1, count, -1, -1, -1) for part in (key, value)]
        own = [part[number].unflatten(1, (count, length)) for part in (key, value)]
        keys, values = (torch.cat(both, dim=2) for both in zip(before, own, strict=True))
        position = torch.arange(prompt + length, device=keys.device)
        mask = position[prompt:, None] >= position[None]  # [length, prompt + length]
        output = attend(
            query[number].flatten(0, 1),
            keys.flatten(0, 2),
            values.flatten(0, 2),
            len(qkv[0]) * count,
            mask=mask,
        )
        outputs.append(output.unflatten(0, (-1, length * count)))
    return torch.cat(outputs, dim=1)
