"""The reward function for each data source: built by the controller and, from the same spec, by each worker."""

import inspect
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from megarl.rewards.registry import (
    REWARDS,
    RewardFunction,
    load_reward_function,
    needs_ground_truth,
    rules_of,
)
from megarl.util.plugins import load_plugins


@dataclass(frozen=True)
class RewardSpec:
    """Where rewards come from, in a form that travels to another process.

    One function for all rows, if any of these is given: `function` (bytes that `pickle.loads` turns into it, as
    cloudpickle makes them), else `custom_path` and `custom_name`, else `rule` by name. Otherwise each row's
    `data_source` has its rule.
    `rule_options`: name of a rule -> what it gets as further keyword arguments.
    """

    plugins: tuple[str, ...] = ()
    function: bytes | None = None
    custom_path: str | None = None
    custom_name: str = "compute_score"
    custom_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rule: str | None = None
    rule_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class RewardFunctions:
    """The functions of a RewardSpec. ValueError: a plugin, file, name or rule that is not as it must be."""

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
        """ValueError: this data source has no rule."""
        if self._common is not None:
            return self._common
        if data_source not in self._of_source:
            self._of_source[data_source] = self._rule(rules_of([data_source])[data_source])
        return self._of_source[data_source]

    def check(self, prompts: Iterable[tuple[str, str, str]]) -> None:
        """Whether every prompt (its uid, data source, ground truth) can be scored.

        ValueError: names all data sources that have no rule, or a prompt that lacks what its rule compares with.
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
