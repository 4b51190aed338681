"""Section data: the sources of prompts, their order, and keys that contradict each other."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import EvalConfig, SFTConfig, TrainConfig, check_config, load_config, resolve, save_config
from tests.config.conftest import lines_of, problems

Train = Callable[..., TrainConfig]
MIXTURE = "data.mixture={{math: {{files: {folder}/train-0.parquet, weight: 3}}, code: {{files: {code}, weight: 1}}}}"


def mixture(folder: Path, code: str) -> str:
    return MIXTURE.format(folder=folder, code=code)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_files=[memory://a/*.parquet, 'file:///x.jsonl', 'https://h/x.parquet']"],
        ["data.streaming=true", "data.sampler.name=sequential", "data.stream_window_rows=1"],
        [
            "data.sampler.name=curriculum",
            "data.sampler.key=extra_info.level",
            "data.sampler.warm_fraction=0.5",
        ],
        ["data.sampler={name: curriculum, key: prompt_length, descending: true}", "data.shuffle=false"],
        ["data.train_max_samples=16", "data.val_max_samples=1"],
        ["data.apply_chat_template_kwargs={enable_thinking: false}", "data.reward_fn_key=source"],
    ],
)
def test_what_fits(train: Train, overrides: list[str]) -> None:
    check_config(train(*overrides))


def test_a_mixture_takes_the_place_of_train_files(train: Train, folder: Path) -> None:
    config = train(mixture(folder, f"[{folder}/train-*.parquet]"), "data.train_files=null")
    check_config(config)
    assert config.data.mixture is not None
    assert {name: part.weight for name, part in config.data.mixture.items()} == {"math": 3.0, "code": 1.0}


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (
            ["data.train_files=null"],
            "data.train_files is required: the files of the training prompts (or data.mixture, for several data sets)",
        ),
        (
            ["data.train_files=null", "data.mixture={}"],
            "data.mixture is empty; give at least one data set: <name>: {files: ..., weight: ...}",
        ),
        (
            ["data.train_files=nothing://x.parquet"],
            "data.train_files: nothing://x.parquet: the protocol nothing:// is unknown; s3://, gs://, hf://, https:// and "
            "others are known",
        ),
        (["data.val_max_samples=0"], "data.val_max_samples=0: it must be -1 (all) or at least 1"),
        (
            ["data.train_max_samples=15"],
            "data.train_max_samples=15 is less than data.train_batch_size=16: not one batch",
        ),
        (
            ["data.sampler.name=randon"],
            "data.sampler.name='randon' is unknown; megarl has curriculum, random, sequential; did you mean random?",
        ),
        (
            ["data.sampler.name=curriculum"],
            "data.sampler.key=None: curriculum sorts by it; it must be prompt_length or extra_info.<name>",
        ),
        (
            ["data.sampler.name=curriculum", "data.sampler.key=level"],
            "data.sampler.key=level: curriculum sorts by it; it must be prompt_length or extra_info.<name>",
        ),
        (
            ["data.sampler.warm_fraction=0.5"],
            "data.sampler.warm_fraction=0.5 is read by curriculum, but data.sampler.name=None",
        ),
        (
            ["data.sampler.name=random", "data.sampler.options={a: 1}"],
            "data.sampler.options={'a': 1} is read by a sampler of a plugin, but data.sampler.name=random",
        ),
        (
            ["data.streaming=true", "data.sampler={name: curriculum, key: prompt_length}"],
            "data.sampler.name='curriculum' needs all rows at once, which data.streaming=true does not have; it can be "
            "random or sequential",
        ),
        (
            ["data.apply_chat_template_kwargs={tokenize: true}"],
            "data.apply_chat_template_kwargs.tokenize: megarl says this to the tokenizer itself; leave it out",
        ),
    ],
)
def test_what_does_not_fit(train: Train, overrides: list[str], problem: str) -> None:
    assert problems(train(*overrides)) == [problem]


def test_all_that_is_wrong_with_a_mixture(train: Train, folder: Path) -> None:
    lines = problems(train(mixture(folder, f"{folder}/gone.parquet"), "data.train_max_samples=100"))
    assert lines == [
        f"data.mixture.code.files: the file {folder}/gone.parquet does not exist (working directory {Path.cwd()})",
        "data.train_files and data.mixture: training prompts come from one of them; leave the other out",
        "data.train_max_samples=100 counts rows of data.train_files; data.mixture has weights instead",
    ]
    with pytest.raises(ValueError, match=r"data\.mixture\.a\.weight is required \(a number\)"):
        train("data.mixture.a.files=x.parquet")


def test_a_package_that_a_url_needs_is_named(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_package.FileSystem", "err": "Install no_such_package to access Nowhere"}
    monkeypatch.setitem(importlib.import_module("fsspec.registry").known_implementations, "nowhere", known)
    assert problems(train("data.val_files=nowhere://x.parquet")) == [
        "data.val_files: nowhere://x.parquet: nowhere:// needs a package that is not installed: "
        "Install no_such_package to access Nowhere"
    ]


def test_a_sampler_of_a_plugin_may_have_any_name(train: Train, folder: Path) -> None:
    (folder / "mine.py").write_text("")
    check_config(train("data.sampler={name: mine, options: {a: [1, {b: 2}]}}", f"plugins=[{folder}/mine.py]"))


def test_the_tokenizer_has_two_names(train: Train, folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    config = train(f"data.tokenizer={folder}/tokenizer")
    check_config(config)
    full = resolve(config)
    assert full.actor_rollout_ref.model.tokenizer_path == f"{folder}/tokenizer"
    assert full.data.tokenizer is None
    check_config(full)
    assert problems(train(f"data.tokenizer={folder}/gone"))[0].startswith(
        f"data.tokenizer: {folder}/gone is no folder"
    )
    assert resolve(train("data.tokenizer=null")).actor_rollout_ref.model.tokenizer_path == f"{folder}/model"
    both = f"data.tokenizer={folder}/tokenizer", f"actor_rollout_ref.model.tokenizer_path={folder}/model"
    assert lines_of(lambda: train(*both)) == [
        f"override '{both[0]}': data.tokenizer and actor_rollout_ref.model.tokenizer_path (override '{both[1]}') say the same "
        "thing; give one of them"
    ]


def test_the_other_commands_check_the_template_too(
    sft: Callable[..., SFTConfig], evaluation: Callable[..., EvalConfig]
) -> None:
    for make in (sft, evaluation):
        check_config(make("data.apply_chat_template_kwargs.enable_thinking=false"))
        (line,) = problems(make("data.apply_chat_template_kwargs.return_dict=true"))
        assert line.startswith("data.apply_chat_template_kwargs.return_dict: ")


def test_free_keys_are_kept_as_they_are(train: Train, folder: Path) -> None:
    """Free keys stay as they are when overrides are merged into them, and when the configuration is written and read again."""
    config = train(
        "data.apply_chat_template_kwargs={enable_thinking: true, style: {kind: short, lines: [1, 2.5, null]}}",
        "data.apply_chat_template_kwargs.enable_thinking=false",
    )
    expected = {"enable_thinking": False, "style": {"kind": "short", "lines": [1, 2.5, None]}}
    assert config.data.apply_chat_template_kwargs == expected
    path = save_config(config, folder / "saved.yaml")
    assert load_config(TrainConfig, path) == config
    with pytest.raises(ValueError, match="apply_chat_template_kwargs: expected free keys or null, found 3"):
        train("data.apply_chat_template_kwargs=3")


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"enum": [1, "a"]}}}},
}


def test_tools_by_configuration_reach_the_template_as_they_are(
    train: Train, sft: Callable[..., SFTConfig], evaluation: Callable[..., EvalConfig]
) -> None:
    for one in (train, sft, evaluation):
        config = one(
            f"data.apply_chat_template_kwargs={{tools: [{TOOL}]}}", "data.tools_key=extra_info.tools"
        )
        check_config(config)
        assert config.data.apply_chat_template_kwargs == {"tools": [TOOL]}
        assert problems(one("data.apply_chat_template_kwargs={tools: f}"))[0].startswith(
            "data.apply_chat_template_kwargs.tools='f': it must be a list of JSON schemas"
        )
        assert problems(one("data.tools_key=messages"))[0].startswith(
            "data.tools_key='messages': it must be the column"
        )


PTX = "data.ptx={{files: {folder}/val.parquet, batch_size: 8, max_length: 64{more}}}"
COEF = "actor_rollout_ref.actor.ptx_coef=0.5"


@pytest.mark.parametrize("more", ["", ", text_key: text, truncation: split", ", response_key: answer"])
def test_texts_that_fit(train: Callable[..., TrainConfig], folder: Path, more: str) -> None:
    check_config(train(PTX.format(folder=folder, more=more), COEF))


def test_a_coefficient_needs_texts_and_texts_a_coefficient(
    train: Callable[..., TrainConfig], folder: Path
) -> None:
    assert problems(train(COEF)) == [
        "actor_rollout_ref.actor.ptx_coef=0.5 needs data.ptx: files, batch_size and max_length of texts"
    ]
    assert problems(train(PTX.format(folder=folder, more=""))) == [
        "data.ptx needs actor_rollout_ref.actor.ptx_coef over 0; nothing reads it otherwise"
    ]


def test_all_that_is_wrong_at_once(train: Callable[..., TrainConfig], folder: Path) -> None:
    found = problems(
        train(
            PTX.format(folder=folder, more=""),
            COEF,
            "data.ptx.files=no/such.parquet",
            "data.ptx.max_length=129",
            "data.ptx.batch_size=3",
            "data.ptx.truncation=split",
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
        )
    )
    assert len(found) == 4
    text = "\n".join(found)
    assert "data.ptx.batch_size=3 cannot be shared out evenly over the 2 data parallel ranks" in text
    assert "ppo_max_token_len_per_gpu=128 is less than data.ptx.max_length=129" in text
    assert f"data.ptx.files: the file no/such.parquet does not exist (working directory {Path.cwd()})" in text
    assert "data.ptx.truncation=split needs data.ptx.text_key" in text


def test_plain_text_has_no_response(train: Callable[..., TrainConfig], folder: Path) -> None:
    (found,) = problems(train(PTX.format(folder=folder, more=", text_key: a, response_key: b"), COEF))
    assert found.startswith("data.ptx.text_key='a' and data.ptx.response_key='b': texts are plain or chats")
