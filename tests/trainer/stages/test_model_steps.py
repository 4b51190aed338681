"""A process reward model: scores of real ranks compared with transformers', the texts that it reads, and refused configurations."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerBase,
)

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.data.tokenizer import load_tokenizer
from megarl.layout.grid import ParallelLayout
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.stages.model_steps import StepScoring, split_steps
from megarl.trainer.stages.reward_model import (
    FILE,
    ModelScores,
    RewardModelInputs,
    RewardNormalization,
    load_reward_model,
    score_with_model,
    step_texts,
)
from megarl.trainer.stages.scoring import Scored, mix_scores
from megarl.trainer.stages.step_scores import STEP_SCORES, read_step_scores
from megarl.trainer.workers.dispatch import MicroBatching
from tests.ranks import RankPool
from tests.trainer.stages.test_reward_model import LINES_TEMPLATE, RUN, SIZES, on_ranks, settings

PROMPTS = ["Tom has 3 pens. He buys 4.", "Add 1 and 2."]
SEPARATOR = "\n\n"
# Responses with blank steps, with a separator at the end, without a separator, and with one among other line breaks.
RESPONSES = [
    "3 + 4 = 7\n\nSo 7\u20ac.\n\n\n\n#### 7<|im_end|>",
    "1 + 2 = 3\n\n<|im_end|>",
    "#### 3<|im_end|>",
    "Tom\n\n\nhas 3",
    "<|im_end|>",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Token classifiers of each family and a model with one label; "other" and "other-one" have another tokenizer and chat template."""
    out, texts = tmp_path_factory.mktemp("process_reward_models"), arithmetic_texts(300)
    made = {
        family: make_tiny_model(out / family, texts, family=family, head="step_scores", **SIZES)
        for family in ("llama", "qwen2", "qwen3")
    }
    made["policy"] = make_tiny_model(out / "policy", texts, **SIZES)
    made["one"] = make_tiny_model(out / "one", texts, head="score", **SIZES)
    for name, head in (("other", "step_scores"), ("other-one", "score")):
        made[name] = make_tiny_model(out / name, texts[:20], vocab_size=300, head=head, **SIZES)
        tokenizer = load_tokenizer(made[name])
        tokenizer.chat_template = LINES_TEMPLATE + "{% if add_generation_prompt %}[assistant] {% endif %}"
        tokenizer.save_pretrained(made[name])
    return made


def answered(policy: PreTrainedTokenizerBase) -> pa.Table:
    rows = [
        {
            "uid": f"p:{row}/0",
            "messages": json.dumps([{"role": "user", "content": PROMPTS[row % 2]}]),
            "prompt_ids": policy(PROMPTS[row % 2])["input_ids"],
            "response_ids": policy(response)["input_ids"],
        }
        for row, response in enumerate(RESPONSES)
    ]
    return pa.Table.from_pylist(rows)


def loaded(path: Path, policy: PreTrainedTokenizerBase, **changes: Any) -> RewardModelInputs:
    changes = {"step_separator": SEPARATOR, "max_length": 64, "max_token_len_per_gpu": 64, **changes}
    return load_reward_model(settings(path, **changes), policy)


# The steps of RESPONSES, by hand: each step's text, and the response up to the step's end.
STEPS = [
    [("3 + 4 = 7", "3 + 4 = 7\n\n"), ("So 7\u20ac.", "3 + 4 = 7\n\nSo 7\u20ac.\n\n"), ("#### 7", None)],
    [("1 + 2 = 3", None)],
    [("#### 3", None)],
    [("Tom", "Tom\n\n"), ("\nhas 3", None)],
    [("", None)],
]


def last_places(policy: PreTrainedTokenizerBase, batch: pa.Table) -> list[list[int]]:
    """The last token of each step in STEPS, found by decoding one more token at a time."""
    found = []
    for ids, steps in zip(batch["response_ids"].to_pylist(), STEPS, strict=True):
        texts = [policy.decode(ids[: count + 1], skip_special_tokens=True) for count in range(len(ids))]
        own = [next(n for n, text in enumerate(texts) if text.startswith(end)) for _, end in steps[:-1]]
        found.append([*own, len(ids) - 1])
    return found


