"""The reward model: scores of real ranks compared with transformers', the texts that it reads, and refused configurations."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.cluster.ranks import RankInfo
from megarl.config import MegatronConfig, RewardModelConfig
from megarl.config.schema.rewards import RewardModelPathConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import TEMPLATE_KWARGS, from_lists
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.reward_model import (
    FILE,
    ModelScores,
    RewardModelInputs,
    RewardNormalization,
    load_reward_model,
    score_with_model,
    texts_of,
)
from megarl.trainer.stages.scoring import Scored, mix_scores
from megarl.trainer.workers.dispatch import MicroBatching, ModelSpec
from megarl.trainer.workers.scalar_heads import RewardModelWorker
from tests.ranks import RankPool

SIZES = {"hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 4, "max_position_embeddings": 64}
LINES_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A reward model of each family, and one ("other") whose tokenizer and chat template are not the policy's."""
    out, texts = tmp_path_factory.mktemp("reward_models"), arithmetic_texts(300)
    made = {
        family: make_tiny_model(out / family, texts, family=family, head="score", **SIZES)
        for family in ("llama", "qwen2", "qwen3")
    }
    made["policy"] = make_tiny_model(out / "policy", texts, **SIZES)
    made["other"] = make_tiny_model(
        out / "other", texts[:20], vocab_size=300, head="score", tie_word_embeddings=True, **SIZES
    )
    tokenizer = load_tokenizer(made["other"])
    tokenizer.chat_template = LINES_TEMPLATE
    tokenizer.save_pretrained(made["other"])
    return made


def trajectories(num_rows: int = 7) -> pa.Table:
    generator = np.random.default_rng(5)
    rows = [
        {
            "uid": f"p:{row}/0",
            "prompt_ids": generator.integers(3, 500, generator.integers(1, 9)).astype(np.int32),
            "response_ids": generator.integers(3, 500, generator.integers(1, 14)).astype(np.int32),
        }
        for row in range(num_rows)
    ]
    return pa.Table.from_pylist(rows)


def settings(path: Path, **changes: Any) -> RewardModelConfig:
    """An enabled and resolved `reward_model` section."""
    given = {
        "enable": True,
        "model": RewardModelPathConfig(path=str(path), input_tokenizer=changes.pop("input_tokenizer", None)),
        "max_length": 40,
        "max_token_len_per_gpu": 40,
    }
    return RewardModelConfig(**{**given, **changes})


def _score_texts(rank: int, world: int, folder: str, sizes: dict, texts: pa.Table, shares: list) -> Any:
    megatron = MegatronConfig(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        sequence_parallel=sizes.get("tp", 1) > 1,
        dtype="float32",
    )
    info = RankInfo(rank, world, rank, "localhost", 0, "reward_model", "", (), "")
    worker = RewardModelWorker(info, ModelSpec(folder, "value", megatron, None, 0, 60.0))
    assert set(worker.parts) == {"weights"}, "nothing is trained"
    return worker.score_texts(texts, shares)


def on_ranks(ranks: RankPool, folder: Path, world: int, sizes: dict, cut: MicroBatching) -> Role:
    """The role with a worker group whose calls run on the pool's ranks; `RUN` stands in for the run."""

    def call(method: str, texts: pa.Table, shares: list) -> list:
        assert method == "score_texts"
        return ranks.run(_score_texts, str(folder), sizes, texts, shares, world=world)

    layout = ParallelLayout(world=world, sp=sizes.get("tp", 1) > 1, **sizes)
    return Role(SimpleNamespace(call=call), layout, cut)


RUN = SimpleNamespace(put=lambda table: table, wait=lambda results: results)
LAYOUTS = {
    "tp2-pp2": ("llama", 4, {"tp": 2, "pp": 2}, MicroBatching(0, 40, None)),
    "tp2-cp2": ("qwen2", 4, {"tp": 2, "cp": 2}, MicroBatching(0, None, 2)),
    "pp2-vpp2-dp2": ("qwen3", 4, {"pp": 2, "vpp": 2}, MicroBatching(0, None, 1)),
}


@pytest.mark.parametrize(
    "name", ["tp2-pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp2-cp2", "pp2-vpp2-dp2"))]
)
def test_scores_are_those_of_transformers(ranks: RankPool, folders: dict[str, Path], name: str) -> None:
    """Seven trajectories, a number that neither data parallel ranks nor stages divide, in several kinds of micro-batches."""
    family, world, sizes, cut = LAYOUTS[name]
    policy, batch = load_tokenizer(folders["policy"]), trajectories()
    inputs = load_reward_model(settings(folders[family]), policy)
    found = score_with_model(RUN, on_ranks(ranks, folders[family], world, sizes, cut), batch, inputs)
    assert found.scores.dtype == np.float32 and not found.truncated.any()
    model = AutoModelForSequenceClassification.from_pretrained(folders[family], dtype=torch.float32).eval()
    expected = []
    with torch.no_grad():
        for row in batch.to_pylist():
            expected.append(model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).logits.item())
    np.testing.assert_allclose(found.scores, expected, rtol=0, atol=1e-5)
    assert np.std(expected) > 1e-2, "the scores differ, so that a wrong order would show"


