from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import megarl.config
from megarl.config import (
    EvalConfig,
    MegatronConfig,
    SFTConfig,
    TrainConfig,
    check_model,
    fit_problems,
    position_warnings,
    resolve,
)
from tests.config.conftest import lines_of, problems
from tests.config.facts import GPT_OSS, MLA, MOE, NET, SPARSE, Facts

ACTOR = "actor_rollout_ref.actor.megatron"


def check_models(config: Any, *models: Facts, **critic: Facts) -> None:
    megarl.config.check_models(resolve(config), *models, **critic)


def fit(megatron: MegatronConfig, facts: Facts, **key: str) -> None:
    check_model(megatron, facts, **key)


def test_what_divides_passes() -> None:
    for tp in (1, 2, 4, 8):
        fit(MegatronConfig(tensor_model_parallel_size=tp), Facts())
    fit(MegatronConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), Facts())


def test_tensor_parallel_names_the_key_the_size_and_what_is_possible() -> None:
    lines = lines_of(lambda: fit(MegatronConfig(tensor_model_parallel_size=3), Facts(ffn_hidden_size=96)))
    assert lines == [
        f"{ACTOR}.tensor_model_parallel_size=3 does not divide num_attention_heads=8; possible: 1,2,4,8",
        f"{ACTOR}.tensor_model_parallel_size=3 does not divide num_query_groups=8; possible: 1,2,4,8",
    ]


def test_megatron_shares_no_key_value_head() -> None:
    lines = lines_of(lambda: fit(MegatronConfig(tensor_model_parallel_size=4), Facts(num_query_groups=2)))
    assert lines == [
        f"{ACTOR}.tensor_model_parallel_size=4 does not divide num_query_groups=2; possible: 1,2"
    ]


def test_experts_divide() -> None:
    fit(MegatronConfig(expert_model_parallel_size=4, expert_tensor_parallel_size=2), Facts(moe=MOE))
    lines = lines_of(
        lambda: fit(
            MegatronConfig(expert_model_parallel_size=3, expert_tensor_parallel_size=5), Facts(moe=MOE)
        )
    )
    assert lines == [
        f"{ACTOR}.expert_model_parallel_size=3 does not divide num_experts=8; possible: 1,2,4,8",
        f"{ACTOR}.expert_tensor_parallel_size=5 does not divide the experts' ffn_hidden_size=48; "
        "possible: 1,2,3,4,6,8,12,16,24,48",
    ]
    assert lines_of(lambda: fit(MegatronConfig(expert_model_parallel_size=2), Facts())) == [
        f"{ACTOR}.expert_model_parallel_size=2: the model has no experts; leave it out"
    ]


def test_latent_attention_has_no_key_value_heads_but_needs_sequence_parallel() -> None:
    facts = Facts(num_query_groups=1, mla=MLA)
    fit(MegatronConfig(tensor_model_parallel_size=4), facts)
    (line,) = lines_of(
        lambda: fit(MegatronConfig(tensor_model_parallel_size=4, sequence_parallel=False), facts)
    )
    assert line.startswith(f"{ACTOR}.sequence_parallel=false with tensor_model_parallel_size=4: ")


def test_gated_delta_nets_give_their_heads_to_tensor_and_context_parallel_ranks() -> None:
    facts = Facts(delta_net=NET, num_query_groups=4, moe=MOE)
    fit(MegatronConfig(tensor_model_parallel_size=2, context_parallel_size=4), facts)
    (line,) = lines_of(
        lambda: fit(MegatronConfig(tensor_model_parallel_size=4, context_parallel_size=4), facts)
    )
    assert line == (
        f"{ACTOR}.context_parallel_size=4 x tensor_model_parallel_size=4 does not divide linear_num_key_heads=8, which both cut"
    )
    odd = replace(facts, delta_net=replace(NET, key_heads=3))
    (line,) = lines_of(lambda: fit(MegatronConfig(tensor_model_parallel_size=2), odd))
    assert line.startswith(f"{ACTOR}.tensor_model_parallel_size=2 does not divide linear_num_key_heads=3")


