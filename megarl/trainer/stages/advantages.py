"""From scores and log-probs to the advantages of a step, and the coefficients of a run's losses that change from step to step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.advantages import AdvantageBatch, AdvantageOptions, compute_advantages
from megarl.algorithms.comparisons import part_spread
from megarl.algorithms.kl import (
    FixedKLController,
    KLController,
    LinearKLController,
    apply_kl_penalty,
    kl_estimate,
    make_kl_controller,
    place_scores,
    place_steps,
)
from megarl.algorithms.metrics import batch_metrics, rollout_difference
from megarl.algorithms.player_baselines import Player
from megarl.algorithms.ragged import segment_sum
from megarl.algorithms.rollout_correction import CorrectionOptions, correct_rollout
from megarl.algorithms.turns import Turns, shared_states
from megarl.config import ActorConfig, AlgorithmConfig
from megarl.data.sessions import first_rows_of_players, group_ids, last_rows_of_players, num_sessions, players
from megarl.data.trajectories import (
    GIVEN,
    SCORED_MASK,
    TEACHER,
    append_column,
    environment_notes,
    from_ragged,
    ragged,
)
from megarl.trainer.stages.given_responses import given_metrics, join_given, split_given
from megarl.trainer.stages.kept_tokens import kept_metrics
from megarl.trainer.stages.step_scores import flat_steps


@dataclass
class Controls:
    """The settings in force; part of a checkpoint.

    Attributes:
        kl: coefficient of the KL in the reward; adapted in `compute_batch_advantages`.
        kl_loss: coefficient of the KL in the actor's loss; adapted in `update`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. A checkpoint has them where `health.auto_action` has
            lowered them; else a run that continues from it takes the configuration's.
        player_baselines: baselines of games' players, for `algorithm.adv_estimator=spiral`; moved in `compute_batch_advantages`.
    """

    kl: KLController
    kl_loss: KLController
    clip_low: float
    clip_high: float
    player_baselines: dict[Player, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._configured = {"clip_low": self.clip_low, "clip_high": self.clip_high}

    def state_dict(self) -> dict[str, Any]:
        clips = {name: getattr(self, name) for name in self._configured}
        return {
            "kl": self.kl.state_dict(),
            "kl_loss": self.kl_loss.state_dict(),
            **{name: None if clip == self._configured[name] else clip for name, clip in clips.items()},
            "player_baselines": [[*player, value] for player, value in self.player_baselines.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        self.kl_loss.load_state_dict(state["kl_loss"])
        for name, configured in self._configured.items():
            lowered = state[name]
            setattr(self, name, configured if lowered is None else min(configured, float(lowered)))
        baselines = state.get("player_baselines", ())  # checkpoints of earlier versions have none
        self.player_baselines = {(game, player): float(value) for game, player, value in baselines}


def make_controls(algorithm: AlgorithmConfig, actor: ActorConfig, num_steps: int) -> Controls:
    """The controls at the start of a run of `num_steps` steps; both sections are resolved."""
    control = algorithm.kl_ctrl
    kl = make_kl_controller(
        control.type,
        control.kl_coef,
        control.target_kl,
        control.horizon,
        control.end_kl_coef,
        control.schedule_steps or num_steps,
    )
    kl_loss: KLController = FixedKLController(actor.kl_loss_coef)
    if actor.kl_loss_end_coef is not None:
        kl_loss = LinearKLController(
            actor.kl_loss_coef, actor.kl_loss_end_coef, actor.kl_loss_schedule_steps or num_steps
        )
    return Controls(kl, kl_loss, actor.clip_ratio_low, actor.clip_ratio_high)


TEACHER_REF_KL = "actor/teacher_ref_kl/"  # before a teacher's name: the KL in the reward


def compute_batch_advantages(
    batch: pa.Table,
    algorithm: AlgorithmConfig,
    kl: KLController,
    player_baselines: dict[Player, float] | None = None,
) -> tuple[pa.Table, dict[str, float]]:
    """Append `token_level_rewards`, `advantages` and, with a critic, `returns`; adapt the KL coefficient.

    The trajectories of a session follow one another and count as one: the sum of their rewards is compared with the sums of other sessions,
    and a critic's returns continue from one to the next. The same holds for each player of a session, who is compared with the same player
    in the prompt's other sessions.

    With `algorithm.rollout_correction` rejected tokens are removed from `response_mask` (which is kept as SCORED_MASK), and weights
    are appended as `rollout_is_weights`. A trajectory without a live token (a failed reward, say) counts in no statistic, nor does one whose
    response is given (GIVEN): its advantages are 0.

    Args:
        batch: columns `score`, `old_log_probs` (not where a step is a single update), and the ones that the estimator and the KL
            need: `ref_log_probs`, `values`, `baseline_score`, named rewards; scores of steps where the reward gives any.
        player_baselines: as the last step left them; `spiral` moves them. None: there are none yet.

    Raises:
        ValueError: a column that the estimator needs is missing, or the estimator cannot see the scores of steps.
    """
    # Given responses would move the means of their groups, so the policy's own are compared without them.
    if GIVEN in batch.column_names:
        own, given, is_given = split_given(batch)
        metrics = given_metrics(batch)
        if own.num_rows:
            own, found = compute_batch_advantages(own, algorithm, kl, player_baselines)
            metrics |= found
        else:
            tokens, bounds = ragged(given, "response_mask")
            given = append_column(given, "advantages", (np.zeros(len(tokens)), bounds))
        return join_given(own, given, is_given), metrics
    names = ("response_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs", "full_kl", "values")
    column = {name: torch.tensor(ragged(batch, name)[0]) for name in names if name in batch.column_names}
    offsets = torch.from_numpy(ragged(batch, "response_mask")[1])
    # All rows of a session's player are one stretch of tokens for the estimator, with the score of the last one.
    mask, first, last = column["response_mask"], first_rows_of_players(batch), last_rows_of_players(batch)
    of_sessions = torch.cat([offsets[torch.from_numpy(first)], offsets[-1:]])
    scores = torch.tensor(batch["score"].to_numpy()[last])
    scored = segment_sum(mask, of_sessions) > 0
    metrics = kept_metrics(batch)
    if "old_log_probs" in column and not algorithm.rollout_correction.bypass_mode:
        metrics |= rollout_difference(column["old_log_probs"], column["rollout_log_probs"], mask)
        batch, mask, found = _correct(batch, column, mask, offsets, algorithm)
        metrics |= found
    if algorithm.use_kl_in_reward and TEACHER in batch.column_names:
        metrics |= _kl_by_teacher(batch, column, mask, offsets, algorithm)
    # From here on `mask` lacks rejected tokens; a trajectory that failed has lost its tokens before.
    rewards, found = _token_rewards(scores, column, mask, of_sessions, algorithm, kl, num_sessions(batch))
    metrics |= found
    # Scores of steps are added after the KL, which is per token, and before any comparison of groups.
    steps = flat_steps(batch, offsets)
    if steps is not None:
        if algorithm.adv_estimator == "gdpo":
            raise ValueError(
                "algorithm.adv_estimator='gdpo' compares named numbers of the reward, and would not see the scores of steps that it gives; "
                "leave `steps` out of the reward's result, or choose another estimator"
            )
        rewards = rewards + place_steps(*steps, mask, offsets)
    baselines = None
    if "baseline_score" in batch.column_names:
        baselines = torch.tensor(batch["baseline_score"].to_numpy()[last])
    groups, weights = group_ids(batch), algorithm.reward_weights or {}
    uids = [groups[row] for row in last]
    parts = None
    if weights:
        names = [f"reward_part/{name}" for name in weights]
        missing = [name for name in names if name not in batch.column_names]
        if missing:
            raise ValueError(
                f"algorithm.reward_weights: the trajectories have no column {', '.join(missing)}"
            )
        parts = torch.tensor(np.stack([batch[name].to_numpy()[last] for name in names], axis=1))
        spread = part_spread(parts[scored], [uid for uid, there in zip(uids, scored, strict=True) if there])
        metrics |= {f"reward/{name}_std": value for name, value in zip(weights, spread, strict=True)}
    # Turns are noted row by row: where sessions have several rows, no row has the turns of its session.
    turns = turns_of(batch, offsets) if len(first) == batch.num_rows else None
    if algorithm.adv_estimator == "gigpo" and turns is not None:
        metrics["critic/shared_states"] = shared_states(mask, offsets, turns, uids)
    result = compute_advantages(
        algorithm.adv_estimator,
        AdvantageBatch(
            rewards,
            mask,
            of_sessions,
            column.get("values"),
            uids,
            baselines,
            parts,
            turns,
            _players(batch, last),
            player_baselines or {},
        ),
        AdvantageOptions(
            algorithm.gamma,
            algorithm.lam,
            algorithm.whiten_advantages,
            algorithm.norm_adv_by_std_in_grpo,
            tuple(map(float, weights.values())),
            algorithm.step_advantage_weight,
            algorithm.baseline_decay,
        ),
    )
    # The caller's baselines move in place: the next step begins with them, and a checkpoint saves them.
    for player, value in (result.player_baselines or {}).items():
        metrics["/".join(["critic/baseline", *filter(None, player)])] = value
        if player_baselines is not None:
            player_baselines[player] = value
    reasons = batch["finish_reason"].to_pylist()
    truncated = torch.tensor([reasons[row] == "length" for row in last])
    metrics |= batch_metrics(
        scores[scored],
        rewards,
        result.advantages,
        mask,
        of_sessions,
        truncated,
        result.returns,
        column.get("values"),
    )
    new = {"token_level_rewards": rewards, "advantages": result.advantages, "returns": result.returns}
    for name, values in new.items():
        if values is not None:
            batch = append_column(batch, name, (values.numpy(), offsets.numpy()))
    return batch, metrics


def _players(batch: pa.Table, rows: np.ndarray) -> list[Player] | None:
    """The game and the player of some rows; None: the table has no data sources."""
    if "data_source" not in batch.column_names:
        return None
    sources, names = batch["data_source"].to_pylist(), players(batch).tolist()
    return [(sources[row], names[row]) for row in rows]


def _kl_by_teacher(
    batch: pa.Table,
    column: dict[str, torch.Tensor],
    mask: torch.Tensor,
    offsets: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> dict[str, float]:
    """The estimated KL to each of several teachers: the mean over the live tokens that the teacher judges."""
    estimate = kl_estimate(column["old_log_probs"], column["ref_log_probs"], algorithm.kl_penalty)
    judges = np.repeat(np.array(batch[TEACHER].to_pylist()), offsets.diff().numpy())
    live = {str(name): mask & torch.from_numpy(judges == name) for name in np.unique(judges)}
    return {
        f"{TEACHER_REF_KL}{name}": float(estimate[there].double().mean())
        for name, there in live.items()
        if there.any()
    }


def turns_of(batch: pa.Table, offsets: torch.Tensor) -> Turns | None:
    """The turns in the environment's notes; a trajectory without any has one turn. None: the notes lack some turns."""
    if "environment_notes" not in batch.column_names:
        return None
    starts: list[int] = []
    states: list[str] = []
    rows = zip(offsets.tolist(), batch["num_turns"].to_pylist(), environment_notes(batch), strict=False)
    for start, num_turns, notes in rows:
        if num_turns > max(1, len(notes.turns)):  # agents' sessions have no notes of their turns
            return None
        for place, state in notes.turns or ((0, ""),):
            starts.append(start + place)
            states.append(state)
    return Turns(torch.tensor(starts, dtype=torch.int64), states)


