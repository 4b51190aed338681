"""The reward model's part of a step: the text that it reads of each trajectory, its score, and how scores become rewards.

Scores are shifted, and scaled if that is configured, by the mean and deviation that reference answers get. A model that scores each step of a
response reads the texts of `model_steps`.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.hf.export import NORMALIZATION_FILE
from megarl.checkpoints.hf.load import HFReader
from megarl.config import RewardModelConfig
from megarl.data.tokenizer import ROWS_AT_ONCE, decode_texts, encode_texts, load_tokenizer, render_text
from megarl.data.trajectories import MESSAGES, POSITIONS, TEMPLATE_KWARGS, from_lists, from_ragged, ragged
from megarl.models import ModelConfig, read_model_config
from megarl.models.table import VALUE_HEAD
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.run.run import Run
from megarl.trainer.stages.model_steps import (
    StepScoring,
    StepText,
    check_steps,
    rendered_steps,
    separated_steps,
    steps_in_tokens,
)
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.workers.dispatch import plan_rows, rows_to_share

FILE = NORMALIZATION_FILE


@dataclass(frozen=True)
class RewardNormalization:
    """A reward is (output - mean) / std; `num_answers` were measured."""

    mean: float = 0.0
    std: float = 1.0
    num_answers: int = 0

    def apply(self, outputs: np.ndarray) -> np.ndarray:
        """Rewards from the head's outputs: float32 [texts] each."""
        return ((outputs.astype(np.float64) - self.mean) / self.std).astype(np.float32)

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


AS_IT_IS = RewardNormalization()


def measure_normalization(outputs: np.ndarray, kind: str) -> RewardNormalization:
    """The normalization that gives the measured outputs mean 0, and with kind "mean_std" standard deviation 1.

    Args:
        outputs: float32 [reference answers].
        kind: "mean" or "mean_std".

    Raises:
        ValueError: all outputs are equal, so that nothing can be divided by their deviation.
    """
    assert kind in ("mean", "mean_std"), kind
    values = outputs.astype(np.float64)
    std = 1.0
    if kind == "mean_std":
        std = float(values.std())
        if std == 0.0:
            raise ValueError(
                f"data.normalize=mean_std: the {len(values)} reference answers all get the reward {values[0]:g}; give more "
                "of them (data.normalize_files, data.normalize_max_samples), or set data.normalize=mean"
            )
    return RewardNormalization(float(values.mean()), std, len(values))


def read_normalization(path: str | Path) -> RewardNormalization:
    """The normalization in a reward model's folder; outputs stay unchanged without one.

    Raises:
        ValueError: the file has not the format that `megarl rm` writes.
    """
    file = Path(path).expanduser() / FILE
    if not file.is_file():
        return AS_IT_IS
    try:
        found = json.loads(file.read_text())
        mean, std = float(found["mean"]), float(found["std"])
        number = int(found.get("num_answers", 0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} must be a JSON object with the numbers mean and std: {type(error).__name__}: {error}"
        ) from None
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise ValueError(f"{file}: mean={mean} must be finite, std={std} positive and finite")
    return RewardNormalization(mean, std, number)


TOKEN_CLASSIFIERS = ("qwen2", "llama", "qwen3")
"""Families whose folders for token classification are read: those whose reward models are tested against transformers' classes."""


@dataclass(frozen=True)
class RewardModelInputs:
    """The reward model's facts and tokenizers, read before it is started.

    Attributes:
        policy: the policy's tokenizer.
        own: the reward model's; None: it reads the policy's token ids.
        max_length: tokens of a text that it reads; the end of a longer one is cut off.
        normalization: applied to the head's outputs; by default they stay unchanged.
        steps: how it scores each step of a response; None: it scores texts.
    """

    model: ModelConfig
    policy: PreTrainedTokenizerBase
    own: PreTrainedTokenizerBase | None
    max_length: int
    normalization: RewardNormalization = AS_IT_IS
    steps: StepScoring | None = None


