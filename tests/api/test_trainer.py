"""The Python API: its configuration, its prompts, its refusals; and real runs, which are slow. test_page.py has another."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

import megarl
from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl import Trainer, make_trainer_config
from megarl.api.trainer import MOST_KEPT, DataCollector, PromptSupply
from megarl.config import check_config, load_config, resolve, resolve_batches
from megarl.config.schema.commands import TrainConfig
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.processes.scorer import Scorer
from megarl.rewards.registry import RewardSpec
from megarl.rewards.sample import Sample
from megarl.trainer.run.run import Run
from tests.fixtures.runs import REPOSITORY, assert_same_steps, steps, succeed

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "model"
    make_tiny_model(folder, arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    return folder


def test_the_names_of_the_package() -> None:
    assert megarl.DataCollector is DataCollector and set(megarl._API) < set(megarl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Collector'"):
        _ = megarl.Collector


def test_the_configuration_that_the_article_makes() -> None:
    config = make_trainer_config(
        algo="ppo",
        actor_micro_batch_size=4,
        critic_micro_batch_size=4,
        rollouts_per_device=64,
        vf_coef=0.1,
        clip_eps=0.2,
        mixed_precision="bf16",
        devices=8,
    )
    plan = resolve_batches(resolve(config))
    assert (plan.trajectories_per_step, plan.prompts_per_step, plan.actor_update.updates_per_step) == (
        512,
        512,
        1,
    )
    assert plan.actor_update.micro_batch_sequences == 4
    assert plan.critic_update is not None and plan.critic_update.micro_batch_sequences == 4
    full = resolve(config)
    assert full.critic is not None and full.critic.vf_coef == 0.1
    assert full.actor_rollout_ref.actor.clip_ratio_low == 0.2
    assert full.actor_rollout_ref.actor.megatron.dtype == full.critic.megatron.dtype == "bfloat16"
    assert full.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert make_trainer_config(mixed_precision="fp16").actor_rollout_ref.actor.megatron.dtype == "float16"


def test_other_algorithms_and_any_key(model: Path) -> None:
    config = make_trainer_config(
        algo="grpo",
        rollouts_per_device=64,
        kl_coef=0.01,
        **{"trainer.seed": 7, f"{ACTOR}.ppo_mini_batch_size": 4, "actor_rollout_ref.model.path": str(model)},
    )
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n, config.critic) == (8, 8, None)
    assert (config.trainer.seed, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (7, 4)
    assert config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef == 0.01
    check_config(config, data_files=False)
    by_tokens = make_trainer_config(
        **{f"{ACTOR}.ppo_max_token_len_per_gpu": 2048, f"{ACTOR}.clip_range": [0.2, 0.3]}
    )
    assert resolve_batches(resolve(by_tokens)).critic_update.micro_batch_tokens == 2048


def test_keys_are_paths_and_texts_of_any_characters() -> None:
    keys = {
        "trainer.default_local_dir": Path("runs", "first"),
        "trainer.experiment_name": "\U0001f680 \u5b9e\u2028",
    }
    trainer = make_trainer_config(algo="grpo", **keys).trainer
    assert (trainer.default_local_dir, trainer.experiment_name) == ("runs/first", "\U0001f680 \u5b9e\u2028")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"use_vllm": True}, "megarl generates with SGLang"),
        ({"mixed_precision": "bf6"}, "it must be bf16, fp16, fp32 or None; did you mean bf16?"),
        (
            {"algo": "grpo", "rollouts_per_device": 63},
            "63 trajectories a step, which do not divide into prompts of 8",
        ),
        ({"algo": "rloo", "vf_coef": 0.1}, "vf_coef=0.1: algo='rloo' has no critic; leave it out"),
        ({"trainer.sed": 1}, "unknown key trainer.sed; did you mean trainer.seed?"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        make_trainer_config(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "actor_model is required"),
        (
            {"actor_model": object()},
            "must be the folder of a Hugging Face model or its id on the Hub, found object",
        ),
        ({"actor_model": "m", "use_vllm": True}, "megarl generates with SGLang"),
        ({"actor_model": "m", "steps": 3}, r"Trainer\(steps=...\): there is no such argument"),
        ({"actor_model": "no/such/model"}, "actor_rollout_ref.model.path: no/such/model is no folder"),
    ],
)
def test_a_trainer_that_cannot_be_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Trainer(make_trainer_config(), **arguments)


def test_keys_that_only_the_loop_reads_are_refused() -> None:
    keys = {"trainer.max_restarts": 3, "data.train_files": "x", "trainer.mode": "one_step_off"}
    config = make_trainer_config(**keys)
    with pytest.raises(
        ValueError,
        match=r"data\.train_files, trainer\.max_restarts, trainer\.mode: only `megarl train` reads",
    ):
        Trainer(config, actor_model="m")
    with pytest.raises(ValueError, match="=grpo has no critic"):
        Trainer(make_trainer_config(algo="grpo"), actor_model="m", critic_model="m")


def supply(model: Path, *overrides: str, size: int = 2) -> PromptSupply:
    required = ["data.max_prompt_length=64", "data.max_response_length=8", f"actor_rollout_ref.model.path={model}",
                f"data.train_batch_size={size}", f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.optim.lr=1"]  # fmt: skip
    config = load_config(TrainConfig, None, [*required, *overrides])
    return PromptSupply(config.data, load_tokenizer(str(model), False), lambda table: None)


@pytest.mark.parametrize("plays", [False, True])
def test_prompts_that_an_agent_scores_need_no_rule(model: Path, plays: bool) -> None:
    keys = ["data.max_prompt_length=64", "data.max_response_length=8", f"actor_rollout_ref.model.path={model}",
            "data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1", f"{ACTOR}.optim.lr=1",
            f"actor_rollout_ref.rollout.gateway.enable={str(plays).lower()}"]  # fmt: skip
    collector = DataCollector.__new__(DataCollector)  # its constructor takes the processes of a run
    collector._config = load_config(TrainConfig, None, keys)
    prompts = next(supply(model, size=1).batches([{"prompt": "4 stones", "data_source": "nim"}]))
    refused = pytest.raises(ValueError, match="no reward rule for data_source 'nim'")
    with Scorer(RewardSpec(), num_workers=1, timeout=30.0) as collector._scorer:
        with nullcontext() if plays else refused:
            collector._check(prompts)


def test_prompts_of_every_kind(model: Path) -> None:
    text = "1 + 2 ="
    chat = [{"role": "user", "content": text}]
    prompts = [
        text,
        chat,
        {"prompt": text, "ground_truth": "3", "data_source": "sums", "extra_info": {"level": 1}},
        {"prompt": chat, "reward_model": {"ground_truth": 3}},
    ]
    batch = next(supply(model, "data.shuffle=false", size=4).batches(prompts))
    assert len({tuple(ids) for ids in batch["prompt_ids"].to_pylist()}) == 1
    assert batch["ground_truth"].to_pylist() == ["", "", "3", "3"]
    assert batch["data_source"].to_pylist() == ["python", "python", "sums", "python"]
    assert json.loads(batch["extra_info"][2].as_py()) == {"level": 1}
    again = next(supply(model, "data.shuffle=false", size=4).batches(batch))
    assert again.equals(batch)


def test_prompts_with_the_columns_that_keys_name(model: Path) -> None:
    """The same keys as for files; `ground_truth` takes the place of any answer key."""
    keys = [
        "data.shuffle=false",
        "data.prompt_key=question",
        "data.answer_key=facts.answer",
        "data.reward_fn_key=kind",
    ]
    prompts = [
        {"question": "1 + 2 =", "facts": {"answer": "3"}, "kind": "sums"},
        {"question": "1 + 3 =", "ground_truth": "4"},
    ]
    batch = next(supply(model, *keys).batches(prompts))
    assert batch["ground_truth"].to_pylist() == ["3", "4"]
    assert batch["data_source"].to_pylist() == ["sums", "python"]
    with pytest.raises(ValueError) as error:
        next(supply(model, *keys).batches([*prompts, *({"prompt": "x", "answer": "y"} for _ in range(9))]))
    assert str(error.value) == (
        "prompts: number 2 is a dict without 'question' (keys: prompt, answer); name it so, or set data.prompt_key"
    )
    with pytest.raises(ValueError, match=r"prompts row 0: no 'facts.answer': .*; set data.answer_key"):
        next(supply(model, *keys).batches(["1 + 2 ="]))


def test_the_same_prompts_go_on_where_they_ended(model: Path) -> None:
    source = supply(model)
    prompts = [f"{number} + 1 =" for number in range(5)]
    seen = [uid for _ in range(2) for uid in next(source.batches(list(prompts)))["uid"].to_pylist()]
    assert len(set(seen)) == 4  # two batches of two, out of five
    prompts.append("6 + 1 =")
    assert next(source.batches(prompts)).num_rows == 2


def test_a_row_that_was_changed_in_place_is_another_prompt(model: Path) -> None:
    source, row = supply(model, size=1), {"prompt": "1 + 2 =", "ground_truth": "4"}
    next(source.batches([row]))
    row["ground_truth"] = "3"
    assert next(source.batches([row]))["ground_truth"].to_pylist() == ["3"]


def uids(source: PromptSupply, prompts: Any) -> list[str]:
    return next(source.batches(prompts))["uid"].to_pylist()


def test_a_position_that_was_saved_is_that_of_its_prompts(model: Path) -> None:
    prompts = [f"{number} + 1 =" for number in range(6)]
    source = supply(model)
    assert source.state_dict() == {}
    uids(source, prompts)
    state = json.loads(json.dumps(source.state_dict()))
    coming = [uids(source, prompts) for _ in range(4)]
    again = supply(model)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert [uids(again, list(prompts)) for _ in range(4)] == coming
    others = supply(model)
    others.load_state_dict(state)
    other = ["1 + 1 =", *prompts[1:]]
    fresh = supply(model)
    assert [uids(others, other) for _ in range(3)] == [uids(fresh, other) for _ in range(3)]


def test_prompts_go_on_after_others(model: Path) -> None:
    """A program that now and then looks at the answers to other prompts does not begin its own ones anew, also when it is started again."""
    prompts, others = ([f"{number} + {more} =" for number in range(6)] for more in (1, 2))
    alone, source = supply(model), supply(model)
    expected = [uids(alone, prompts) for _ in range(6)]
    seen = []
    for _ in range(2):
        seen.append(uids(source, prompts))
        between = uids(source, others)
    assert seen == expected[:2]
    state = json.loads(json.dumps(source.state_dict()))
    again = supply(model)
    again.load_state_dict(state)
    assert uids(source, others) == uids(again, others) != between
    assert (
        [uids(again, prompts) for _ in range(4)] == [uids(source, prompts) for _ in range(4)] == expected[2:]
    )


def test_positions_of_a_few_prompts_are_kept(model: Path) -> None:
    """New prompts for each call do not let a run grow without end."""
    source = supply(model)
    lists = [[f"{number} + {more} =" for number in range(4)] for more in range(2 * MOST_KEPT)]
    for prompts in lists:
        uids(source, prompts)
    assert len(source.state_dict()["others"]) == MOST_KEPT - 1
    again = supply(model)
    again.load_state_dict(source.state_dict())
    for prompts in lists:
        uids(again, prompts)
    assert len(again.state_dict()["others"]) == MOST_KEPT - 1


def test_an_equal_table_is_the_same_prompts(model: Path) -> None:
    table = next(supply(model, "data.shuffle=false", size=4).batches(["1 =", "2 =", "3 =", "4 ="]))
    source = supply(model, "data.shuffle=false")
    seen = [*uids(source, table), *uids(source, pa.concat_tables([table.slice(0, 1), table.slice(1)]))]
    assert seen == table["uid"].to_pylist()


def test_few_prompts_are_repeated_within_a_batch(model: Path) -> None:
    batch = next(supply(model, size=5).batches(["1 + 1 =", "1 + 2 ="]))
    assert batch["uid"].to_pylist() == ["prompt:0", "prompt:1", "prompt:0", "prompt:1", "prompt:0"]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "prompts: there are none"),
        ("1 + 1 =", "prompts: found one str; give a list of prompts"),
        ({"prompt": "1 + 1 ="}, "prompts: found one dict; give a list of prompts"),
        (["1 + 1 =", 7], "prompts row 1: "),
        ([[{"role": "user"}]], "prompts row 0: "),
        (pa.table({"uid": ["a"]}), "the table lacks the columns "),
    ],
)
def test_prompts_that_are_none(model: Path, prompts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        supply(model).batches(prompts)


def test_a_call_that_was_interrupted_leaves_no_samples_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a notebook a long call is interrupted, and made again with the same prompts."""
    sample = Sample("prompt:0/0", "python", "1 + 1 =", "2", "2", None)

    def interrupted(*arguments: Any) -> None:
        scorer.submit([sample])
        raise KeyboardInterrupt

    monkeypatch.setattr("megarl.api.trainer.collect", interrupted)
    with Scorer(RewardSpec(rule="exact_match"), num_workers=0, timeout=10.0) as scorer:
        collector = SimpleNamespace(
            supply=SimpleNamespace(batches=lambda prompts: iter(())),
            version=0,
            _config=None,
            _run=Run(tmp_path, Console()),
            _roles=None,
            _rewards=None,
            _scorer=scorer,
        )
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                DataCollector.collect(collector, ["1 + 1 ="])