def test_ranks_that_share_a_delta_nets_heads_need_sequence_parallelism() -> None:
    shared = MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=False)
    (line,) = lines_of(lambda: fit(shared, Facts(delta_net=NET)))
    assert line.startswith(f"{ACTOR}.sequence_parallel=false with tensor_model_parallel_size=2: ")
    fit(replace(shared, sequence_parallel=None), Facts(delta_net=NET))


@pytest.mark.parametrize("keys", [{"fp8": "hybrid"}, {"fsdp": "optim_grads"}], ids=str)
def test_what_gated_delta_nets_are_not_trained_with(keys: dict[str, str]) -> None:
    ((name, value),) = keys.items()
    (line,) = lines_of(
        lambda: fit(MegatronConfig(**keys), Facts(delta_net=NET, moe=MOE, family="qwen3_next"))
    )
    assert line == f"{ACTOR}.{name}={value}: not supported with gated delta nets (qwen3_next); leave it out"
    fit(MegatronConfig(), Facts(delta_net=NET, moe=MOE))


def test_parts_of_products_in_float8_are_multiples_of_16() -> None:
    """64 / 8 = 8 and 48 / 2 = 24 are no multiples of 16; without float8 these sizes fit."""
    sizes = {"tensor_model_parallel_size": 8, "expert_tensor_parallel_size": 2}
    check_model(MegatronConfig(**sizes), Facts(moe=MOE), "megatron")
    lines = lines_of(lambda: check_model(MegatronConfig(**sizes, fp8="e4m3"), Facts(moe=MOE), "megatron"))
    assert len(lines) == 3 and all(line.startswith("megatron.fp8=e4m3: each of ") for line in lines)
    assert "8 ranks has 8 of ffn_hidden_size=64" in lines[0] and "2 ranks has 24 of the experts'" in lines[2]
    check_model(MegatronConfig(tensor_model_parallel_size=2, fp8="e4m3"), Facts(), "megatron")