LAYOUTS = {
    "qwen2-tp2-cp2": ("qwen2", 4, {"tp": 2, "cp": 2}, MicroBatching(0, None, 2)),
    "llama-tp2-pp2": ("llama", 4, {"tp": 2, "pp": 2}, MicroBatching(0, 64, None)),
    "qwen3-pp2-dp2": ("qwen3", 4, {"pp": 2}, MicroBatching(0, None, 1)),
}


@pytest.mark.parametrize(
    "name",
    [
        "qwen2-tp2-cp2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-tp2-pp2", "qwen3-pp2-dp2")),
    ],
)
def test_steps_have_the_probabilities_of_transformers_at_separators(
    ranks: RankPool, folders: dict[str, Path], name: str
) -> None:
    """The expected text, made as TRL does: the prompt's ids, then each step's and the separator's, whose last token has the label."""
    family, world, sizes, cut = LAYOUTS[name]
    policy = load_tokenizer(folders["policy"])
    batch = answered(policy)
    inputs = loaded(folders[family], policy)
    found = score_with_model(RUN, on_ranks(ranks, folders[family], world, sizes, cut), batch, inputs)
    model = AutoModelForTokenClassification.from_pretrained(folders[family], dtype=torch.float32).eval()
    assert model.config.num_labels == 2 and model.score.bias.abs().min() > 0
    expected = []
    for prompt, steps in zip(batch["prompt_ids"].to_pylist(), STEPS, strict=True):
        ids, ends = list(prompt), []
        for text, _ in steps:
            ids += policy(text)["input_ids"] + policy(SEPARATOR)["input_ids"]
            ends.append(len(ids) - 1)
        with torch.no_grad():
            expected.append(model(torch.tensor([ids])).logits.softmax(-1)[0, ends, 1].tolist())
    assert found.steps is not None and not found.truncated.any()
    assert [[place for place, _ in own] for own in found.steps] == last_places(policy, batch)
    values = [score for own in found.steps for _, score in own]
    np.testing.assert_allclose(values, [value for own in expected for value in own], rtol=0, atol=1e-4)
    assert np.std(values) > 1e-2, "the scores differ, so that a wrong order would show"
    np.testing.assert_allclose(found.scores, [sum(own) for own in expected], rtol=0, atol=1e-4)
    assert found.numbers["model_num_steps"].tolist() == [3, 1, 1, 2, 1]
    np.testing.assert_allclose(
        found.numbers["model_step_score"], [np.mean(own) for own in expected], rtol=0, atol=1e-4
    )


def test_one_label_judges_the_text_up_to_each_steps_end(ranks: RankPool, folders: dict[str, Path]) -> None:
    """Each step's score is transformers' for the text up to its end; the last step's equals the trajectory's score without steps."""
    policy = load_tokenizer(folders["policy"])
    batch = answered(policy)
    role = on_ranks(ranks, folders["one"], 1, {}, MicroBatching(0, 64, None))
    found = score_with_model(RUN, role, batch, loaded(folders["one"], policy, step_reward="last"))
    model = AutoModelForSequenceClassification.from_pretrained(folders["one"], dtype=torch.float32).eval()
    inputs = loaded(folders["one"], policy)
    places, expected = last_places(policy, batch), []
    for row, own in zip(batch.to_pylist(), places, strict=True):
        for place in own:
            with torch.no_grad():
                text = row["prompt_ids"] + row["response_ids"][: place + 1]
                expected.append(model(torch.tensor([text])).logits.item())
    steps = score_with_model(RUN, role, batch, inputs).steps
    assert steps is not None and found.steps is None
    assert [[place for place, _ in own] for own in steps] == places
    np.testing.assert_allclose([score for own in steps for _, score in own], expected, rtol=0, atol=1e-5)
    plain = load_reward_model(settings(folders["one"], max_length=64), policy)
    np.testing.assert_allclose(
        found.scores, score_with_model(RUN, role, batch, plain).scores, rtol=0, atol=1e-6
    )