def three_steps(model: Path, out: Path, resumed: Path | None) -> None:
    """Steps of PPO with adapters until there are three, from the beginning or from a checkpoint.

    The reward is the program's own, and higher for shorter responses.
    """
    longest = 8

    def shortness(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any
    ) -> dict[str, float]:
        return {"score": 1.0 - len(solution_str) / (8 * longest), "length": len(solution_str)}

    config = make_trainer_config(
        algo="ppo",
        rollouts_per_device=8,
        actor_lr=1e-2,
        critic_lr=1e-3,
        vf_coef=0.5,
        max_prompt_length=48,
        max_response_length=longest,
        **{
            "actor_rollout_ref.model.lora.rank": 4,
            "critic.model.lora.rank": 4,
            "critic.model.share_base": True,
            "trainer.resume_mode": "path" if resumed else "auto",
            "trainer.resume_from_path": str(resumed) if resumed else None,
            "trainer.default_local_dir": str(out),
            "trainer.logger": ["console"],
        },
    )
    prompts = [f"{number} + {number} =" for number in range(1, 13)]
    with Trainer(config, actor_model=model, reward_fn=shortness) as trainer:
        assert trainer.step == (1 if resumed else 0)
        while trainer.step < 3:
            data = trainer.collect_data(prompts)
            assert set(data.table["weight_version"].to_pylist()) == {trainer.step + 1}
            with pytest.raises(ValueError, match="is saved after update_policy"):
                trainer.save_checkpoint()
            results = trainer.update_policy(data)
            assert 0.0 < results["reward"] <= 1.0
            assert results["reward/length"] > 0.0 and results["actor/grad_norm"] > 0.0
            if trainer.step == 1:
                assert trainer.save_checkpoint() == out / "checkpoints" / "step-1"
        with pytest.raises(ValueError, match="collect_data number 3, of which there were 3"):
            trainer.update_policy(data)
        trainer.save(out / "policy")
    trainer.close()