def _token_rewards(
    scores: torch.Tensor,
    column: dict[str, torch.Tensor],
    mask: torch.Tensor,
    offsets: torch.Tensor,
    algorithm: AlgorithmConfig,
    kl: KLController,
    sessions: int,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Scores on the last live tokens, less the KL on each with `algorithm.use_kl_in_reward`; adapts its coefficient."""
    if not algorithm.use_kl_in_reward:
        return place_scores(scores, mask, offsets), {}
    rewards, mean_kl = apply_kl_penalty(
        scores,
        column["old_log_probs"],
        column["ref_log_probs"],
        mask,
        offsets,
        kl.coef,
        algorithm.kl_penalty,
        column.get("full_kl"),
    )
    metrics = {"actor/ref_kl": mean_kl, "actor/kl_coef": kl.coef}
    if math.isfinite(mean_kl):  # else the rewards are not finite, and the step is not trained on
        kl.update(mean_kl, sessions)
    return rewards, metrics


def _correct(
    batch: pa.Table,
    column: dict[str, torch.Tensor],
    mask: torch.Tensor,
    offsets: torch.Tensor,
    algorithm: AlgorithmConfig,
) -> tuple[pa.Table, torch.Tensor, dict[str, float]]:
    """The batch corrected by `algorithm.rollout_correction`, its mask of live tokens, and metrics."""
    settings = algorithm.rollout_correction
    options = CorrectionOptions(
        settings.rollout_is,
        settings.rollout_is_threshold,
        settings.rollout_rs,
        settings.rollout_rs_threshold,
        settings.rollout_rs_threshold_lower,
    )
    found = correct_rollout(column["old_log_probs"], column["rollout_log_probs"], mask, offsets, options)
    bounds = offsets.numpy()
    if options.rs_level is not None:
        batch = append_column(batch, SCORED_MASK, (mask.numpy(), bounds))
        place = batch.column_names.index("response_mask")
        masks = from_ragged(found.mask.numpy().astype(np.bool_), bounds)
        batch = batch.set_column(place, "response_mask", masks)
    if found.weights is not None:
        batch = append_column(batch, "rollout_is_weights", (found.weights.numpy(), bounds))
    return batch, found.mask, found.metrics
