"""Configurations that public articles about verl print work here as printed, or are refused with the megarl key to use.

`articles/` has their YAML files. The tests check every key: either it is read with the printed value, or `REFUSED` has
a word of its message and the overrides that follow the message's advice.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config import TrainConfig, check_config, load_config, resolve
from megarl.config.loading import load_with_origins
from megarl.config.loading.document import entries, plain, read_file
from megarl.config.show import notes
from tests.config.conftest import batches_of, lines_of

ARTICLES = Path(__file__).parent / "articles"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
QWEN7B, DEEPSEEK, SINGLE = "gsm8k_qwen2.5-7b", "deepseek-llm-7b", "qwen2.5-0.5b_single_gpu"

# Article -> refused key -> (a word of its message, the overrides that follow its advice).
REFUSED = {
    QWEN7B: {
        f"{ACTOR}.strategy": ("Megatron-core", [f"{ACTOR}.strategy=megatron"]),
        f"{ACTOR}.ulysses_sequence_parallel_size": (
            f"use {ACTOR}.megatron.context_parallel_size",
            [f"{ACTOR}.megatron.context_parallel_size=2"],
        ),
        f"{ROLLOUT}.name": ("write sglang", [f"{ROLLOUT}.name=sglang"]),
        "critic.strategy": ("Megatron-core", ["critic.strategy=megatron"]),
    },
    DEEPSEEK: {
        f"{ACTOR}.strategy": ("Megatron-core", [f"{ACTOR}.strategy=megatron"]),
        f"{ROLLOUT}.name": ("write sglang", [f"{ROLLOUT}.name=sglang"]),
        f"{ROLLOUT}.load_format": ("leave it out", []),
    },
    SINGLE: {},
}
# Keys that an article does not print and for which megarl has no default.
REQUIRED = {
    QWEN7B: [],
    DEEPSEEK: [f"{ACTOR}.optim.lr=1e-6", "critic.optim.lr=1e-5"],
    SINGLE: ["data.train_files=~/data/gsm8k/train.parquet", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"],
}  # fmt: skip


def printed(article: str) -> dict[str, Any]:
    """Every key that an article prints, with its value."""
    return {key: plain(entry) for key, entry in entries(read_file(ARTICLES / f"{article}.yaml"))}


@pytest.fixture
def following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """following(article): the article's file without the refused keys, in a home folder that has the files it names."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for file in ("data/gsm8k/train", "data/gsm8k/test", "data/rlhf/gsm8k/train", "data/rlhf/gsm8k/test"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{file}.parquet").write_text("")
    for model in ("deepseek-llm-7b-chat", "Anomy-RM-v0.1"):
        (tmp_path / "models" / model).mkdir(parents=True)
        (tmp_path / "models" / model / "config.json").write_text("{}")

    def write(article: str) -> Path:
        path = tmp_path / "article.yaml"
        unknown = {key.rpartition(".")[2] for key in REFUSED[article]} - {"strategy", "name"}
        lines = (ARTICLES / f"{article}.yaml").read_text().splitlines()
        path.write_text("\n".join(line for line in lines if line.split(":")[0].strip() not in unknown))
        return path

    return write


def advised(article: str) -> list[str]:
    return [text for _, texts in REFUSED[article].values() for text in texts] + REQUIRED[article]


@pytest.mark.parametrize("article", REFUSED)
def test_what_differs_is_refused_with_the_key_to_use_and_nothing_else_is(article: str) -> None:
    path = ARTICLES / f"{article}.yaml"
    lines = REFUSED[article] and lines_of(lambda: load_config(TrainConfig, path, REQUIRED[article]))
    assert len(lines) == len(REFUSED[article]), lines
    for key, (word, _) in REFUSED[article].items():
        (line,) = [line for line in lines if f": {key}=" in line or f": {key} is no key" in line]
        assert line.startswith(f"{path} line ") and word in line


@pytest.mark.parametrize("article", REFUSED)
def test_every_other_key_is_read_with_the_value_that_is_printed(
    article: str, following: Callable[[str], Path]
) -> None:
    config = load_config(TrainConfig, following(article), advised(article))
    keys = printed(article)
    assert len(keys) >= 10
    for key, value in keys.items():
        if key in REFUSED[article]:
            continue
        found: Any = config
        for name in key.split("."):
            found = getattr(found, name)
        expected = tuple(value) if isinstance(value, list) else value
        if isinstance(value, str) and value.startswith("~"):
            expected = str(Path(value).expanduser())
        assert found == expected, key


@pytest.mark.parametrize(("article", "devices"), [(QWEN7B, 8), (DEEPSEEK, 8), (SINGLE, 1)])
def test_after_the_advice_was_followed_it_fits_its_devices(
    article: str, devices: int, following: Callable[[str], Path]
) -> None:
    # Without wandb, which not every machine has.
    config = load_config(TrainConfig, following(article), [*advised(article), "trainer.logger=[console]"])
    check_config(config)
    assert batches_of(config).devices == devices


