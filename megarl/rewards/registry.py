"""Reward functions: rules by name and data source, and the user's own from a .py file.

    @register_reward("length", data_sources=["mine/essays"])
    def length(data_source, solution_str, ground_truth, extra_info):
        return min(len(solution_str), 1000) / 1000

in a file that the recipe names in `plugins` makes `reward.rule=length` known, and the rule of rows from `mine/essays`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megarl.rewards.rules import code_tests, gsm8k, judge, math_rules, text
from megarl.util.plugins import Registry, import_file

# (data_source, solution_str, ground_truth, extra_info) by keyword, and prompt_str if it has such a parameter
# -> a number, or a dict with one under "score"; or a coroutine of that.
RewardFunction = Callable[..., Any]
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(
    path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """The function `name` of the file `path`; it is called with the four arguments of `_ARGUMENTS` by keyword, and
    with `prompt_str` if it has such a parameter, and is given `kwargs` besides. It may be async.

    ValueError, with the config key and what was found: no such file, not a .py file, a file that fails while it
    is imported, no such name in it, a name that is not callable, a function that does not take these arguments.
    """
    module = import_file(path, "custom_reward_function.path")
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"custom_reward_function.name={name!r}: {path} has no such function; "
            f"it defines {', '.join(functions) if functions else 'none'}"
        )
    function = getattr(module, name)
    _check_function(function, f"custom_reward_function.name={name!r} in {path}", kwargs or {})
    return functools.partial(function, **kwargs) if kwargs else function


def _check_function(function: object, where: str, kwargs: Mapping[str, Any]) -> None:
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, not a function")
    wanted = f"compute_score({', '.join([*_ARGUMENTS, *kwargs])})"
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # a builtin or extension type without a signature
        raise ValueError(f"{where}: its signature cannot be read; it must be {wanted}") from error
    try:
        prompt = {"prompt_str": ""} if "prompt_str" in signature.parameters else {}
        signature.bind(**dict.fromkeys(_ARGUMENTS), **prompt, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{where}: its signature is {signature}; it is called as {wanted} by keyword, which fails: {error}"
        ) from error


REWARDS: Registry[RewardFunction] = Registry("reward rule", "reward.rule")
_RULE_OF: dict[str, str] = {}  # data source, or its beginning if it ends in "*"
_COMPARES: set[str] = set()  # rules that cannot score without a ground truth


def register_reward(
    name: str, data_sources: Sequence[str] = (), *, needs_ground_truth: bool = False
) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a reward function known as `reward.rule=<name>`, and as the rule of data sources.

    `data_sources`: their names; one that ends in `*` stands for all that begin so.
    `needs_ground_truth`: prompts that have none are refused.
    ValueError: the name or a data source is taken.
    """

    def register(function: RewardFunction) -> RewardFunction:
        for source in data_sources:
            if source in _RULE_OF:
                raise ValueError(f"data source {source!r} already has the reward rule {_RULE_OF[source]!r}")
        REWARDS.register(name)(function)
        _RULE_OF.update(dict.fromkeys(data_sources, name))
        if needs_ground_truth:
            _COMPARES.add(name)
        return function

    return register


def rules_of(data_sources: Iterable[str]) -> dict[str, str]:
    """Data source -> the name of its rule: that of its own name, else of the longest beginning.

    ValueError: names all that have none.
    """
    rules = {source: _rule_of(source) for source in sorted(set(data_sources))}
    unknown = [source for source, rule in rules.items() if rule is None]
    if unknown:
        raise ValueError(
            f"no reward rule for data_source {', '.join(map(repr, unknown))}; known: {', '.join(sorted(_RULE_OF))}. "
            f"For others set custom_reward_function.path, or reward.rule to one of {', '.join(REWARDS.names())}"
        )
    return rules


def needs_ground_truth(rule: str) -> bool:
    """Whether a rule compares with the ground truth."""
    return rule in _COMPARES


def _rule_of(data_source: str) -> str | None:
    if data_source in _RULE_OF:
        return _RULE_OF[data_source]
    beginnings = [key for key in _RULE_OF if key.endswith("*") and data_source.startswith(key[:-1])]
    return _RULE_OF[max(beginnings, key=len)] if beginnings else None


# The data sources are those that verl's converters of these data sets write.
register_reward("gsm8k", ["openai/gsm8k", "megarl/arithmetic"], needs_ground_truth=True)(gsm8k.compute_score)
register_reward("gsm8k_flexible", needs_ground_truth=True)(gsm8k.compute_score_flexible)
register_reward(
    "math",
    ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "numina_*"],
    needs_ground_truth=True,
)(math_rules.boxed_score)
register_reward("math_dapo", ["math", "math_dapo*", "aime*"], needs_ground_truth=True)(math_rules.dapo_score)
register_reward("code", ["codecontests", "apps", "codeforces", "taco"], needs_ground_truth=True)(
    code_tests.compute_score
)
register_reward(
    "multiple_choice",
    ["cais/mmlu", "TIGER-Lab/MMLU-Pro", "Idavidrein/gpqa", "allenai/ai2_arc"],
    needs_ground_truth=True,
)(text.multiple_choice)
register_reward("exact_match", needs_ground_truth=True)(text.exact_match)
register_reward("search_r1", ["searchR1_*"], needs_ground_truth=True)(text.search_r1)
register_reward("llm_judge")(judge.compute_score)
