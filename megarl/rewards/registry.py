"""Which rule scores which data source."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from megarl.rewards import gsm8k

RewardFunction = Callable[..., Any]  # (data_source, solution_str, ground_truth, extra_info) -> number or dict

RULES: Mapping[str, RewardFunction] = MappingProxyType(
    {
        "openai/gsm8k": gsm8k.compute_score,
        "megarl/arithmetic": gsm8k.compute_score,
    }
)


def reward_functions(
    data_sources: Iterable[str], custom: RewardFunction | None = None
) -> dict[str, RewardFunction]:
    """The function of each data source: `custom` for all where given, else its rule.

    ValueError: a data source without a rule. Call it with a data set's sources before a run is started.
    """
    sources = sorted(set(data_sources))
    if custom is not None:
        return dict.fromkeys(sources, custom)
    unknown = [source for source in sources if source not in RULES]
    if unknown:
        raise ValueError(
            f"no reward rule for data_source {', '.join(map(repr, unknown))}; known: {', '.join(sorted(RULES))}. "
            "For others set custom_reward_function.path"
        )
    return {source: RULES[source] for source in sources}
