"""Multi-turn trajectories: the specification from the configuration, and the player in an engine's process."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.config import ModelPathConfig, RolloutConfig
from megarl.config.schema.rollout import MultiTurnConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import MESSAGES, TEMPLATE_KWARGS
from megarl.environments import find_environment
from megarl.environments.environment import Task
from megarl.rollout.engine import Generation, SamplingParams
from megarl.rollout.turns import Answer, Player
from megarl.util.plugins import load_plugins


@dataclass(frozen=True)
class TurnsSpec:
    """The settings with which an engine's process plays an environment."""

    multi_turn: MultiTurnConfig
    model: ModelPathConfig
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()


def turns_spec(
    rollout: RolloutConfig,
    model: ModelPathConfig,
    template_kwargs: Mapping[str, Any] | None,
    plugins: tuple[str, ...],
) -> TurnsSpec | None:
    """The settings of section `rollout.multi_turn` (resolved and checked); None where it is not enabled.

    Raises:
        ValueError: there is no such environment, or it does not take the options.
    """
    multi_turn = rollout.multi_turn
    if not multi_turn.enable:
        return None
    assert multi_turn.environment is not None and model.tokenizer_path is not None, "checked and resolved"
    load_plugins(plugins)
    find_environment(multi_turn.environment, multi_turn.options or {})
    # The engines' working directory need not be this one.
    files = tuple(str(Path(file).expanduser().resolve()) for file in plugins)
    return TurnsSpec(multi_turn, model, template_kwargs or {}, files)


class Players:
    """Plays the requests of one engine, in the engine's process."""

    def __init__(
        self,
        spec: TurnsSpec,
        answer: Answer,
        stop_token_ids: tuple[int, ...],
        longest_input: int | None = None,
    ) -> None:
        """`answer`: the engine's; `stop_token_ids`, `longest_input`: as in `Player`."""
        load_plugins(spec.plugins)
        multi_turn, model = spec.multi_turn, spec.model
        assert multi_turn.environment is not None and model.tokenizer_path is not None
        options = multi_turn.options or {}
        make = partial(find_environment(multi_turn.environment, options), **options)
        self._tokenizer = load_tokenizer(model.tokenizer_path, model.trust_remote_code)
        self.player = Player(
            make, multi_turn, self._tokenizer, answer, stop_token_ids, spec.template_kwargs, longest_input
        )

    def answers(
        self, requests: pa.Table, sampling: SamplingParams, version: int
    ) -> list[Coroutine[Any, Any, list[Generation]]]:
        """A coroutine for each of the requests, which plays it; `version`: of the engine's weights."""

        async def play(task: Task, ids: list[int]) -> list[Generation]:
            return [await self.player.play(task, ids, sampling, version)]

        tasks = tasks_of(requests, self._tokenizer)
        return [play(task, ids) for task, ids in zip(tasks, requests["prompt_ids"].to_pylist(), strict=True)]


def tasks_of(requests: pa.Table, tokenizer: PreTrainedTokenizerBase) -> list[Task]:
    """The tasks of environments or agents, one for each request (see `expand_prompts`)."""
    columns = ("uid", "prompt_ids", "data_source", "ground_truth", "extra_info")
    kept = (_json_column(requests, name) for name in (MESSAGES, TEMPLATE_KWARGS))
    rows = zip(*(requests[name].to_pylist() for name in columns), *kept, strict=True)
    return [
        Task(
            uid=uid,
            prompt=tokenizer.decode(ids, skip_special_tokens=True),
            messages=messages,
            data_source=source,
            ground_truth=truth,
            extra_info=json.loads(extra) if extra else {},
            template_kwargs=keywords,
        )
        for uid, ids, source, truth, extra, messages, keywords in rows
    ]


def _json_column(requests: pa.Table, name: str) -> list[Any]:
    """The parsed values of a column of JSON; None for each row without the column."""
    if name not in requests.column_names:
        return [None] * requests.num_rows
    return [json.loads(text) for text in requests[name].to_pylist()]