def test_chats_are_rendered_anew_for_another_tokenizer(folders: dict[str, Path]) -> None:
    policy, own = load_tokenizer(folders["policy"]), load_tokenizer(folders["other"])
    batch, given = answered(policy), {"input_tokenizer": str(folders["policy"])}
    assert own(PROMPTS[0])["input_ids"] != policy(PROMPTS[0])["input_ids"]

    def encode(text: str) -> list[int]:
        return own(text, add_special_tokens=False)["input_ids"]

    inputs = loaded(folders["other"], policy, **given)
    texts = step_texts(batch, inputs, inputs.steps)
    for row, (text, steps) in enumerate(zip(texts, STEPS, strict=True)):
        ids = encode(f"[user] {PROMPTS[row % 2]}<|im_end|>[assistant] ")
        for step, _ in steps:
            ids += encode(step) + encode(SEPARATOR)
        assert text.ids.tolist() == ids
    assert [text.places for text in texts] == last_places(policy, batch)
    inputs = loaded(folders["other-one"], policy, **given)
    texts = step_texts(batch, inputs, inputs.steps)
    for row, (text, steps) in enumerate(zip(texts, STEPS, strict=True)):
        begin = f"[user] {PROMPTS[row % 2]}<|im_end|>[assistant] "
        whole = begin + policy.decode(batch["response_ids"][row].as_py(), skip_special_tokens=True)
        assert text.ids.tolist() == encode(whole + "<|im_end|>")
        read = [own.decode(text.ids[: position + 1]) for position in text.positions]
        before = [own.decode(text.ids[:position]) for position in text.positions]
        for (_, end), there, short in zip(steps[:-1], read[:-1], before[:-1], strict=True):
            assert there.startswith(begin + end) and not short.startswith(begin + end)
        assert read[-1] == whole + "<|im_end|>"
    assert [text.places for text in texts] == last_places(policy, batch)


def test_a_template_that_changes_responses_is_refused_for_one_label(folders: dict[str, Path]) -> None:
    policy = load_tokenizer(folders["policy"])
    inputs = loaded(folders["other-one"], policy, input_tokenizer=str(folders["policy"]))
    inputs.own.chat_template = "{{ messages[-1].content | upper }}"
    batch = answered(policy)
    with pytest.raises(ValueError, match=r"trajectory p:3/0, for .* does not write the response as it is"):
        step_texts(batch.slice(3), inputs, inputs.steps)


class Counter:
    """A worker group that outputs the positions as scores, and keeps the texts."""

    def call(self, method: str, texts: pa.Table, shares: list) -> list:
        self.texts = texts
        rows = [row for share in shares for micro in share for row in micro]
        lists = [np.array(texts["positions"][row].as_py(), np.float32) for row in rows]
        return [(rows, {"scores": (np.concatenate(lists), np.cumsum([0, *map(len, lists)]))})]


def test_steps_that_the_model_does_not_read_to_their_end_have_no_score(folders: dict[str, Path]) -> None:
    policy = load_tokenizer(folders["policy"])
    batch, group = answered(policy), Counter()
    full = loaded(folders["one"], policy)
    texts = step_texts(batch, full, full.steps)
    length = texts[0].positions[1]  # the second step's end is cut off
    found = score_with_model(
        RUN,
        Role(group, ParallelLayout(world=1), MicroBatching(0, 64, None)),
        batch,
        loaded(folders["one"], policy, max_length=length),
    )
    kept = [[position for position in text.positions if position < length] for text in texts]
    assert len(kept[0]) == 1 and any(not own for own in kept[1:]) == any(
        len(text.ids) > length and not own for text, own in zip(texts[1:], kept[1:], strict=True)
    )
    assert found.truncated.tolist() == [len(text.ids) > length for text in texts]
    assert found.steps is not None
    assert [[score for _, score in own] for own in found.steps] == kept
    assert max(map(len, group.texts["input_ids"].to_pylist())) <= length
    # The model is not called if no step is left.
    none = loaded(folders["one"], policy, max_length=1)
    nothing = score_with_model(RUN, None, batch, none)
    assert nothing.scores.tolist() == [0.0] * 5 and nothing.steps == [[]] * 5 and nothing.truncated.all()
    assert np.isnan(nothing.numbers["model_step_score"]).all()