def chats() -> pa.Table:
    """Two trajectories' uids, messages of the prompts, and answers as text."""
    return pa.table(
        {
            "uid": ["p:0/0", "p:1/0"],
            "messages": [
                json.dumps([{"role": "user", "content": "Tom has 12 pens"}]),
                json.dumps([{"role": "system", "content": "add"}, {"role": "user", "content": "1 and 2"}]),
            ],
            "answers": ["#### 7", "3"],
        }
    )


class Recorder:
    """A worker group that scores each text by its length, and keeps the texts."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def call(self, method: str, texts: pa.Table, shares: list) -> list:
        self.texts = texts["input_ids"].to_pylist()
        rows = [row for share in shares for micro in share for row in micro]
        return [(rows, {"scores": from_lists([[len(self.texts[row])] for row in rows], np.float32)})]


def test_chats_are_rendered_anew_for_another_tokenizer(folders: dict[str, Path]) -> None:
    policy, own = load_tokenizer(folders["policy"]), load_tokenizer(folders["other"])
    inputs = load_reward_model(settings(folders["other"], input_tokenizer=str(folders["policy"])), policy)
    ids = [policy(answer + "<|im_end|>")["input_ids"] for answer in chats()["answers"].to_pylist()]
    batch = chats().append_column("response_ids", pa.array(ids, pa.list_(pa.int32())))
    group = Recorder()
    found = score_with_model(
        RUN, Role(group, ParallelLayout(world=1), MicroBatching(0, 80, None)), batch, inputs
    )
    assert [own.decode(text) for text in group.texts] == [
        "[user] Tom has 12 pens<|im_end|>[assistant] #### 7<|im_end|>",
        "[system] add<|im_end|>[user] 1 and 2<|im_end|>[assistant] 3<|im_end|>",
    ]
    assert found.scores.tolist() == [len(own(own.decode(text))["input_ids"]) for text in group.texts]
    assert own("Tom has 12 pens")["input_ids"] != policy("Tom has 12 pens")["input_ids"]


def test_tools_of_a_row_reach_the_reward_models_own_template(folders: dict[str, Path]) -> None:
    """All other keywords are only for the policy's template."""
    policy, own = load_tokenizer(folders["policy"]), load_tokenizer(folders["other"])
    own.chat_template = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{{ style }}{{ messages[-1].content }}"
    )
    given = [{"tools": [{"name": "f"}, {"name": "g"}], "style": "s"}, {"style": "s"}]
    batch = chats().append_column("response_ids", pa.array([[5], [6]], pa.list_(pa.int32())))
    batch = batch.append_column(TEMPLATE_KWARGS, pa.array([json.dumps(keywords) for keywords in given]))
    inputs = RewardModelInputs(read_model_config(str(folders["other"])), policy, own, max_length=40)
    texts = [own.decode(ids) for ids in texts_of(batch, inputs)]
    assert texts == ["f;g;" + policy.decode([5]), policy.decode([6])]


def test_scores_are_shifted_and_scaled_as_the_folder_says(folders: dict[str, Path], tmp_path: Path) -> None:
    """The folder has mean and deviation as measured by `megarl rm`; the model's score of a text is its length."""
    policy, batch, group = load_tokenizer(folders["policy"]), trajectories(), Recorder()
    folder = shutil.copytree(folders["llama"], tmp_path / "rm")
    (folder / FILE).write_bytes(RewardNormalization(4.0, 2.0, 9).to_json())
    inputs = load_reward_model(settings(folder), policy)
    role = Role(group, ParallelLayout(world=1), MicroBatching(0, 40, None))
    found = score_with_model(RUN, role, batch, inputs)
    lengths = [len(row["prompt_ids"] + row["response_ids"]) for row in batch.to_pylist()]
    assert found.scores.tolist() == [(length - 4) / 2 for length in lengths]


def test_the_end_of_a_long_text_is_cut_off_and_told(folders: dict[str, Path]) -> None:
    policy, batch, group = load_tokenizer(folders["policy"]), trajectories(), Recorder()
    inputs = RewardModelInputs(read_model_config(str(folders["llama"])), policy, None, max_length=10)
    found = score_with_model(
        RUN, Role(group, ParallelLayout(world=1), MicroBatching(0, 10, None)), batch, inputs
    )
    whole = [row["prompt_ids"] + row["response_ids"] for row in batch.to_pylist()]
    assert group.texts == [ids[:10] for ids in whole]
    assert found.truncated.tolist() == [len(ids) > 10 for ids in whole] and 0 < found.truncated.sum() < 7