def test_the_8_gpu_article_means_what_it_says(following: Callable[[str], Path]) -> None:
    config, origins = load_with_origins(TrainConfig, following(QWEN7B), advised(QWEN7B))
    full = resolve(config)
    actor, critic = full.actor_rollout_ref.actor, full.critic
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_range) == (0.2, 0.3, None)
    # use_dynamic_bsz: micro-batches by tokens; the critic and the reference have the actor's size
    assert (actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu) == (3072, None)
    assert critic is not None
    assert (critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu) == (3072, None)
    ref = full.actor_rollout_ref.ref
    assert (ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu) == (3072, None)
    plan = batches_of(config)
    assert (plan.actor.cp, plan.actor.dp, plan.rollout.engines, plan.rollout.tp) == (2, 4, 4, 2)
    assert (plan.actor_update.updates_per_step, plan.actor_update.sequences_per_dp_rank) == (4, 64)
    said = "\n".join(notes(config, origins))
    for key in (f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", "critic.ppo_micro_batch_size_per_gpu=8"):
        assert f"{key} is not used: {ACTOR}.use_dynamic_bsz=true cuts micro-batches by tokens" in said
    assert "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu" in said  # there is no reference
    assert "algorithm.kl_ctrl.kl_coef" in said


def test_the_deepseek_article_means_what_it_says(following: Callable[[str], Path]) -> None:
    full = resolve(load_config(TrainConfig, following(DEEPSEEK), advised(DEEPSEEK)))
    actor = full.actor_rollout_ref.actor
    assert (actor.optim.clip_grad, actor.grad_clip) == (1.0, None)
    assert actor.megatron.recompute_granularity is None
    assert full.critic is not None and full.critic.ppo_micro_batch_size_per_gpu == 8
    assert full.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert not full.reward_model.enable


# Settings that the articles tell their readers to type: hyper-parameters without their sections, other keys, other commands.
@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "global_profiler.steps=[1,5,10]",
            "use trainer.profile_steps and trainer.profile_ranks",
        ),
        ("lora_rank=32", "use actor_rollout_ref.model.lora.rank"),
        ("actor_rollout_ref.model.lora_rank=128", "use actor_rollout_ref.model.lora.rank"),
        ("use_vllm=True", "megarl generates with SGLang"),
        (f"{ACTOR}.fsdp_config.param_offload=true", f"FSDP's; use {ACTOR}.megatron.param_offload"),
        ("entropy_coeff=0.01", f"did you mean {ACTOR}.entropy_coeff?"),
        ("PPO_epochs=4", f"did you mean {ACTOR}.ppo_epochs or critic.ppo_epochs?"),
        ("kl_coef=0.002", "did you mean algorithm.kl_ctrl.kl_coef?"),
        ("clip_ratio=0.1", f"did you mean {ACTOR}.clip_ratio"),
        ("kl_ctrl.kl_coef=0.001", "did you mean algorithm.kl_ctrl.kl_coef?"),
        ("train_batch_size=64", "did you mean data.train_batch_size?"),
        ("max_prompt_length=512", "did you mean data.max_prompt_length?"),
        ("max_response_length=512", "did you mean data.max_response_length?"),
        ("actor.optim.lr=1e-6", f"did you mean {ACTOR}.optim.lr?"),
        ("actor.ppo_mini_batch_size=32", f"did you mean {ACTOR}.ppo_mini_batch_size?"),
        ("actor.ppo_micro_batch_size_per_gpu=4", f"did you mean {ACTOR}.ppo_micro_batch_size_per_gpu?"),
        ("rollout.gpu_memory_utilization=0.75", f"did you mean {ROLLOUT}.gpu_memory_utilization?"),
        ("total_epochs=1", "did you mean trainer.total_epochs?"),
    ],
)
def test_what_the_texts_say_to_type_is_answered_with_the_key(
    override: str, words: str, train: Callable[..., TrainConfig]
) -> None:
    (line,) = lines_of(lambda: train(override))
    assert words in line


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("+trainer.total_epochs=15", "total_epochs", 15),
        ("++trainer.total_epochs=15", "total_epochs", 15),
        ("trainer.logger=[console, tensorboard]", "logger", ("console", "tensorboard")),
    ],
)
def test_overrides_in_hydras_words_are_read(
    override: str, key: str, value: object, train: Callable[..., TrainConfig]
) -> None:
    assert getattr(train(override).trainer, key) == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["merge", "--backend", "fsdp", "--local_dir=checkpoints/actor", "--target_dir=hf_model"],
            "exports the policy as a Hugging Face folder",
        ),
        (["model_merger", "merge"], "`megarl convert`"),
        (["main_ppo", "data.train_batch_size=64"], "use megarl train"),
    ],
)
def test_other_commands_are_answered_with_megarls(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
