"""Configurations that every command refuses; those of fine-tuning and reward models in particular."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import (
    DPOConfig,
    EvalConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
    batch_summary,
    batch_table,
    check_config,
    load_config,
    resolve,
)
from megarl.config.schema.algorithm import KL_KINDS
from megarl.config.schema.run import LOGGERS
from megarl.config.show import notes
from tests.config.conftest import batches_of, problems

Train = Callable[..., TrainConfig]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_valid_configurations_pass_unresolved_and_resolved(
    train: Train, grpo: Train, sft: Callable[..., SFTConfig], evaluation: Callable[..., EvalConfig]
) -> None:
    for config in (train(), grpo(), sft(), evaluation()):
        check_config(config)
        check_config(resolve(config))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            f"{ROLLOUT}.name=sglng",
            f"{ROLLOUT}.name='sglng' is unknown; megarl has sglang; did you mean sglang?",
        ),
        (
            "algorithm.kl_penalty=low_var",
            f"algorithm.kl_penalty='low_var' is unknown; megarl has {', '.join(KL_KINDS)}; did you mean low_var_kl?",
        ),
        (
            "trainer.logger=[tensorbord]",
            f"trainer.logger='tensorbord' is unknown; megarl has {', '.join(LOGGERS)}; did you mean tensorboard?",
        ),
        (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature=0.0 is out of range: it must be greater than 0"),
        (
            "critic.optim.betas=[0.9, 1]",
            "critic.optim.betas=1.0 is out of range: it must be at least 0 and less than 1",
        ),
        (
            "algorithm.gamma=1.5",
            "algorithm.gamma=1.5 is out of range: it must be at least 0 and at most 1",
        ),
        ("trainer.test_freq=0", "trainer.test_freq=0: it must be -1 (never) or at least 1"),
        (
            f"{ROLLOUT}.val_kwargs.top_k=0",
            f"{ROLLOUT}.val_kwargs.top_k=0: it must be -1 (all) or at least 1",
        ),
        (
            f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=1",
            f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=1 is out of range: it must be at least 2",
        ),
    ],
)
def test_values_out_of_range(train: Train, override: str, problem: str) -> None:
    assert problems(train(override)) == [problem]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [f"{ACTOR}.megatron.tensor_model_parallel_size=3"],
            f"{ACTOR}.megatron: tensor_model_parallel_size=3 x pipeline_model_parallel_size=2 x "
            "context_parallel_size=1 needs 6 devices, which does not divide the 4 devices of resource pool 'global'; "
            "possible products: 1,2,4",
        ),
        (
            ["critic.megatron={sequence_parallel: true, pipeline_model_parallel_size: 2}"],
            "critic.megatron.sequence_parallel=true needs critic.megatron.tensor_model_parallel_size of at least 2; "
            "leave it out (null: true where that is over 1)",
        ),
        (
            [f"{ACTOR}.share_prompts=true", "critic.megatron={context_parallel_size: 2}"],
            f"{ACTOR}.share_prompts=true: prompts cannot be shared with critic.megatron.context_parallel_size=2; "
            "set it to false",
        ),
        (
            [f"{ACTOR}.ppo_mini_batch_size=6"],
            f"{ACTOR}.ppo_mini_batch_size=6 does not divide data.train_batch_size=16",
        ),
        (
            ["critic.ppo_mini_batch_size=1"],
            f"critic.ppo_mini_batch_size=1 x {ROLLOUT}.n=3 = 3 trajectories cannot be shared out evenly over the 2 "
            "data parallel ranks of critic.megatron; a multiple of 2 is needed",
        ),
        (
            ["critic.megatron.virtual_pipeline_model_parallel_size=2", "critic.ppo_mini_batch_size=2"],
            f"critic.ppo_mini_batch_size=2 x {ROLLOUT}.n=3 = 6 trajectories cannot be shared out evenly over the 2 "
            "data parallel ranks and 2 stages of the interleaved pipeline of critic.megatron; a multiple of 4 is needed",
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"],
            f"{ACTOR}.ppo_max_token_len_per_gpu and {ACTOR}.ppo_micro_batch_size_per_gpu are both set (128 tokens, "
            f"2 trajectories); give one of them, or say by {ACTOR}.use_dynamic_bsz which counts (true: tokens)",
        ),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=63"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=63 is less than data.max_prompt_length=24 + "
            "data.max_response_length=40 = 64: a long trajectory would not fit",
        ),
        (
            ["critic.ppo_max_token_len_per_gpu=63"],
            "critic.ppo_max_token_len_per_gpu=63 is less than data.max_prompt_length=24 + "
            "data.max_response_length=40 = 64: a long trajectory would not fit",
        ),
        (
            ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=63"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=63 is less than data.max_prompt_length=24 + "
            "data.max_response_length=40 = 64: a long trajectory would not fit",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=8"],
            f"{ROLLOUT}.tensor_model_parallel_size=8 is more than the 4 devices of resource pool 'global'",
        ),
        (
            [f"{ROLLOUT}.num_engines=3"],
            f"{ROLLOUT}.num_engines=3 x {ROLLOUT}.tensor_model_parallel_size=2 is more than the 4 devices of resource "
            "pool 'global'; at most 2 engines fit",
        ),
        (
            ["critic=null"],
            "critic.optim.lr is required: algorithm.adv_estimator='gae' trains a critic, but there is no section "
            "critic (grpo needs none)",
        ),
        (
            ["algorithm.adv_estimator=grpo"],
            "critic: algorithm.adv_estimator='grpo' has no critic; leave the section out (or critic=null)",
        ),
        (
            ["algorithm.adv_estimator=grpo", "critic=null", f"{ROLLOUT}.n=1"],
            f"{ROLLOUT}.n=1: algorithm.adv_estimator='grpo' compares the responses to one prompt and needs at least 2",
        ),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, horizon: 9}"],
            "algorithm.kl_ctrl.horizon=9 is too short for 48 trajectories a step: the coefficient could change sign; "
            "it must be over 9.6",
        ),
        (
            ["critic.optim={lr: 1e-5, min_lr: 1e-4}"],
            "critic.optim.min_lr=0.0001 is greater than critic.optim.lr=1e-05",
        ),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=9", f"{ACTOR}.optim.lr_decay_steps=9"],
            f"{ACTOR}.optim.lr_warmup_steps=9 must be less than {ACTOR}.optim.lr_decay_steps=9",
        ),
        (["data.val_files=null", "trainer.test_freq=5"], "trainer.test_freq=5 needs data.val_files"),
        (
            ["data.val_files=null", "trainer.val_before_train=true"],
            "trainer.val_before_train=true needs data.val_files",
        ),
    ],
)
def test_values_that_do_not_fit_each_other(train: Train, overrides: list[str], problem: str) -> None:
    assert problems(train(*overrides)) == [problem]


def test_virtual_pipeline_needs_a_pipeline(train: Train) -> None:
    config = train(
        f"{ACTOR}.megatron.pipeline_model_parallel_size=1",
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2",
    )
    assert problems(config) == [
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2 needs {ACTOR}.megatron.pipeline_model_parallel_size "
        "of at least 2; leave it out (null) without pipeline parallelism"
    ]


def test_experts_have_groups_of_their_own(train: Train) -> None:
    check_config(train(f"{ACTOR}.megatron.expert_model_parallel_size=2"))
    (line,) = problems(train(f"{ACTOR}.megatron.expert_model_parallel_size=4"))
    assert line == (
        f"{ACTOR}.megatron: expert_model_parallel_size=4 x expert_tensor_parallel_size=1 x "
        "pipeline_model_parallel_size=2 needs 8 devices, which does not divide the 4 devices of resource pool 'global'"
    )


def test_uneven_stages_need_a_pipeline(train: Train) -> None:
    (line,) = problems(
        train("critic.megatron={num_layers_in_last_pipeline_stage: 1, pipeline_model_parallel_size: 1}")
    )
    assert line == (
        "critic.megatron.num_layers_in_last_pipeline_stage=1 needs critic.megatron.pipeline_model_parallel_size "
        "of at least 2"
    )


def test_a_budget_in_trajectories_is_enough(train: Train) -> None:
    check_config(train(f"{ACTOR}.ppo_max_token_len_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"))


def test_the_critic_may_count_otherwise_than_the_actor(train: Train) -> None:
    check_config(train("critic.ppo_micro_batch_size_per_gpu=4"))


@pytest.mark.parametrize(
    ("pools", "overrides", "problem"),
    [
        (
            "{a: {n_gpus_per_node: 2}, b: {n_gpus_per_node: 2}}",
            [],
            f"{ACTOR}.resource_pool is required where resource_pools has several and none is named global: one of a, b",
        ),
        (
            "{global: {n_gpus_per_node: 4}}",
            ["critic.resource_pool=globl"],
            "critic.resource_pool='globl' is unknown; resource_pools has global; did you mean global?",
        ),
        (
            "{global: {n_gpus_per_node: 4}, spare: {n_gpus_per_node: 1}}",
            ["trainer.n_gpus_per_node=5"],
            "resource_pools.spare is used by no role; name it as a resource_pool or leave it out",
        ),
        (
            "{global: {n_gpus_per_node: 4}, engines: {n_gpus_per_node: 2}}",
            [f"{ROLLOUT}.resource_pool=engines"],
            "resource_pools have 6 devices together, more than trainer.nnodes=1 x trainer.n_gpus_per_node=4 = 4",
        ),
        (
            "{global: {nnodes: 2, n_gpus_per_node: 2}}",
            [],
            "resource_pools.global.nnodes=2 is more than trainer.nnodes=1",
        ),
        (
            "{}",
            [],
            "resource_pools is empty; name at least one pool, or leave it out for one of all devices",
        ),
    ],
)
def test_pools(train: Train, pools: str, overrides: list[str], problem: str) -> None:
    assert problems(train(f"resource_pools={pools}", *overrides)) == [problem]


def test_roles_are_checked_against_their_own_pool(train: Train) -> None:
    config = train(
        "trainer.n_gpus_per_node=7",
        "resource_pools={global: {n_gpus_per_node: 4}, small: {n_gpus_per_node: 3}}",
        "critic.resource_pool=small",
    )
    (line,) = problems(config)
    assert line.startswith("critic.megatron: ") and "the 3 devices of resource pool 'small'" in line


def test_the_reference_is_checked_only_where_it_is_used(train: Train) -> None:
    layout = "actor_rollout_ref.ref.megatron={tensor_model_parallel_size: 3}"
    check_config(train(layout))
    (line,) = problems(train(layout, f"{ACTOR}.use_kl_loss=true"))
    assert line.startswith("actor_rollout_ref.ref.megatron: ") and "needs 3 devices" in line


def test_files_and_folders(train: Train, folder: Path) -> None:
    here = Path.cwd()
    config = train(
        f"data.train_files=[{folder}/train-0.parquet, {folder}/gone.parquet, {folder}/*.arrow]",
        f"data.val_files={folder}",
        "actor_rollout_ref.model={path: no/such/model, tokenizer_path: nowhere}",
        f"critic.model.path={folder}",
        "custom_reward_function.path=reward.py",
    )
    assert problems(config) == [
        f"actor_rollout_ref.model.path: no/such/model is no folder (working directory {here}); give the folder of a "
        "downloaded Hugging Face model, or its id on the Hub (owner/name)",
        f"critic.model.path: the folder {folder} has no config.json, so it is no Hugging Face model",
        f"actor_rollout_ref.model.tokenizer_path: nowhere is no folder (working directory {here})",
        f"data.train_files: the file {folder}/gone.parquet does not exist (working directory {here})",
        f"data.train_files: no file matches {folder}/*.arrow (working directory {here})",
        f"data.val_files: {folder} is a folder; give the files in it, for example {folder}/*.parquet",
        f"custom_reward_function.path: the file reward.py does not exist (working directory {here})",
    ]


def test_all_violations_come_in_one_message(train: Train) -> None:
    config = train(
        f"{ACTOR}.megatron.tensor_model_parallel_size=0",
        "data.train_batch_size=0",
        f"{ROLLOUT}.n=0",
        f"{ROLLOUT}.tensor_model_parallel_size=0",
        "trainer.n_gpus_per_node=0",
        f"{ACTOR}.ppo_mini_batch_size=0",
        "resource_pools={a: {n_gpus_per_node: 0}}",
        "algorithm.kl_ctrl.horizon=-1",
    )
    lines = problems(config)
    for key in (
        f"{ACTOR}.megatron.tensor_model_parallel_size=0",
        "data.train_batch_size=0",
        f"{ROLLOUT}.n=0",
        f"{ROLLOUT}.tensor_model_parallel_size=0",
        "trainer.n_gpus_per_node=0",
        f"{ACTOR}.ppo_mini_batch_size=0",
        "resource_pools.a.n_gpus_per_node=0",
        "algorithm.kl_ctrl.horizon=-1.0",
    ):
        assert any(line.startswith(f"{key} is out of range") for line in lines), key


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "data.train_batch_size=7",
            "data.train_batch_size=7 cannot be shared out evenly over the 2 data parallel ranks of megatron; a "
            "multiple of 2 is needed",
        ),
        (
            "max_token_len_per_gpu=63",
            "max_token_len_per_gpu=63 is less than data.max_length=64: a long example would not fit",
        ),
        ("trainer.test_freq=2", "trainer.test_freq=2 needs data.val_files"),
        ("optim.min_lr=1", "optim.min_lr=1 is greater than optim.lr=0.001"),
        (
            "megatron.grad_offload=true",
            "megatron.grad_offload is for runs with rollout engines: fine-tuning uses all it has all the time; leave "
            "it out",
        ),
    ],
)
def test_sft(sft: Callable[..., SFTConfig], override: str, problem: str) -> None:
    assert problems(sft(override)) == [problem]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "rollout.temperature=0.5",
            "rollout.temperature=0.5 is of training rollouts; evaluation reads rollout.val_kwargs.temperature",
        ),
        (
            "rollout.resource_pool=a",
            "rollout.resource_pool='a': evaluation has one pool; leave it out",
        ),
        (
            "rollout.free_cache_engine=false",
            "rollout.free_cache_engine: evaluation trains nothing that could use the memory; leave it out",
        ),
    ],
)
def test_evaluation_refuses_what_it_does_not_read(
    evaluation: Callable[..., EvalConfig], override: str, problem: str
) -> None:
    assert problems(evaluation(override)) == [problem]


def test_a_configuration_made_in_code_is_checked_alike(train: Train) -> None:
    config = train()
    config = replace(config, data=replace(config.data, truncation="middel"))
    assert problems(config) == [
        "data.truncation='middel' is unknown; megarl has error, left, right, middle; did you mean middle?"
    ]


def test_what_is_right_is_accepted(
    rm: Callable[..., RMConfig], sft: Callable[..., SFTConfig], folder: Path
) -> None:
    for config in (rm, sft):
        check_config(
            config(
                f"data.val_files={folder}/val.parquet",
                "trainer.test_freq=2",
                "trainer.save_best=true",
                "trainer.early_stop_patience=3",
            )
        )
    check_config(sft("data.text_key=text", "data.truncation=split"))
    files = f"data.normalize_files={folder}/val.parquet"
    check_config(rm(files, "data.normalize_response_key=answer", "data.normalize=mean_std"))


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.save_best=true"],
            "trainer.save_best=true needs trainer.test_freq: the best model is that of the lowest val/loss",
        ),
        (
            ["trainer.early_stop_patience=2"],
            "trainer.early_stop_patience=2 counts validations: it needs trainer.test_freq",
        ),
        (["trainer.save_freq=0"], "trainer.save_freq=0: it must be -1 (never) or at least 1"),
        (
            ["data.truncation=split"],
            "data.truncation=split is for plain text (data.text_key): a chat is not cut into several",
        ),
        (
            ["data.text_key=text", "data.response_key=answer"],
            "data.response_key is of chats, but data.text_key='text' reads plain text; give one of them",
        ),
        (
            ["model.mtp_loss_coef=0.3"],
            "model.mtp_loss_coef is of model.mtp=train, which is drop; leave it out",
        ),
        (
            ["model.mtp=train", "model.lora.rank=4"],
            "model.mtp=train goes without model.lora.rank=4: multi-token prediction layers have no adapters, and frozen ones stay as they "
            "are; give keep, or no adapters",
        ),
        (
            ["model.indexer_loss_coef=0.3"],
            "model.indexer_loss_coef is of model.indexer=train, which is freeze; leave it out",
        ),
        (
            ["model.indexer=train", "model.lora.rank=4"],
            "model.indexer=train goes without model.lora.rank=4: indexers have no adapters, and adapters alone are trained, saved and served; leave out "
            "one of them",
        ),
        (
            ["model.indexer=train", "megatron.fsdp=optim_grads"],
            "model.indexer=train goes without megatron.fsdp=optim_grads: indexers read their weights outside the layers that Megatron-FSDP gathers; "
            "leave out one of them",
        ),
        (
            ["model.indexer=train", "optim.optimizer=muon"],
            "model.indexer=train goes without optim.optimizer=muon, which makes steps of matrices orthogonal: nobody has tried it with indexers; give "
            "adam, or leave it out",
        ),
        (
            ["model.mtp=train", "megatron.fsdp=optim_grads"],
            "model.mtp=train goes without megatron.fsdp=optim_grads: the units of Megatron-FSDP are the model's own layers; leave out one "
            "of them",
        ),
    ],
)
def test_fine_tuning(sft: Callable[..., SFTConfig], overrides: list[str], problem: str) -> None:
    assert problems(sft(*overrides)) == [problem]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["data.normalize_response_key=answer"],
            "data.normalize_response_key='answer' is a column of data.normalize_files, which is null",
        ),
        (["data.normalize_max_samples=0"], "data.normalize_max_samples=0: it must be -1 (all) or at least 1"),
        (
            ["model.mtp=keep"],
            "model.mtp=keep: a reward model predicts no tokens, so it has no such layers; leave it out",
        ),
        (
            ["model.mtp=train"],
            "model.mtp=train: a reward model predicts no tokens, so it has no such layers; leave it out",
        ),
        (
            ["model.indexer=train"],
            "model.indexer=train: indexers learn with the tokens that a model learns to predict, and a reward model predicts none; leave it out",
        ),
        (["model.head_init=ones"], "model.head_init='ones' is unknown; megarl has zeros, normal"),
        (
            ["data.train_batch_size=7"],
            "data.train_batch_size=7 cannot be shared out evenly over the 2 data parallel ranks of megatron; a "
            "multiple of 2 is needed",
        ),
    ],
)
def test_reward_models(rm: Callable[..., RMConfig], overrides: list[str], problem: str) -> None:
    assert problems(rm(*overrides)) == [problem]


def test_preferences_train_no_prediction_layers(examples: list[str]) -> None:
    """A preference has two responses, and the model must not learn to predict one of them."""
    config = load_config(DPOConfig, None, [*examples, "model.mtp=train"])
    assert problems(config) == [
        "model.mtp=train: preferences have responses that are not to be predicted; give keep, and train the layers by megarl sft"
    ]


def test_preferences_train_no_indexers(examples: list[str]) -> None:
    config = load_config(DPOConfig, None, [*examples, "model.indexer=train"])
    assert problems(config) == [
        "model.indexer=train: preferences are a loss of whole responses, and indexers learn by the token; leave it out, and train them by megarl sft or "
        "with the policy"
    ]


def test_reference_answers_without_a_use(rm: Callable[..., RMConfig], folder: Path) -> None:
    config = rm("data.normalize=none", f"data.normalize_files={folder}/val.parquet")
    assert problems(config) == [
        "data.normalize_files: data.normalize=none uses no reference answers; leave one of them out"
    ]


def test_the_arithmetic_counts_rankings(rm: Callable[..., RMConfig]) -> None:
    config = rm()
    assert resolve(config).trainer.default_local_dir == "outputs/megarl/rm"
    plan = batches_of(config)
    assert (plan.model.dp, plan.update.sequences_per_mini_batch) == (2, 8)
    assert batch_table(plan)[1][3:] == ("1 x 8 (4 a dp rank)", "max 128 tokens")
    assert batch_summary(plan) == "8 rankings, each text of at most 64 tokens"


@pytest.mark.parametrize(
    ("command", "override", "note"),
    [
        ("sft", "trainer.early_stop_min_delta=1", "has no effect without trainer.early_stop_patience"),
        ("sft", "data.append_eos=false", "has no effect without data.text_key"),
        ("sft", "data.prompt_key=q", "has no effect without data.response_key"),
        ("rm", "data.normalize_max_samples=5", None),
    ],
)
def test_keys_in_vain_are_told(
    rm: Callable[..., RMConfig],
    sft: Callable[..., SFTConfig],
    command: str,
    override: str,
    note: str | None,
) -> None:
    config = {"rm": rm, "sft": sft}[command](override)
    key = override.partition("=")[0]
    assert notes(config, [key]) == ([] if note is None else [f"{key} {note}"])


def test_keys_that_another_key_leaves_without_effect(
    rm: Callable[..., RMConfig], sft: Callable[..., SFTConfig]
) -> None:
    assert notes(rm("data.normalize=none"), ["data.normalize_max_samples"]) == [
        "data.normalize_max_samples has no effect without data.normalize"
    ]
    (note,) = notes(sft("data.text_key=text"), ["data.text_key", "data.prompt_key"])
    assert note.startswith("data.prompt_key has no effect with data.text_key")
