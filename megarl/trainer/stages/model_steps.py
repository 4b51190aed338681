"""The steps of responses as a process reward model reads them: at which tokens of which text it judges, and where each step ends in the
policy's tokens.

Guarantees, each asserted by a test:
- A response is cut at the separator; a step has the separator that ends it, blank ones are none, and the last step ends with the response's
  last token. So a response without a separator is one step.
- A model with one label reads the text that it reads without steps: one step has the score that the trajectory has then.
- A model for token classification reads the text that TRL's PRMTrainer makes of a prompt and its steps for training: ids of the prompt, then of
  each step by itself, the separator's after each, where the step is judged by the separator's last token.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.trainer.stages.step_scores import last_tokens


@dataclass(frozen=True)
class StepScoring:
    """How a reward model scores the steps of responses.

    Attributes:
        separator: the text that ends a step.
        reward: "each": rewards of steps; "min", "product", "last": the trajectory's one score.
        bias: of a model for token classification: a step's score is sigmoid(output + bias), its second label's probability; None: a model with one
            label, whose outputs are scores.
    """

    separator: str
    reward: str
    bias: float | None

    def scores(self, outputs: np.ndarray) -> np.ndarray:
        """The scores of steps from the head's outputs: float32 [steps] each."""
        if self.bias is None:
            return outputs
        # By tanh, since exp overflows.
        return (0.5 + 0.5 * np.tanh(0.5 * (outputs.astype(np.float64) + self.bias))).astype(np.float32)

    def of_trajectory(self, scores: np.ndarray) -> float:
        """The trajectory's number from its steps' scores [steps]: their sum, with "each"; 0 without steps."""
        if not len(scores):
            return 0.0
        if self.reward == "last":
            return float(scores[-1])
        return float({"each": np.sum, "min": np.min, "product": np.prod}[self.reward](scores))


@dataclass(frozen=True)
class StepText:
    """A text for the model and the ends of its steps.

    Attributes:
        ids: int32 [tokens].
        positions: numbers of its tokens, ascending, at which the model judges a step.
        places: numbers of the response's tokens (the policy's) with which these steps end.
    """

    ids: np.ndarray
    positions: list[int]
    places: list[int]

    def first(self, length: int) -> StepText:
        """The first tokens, with the steps that are judged at one of them."""
        kept = bisect.bisect_left(self.positions, length)
        return StepText(self.ids[:length], self.positions[:kept], self.places[:kept])


def check_steps(
    path: str, steps: StepScoring, own: PreTrainedTokenizerBase | None, policy: PreTrainedTokenizerBase
) -> None:
    """ValueError: the model in the folder `path`, whose tokenizer is `own` (None: the policy's), cannot score steps so."""
    if steps.bias is not None:
        if not (own or policy).encode(steps.separator, add_special_tokens=False):
            raise ValueError(
                f"reward_model.step_separator={steps.separator!r} has no token of the tokenizer in {path}, at which the model would judge a step"
            )
        return
    if steps.reward == "product":
        raise ValueError(
            f"reward_model.step_reward=product multiplies probabilities; {path} has one label, whose outputs have no bounds: take each, min "
            "or last, or a model for token classification with two labels"
        )
    if own is not None and not getattr(own, "is_fast", False):
        raise ValueError(
            f"reward_model.step_separator: the tokenizer in {path} does not tell where tokens are in a text ({type(own).__name__} is no fast "
            "one), so that steps' ends cannot be found in it; take a model with the policy's tokenizer and template, or one for token "
            "classification"
        )


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """The steps of a response, without separators, and the characters of the response up to the end of each, with its separator."""
    steps: list[tuple[str, int]] = []
    start = 0
    for step in text.split(separator):
        end = min(start + len(step) + len(separator), len(text))
        if step.strip():
            steps.append((step, end))
        start = end
    return steps or [(text, len(text))]


def _places(policy: PreTrainedTokenizerBase, response: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The numbers of the response's tokens with which steps end; the last step ends with the last token, though that may be no text."""
    return [*last_tokens(policy, response, ends[:-1]), len(response) - 1]


def steps_in_tokens(
    policy: PreTrainedTokenizerBase, prompt: Sequence[int], response: Sequence[int], separator: str
) -> StepText:
    """The text and its steps' ends, for a model with one label that reads the policy's tokens."""
    text = policy.decode(response, skip_special_tokens=True)
    places = _places(policy, response, [end for _, end in split_steps(text, separator)])
    ids = np.array([*prompt, *response], dtype=np.int32)
    return StepText(ids, [len(prompt) + place for place in places], places)


def rendered_steps(
    uid: str,
    own: PreTrainedTokenizerBase,
    policy: PreTrainedTokenizerBase,
    rendered: str,
    response: Sequence[int],
    separator: str,
) -> StepText:
    """The text and its steps' ends, for a model with one label that reads the chat `rendered` by its own template, in its own tokens.

    Raises:
        ValueError: the chat does not contain the response unchanged, apart from space at its ends.
    """
    text = policy.decode(response, skip_special_tokens=True)
    ends = [end for _, end in split_steps(text, separator)]
    start, blank = rendered.rfind(text.strip()), len(text) - len(text.lstrip())
    if start < 0:
        raise ValueError(
            f"trajectory {uid}, for the reward model: its chat template does not write the response as it is, so that the ends of steps have no "
            "place in its text; leave reward_model.step_separator out, or take a model with the policy's tokenizer and template, or one for "
            "token classification"
        )
    encoded = own(rendered, add_special_tokens=False, return_offsets_mapping=True)
    begins = [first for first, _ in encoded["offset_mapping"]]
    # The last token that begins before a step's end: several may share a character.
    positions = [bisect.bisect_left(begins, start - blank + end) - 1 for end in ends[:-1]]
    ids = np.array(encoded["input_ids"], dtype=np.int32)
    return StepText(ids, [*positions, len(ids) - 1], _places(policy, response, ends))


def separated_steps(
    own: PreTrainedTokenizerBase,
    policy: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    response: Sequence[int],
    separator: str,
) -> StepText:
    """The text and its steps' ends, for a model for token classification, as TRL's PRMTrainer 1.x makes its texts (`tokenize_row`).

    Args:
        prompt: ids of `own`.
    """
    steps = split_steps(policy.decode(response, skip_special_tokens=True), separator)
    *encoded, ending = own([*(step for step, _ in steps), separator], add_special_tokens=False)["input_ids"]
    ids, positions = list(prompt), []
    for step in encoded:
        ids += [*step, *ending]
        positions.append(len(ids) - 1)
    return StepText(
        np.array(ids, dtype=np.int32), positions, _places(policy, response, [end for _, end in steps])
    )