def two_steps(config: TrainConfig, model: Path, prompts: Path) -> None:
    """Two steps on the prompts of a file."""
    dataset = PromptDataset(str(prompts), load_tokenizer(str(model), False), max_prompt_length=48)
    with Trainer(config, actor_model=model) as trainer:
        for _ in range(2):
            trainer.update_policy(trainer.collect_data(dataset))


def in_a_process(function: Callable[..., None], *arguments: Any) -> None:
    """Run a function as a program of its own, with a Ray of its own."""
    program = "import pickle, sys; function, arguments = pickle.load(sys.stdin.buffer); function(*arguments)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((function, arguments)),
        cwd=REPOSITORY,
        capture_output=True,
        timeout=400,
    )
    assert result.returncode == 0, (result.stdout + result.stderr).decode()[-4000:]


@pytest.fixture(scope="module")
def real_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    in_a_process(three_steps, model, out, None)
    return out


@pytest.mark.slow
def test_the_policy_is_saved_merged_and_as_adapters(model: Path, real_run: Path) -> None:
    ids = torch.arange(3, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(real_run / "policy")
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        plain, ours = base(ids).logits, merged(ids).logits
        theirs = PeftModel.from_pretrained(base, real_run / "policy/adapter").eval()(ids).logits
    assert (plain - ours).abs().max() > 1e-3
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_program_that_is_started_again_goes_on(model: Path, real_run: Path, tmp_path: Path) -> None:
    """It goes on from the checkpoint after step 1, in the middle of the prompts' epoch, and gives the same results bit for bit."""
    in_a_process(three_steps, model, tmp_path, real_run / "checkpoints" / "step-1")
    assert_same_steps(real_run, tmp_path, 2)
    for name in (
        "policy/model.safetensors",
        "policy/adapter/adapter_model.safetensors",
        "rollouts/step-000003.parquet",
    ):
        assert (real_run / name).read_bytes() == (tmp_path / name).read_bytes(), name


@pytest.mark.slow
def test_it_is_megarl_train_cut_in_two(task: Path, tmp_path: Path) -> None:
    """The same prompts and configuration give the same numbers, bit for bit."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 - len(solution_str) / 64\n"
    )
    config = make_trainer_config(
        algo="ppo",
        rollouts_per_device=8,
        actor_lr=1e-3,
        critic_lr=1e-3,
        kl_coef=0.01,
        max_prompt_length=48,
        max_response_length=8,
        total_training_steps=2,
        **{
            "trainer.default_local_dir": str(tmp_path / "api"),
            "trainer.logger": ["console"],
            "custom_reward_function.path": str(reward),
        },
    )
    files = str(task / "data/train.parquet")
    in_a_process(two_steps, config, task / "model", Path(files))
    succeed("train", tmp_path / "api/config.yaml", f"data.train_files={files}",
            f"trainer.default_local_dir={tmp_path}/loop", "trainer.rollout_data_dir=null")  # fmt: skip
    for mine, loops in zip(steps(tmp_path / "api"), steps(tmp_path / "loop"), strict=True):
        same = [name for name in loops if name.startswith(("actor/", "critic/", "reward/"))]
        assert len(same) > 20
        assert {name: mine[name] for name in same} == {name: loops[name] for name in same}