@dataclass(frozen=True)
class ModelScores:
    """A reward model's scores of a table of trajectories.

    Attributes:
        scores: float32 [rows].
        truncated: rows whose text was longer than the model reads [rows].
        steps: rewards of steps, which take the place of `scores`: for each row, numbers of the response's tokens and scores; None: there
            are none.
        numbers: further numbers by name [rows]; NaN where a row has none.
    """

    scores: np.ndarray
    truncated: np.ndarray
    steps: list[list[tuple[int, float]]] | None = None
    numbers: dict[str, np.ndarray] = field(default_factory=dict)


def load_reward_model(config: RewardModelConfig, policy: PreTrainedTokenizerBase) -> RewardModelInputs:
    """Read and check the reward model of an enabled, resolved section.

    Args:
        policy: the policy's tokenizer.

    Raises:
        ValueError: the folder holds no reward model, the model cannot read texts of `max_length`, or the tokenizers do
            not fit what `input_tokenizer` says.
    """
    path, max_length = config.model.path, config.max_length
    assert path is not None and max_length is not None, "checked and resolved"
    model = read_model_config(path)
    scores_steps = config.step_separator is not None
    with HFReader(path, two_labels=True) as reader:
        of_tokens = reader.has_two_labels
        if of_tokens and scores_steps:
            _check_token_classifier(path, model)
        found = reader.tensors[VALUE_HEAD].shape if VALUE_HEAD in reader.tensors else None
        if found != (1, model.hidden_size) and not (of_tokens and scores_steps):
            has = "is missing" if found is None else f"has shape {list(found)}"
            advice = "; reward_model.step_separator makes a token classifier of two labels score steps"
            raise ValueError(
                f"reward_model.model.path: {path} holds no reward model: {VALUE_HEAD} {has}; a Hugging Face model for sequence "
                f"classification with one label has it, of shape [1, {model.hidden_size}]{advice if of_tokens else ''}"
            )
        reader.check(model, "value")
        bias = reader.two_label_bias() if of_tokens else None
    if max_length > model.max_position_embeddings:
        raise ValueError(
            f"reward_model.max_length={max_length} (null: the longest trajectory) is more than the "
            f"{model.max_position_embeddings} positions of the reward model in {path}; set it to that or less"
        )
    own, normalization = _own_tokenizer(config, policy), read_normalization(path)
    steps = None
    if config.step_separator is not None:
        steps = StepScoring(config.step_separator, config.step_reward, bias)
        if normalization != AS_IT_IS:
            raise ValueError(
                f"reward_model.step_separator: {FILE} in {path} was measured on complete answers, not on steps; take a copy of the folder "
                "without it, or leave step_separator out"
            )
        check_steps(path, steps, own, policy)
    return RewardModelInputs(model, policy, own, max_length, normalization, steps)


def _check_token_classifier(path: str, model: ModelConfig) -> None:
    if model.family not in TOKEN_CLASSIFIERS or not model.architecture.endswith("ForTokenClassification"):
        raise ValueError(
            f"reward_model.model.path: {path} is a {model.architecture or 'model without architectures'} (model_type="
            f"{model.hf['model_type']!r}) with two labels; models that score steps are *ForTokenClassification with two labels of "
            f"{', '.join(TOKEN_CLASSIFIERS)}, or *ForSequenceClassification with one label"
        )


