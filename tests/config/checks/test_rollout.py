"""Checks of sampling options, of section multi_turn and of the sources of scores, and the Scorer that a configuration describes."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config import (
    EvalConfig,
    TrainConfig,
    batch_table,
    check_config,
    check_models,
    load_config,
    needs_rules,
    resolve,
)
from megarl.config.checks.rollout import NEUTRAL_SAMPLING
from megarl.config.schema.rollout import MOST_KEPT, RolloutConfig, SamplingConfig
from megarl.rewards.processes.scorer import make_scorer
from megarl.rewards.sample import Sample
from tests.config.conftest import batches_of, lines_of, problems

RECIPE = "recipes/dapo_cpu.yaml"
DRAFTING = "actor_rollout_ref.rollout.speculative.algorithm"
ROLLOUT, LORA = "actor_rollout_ref.rollout", ["actor_rollout_ref.model.lora.rank=4"]


def recipe_problems(*overrides, schema=TrainConfig, recipe=RECIPE):
    """The problems of a recipe under overrides, except missing files."""
    config = load_config(schema, recipe, overrides)
    try:
        check_config(config, data_files=False)
    except ValueError as error:
        lines = str(error).split("\n  - ")[1:]
        return [line for line in lines if "outputs/demo" not in line]
    return []


def test_the_recipe_is_sound_and_gen_batch_size_defaults_to_the_steps_prompts():
    assert recipe_problems() == []
    assert resolve(load_config(TrainConfig, RECIPE)).data.gen_batch_size == 32
    ppo = load_config(TrainConfig, "recipes/quickstart_ppo.yaml")
    assert ppo.data.gen_batch_size is None and resolve(ppo).data.gen_batch_size == 128


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.filter_groups.enable=false"], "data.gen_batch_size=32 is not data.train_batch_size=16"),
        (
            ["algorithm.filter_groups.max_num_gen_batches=1", "data.gen_batch_size=8"],
            "no step could be filled",
        ),
        (["algorithm.filter_groups.metric=seq_final_reward"], "use seq_reward"),
        (["reward_model.overlong_buffer.len=9"], "len=9 is more than data.max_response_length=8"),
        (["trainer.save_freq=0"], "-1 (never) or at least 1"),
        (["data.val_sets.a/b.files=x.parquet"], "'a/b': a name may have letters"),
        (
            ["data.val_sets.a.files=x.parquet", "data.val_sets.a.max_samples=0"],
            "data.val_sets.a.max_samples=0: it must be -1 (all) or at least 1",
        ),
        ([f"{ROLLOUT}.speculative.num_draft_tokens=5"], f"without {ROLLOUT}.speculative.algorithm no tokens"),
        ([f"{DRAFTING}=eagle3"], f"=eagle3 needs {ROLLOUT}.speculative.draft_path"),
        (
            [
                f"{DRAFTING}=ngram",
                f"{ROLLOUT}.attention_data_parallel_size=2",
                f"{ROLLOUT}.tensor_model_parallel_size=2",
            ],
            f"{DRAFTING}=ngram with {ROLLOUT}.attention_data_parallel_size=2 has not been tried",
        ),
        (
            [f"{DRAFTING}=ngram", f"{ROLLOUT}.speculative.draft_path=x"],
            "=ngram has no draft model: leave out",
        ),
        (
            [f"{DRAFTING}=ngram", f"{ROLLOUT}.speculative.accept_length=4.5"],
            "accept_length=4.5: a pass gives at most actor_rollout_ref.rollout.speculative.num_draft_tokens + 1 = 4",
        ),
        (
            [f"{DRAFTING}=ngram", "actor_rollout_ref.actor.router_replay=rollout"],
            "with actor_rollout_ref.actor.router_replay=rollout: SGLang records experts by place in the cache",
        ),
        (
            [
                "actor_rollout_ref.actor.router_replay=rollout",
                f"{ROLLOUT}.engine_kwargs.chunked_prefill_size=-1",
            ],
            "chunked_prefill_size=-1 with actor_rollout_ref.actor.router_replay=rollout: SGLang (0.5.21) then has room",
        ),
        (
            [f"{DRAFTING}=mtp", f"{ROLLOUT}.val_kwargs.repetition_penalty=1.2"],
            "val_kwargs.repetition_penalty=1.2 with actor_rollout_ref.rollout.speculative.algorithm=mtp",
        ),
        ([f"{ROLLOUT}.lora_sync=merged"], "lora_sync=merged, but there are no adapters"),
        (
            [*LORA, f"{ROLLOUT}.lora_sync=adapters", f"{ROLLOUT}.quantization=fp8"],
            "lora_sync=adapters beside rollout.quantization=fp8",
        ),
        (
            [
                *LORA,
                f"{ROLLOUT}.lora_sync=adapters",
                f"{ROLLOUT}.tensor_model_parallel_size=2",
                f"{ROLLOUT}.attention_data_parallel_size=2",
            ],
            "lora_sync=adapters beside actor_rollout_ref.rollout.attention_data_parallel_size=2: SGLang",
        ),
        (
            [*LORA, f"{ROLLOUT}.lora_sync=adapters", f"{ROLLOUT}.sync_skip_unchanged=true"],
            "rollout.sync_skip_unchanged=true is of merged weights: leave one of them out",
        ),
    ],
)
def test_what_does_not_fit_is_told(overrides, told):
    found = recipe_problems(*overrides)
    assert len(found) == 1 and told in found[0]


def test_other_ways_to_draft_are_refused_with_what_to_use():
    for name, use in (
        ("nextn", "write mtp"),
        ("EAGLE", "eagle3 is for a draft model"),
        ("dflash", "write one of these"),
    ):
        with pytest.raises(ValueError, match=use):
            load_config(TrainConfig, RECIPE, [f"{DRAFTING}={name}"])
    assert recipe_problems(f"{DRAFTING}=ngram", f"{ROLLOUT}.speculative.accept_length=2") == []
    evaluated = "rollout.speculative"
    given = [f"{evaluated}.algorithm=eagle3", "rollout.val_kwargs.presence_penalty=0.5"]
    found = recipe_problems(*given, schema=EvalConfig, recipe="recipes/quickstart_eval.yaml")
    assert [line.split(":")[0].split(" ")[0] for line in found] == [
        f"{evaluated}.algorithm=eagle3", "rollout.val_kwargs.presence_penalty=0.5",
    ]  # fmt: skip


def test_one_response_a_prompt_has_no_spread():
    assert any(
        "drops prompts whose responses do not differ" in line
        for line in recipe_problems("actor_rollout_ref.rollout.n=1")
    )


def test_all_is_told_at_once():
    found = recipe_problems(
        "reward_model.overlong_buffer.len=9", "algorithm.filter_groups.metric=seq_final_reward"
    )
    assert len(found) == 2


def test_files_of_sets_must_be_there():
    config = load_config(TrainConfig, RECIPE, ["data.val_sets.hard.files=nowhere.parquet"])
    with pytest.raises(ValueError, match=r"data\.val_sets\.hard\.files.*nowhere\.parquet"):
        check_config(config)


def test_evaluation_needs_problems():
    recipe = "recipes/quickstart_eval.yaml"
    assert recipe_problems("data.val_files=null", schema=EvalConfig, recipe=recipe) == [
        "data.val_files is required (or data.val_sets): the problems to answer"
    ]


def test_sets_alone_are_enough_to_validate():
    assert recipe_problems("data.val_files=null", "data.val_sets.hard.files=x.parquet") == []
    assert recipe_problems("data.val_files=null")  # test_freq needs validation data


OTHERS = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
}


def test_what_leaves_the_distribution_as_it_is_are_the_defaults():
    assert set(OTHERS) == set(NEUTRAL_SAMPLING)
    for name, value in NEUTRAL_SAMPLING.items():
        assert getattr(RolloutConfig(), name) == getattr(SamplingConfig(), name) == value


CUTS = ("top_p", "top_k", "min_p")


@pytest.mark.parametrize(("name", "value"), [item for item in OTHERS.items() if item[0] not in CUTS])
def test_training_knows_of_no_penalty(train, evaluation, name, value):
    (line,) = problems(train(f"{ROLLOUT}.{name}={value}"))
    assert line.startswith(f"{ROLLOUT}.{name}={value}: training rollouts must sample from ")
    assert f"(rollout.val_kwargs.{name} may be set)" in line and "know of no penalty" in line
    check_config(train(f"{ROLLOUT}.val_kwargs.{name}={value}"))


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_evaluation_samples_as_val_kwargs_say(evaluation, name, value):
    check_config(evaluation(f"rollout.val_kwargs.{name}={value}"))
    (line,) = problems(evaluation(f"rollout.{name}={value}"))
    assert line.endswith(f"evaluation reads rollout.val_kwargs.{name}")


@pytest.mark.parametrize("name", CUTS)
def test_tokens_that_are_left_out_of_training_need_estimates_by_drawn_ones(train, name):
    given, kl = f"{ROLLOUT}.{name}={OTHERS[name]}", "actor_rollout_ref.actor.kl_loss_type"
    check_config(train(given))
    check_config(train(given, "actor_rollout_ref.actor.use_kl_loss=true"))
    for kind in ("full", "top_k"):
        (line,) = problems(train(given, "actor_rollout_ref.actor.use_kl_loss=true", f"{kl}={kind}"))
        assert line.startswith(
            f"{given} with {kl}={kind}: the exact KL compares distributions over the same tokens"
        )
    (line,) = problems(train(given, "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"))
    assert line.startswith(f"{given} with algorithm.kl_penalty=full: ")
    (line,) = problems(train(given, f"{DRAFTING}=ngram"))
    assert line.startswith(f"{given} with {DRAFTING}=ngram: SGLang does not return the tokens")


def test_a_choice_of_one_token_is_none(train):
    (line,) = problems(train(f"{ROLLOUT}.top_k=1"))
    assert line.startswith(f"{ROLLOUT}.top_k=1: a token that is drawn from one has the log-prob 0")
    (line,) = problems(train(f"{ROLLOUT}.top_k={MOST_KEPT + 1}"))
    assert line.startswith(f"{ROLLOUT}.top_k={MOST_KEPT + 1}") and str(MOST_KEPT) in line
    (line,) = problems(train(f"{ROLLOUT}.top_p=1.5"))
    assert line.startswith(f"{ROLLOUT}.top_p=1.5")


def test_penalties_stay_within_what_the_engine_takes(train):
    lines = lines_of(
        lambda: check_config(
            train(
                f"{ROLLOUT}.val_kwargs.repetition_penalty=2.5",
                f"{ROLLOUT}.val_kwargs.frequency_penalty=-3",
                f"{ROLLOUT}.val_kwargs.min_p=1.5",
                f"{ROLLOUT}.stop_token_ids=[5,-1]",
            )
        )
    )
    assert len(lines) == 4 and f"{ROLLOUT}.stop_token_ids=[5, -1]: token ids are not negative" in lines


def test_an_environment_is_named(train, evaluation, tmp_path):
    check_config(train(f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"))
    check_config(evaluation("rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculator"))
    (line,) = problems(train(f"{ROLLOUT}.multi_turn.enable=true"))
    assert line.startswith(f"{ROLLOUT}.multi_turn.environment is required with")
    unknown = ["rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculater"]
    (line,) = problems(evaluation(*unknown))
    assert line.startswith("rollout.multi_turn.environment='calculater' is unknown; megarl has calculator")
    slow = [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"]
    (line,) = problems(train(*slow, f"{ROLLOUT}.multi_turn.step_timeout=600"))
    assert "step_timeout=600 must be less than" in line
    (tmp_path / "mine.py").write_text("")
    check_config(evaluation(*unknown, f"plugins=[{tmp_path}/mine.py]"))  # the file may define it


GATEWAY = f"{ROLLOUT}.gateway"


def test_agents(train, evaluation, tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text("")
    enabled = [
        f"{GATEWAY}.enable=true",
        f"{GATEWAY}.agent={agent}:play",
        "algorithm.adv_estimator=grpo",
        "critic=null",
    ]
    enabled += [f"{ROLLOUT}.n=2"]
    check_config(train(*enabled))
    check_config(evaluation("rollout.gateway.enable=true", "rollout.gateway.command=[agent, --fast]"))
    (line,) = problems(train(f"{GATEWAY}.timeout=5"))
    assert line == f"{GATEWAY}.timeout: without {GATEWAY}.enable=true there are no agents"
    (line,) = problems(evaluation("rollout.gateway.enable=true"))
    assert line.endswith("give one of them")
    (line,) = problems(train(*enabled, f"{GATEWAY}.command=[agent]"))
    assert line.endswith("give one of them")
    (line,) = problems(train(*enabled, f"{GATEWAY}.score={tmp_path}/none.py:score"))
    assert f"{tmp_path}/none.py does not exist" in line
    (line,) = problems(train(*enabled, f"{GATEWAY}.score={agent}"))
    assert line.endswith("must be FILE.py:FUNCTION")
    (line,) = problems(train(*enabled, f"{GATEWAY}.sandbox=namespaces", f"{GATEWAY}.preload=[agents]"))
    assert "an agent in a sandbox is no copy" in line
    (line,) = problems(train(*enabled, f"{GATEWAY}.python={tmp_path}/python"))
    assert f"{tmp_path}/python': there is no such program" in line


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.adv_estimator=remax"], "use grpo"),
        (["trainer.phase_timeout=600"], "timeout=600 must be less than trainer.phase_timeout=600"),
        (["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=2"], "no one length"),
        ([f"{GATEWAY}.models=[]"], "need a name"),
        ([f"{GATEWAY}.players=[white,black,white]"], "have white twice"),
        ([f"{GATEWAY}.players=[black,policy]"], "have policy twice"),
        ([f"{GATEWAY}.players=[white]"], "one player is none"),
        ([f"{GATEWAY}.players=[a,b]", "algorithm.adv_estimator=remax"], "use grpo"),
        (
            [f"{GATEWAY}.sandbox=dokcer"],
            "sandbox='dokcer' must be one of none, namespaces, bubblewrap, docker, podman, or FILE.py:NAME",
        ),
        ([f"{GATEWAY}.sandbox=docker"], "sandbox=docker needs actor_rollout_ref.rollout.gateway.image"),
        ([f"{GATEWAY}.sandbox=bubblewrap", f"{GATEWAY}.image=a"], "image='a' has no effect with"),
        ([f"{GATEWAY}.image=a"], "image has no effect without a sandbox"),
        ([f"{GATEWAY}.sandbox=podman", f"{GATEWAY}.image=a", f"{GATEWAY}.host=cluster"], "leave host out"),
        (
            [f"{GATEWAY}.sandbox=none.py:Own", f"{GATEWAY}.host=cluster"],
            "sandbox: the file none.py does not exist",
        ),
        (
            [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"],
            "an agent or an environment",
        ),
        ([f"{GATEWAY}.preload=[agents]"], "preload: for .*gateway.agent=FILE.py:FUNCTION alone"),
    ],
)
def test_what_agents_cannot_have(train, overrides, told):
    enabled = [
        f"{GATEWAY}.enable=true",
        f"{GATEWAY}.command=[agent]",
        "algorithm.adv_estimator=grpo",
        "critic=null",
    ]
    (line,) = problems(train(*enabled, f"{ROLLOUT}.n=2", *overrides))
    assert re.search(told, line)


def test_keys_of_turns_that_there_are_not_are_refused(train):
    config = train(f"{ROLLOUT}.multi_turn.max_user_turns=2", f"{ROLLOUT}.multi_turn.options={{role: user}}")
    (line,) = problems(config)
    for name in ("max_user_turns", "options"):
        assert f"{ROLLOUT}.multi_turn.{name}" in line
    assert f"without {ROLLOUT}.multi_turn.enable=true" in line


def test_free_options_arrive_as_they_were_written(train):
    config = train(f"{ROLLOUT}.multi_turn.options={{role: user, tries: [1, 2], deep: {{a: 0.5}}}}")
    found = config.actor_rollout_ref.rollout.multi_turn.options
    assert found == {"role": "user", "tries": [1, 2], "deep": {"a": 0.5}}


JUDGE = ("reward.rule=llm_judge", "reward.judge.base_url=http://h:1/v1", "reward.judge.model=m")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.rule=gsm"], "reward.rule='gsm' is unknown; megarl has gsm8k, gsm8k_flexible, math, .*; did you mean gsm8k"),
        (["reward.rule=math", "reward.gsm8k_rule_reward=true"], "reward.rule='math' and reward.gsm8k_rule_reward=True: each"),
        (["custom_reward_function.reward_kwargs={a: 1}"], "reward_kwargs are for a function: custom_reward_function.path"),
        (["reward.rule=llm_judge"], "reward.judge.base_url is required with reward.rule='llm_judge'"),
        (["reward.rule=llm_judge"], "reward.judge.model is required"),
        (["reward.judge.model=m"], "reward.judge.model has no effect without reward.rule='llm_judge'"),
        ([*JUDGE, "reward.judge.base_url=localhost:1"], "base_url='localhost:1' must begin with http:// or https://"),
        ([*JUDGE, "reward.judge.prompt=Good?"], r"reward.judge.prompt must contain \{response\}"),
        ([*JUDGE, "reward.judge.pattern=(x"], "reward.judge.pattern='\\(x' is no regular expression: missing"),
        ([*JUDGE, "reward.judge.pattern=x"], "reward.judge.pattern='x' must have a group"),
        ([*JUDGE, "reward.judge.timeout=120"], "reward.judge.timeout=120 must be less than reward.timeout=120"),
        (["reward.code.isolation=docker"], "reward.code.isolation='docker' is unknown"),
    ],
)  # fmt: skip
def test_violations(train, evaluation, overrides, message):
    for config in (train(*overrides), evaluation(*overrides)):
        found = problems(config)
        assert any(re.search(message, line) for line in found), found


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward.gsm8k_rule_reward=true"],  # as an article prints it
        ["reward.rule=gsm8k", "reward.gsm8k_rule_reward=true"],
        ["reward.rule=code", "reward.code.isolation=seccomp"],
        JUDGE,
    ],
)
def test_what_is_accepted(train, evaluation, overrides):
    check_config(train(*overrides))
    check_config(evaluation(*overrides))


def test_two_ways_to_score_all_rows_are_refused(train, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0")
    config = train(f"custom_reward_function.path={tmp_path}/reward.py", "reward.rule=math")
    assert any(
        re.search("path=.*reward.py' and reward.rule='math': each says", line) for line in problems(config)
    )


def test_a_rule_for_all_rows(train):
    with make_scorer(train("reward.gsm8k_rule_reward=true", "reward.num_workers=1")) as scorer:
        scorer.submit([Sample("a", "a source without a rule", "", "#### 7", "7", None)])
        assert scorer.collect()["a"].score == 1.0


def test_a_function_of_ones_own_with_arguments(evaluation, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info, *, bonus):\n    return len(solution_str) + bonus"
    )
    config = evaluation(
        f"custom_reward_function.path={tmp_path}/reward.py",
        "custom_reward_function.name=mine",
        "custom_reward_function.reward_kwargs={bonus: 10}",
        "reward.num_workers=1",
    )
    with make_scorer(config) as scorer:
        scorer.submit([Sample("a", "d", "", "four", "", None)])
        assert scorer.collect()["a"].score == 14.0


def test_the_key_of_the_judge_must_be_there(train, monkeypatch):
    monkeypatch.delenv("TEST_JUDGE_KEY", raising=False)
    config = train(*JUDGE, "reward.judge.api_key_env=TEST_JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_env='TEST_JUDGE_KEY': this variable is not set"):
        make_scorer(config)
    monkeypatch.setenv("TEST_JUDGE_KEY", "secret")
    make_scorer(config).close()


Train = Callable[..., TrainConfig]


@pytest.fixture
def rewarded(train: Train, folder: Path) -> Train:
    """The configuration with a reward model."""
    (folder / "reward").mkdir()
    (folder / "reward" / "config.json").write_text("{}")
    given = ("reward_model.enable=true", f"reward_model.model.path={folder}/reward")
    return lambda *overrides: train(*given, *overrides)


def test_without_enable_nothing_is_derived_or_asked_for(train: Train) -> None:
    """As the second article prints it: the model's folder does not exist, and enable is false."""
    config = train("reward_model.model.path=~/models/none", "reward_model.micro_batch_size_per_gpu=16")
    check_config(config)
    assert resolve(config).reward_model == config.reward_model
    assert needs_rules(config) and batches_of(config).reward_model is None


