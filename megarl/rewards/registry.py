"""Reward functions: rules by name and data source, the user's own from a .py file, and `RewardFunctions`, which the controller
and each worker make from the same `RewardSpec`.

    @register_reward("length", data_sources=["mine/essays"])
    def length(data_source, solution_str, ground_truth, extra_info):
        return min(len(solution_str), 1000) / 1000

in a file that the recipe names in `plugins` makes `reward.rule=length` known, and the rule of rows from `mine/essays`.
"""

import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from megarl.rewards.rules import code_tests, judge, math_rules, text
from megarl.util.plugins import Registry, import_file, load_plugins

# (data_source, solution_str, ground_truth, extra_info) by keyword, and prompt_str if it has such a parameter
# -> a number, or a dict with one under "score"; or a coroutine of that.
RewardFunction = Callable[..., Any]
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(
    path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """The function `name` of the file `path`; it is called by keyword with the four arguments of `_ARGUMENTS`, with
    `prompt_str` if it has such a parameter, and `kwargs`. It may be async.

    ValueError, with the config key and the fault: no such file, not a .py file, a file that fails while it
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
    return partial(function, **kwargs) if kwargs else function


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
    """Data source -> the name of its rule: the rule of its own name, else of the longest beginning.

    ValueError: names all data sources that have no rule.
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


@dataclass(frozen=True)
class RewardSpec:
    """The source of rewards, in a form that can be sent to another process.

    One function for all rows, if any of these is given: `function` (bytes that `pickle.loads` turns into it, as
    cloudpickle makes them), else `custom_path` and `custom_name`, else `rule` by name. Otherwise each row's
    `data_source` has its rule.
    `rule_options`: name of a rule -> its further keyword arguments.
    """

    plugins: tuple[str, ...] = ()
    function: bytes | None = None
    custom_path: str | None = None
    custom_name: str = "compute_score"
    custom_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None
    rule_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class RewardFunctions:
    """The functions of a RewardSpec. ValueError: a wrong plugin, file, name or rule."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        load_plugins(spec.plugins)
        self._common: Reward | None = None
        if spec.function is not None:
            self._common = Reward(pickle.loads(spec.function))
        elif spec.custom_path is not None:
            self._common = Reward(
                load_reward_function(spec.custom_path, spec.custom_name, spec.custom_kwargs)
            )
        elif spec.rule is not None:
            self._common = self._rule(spec.rule)
        self._of_source: dict[str, Reward] = {}

    def of(self, data_source: str) -> "Reward":
        """The reward of a data source. ValueError: it has no rule."""
        if self._common is not None:
            return self._common
        if data_source not in self._of_source:
            self._of_source[data_source] = self._rule(rules_of([data_source])[data_source])
        return self._of_source[data_source]

    def check(self, prompts: Iterable[tuple[str, str, str]]) -> None:
        """Check that every prompt (its uid, data source, ground truth) can be scored.

        ValueError: names all data sources that have no rule, or a prompt without the ground truth that its rule compares with.
        """
        rows = list(prompts)
        if self._common is None:
            rules_of(source for _, source, _ in rows)
        for uid, source, truth in rows:
            rule = self.of(source).rule
            if not truth and rule is not None and needs_ground_truth(rule):
                raise ValueError(
                    f"prompt {uid}: the reward rule {rule!r} of data_source {source!r} compares with the ground truth "
                    "(data.answer_key), which this prompt does not have; give it, or choose another reward"
                )

    def _rule(self, name: str) -> "Reward":
        return Reward(partial(REWARDS[name], **self._spec.rule_options.get(name, {})), rule=name)


@dataclass(frozen=True)
class Reward:
    """A reward function, and how it is called; `rule`: its name, if it has one."""

    function: RewardFunction
    rule: str | None = None

    @cached_property
    def is_async(self) -> bool:
        inner = self.function
        while isinstance(inner, partial):
            inner = inner.func
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
            getattr(inner, "__call__", None)  # noqa: B004 (an object with an async __call__)
        )

    @cached_property
    def takes_prompt(self) -> bool:
        """Whether it has a parameter `prompt_str` (the text of the prompt)."""
        try:
            return "prompt_str" in inspect.signature(self.function).parameters
        except ValueError:  # a builtin without a signature
            return False


# The data sources are the names that verl's converters of these data sets write.
register_reward("gsm8k", ["openai/gsm8k", "megarl/arithmetic"], needs_ground_truth=True)(text.gsm8k)
register_reward("gsm8k_flexible", needs_ground_truth=True)(text.gsm8k_flexible)
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