def test_a_response_is_cut_at_separators() -> None:
    assert split_steps("a\nb\n", "\n") == [("a", 2), ("b", 4)]
    assert split_steps("\n\na \n\n b", "\n") == [("a ", 5), (" b", 8)]
    assert split_steps("ab", "\n\n") == [("ab", 2)] and split_steps("", "\n") == [("", 0)]
    assert split_steps("\n", "\n") == [("\n", 1)]


def test_what_steps_make_of_a_trajectorys_score() -> None:
    scores = np.array([0.5, 0.25, 0.75], np.float32)
    kinds = {"each": 1.5, "min": 0.25, "product": 0.09375, "last": 0.75}
    for reward, expected in kinds.items():
        steps = StepScoring("\n", reward, 0.0)
        assert steps.of_trajectory(scores) == expected and steps.of_trajectory(scores[:0]) == 0.0
    outputs = torch.tensor([-900.0, -1.0, 0.0, 30.0])
    np.testing.assert_allclose(
        StepScoring("\n", "each", 0.5).scores(outputs.numpy()), torch.sigmoid(outputs + 0.5), atol=1e-7
    )


def test_steps_of_model_and_function_are_rewards_together() -> None:
    """Step scores are multiplied by their weights. A sample whose function failed has none; the model's sum is not part of the score."""
    table = pa.table(
        {
            "score": pa.array([1.0, 0.0, 0.0], pa.float32()),
            STEP_SCORES: ["[[2, 0.25], [5, 0.125]]", "[]", "[]"],
        }
    )
    scored = Scored(table, {}, [None] * 3, [None, None, "it hung"])
    steps = [[(2, 0.5), (3, 1.0)], [(0, 0.75)], [(1, 1.0)]]
    by_model = ModelScores(
        np.array([1.5, 0.75, 1.0], np.float32), np.zeros(3, bool), steps, {"n": np.ones(3)}
    )
    mixed = mix_scores(scored, by_model, rule_weight=0.5, model_weight=2.0)
    assert mixed.scores.tolist() == [0.5, 0.0, 0.0]
    assert read_step_scores(mixed.table) == [[(2, 0.25), (2, 1.0), (3, 2.0), (5, 0.125)], [(0, 1.5)], []]
    assert mixed.numbers["model"].tolist() == [1.5, 0.75, 1.0] and mixed.numbers["n"].tolist() == [1, 1, 1]


def copied(folder: Path, out: Path, **fields: Any) -> Path:
    """A copy of a model with these fields in its config."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **fields}))
    return out


def test_models_that_score_no_steps_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = load_tokenizer(folders["policy"])
    with pytest.raises(ValueError, match=r"score.weight has shape \[2, 32\].*step_separator makes a token"):
        loaded(folders["qwen2"], policy, step_separator=None)
    with pytest.raises(ValueError, match=r"holds no reward model: score.weight is missing"):
        loaded(folders["policy"], policy)
    other = copied(folders["qwen2"], tmp_path / "class", architectures=["Qwen2ForProcessRewardModel"])
    with pytest.raises(ValueError, match=r"is a Qwen2ForProcessRewardModel .* are \*ForTokenClassification"):
        loaded(other, policy)
    three = copied(folders["qwen2"], tmp_path / "three")
    state = load_file(three / "model.safetensors")
    state |= {"score.weight": torch.zeros(3, 32), "score.bias": torch.zeros(3)}
    save_file(state, three / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight has shape \[3, 32\]"):
        loaded(three, policy)
    shifted = copied(folders["one"], tmp_path / "shifted")
    (shifted / FILE).write_bytes(RewardNormalization(4.0, 2.0, 9).to_json())
    with pytest.raises(ValueError, match=f"step_separator: {FILE} in .* was measured on complete answers"):
        loaded(shifted, policy)
    with pytest.raises(ValueError, match=r"step_reward=product multiplies probabilities; .* has one label"):
        loaded(folders["one"], policy, step_reward="product")
    assert loaded(folders["llama"], policy, step_reward="product").steps.bias is not None