def test_what_is_not_said_is_the_actors(rewarded: Train) -> None:
    config = rewarded()
    check_config(config)
    full = resolve(config)
    reward, actor = full.reward_model, full.actor_rollout_ref.actor
    assert (reward.megatron, reward.resource_pool) == (actor.megatron, "global")
    assert (reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu) == (128, None)
    assert reward.max_length == 64  # prompt and response
    assert resolve(full) == full
    assert not needs_rules(config) and needs_rules(rewarded("reward_model.rule_weight=0.5"))


def test_the_actors_micro_batch_is_raised_to_the_longest_text(rewarded: Train) -> None:
    config = rewarded("reward_model.max_length=200")
    check_config(config)
    assert resolve(config).reward_model.max_token_len_per_gpu == 200
    assert resolve(resolve(config)) == resolve(config)


def test_a_layout_and_micro_batches_of_its_own(rewarded: Train) -> None:
    config = rewarded(
        "reward_model.megatron.tensor_model_parallel_size=2",
        "reward_model.micro_batch_size_per_gpu=4",
        "reward_model.max_length=500",
    )
    check_config(config)
    full = resolve(config).reward_model
    assert full.megatron is not None and full.megatron.sequence_parallel
    assert (full.max_token_len_per_gpu, full.micro_batch_size_per_gpu) == (None, 4)
    plan = batches_of(config)
    assert plan.reward_model is not None and (plan.reward_model.tp, plan.reward_model.dp) == (2, 2)
    header, *rows = batch_table(plan)
    (row,) = [row for row in rows if row[0] == "reward model"]
    assert row == ("reward model", "4", "tp2 x pp1 x cp1 x dp2", "", "max 4 trajectories")
    assert {len(row) for row in rows} == {len(header)}