def _own_tokenizer(
    config: RewardModelConfig, policy: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    path, given = config.model.path, config.model.input_tokenizer
    assert path is not None
    own = load_tokenizer(path, config.model.trust_remote_code)
    if given is None:
        if not policy.get_vocab().items() <= own.get_vocab().items():
            raise ValueError(
                f"the reward model in {path} has another tokenizer than the policy: set "
                "reward_model.model.input_tokenizer to the policy's, and data.return_raw_input_ids=true"
            )
        if own.chat_template != policy.chat_template:
            warnings.warn(
                f"the reward model in {path} has another chat template than the policy, but is given the policy's token ids; "
                "with reward_model.model.input_tokenizer (the policy's) chats are rendered with its own template",
                stacklevel=2,
            )
        return None
    if load_tokenizer(given, config.model.trust_remote_code).get_vocab() != policy.get_vocab():
        raise ValueError(
            f"reward_model.model.input_tokenizer={given} is not the policy's tokenizer, which responses are decoded with; "
            "the reward model's own is the one in reward_model.model.path"
        )
    return own


def score_weights(reward: RewardModelConfig) -> tuple[float, float]:
    """The weights of the rules' score and of the reward model's."""
    return (reward.rule_weight, reward.weight) if reward.enable else (1.0, 0.0)


def score_with_model(run: Run, role: Role, batch: pa.Table, inputs: RewardModelInputs) -> ModelScores:
    """The reward model's score of each trajectory. Its weights must be on the devices (phase `score_model`).

    Raises:
        ValueError: the reward model's chat template refuses a prompt.
        NotFinite: a score is not finite.
    """
    if inputs.steps is not None:
        return _score_steps(run, role, batch, inputs, inputs.steps)
    lists = texts_of(batch, inputs)
    lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
    truncated = lengths > inputs.max_length
    scores = score_lists(run, role, [ids[: inputs.max_length] for ids in lists])
    scores = inputs.normalization.apply(scores)
    _require_finite(batch, scores)
    return ModelScores(scores, truncated)


def _require_finite(batch: pa.Table, scores: np.ndarray) -> None:
    if not np.isfinite(scores).all():
        row = int(np.argmin(np.isfinite(scores)))
        raise NotFinite(f"the reward model's score of trajectory {batch['uid'][row]} is {scores[row]}", batch)


def _score_steps(
    run: Run, role: Role, batch: pa.Table, inputs: RewardModelInputs, steps: StepScoring
) -> ModelScores:
    """The scores of all steps whose ends the model reads; a trajectory without such a step has the score 0."""
    texts = step_texts(batch, inputs, steps)
    truncated = np.array([len(text.ids) > inputs.max_length for text in texts])
    texts = [text.first(inputs.max_length) for text in texts]
    read = [row for row, text in enumerate(texts) if text.positions]
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(texts)
    if read:
        outputs = score_positions(
            run, role, [texts[row].ids for row in read], [texts[row].positions for row in read]
        )
        for row, values in zip(read, outputs, strict=True):
            found[row] = steps.scores(values)
    _require_finite(batch, np.array([values.sum() for values in found]))
    scores = np.array([steps.of_trajectory(values) for values in found], dtype=np.float32)
    numbers = {
        "model_num_steps": np.array([float(len(values)) for values in found]),
        "model_step_score": np.array([values.mean() if len(values) else np.nan for values in found]),
    }
    places = [
        [(place, float(value)) for place, value in zip(text.places, values, strict=True)]
        for text, values in zip(texts, found, strict=True)
    ]
    return ModelScores(scores, truncated, places if steps.reward == "each" else None, numbers)


def score_lists(run: Run, role: Role, lists: list[np.ndarray]) -> np.ndarray:
    """The head's output at the last token of each of any number of texts (token ids): float32 [texts]."""
    return np.concatenate(score_positions(run, role, lists, None))


def score_positions(
    run: Run, role: Role, lists: list[np.ndarray], positions: list[list[int]] | None
) -> list[np.ndarray]:
    """The head's outputs at tokens of each of any number of texts (token ids): float32 [tokens] each.

    Args:
        positions: ascending numbers of each text's tokens, at least one; None: its last token.
    """
    # Data parallel ranks get equal numbers of texts: copies of the shortest one fill up.
    shortest = min(range(len(lists)), key=lambda row: len(lists[row]))
    order = [*range(len(lists)), *[shortest] * (rows_to_share(len(lists), role.layout) - len(lists))]
    columns = {"input_ids": from_ragged(*from_lists([lists[row] for row in order], np.int32))}
    if positions is not None:
        columns[POSITIONS] = from_ragged(*from_lists([positions[row] for row in order], np.int32))
    lengths = np.array([len(lists[row]) for row in order])
    batching = role.batching
    shares = plan_rows(
        lengths, role.layout, batching.max_tokens, batching.micro_batch_size, batching.pair_share
    )
    results = run.wait(role.group.call("score_texts", run.put(pa.table(columns)), run.put(shares)))
    return merge_scores(results, len(order))[: len(lists)]


def step_texts(batch: pa.Table, inputs: RewardModelInputs, steps: StepScoring) -> list[StepText]:
    """The text that the model reads of each trajectory, and where its steps end.

    Raises:
        ValueError: the model's chat template refuses a prompt, or does not write the response as it is.
    """
    # Row by row: all of them as Python's lists would take nine times their memory.
    prompts = (row.as_py() for row in batch["prompt_ids"])
    responses = (row.as_py() for row in batch["response_ids"])
    if steps.bias is None and inputs.own is None:
        return [
            steps_in_tokens(inputs.policy, prompt, response, steps.separator)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    if steps.bias is None:
        assert inputs.own is not None
        chats = zip(batch["uid"].to_pylist(), _rendered(batch, inputs, inputs.own), responses, strict=True)
        return [
            rendered_steps(uid, inputs.own, inputs.policy, text, response, steps.separator)
            for uid, text, response in chats
        ]
    if inputs.own is not None:
        prompts = encode_texts(inputs.own, _rendered(batch, inputs, inputs.own, answered=False))
    own = inputs.own or inputs.policy
    return [
        separated_steps(own, inputs.policy, prompt, response, steps.separator)
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def texts_of(batch: pa.Table, inputs: RewardModelInputs) -> list[np.ndarray]:
    """The token ids of each trajectory, prompt and response, as the reward model reads them."""
    if inputs.own is None:
        (prompts, starts), (responses, bounds) = (
            ragged(batch, f"{name}_ids") for name in ("prompt", "response")
        )
        return [
            np.concatenate([prompts[starts[row] : starts[row + 1]], responses[bounds[row] : bounds[row + 1]]])
            for row in range(batch.num_rows)
        ]
    rendered = _rendered(batch, inputs, inputs.own)
    return [
        np.array(ids, dtype=np.int32)
        for start in range(0, len(rendered), ROWS_AT_ONCE)
        for ids in encode_texts(inputs.own, rendered[start : start + ROWS_AT_ONCE])
    ]


def _rendered(
    batch: pa.Table, inputs: RewardModelInputs, own: PreTrainedTokenizerBase, answered: bool = True
) -> list[str]:
    """Each trajectory's chat by the reward model's own template; with `answered` false, its prompt alone."""
    answers = decode_texts(inputs.policy, batch["response_ids"])
    rendered = []
    has_keywords = TEMPLATE_KWARGS in batch.column_names
    keywords = batch[TEMPLATE_KWARGS].to_pylist() if has_keywords else ["{}"] * batch.num_rows
    for uid, messages, given, answer in zip(
        batch["uid"].to_pylist(), batch[MESSAGES].to_pylist(), keywords, answers, strict=True
    ):
        chat = [*json.loads(messages), *([{"role": "assistant", "content": answer}] if answered else [])]
        # All keywords but tools are for the policy's template.
        tools = {name: value for name, value in json.loads(given).items() if name == "tools"}
        try:
            text = render_text(own, chat, add_generation_prompt=not answered, template_kwargs=tools)
        except ValueError as error:
            raise ValueError(f"trajectory {uid}, for the reward model: {error}") from error
        rendered.append(text)
    return rendered


def merge_scores(results: list, num_rows: int) -> list[np.ndarray]:
    """The ranks' results (`RowColumns`, or None) in the order of the rows: float32 [values of the row] each."""
    found: dict[int, np.ndarray] = {}
    for rows, columns in (part for part in results if part is not None):
        values, offsets = columns["scores"]
        found |= zip(rows, np.split(values.astype(np.float32), offsets[1:-1]), strict=True)
    assert sorted(found) == list(range(num_rows)), "each row is computed exactly once"
    return [found[row] for row in range(num_rows)]
