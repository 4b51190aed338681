"""Multi-turn trajectories: the specification from the configuration, and the player in an engine's process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.config import ModelPathConfig, RolloutConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import MESSAGES, TEMPLATE_KWARGS
from megarl.environments import find_environment
from megarl.environments.environment import Task
from megarl.rollout.engine import RolloutEngine
from megarl.rollout.turns import Player, TurnLimits
from megarl.util.plugins import load_plugins


@dataclass(frozen=True)
class TurnsSpec:
    """The settings with which an engine's process plays an environment."""

    environment: str
    options: Mapping[str, Any]
    limits: TurnLimits
    tokenizer_path: str
    trust_remote_code: bool
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()


def turns_spec(
    rollout: RolloutConfig,
    model: ModelPathConfig,
    template_kwargs: Mapping[str, Any] | None,
    plugins: tuple[str, ...],
) -> TurnsSpec | None:
    """As section `rollout.multi_turn` (resolved and checked) says; None where it is not enabled.

    Raises:
        ValueError: there is no such environment, or it does not take the options.
    """
    multi_turn = rollout.multi_turn
    if not multi_turn.enable:
        return None
    assert multi_turn.environment is not None and model.tokenizer_path is not None, "checked and resolved"
    options = multi_turn.options or {}
    load_plugins(plugins)
    find_environment(multi_turn.environment, options)
    limits = TurnLimits(
        max_assistant_turns=multi_turn.max_assistant_turns,
        max_user_turns=multi_turn.max_user_turns,
        max_characters=multi_turn.max_tool_response_length,
        keep_side=multi_turn.tool_response_truncate_side,
        step_timeout=multi_turn.step_timeout,
    )
    return TurnsSpec(
        multi_turn.environment,
        options,
        limits,
        model.tokenizer_path,
        model.trust_remote_code,
        template_kwargs or {},
        # The engines' working directory need not be this one.
        tuple(str(Path(file).expanduser().resolve()) for file in plugins),
    )


@dataclass(frozen=True)
class Players:
    """Plays the requests of one engine."""

    player: Player
    tokenizer: PreTrainedTokenizerBase

    def tasks(self, requests: pa.Table) -> list[Task]:
        """The environments' tasks, one for each request (see `expand_prompts`)."""
        columns = ("uid", "prompt_ids", "data_source", "ground_truth", "extra_info")
        kept = (_json_column(requests, name) for name in (MESSAGES, TEMPLATE_KWARGS))
        rows = zip(*(requests[name].to_pylist() for name in columns), *kept, strict=True)
        return [
            Task(
                uid=uid,
                prompt=self.tokenizer.decode(ids, skip_special_tokens=True),
                messages=messages,
                data_source=source,
                ground_truth=truth,
                extra_info=json.loads(extra) if extra else {},
                template_kwargs=keywords,
            )
            for uid, ids, source, truth, extra, messages, keywords in rows
        ]


def make_players(spec: TurnsSpec, engine: RolloutEngine, stop_token_ids: tuple[int, ...]) -> Players:
    """In the engine's process."""
    load_plugins(spec.plugins)
    made = partial(find_environment(spec.environment, spec.options), **spec.options)
    tokenizer = load_tokenizer(spec.tokenizer_path, spec.trust_remote_code)
    player = Player(made, spec.limits, tokenizer, engine.answer, stop_token_ids, spec.template_kwargs)
    return Players(player, tokenizer)


def _json_column(requests: pa.Table, name: str) -> list[Any]:
    """The parsed values of a column of JSON; None for each row without the column."""
    if name not in requests.column_names:
        return [None] * requests.num_rows
    return [json.loads(text) for text in requests[name].to_pylist()]