def test_a_pool_of_its_own(rewarded: Train) -> None:
    pools = ("resource_pools.main.n_gpus_per_node=4", "resource_pools.judges.n_gpus_per_node=2",
             "actor_rollout_ref.actor.resource_pool=main", "trainer.n_gpus_per_node=6")  # fmt: skip
    layout = "reward_model.megatron.tensor_model_parallel_size=2"
    config = rewarded(*pools, layout, "reward_model.resource_pool=judges")
    check_config(config)
    plan = batches_of(config).reward_model
    assert plan is not None and (plan.pool, plan.world) == ("judges", 2)
    assert problems(rewarded(*pools, layout, "reward_model.resource_pool=judge")) == [
        "reward_model.resource_pool='judge' is unknown; resource_pools has main, judges; did you mean judges?",
        "resource_pools.judges is used by no role; name it as a resource_pool or leave it out",
    ]
    assert problems(rewarded(*pools, "reward_model.resource_pool=judges")) == [
        "reward_model.megatron: tensor_model_parallel_size=2 x pipeline_model_parallel_size=2 x "
        "context_parallel_size=1 needs 4 devices, which does not divide the 2 devices of resource pool 'judges'; "
        "possible products: 1,2"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("reward_model.weight=0",), "reward_model.weight=0: the model's scores would count nothing"),
        (
            ("reward_model.max_token_len_per_gpu=64", "reward_model.micro_batch_size_per_gpu=4"),
            "are both set (64 tokens, 4 trajectories); give one of them",
        ),
        (
            ("reward_model.max_token_len_per_gpu=60",),
            "reward_model.max_token_len_per_gpu=60 is less than reward_model.max_length=64",
        ),
        (("reward_model.max_length=0",), "reward_model.max_length=0 is out of range"),
        (
            ("reward_model.step_reward=min",),
            "reward_model.step_reward=min needs reward_model.step_separator",
        ),
        (
            ("reward_model.step_separator=x", "reward_model.step_reward=sum"),
            "reward_model.step_reward='sum' is unknown",
        ),
        (('reward_model.step_separator=""',), 'reward_model.step_separator="": a response has no steps'),
        (
            (
                "reward_model.step_separator=x",
                "actor_rollout_ref.rollout.multi_turn={enable: true, environment: calculator}",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
            ),
            "reward_model.step_separator with actor_rollout_ref.rollout.multi_turn.enable=true",
        ),
        (
            (
                "reward_model.step_separator=x",
                "algorithm={adv_estimator: gdpo, reward_weights: {model: 1}}",
                "actor_rollout_ref.rollout.n=2",
                "critic=null",
            ),
            "reward_model.step_separator with algorithm.adv_estimator='gdpo', which compares named numbers",
        ),
        (
            (
                "reward_model.step_separator=x",
                "algorithm.filter_groups.enable=true",
                "actor_rollout_ref.rollout.n=2",
            ),
            "algorithm.filter_groups.metric=score: with reward_model.step_separator and without",
        ),
    ],
)
def test_what_does_not_fit_is_refused(rewarded: Train, overrides: tuple[str, ...], problem: str) -> None:
    (found,) = problems(rewarded(*overrides))
    assert problem in found