def test_a_score_that_is_no_number_ends_the_run(folders: dict[str, Path]) -> None:
    group = Recorder()
    group.call = lambda method, texts, shares: [
        (list(range(7)), {"scores": (np.array([1.0] * 6 + [np.nan]), np.arange(8))})
    ]
    inputs = RewardModelInputs(read_model_config(str(folders["llama"])), None, None, max_length=40)
    with pytest.raises(NotFinite, match=r"score of trajectory p:6/0 is nan"):
        score_with_model(
            RUN, Role(group, ParallelLayout(world=1), MicroBatching(0, 40, None)), trajectories(), inputs
        )


def test_a_prompt_that_the_template_refuses_is_named(folders: dict[str, Path]) -> None:
    own = load_tokenizer(folders["other"])
    own.chat_template = "{{ raise_exception('no system role') }}"
    policy = load_tokenizer(folders["policy"])
    batch = chats().append_column("response_ids", pa.array([[5], [6]], pa.list_(pa.int32())))
    inputs = RewardModelInputs(read_model_config(str(folders["other"])), policy, own, max_length=40)
    with pytest.raises(ValueError, match=r"trajectory p:0/0, for the reward model: .*no system role"):
        score_with_model(RUN, None, batch, inputs)


def changed(folder: Path, out: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a model with these weights replaced; None: without that weight."""
    shutil.copytree(folder, out)
    state = {**load_file(out / "model.safetensors"), **tensors}
    save_file(
        {name: tensor for name, tensor in state.items() if tensor is not None}, out / "model.safetensors"
    )
    return out


def test_folders_without_a_reward_model_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    policy = load_tokenizer(folders["policy"])
    with pytest.raises(
        ValueError, match=r"holds no reward model: score.weight is missing; .* shape \[1, 32\]"
    ):
        load_reward_model(settings(folders["policy"]), policy)
    two = changed(folders["llama"], tmp_path / "two", **{"score.weight": torch.zeros(2, 32)})
    with pytest.raises(ValueError, match=r"score.weight has shape \[2, 32\]"):
        load_reward_model(settings(two), policy)
    partly = changed(folders["llama"], tmp_path / "partly", **{"model.norm.weight": None})
    with pytest.raises(ValueError, match=r"model.norm.weight is missing"):
        load_reward_model(settings(partly), policy)
    with pytest.raises(ValueError, match=r"reward_model.max_length=65 .* more than the 64 positions"):
        load_reward_model(settings(folders["llama"], max_length=65), policy)


def test_tokenizers_that_do_not_fit_are_refused(folders: dict[str, Path]) -> None:
    policy = load_tokenizer(folders["policy"])
    with pytest.raises(
        ValueError, match=r"another tokenizer than the policy: set reward_model.model.input_tokenizer"
    ):
        load_reward_model(settings(folders["other"]), policy)
    with pytest.raises(ValueError, match=r"input_tokenizer=.*other is not the policy's tokenizer"):
        load_reward_model(settings(folders["other"], input_tokenizer=str(folders["other"])), policy)
    assert load_reward_model(settings(folders["llama"]), policy).own is None


def test_another_template_over_the_same_tokens_is_told(folders: dict[str, Path]) -> None:
    policy = load_tokenizer(folders["policy"])
    policy.chat_template = LINES_TEMPLATE
    with pytest.warns(UserWarning, match="another chat template than the policy"):
        load_reward_model(settings(folders["llama"]), policy)


def test_weights_of_rule_and_model() -> None:
    """The score is 0.5 * rule + 2 * model; a sample whose rule failed has a score of 0."""
    table = pa.table({"score": pa.array([1.0, 0.0, 0.0], pa.float32())})
    scored = Scored(table, {"acc": np.ones(3)}, [None] * 3, [None, None, "it hung"])
    by_model = ModelScores(np.array([0.25, -1.0, 3.0], np.float32), np.array([False, True, False]))
    mixed = mix_scores(scored, by_model, rule_weight=0.5, model_weight=2.0)
    assert mixed.scores.tolist() == [1.0, -2.0, 0.0]
    assert mixed.numbers["model"].tolist() == [0.25, -1.0, 3.0] and set(mixed.numbers) >= {
        "acc",
        "model_text_cut",
    }
    np.testing.assert_array_equal(mixed.numbers["rule"], [1.0, 0.0, np.nan])
    assert "rule" not in mix_scores(scored, by_model, rule_weight=0.0, model_weight=1.0).numbers