def test_layers_in_bfloat16_leave_some_in_float8() -> None:
    """The model has four layers; Megatron-core allows at most the layers of one stage in bfloat16 at each end."""

    def check(start: int, end: int, stages: int) -> None:
        layers = {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
        check_model(
            MegatronConfig(**layers, fp8="hybrid", pipeline_model_parallel_size=stages), Facts(), "megatron"
        )

    check(1, 2, 2)
    (line,) = lines_of(lambda: check(1, 3, 1))
    assert line == "megatron.fp8=hybrid: 4 layers in bfloat16 leave none of num_layers=4; set it to null"
    (line,) = lines_of(lambda: check(3, 0, 2))
    assert line.startswith(
        "megatron.num_layers_at_start_in_bf16=3 is more than the 2 layers of a pipeline stage"
    )


def test_layouts_of_gpt_oss() -> None:
    """A layout must not add the biases of experts more than once; context parallelism cuts heads."""

    def check(**sizes: Any) -> list[str]:
        return lines_of(lambda: check_model(MegatronConfig(**sizes), GPT_OSS, "megatron"))

    check_model(MegatronConfig(tensor_model_parallel_size=2, context_parallel_size=2), GPT_OSS)
    (line,) = check(expert_tensor_parallel_size=2)
    assert line.startswith("megatron.expert_tensor_parallel_size=2: each rank that has a part of an expert")
    (line,) = check(tensor_model_parallel_size=4, context_parallel_size=4)
    assert line.startswith("megatron.context_parallel_size=4: with attention sinks it cuts heads")
    (line,) = check(fp8="hybrid")
    assert line.startswith("megatron.fp8=hybrid: training in float8 was not executed for experts with biases")


def test_muon_and_biases_of_experts(train: Callable[..., TrainConfig], sft: Callable[..., SFTConfig]) -> None:
    muon, split = "optim.optimizer=muon", "megatron.expert_model_parallel_size=2"
    policy = "actor_rollout_ref.actor"
    check_models(sft(muon), GPT_OSS)
    check_models(sft(muon, split, "megatron.use_distributed_optimizer=false"), GPT_OSS)
    (line,) = lines_of(lambda: check_models(sft(muon, split), GPT_OSS))
    assert line.startswith("optim.optimizer=muon: the model's experts have biases")
    assert line.endswith("set megatron.use_distributed_optimizer=false")
    own = [f"{policy}.{muon}", f"{policy}.{split}"]
    lines = lines_of(lambda: check_models(train(*own), GPT_OSS))
    assert any(f"set {policy}.megatron.use_distributed_optimizer=false" in line for line in lines)


def test_replayed_routing_needs_experts(train: Callable[..., TrainConfig]) -> None:
    for mode in ("rollout", "trainer"):
        config = train(f"actor_rollout_ref.actor.router_replay={mode}")
        found = lines_of(lambda config=config: check_models(config, Facts()))
        assert found == [
            f"actor_rollout_ref.actor.router_replay={mode}: the model has no experts; set it to null"
        ]
        check_models(config, Facts(moe=MOE))


def test_biases_that_move_need_routers_with_biases(train: Callable[..., TrainConfig]) -> None:
    key = "actor_rollout_ref.actor.expert_bias_update_rate=0.001"
    for model in (Facts(), Facts(moe=MOE)):
        found = lines_of(lambda model=model: check_models(train(key), model))
        assert found == [f"{key}: the model's routers have no biases; leave it out"]
    check_models(train(key), Facts(moe=replace(MOE, expert_bias=True)))
    lora = "actor_rollout_ref.model.lora.rank=4"
    (line,) = problems(train(key, lora))
    assert line.startswith(f"{key} with {lora}: all but the adapters is frozen")


def test_indexers_are_trained_where_there_are_some(
    train: Callable[..., TrainConfig], sft: Callable[..., SFTConfig]
) -> None:
    for config, key in (
        (train("actor_rollout_ref.model.indexer=train"), "actor_rollout_ref.model.indexer=train"),
        (sft("model.indexer=train"), "model.indexer=train"),
    ):
        found = lines_of(lambda config=config: check_models(config, Facts(moe=MOE)))
        assert found == [
            f"{key}: qwen3_moe has no indexers, which choose the keys of sparse attention; leave it out"
        ]
        check_models(config, replace(Facts(moe=MOE), indexer=SPARSE.indexer))


def test_a_router_z_loss_needs_routers_that_are_trained(train: Callable[..., TrainConfig]) -> None:
    key = "actor_rollout_ref.actor.router_z_loss_coef=0.001"
    found = lines_of(lambda: check_models(train(key), Facts()))
    assert found == [f"{key}: the model has no experts; leave it out"]
    check_models(train(key), Facts(moe=MOE))
    lora = "actor_rollout_ref.model.lora.rank=4"
    (line,) = problems(train(key, lora))
    assert line.startswith(f"{key} with {lora}: all but the adapters is frozen")


MTP = "actor_rollout_ref.model.mtp=train"


@pytest.mark.parametrize(
    ("facts", "overrides", "problem"),
    [
        ({"num_mtp_layers": 0}, [], "the model has no multi-token prediction layers"),
        ({"moe": replace(MOE, dense_layers=(0, 3))}, [], "which the model's last layer has not; give keep"),
        (
            {"delta_net": replace(NET, layers=(1, 2, 3))},
            [],
            "attention, which the model's last layer has not",
        ),
        ({"tie_word_embeddings": True}, [f"{ACTOR}.pipeline_model_parallel_size=2"], "give 1"),
        (
            {},
            [f"{ACTOR}.pipeline_model_parallel_size=2", f"{ACTOR}.pipeline_model_parallel_layout=Etttt|L"],
            "has no layer (t)",
        ),
    ],
)
def test_layers_that_cannot_be_trained(
    train: Callable[..., TrainConfig], facts: dict[str, Any], overrides: list[str], problem: str
) -> None:
    model = Facts(**{"num_mtp_layers": 1, "moe": MOE, **facts})
    config = train(MTP, *overrides)
    (line,) = lines_of(lambda: check_models(config, model, critic=Facts()))
    assert line.startswith(MTP) and problem in line
    check_models(train(*overrides), model, critic=Facts())  # other models are not checked
    check_models(train(MTP), Facts(num_mtp_layers=1, moe=MOE), critic=Facts())


def test_a_teacher_is_checked_by_its_own_facts(train: Callable[..., TrainConfig]) -> None:
    keys = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.ref.model.path=teacher")
    full = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full")
    check_models(train(*keys, *full), Facts(), Facts(), teachers={"ref": Facts(num_layers=2)})
    (line,) = lines_of(
        lambda: check_models(train(*keys), Facts(), Facts(), teachers={"ref": Facts(num_layers=3)})
    )
    assert line.startswith("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2")
    more = Facts(vocab_size=Facts().vocab_size + 64)
    check_models(train(*keys), Facts(), Facts(), teachers={"ref": more})
    (line,) = lines_of(lambda: check_models(train(*keys, *full), Facts(), Facts(), teachers={"ref": more}))
    assert "compare distributions over the same tokens" in line
    (line,) = lines_of(lambda: check_models(train(*keys), more, more, teachers={"ref": Facts()}))
    assert line.startswith("actor_rollout_ref.ref.model.path: the teacher has ")


def test_a_teacher_that_engines_serve_fits_them_and_its_context(train: Callable[..., TrainConfig]) -> None:
    pools = "resource_pools={global: {n_gpus_per_node: 4}, far: {n_gpus_per_node: 4}}"
    served = "actor_rollout_ref.ref={model: {path: teacher}, resource_pool: far, engine: {tensor_model_parallel_size: 4}}"
    config = train("algorithm.use_kl_in_reward=true", pools, served)
    check_models(config, Facts(), Facts(), teachers={"ref": Facts(num_layers=3)})  # no pipeline stages
    few = Facts(num_attention_heads=2, num_query_groups=2)
    found = lines_of(lambda: check_models(config, Facts(), Facts(), teachers={"ref": few}))
    assert found and all(line.startswith("actor_rollout_ref.ref.engine.tensor_model") for line in found)
    longest = config.data.max_prompt_length + config.data.max_response_length
    short = Facts(context_length=("max_position_embeddings", longest + 6))
    (line,) = lines_of(lambda: check_models(config, Facts(), Facts(), teachers={"ref": short}))
    assert line.startswith("actor_rollout_ref.ref.engine: data.max_prompt_length") and "7 that SGLang" in line
    enough = Facts(context_length=("max_position_embeddings", longest + 7))
    check_models(config, Facts(), Facts(), teachers={"ref": enough})


def test_each_of_several_teachers_is_checked_by_its_own_facts(train: Callable[..., TrainConfig]) -> None:
    keys = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.teachers.math.model.path=math")
    own = "actor_rollout_ref.teachers.code={model: {path: code}, megatron: {tensor_model_parallel_size: 4}}"
    config = train(*keys, own)
    code, math = "teacher_code", "teacher_math"
    check_models(config, Facts(), Facts(), teachers={math: Facts(), code: Facts()})
    few = Facts(num_attention_heads=2, num_query_groups=2)
    found = lines_of(lambda: check_models(config, Facts(), Facts(), teachers={math: Facts(), code: few}))
    assert found and all(line.startswith("actor_rollout_ref.teachers.code.megatron.") for line in found)
    fewer = {math: Facts(vocab_size=8), code: Facts()}
    found = lines_of(lambda: check_models(config, Facts(), Facts(), teachers=fewer))
    assert any(
        line.startswith("actor_rollout_ref.teachers.math.model.path: the teacher has 8 of the policy's")
        for line in found
    )


def test_every_role_of_a_run_is_checked(train: Callable[..., TrainConfig]) -> None:
    check_models(train(), Facts())
    config = train("actor_rollout_ref.ref.megatron={tensor_model_parallel_size: 4}")
    check_models(config, Facts(num_query_groups=2))  # the reference is not used
    lines = lines_of(
        lambda: check_models(
            train(
                "actor_rollout_ref.ref.megatron={tensor_model_parallel_size: 4}",
                "algorithm.use_kl_in_reward=true",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
            ),
            Facts(num_query_groups=2),
            Facts(num_layers=3),
        )
    )
    assert [line.split("=")[0] for line in lines] == [
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
        "critic.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ]


def positions(number: int) -> Facts:
    return Facts(max_position_embeddings=number, context_length=("max_position_embeddings", number))


LENGTHS = ("data.max_prompt_length=100", "data.max_response_length=29")


@pytest.mark.parametrize("multi_turn", [False, True])
def test_prompt_and_response_must_fit_into_the_models_context(
    train: Callable[..., TrainConfig], evaluation: Callable[..., EvalConfig], multi_turn: bool
) -> None:
    turns = (
        ["rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculator"] if multi_turn else []
    )
    configs = {
        "actor_rollout_ref.model.path": train(*LENGTHS, *(f"actor_rollout_ref.{key}" for key in turns)),
        "model.path": evaluation(*LENGTHS, *turns),
    }
    for key, config in configs.items():
        check_models(config, positions(129))
        assert lines_of(partial(check_models, config, positions(128))) == [
            "data.max_prompt_length=100 + data.max_response_length=29 = 129 tokens do not fit into the context of the model in "
            f"{key}, 128 (max_position_embeddings in its config.json); lower one of them"
        ]


@pytest.mark.parametrize(("algorithm", "room"), [("mtp", 5), ("eagle3", 5), ("ngram", 0)])
def test_the_context_has_room_for_drafts_of_a_model(
    train: Callable[..., TrainConfig], algorithm: str, room: int
) -> None:
    """SGLang reserves room for a pass's drafts in each request, and refuses prompts whose responses would leave too little of it."""
    speculative = f"{{algorithm: {algorithm}, num_draft_tokens: 4, draft_path: draft}}"
    config = train(*LENGTHS, f"actor_rollout_ref.rollout.speculative={speculative}")
    short, enough = (replace(positions(129 + more), num_mtp_layers=1) for more in (room - 1, room))
    assert not [line for line in fit_problems(config, enough) if "the context of" in line]
    (line,) = [line for line in fit_problems(config, short) if "the context of" in line]
    assert ("= 129 tokens, and 5 that SGLang keeps free for drafts, do not fit" in line) is bool(room)


def test_long_texts_are_refused_by_engines_alone(
    train: Callable[..., TrainConfig], sft: Callable[..., SFTConfig]
) -> None:
    """Megatron computes any rotary position, so only a warning says that the model was not trained on such positions."""
    assert position_warnings(train(*LENGTHS), positions(999), positions(129)) == []
    config = train(*LENGTHS)
    check_models(config, positions(999), critic=positions(128))
    (warning,) = position_warnings(config, positions(999), positions(128))
    assert warning.startswith(
        "data.max_prompt_length + data.max_response_length = 129 is more than the 128 positions that the model of "
        "critic.model.path was made for"
    )
    config = train(*LENGTHS, "trainer.train_only=dump")
    check_models(config, positions(128))
    (warning,) = position_warnings(config, positions(128), positions(129))
    assert "the model of actor_rollout_ref.model.path" in warning
    config = sft("data.max_length=129")
    check_models(config, positions(128))
    (warning,) = position_warnings(config, positions(128))
    assert warning.startswith(
        "data.max_length=129 is more than the 128 positions that the model of model.path was made for"
    )
    assert position_warnings(config, positions(129)) == []


def test_sft_and_evaluation(sft: Callable[..., SFTConfig], evaluation: Callable[..., EvalConfig]) -> None:
    check_models(sft(), Facts())
    check_models(evaluation(), Facts())
    (line,) = lines_of(lambda: check_models(sft("megatron.pipeline_model_parallel_size=3"), Facts()))
    assert line.startswith("megatron.pipeline_model_parallel_size=3 does not divide num_layers=4")
    (line,) = lines_of(lambda: check_models(evaluation("rollout.tensor_model_parallel_size=5"), Facts()))
    assert line.startswith("rollout.tensor_model_parallel_size=5 does not divide num_attention_heads=8")