def test_a_folder_that_is_not_there_is_refused(rewarded: Train, train: Train, folder: Path) -> None:
    (found,) = problems(rewarded(f"reward_model.model.path={folder}/none"))
    assert found.startswith("reward_model.model.path: ")
    (found,) = problems(train("reward_model.enable=true"))
    assert found.startswith("reward_model.model.path is required with reward_model.enable=true")


def test_another_tokenizer_needs_the_messages(rewarded: Train, folder: Path) -> None:
    given = f"reward_model.model.input_tokenizer={folder}/model"
    (found,) = problems(rewarded(given))
    assert found.startswith("reward_model.model.input_tokenizer needs data.return_raw_input_ids=true")
    check_config(rewarded(given, "data.return_raw_input_ids=true"))


def test_a_reward_function_that_would_count_nothing_is_refused(rewarded: Train, folder: Path) -> None:
    (folder / "reward.py").write_text("def compute_score(**rest):\n    return 1.0\n")
    given = f"custom_reward_function.path={folder}/reward.py"
    (found,) = problems(rewarded(given))
    assert "its scores would count nothing beside the reward model's; give reward_model.rule_weight" in found
    check_config(rewarded(given, "reward_model.rule_weight=1"))
    (found,) = problems(rewarded("reward.rule=gsm8k"))
    assert found.startswith("reward.rule=gsm8k: its scores would count nothing")


def test_turns_are_not_rendered_anew(rewarded: Train, folder: Path) -> None:
    given = (f"reward_model.model.input_tokenizer={folder}/model", "data.return_raw_input_ids=true",
             "actor_rollout_ref.rollout.multi_turn.enable=true",
             "actor_rollout_ref.rollout.multi_turn.environment=calculator")  # fmt: skip
    (found,) = problems(rewarded(*given))
    assert "the turns of a trajectory cannot be rendered anew" in found


def test_the_model_must_fit_its_layout(rewarded: Train) -> None:
    facts = SimpleNamespace(
        family="qwen2",
        num_layers=4,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=64,
        moe=None,
        mla=None,
        delta_net=None,
        indexer=None,
        context_length=("max_position_embeddings", 4096),
    )
    odd = SimpleNamespace(**{**vars(facts), "num_layers": 3})
    config = resolve(rewarded())
    check_models(config, facts, None, facts)
    (found,) = lines_of(lambda: check_models(config, facts, None, odd))
    assert found.startswith(
        "reward_model.megatron.pipeline_model_parallel_size=2 does not divide num_layers=3"
    )
