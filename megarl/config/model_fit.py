"""Checks of a run against its models: the layouts of all roles, the options that a model has no use for, the tokens that it can read."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType

from megarl.config.engine_fit import engine_problems
from megarl.config.megatron_options import exchange_problems
from megarl.config.model_facts import ModelFacts, expert_problems, undivided, weight_widths
from megarl.config.pipeline_layout import layer_problems, parse_layout, pipeline_layout_problems
from megarl.config.problems import raise_if_any
from megarl.config.resolve import (
    ENGINE_ROOM,
    drafted_room,
    full_kl_in_loss,
    full_kl_in_reward,
    megatron_sections,
    reference_key,
    served_references,
    top_k_in_loss,
)
from megarl.config.schema.commands import (
    POLICY,
    EvalConfig,
    MegatronConfig,
    RefConfig,
    RolloutConfig,
    TrainConfig,
    rollout_section,
)
from megarl.config.schema.models import FLOAT8_TOKENS
from megarl.config.schema.supervised import TuningConfig

ACTOR_KEY = "actor_rollout_ref.actor.megatron"
ROLLOUT_KEY = "actor_rollout_ref.rollout"
_LENGTHS = "data.max_prompt_length + data.max_response_length"


def check_model(megatron: MegatronConfig, model: ModelFacts, key: str = ACTOR_KEY) -> None:
    """Raise one ValueError that lists all problems if a model does not fit the layout of the section `key`."""
    raise_if_any("the model does not fit its layout", list(_megatron_problems(key, megatron, model)))


def check_rollout_model(
    rollout: RolloutConfig, model: ModelFacts, key: str = ROLLOUT_KEY, *, loads: bool = False
) -> None:
    """`check_model` for a rollout engine, which may also give several ranks the same key/value head.

    Args:
        loads: whether the engine loads the model's folder itself, rather than being sent weights.
    """
    raise_if_any("the model does not fit its layout", list(engine_problems(key, rollout, model, loads)))


def check_models(
    config: TrainConfig | TuningConfig | EvalConfig,
    model: ModelFacts,
    critic: ModelFacts | None = None,
    reward_model: ModelFacts | None = None,
    teachers: Mapping[str, ModelFacts | None] = MappingProxyType({}),
) -> None:
    """`check_model` for every role of a run, and the lengths that the engines are asked for; all problems in one ValueError.

    Args:
        config: resolved.
        model: facts of the model that is trained or evaluated.
        critic: facts of critic.model.path; None: `model`.
        reward_model: facts of reward_model.model.path; None: it is not checked.
        teachers: facts of the references that are other models than the policy, by their roles (`taught_references`).
    """
    raise_if_any(
        "the model does not fit its layout",
        fit_problems(config, model, critic or model, reward_model, teachers),
    )


def fit_problems(
    config: TrainConfig | TuningConfig | EvalConfig,
    model: ModelFacts | None,
    critic: ModelFacts | None = None,
    reward_model: ModelFacts | None = None,
    teachers: Mapping[str, ModelFacts | None] = MappingProxyType({}),
) -> list[str]:
    """The problems that `check_models` raises, a line each, of the models whose facts are given.

    The configuration is resolved, and `check_config` may refuse it: layouts with sizes below 1 are left out.
    """
    megatrons: list[tuple[str, MegatronConfig | None, ModelFacts | None]] = []
    rollout = None if isinstance(config, TuningConfig) else rollout_section(config)
    if isinstance(config, TuningConfig):
        megatrons = [("megatron", config.megatron, model)]
    elif isinstance(config, TrainConfig):
        policy, own = config.actor_rollout_ref, {"critic": critic, "reward_model": reward_model}
        own |= {reference_key(role): facts for role, facts in teachers.items()}
        megatrons = [
            (f"{key}.megatron", section.megatron, own.get(key, model))
            for key, section in megatron_sections(config).items()
            if not (
                isinstance(section, RefConfig)
                and section.megatron == policy.actor.megatron
                and key not in own
            )  # the actor's problem
        ]
    # All problems of all roles are collected: a user who mends one should not have to start again to hear of the next.
    problems: list[str] = []
    for key, megatron, facts in megatrons:
        assert megatron is not None, "resolved"
        if facts is not None and _positive(megatron):
            problems += _megatron_problems(key, megatron, facts)
    for role, facts in teachers.items():
        if isinstance(config, TrainConfig) and facts is not None and model is not None:
            problems += _teacher_problems(config, f"{reference_key(role)}.model.path", model, facts)
    if isinstance(config, TrainConfig):
        problems += _served_problems(config, model, teachers)
    if rollout is not None and model is not None and _positive(rollout[1]):
        problems += engine_problems(*rollout, model, loads=isinstance(config, EvalConfig))
    if isinstance(config, TrainConfig) and model is not None and model.moe is None:
        replayed = config.actor_rollout_ref.actor.router_replay
        if replayed is not None:
            problems.append(
                f"{POLICY}.actor.router_replay={replayed}: the model has no experts; set it to null"
            )
        coef = config.actor_rollout_ref.actor.router_z_loss_coef
        if coef:
            problems.append(
                f"{POLICY}.actor.router_z_loss_coef={coef:g}: the model has no experts; leave it out"
            )
    if isinstance(config, TrainConfig) and model is not None and not (model.moe and model.moe.expert_bias):
        rate = config.actor_rollout_ref.actor.expert_bias_update_rate
        if rate:
            problems.append(
                f"{POLICY}.actor.expert_bias_update_rate={rate:g}: the model's routers have no biases; leave it out"
            )
    if not isinstance(config, EvalConfig):
        problems += _muon_problems(config, model, critic)
    if model is not None:
        problems += _context_problems(config, model)
        problems += _prediction_problems(config, model)
        problems += _indexer_problems(config, model)
    return problems


def _muon_problems(
    config: TrainConfig | TuningConfig, model: ModelFacts | None, critic: ModelFacts | None
) -> Iterator[str]:
    """Experts with biases, which are no matrices: Megatron's distributed optimizer (0.19.2) does not support these next to Muon."""
    if isinstance(config, TuningConfig):
        trained = [("", config.optim, config.megatron, model)]
    else:
        actor = config.actor_rollout_ref.actor
        trained = [(f"{POLICY}.actor.", actor.optim, actor.megatron, model)]
        if config.critic is not None:
            assert config.critic.megatron is not None, "resolved"
            trained.append(("critic.", config.critic.optim, config.critic.megatron, critic))
    for prefix, optim, megatron, facts in trained:
        if optim.optimizer != "muon" or facts is None or facts.family != "gpt_oss":
            continue
        if megatron.expert_model_parallel_size > 1 and megatron.use_distributed_optimizer:
            yield (
                f"{prefix}optim.optimizer=muon: the model's experts have biases, which a distributed optimizer does not support next to Muon "
                f"with {prefix}megatron.expert_model_parallel_size={megatron.expert_model_parallel_size}; set "
                f"{prefix}megatron.use_distributed_optimizer=false"
            )


def _teacher_problems(
    config: TrainConfig, given: str, model: ModelFacts, teacher: ModelFacts
) -> Iterator[str]:
    """A teacher judges every token that the policy may sample; whole distributions are over the same tokens. `given`: the key of its path."""
    known = f"{model.vocab_size:,} tokens (vocab_size)"
    if teacher.vocab_size < model.vocab_size:
        yield f"{given}: the teacher has {teacher.vocab_size:,} of the policy's {known}; give one with all of them"
    whole = full_kl_in_loss(config) or full_kl_in_reward(config) or top_k_in_loss(config)
    if teacher.vocab_size > model.vocab_size and whole:
        yield (
            f"{given}: kl_loss_type=full and top_k, and kl_penalty=full, compare distributions over the same tokens, and the teacher "
            f"has {teacher.vocab_size:,}, the policy {known}; "
            "choose an estimate (low_var_kl, k2)"
        )


def _served_problems(
    config: TrainConfig, model: ModelFacts | None, teachers: Mapping[str, ModelFacts | None]
) -> Iterator[str]:
    """References that engines serve: their models fit the engines, and trajectories their contexts."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    for role, engines in served_references(config).items():
        facts, key = teachers.get(role, model), reference_key(role)
        if facts is None:
            continue
        if _positive(engines):
            yield from engine_problems(f"{key}.engine", engines, facts, loads=True)
        field, most = facts.context_length
        if prompt + response + ENGINE_ROOM > most:
            yield (
                f"{key}.engine: data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response} tokens, and {ENGINE_ROOM} "
                f"that SGLang keeps free, do not fit into the context of its model, {most} ({field} in its config.json); lower one of them"
            )


def _prediction_problems(config: TrainConfig | TuningConfig | EvalConfig, model: ModelFacts) -> Iterator[str]:
    """Multi-token prediction layers are trained only where a model has some that Megatron-core (0.19.2) can build as they are."""
    if isinstance(config, EvalConfig):
        return
    trained = config.model if isinstance(config, TuningConfig) else config.actor_rollout_ref.model
    section = "megatron" if isinstance(config, TuningConfig) else ACTOR_KEY
    megatron = (
        config.megatron if isinstance(config, TuningConfig) else config.actor_rollout_ref.actor.megatron
    )
    key = "model.mtp=train" if isinstance(config, TuningConfig) else f"{POLICY}.model.mtp=train"
    if trained.mtp != "train":
        return
    if not model.num_mtp_layers:
        yield f"{key}: the model has no multi-token prediction layers (num_nextn_predict_layers or mtp_num_hidden_layers in its config.json); leave it out"
        return
    pp, layout = megatron.pipeline_model_parallel_size, megatron.pipeline_model_parallel_layout
    if model.tie_word_embeddings and pp > 1:
        yield (
            f"{key} with tied embeddings and {section}.pipeline_model_parallel_size={pp}: Megatron-core would give the last stage both an "
            "embedding and a head of its own; give 1"
        )
    if model.moe is not None and model.num_layers - 1 in model.moe.dense_layers:
        # Megatron makes these layers like the model's last one; in checkpoints they have experts.
        yield f"{key}: multi-token prediction layers have experts, which the model's last layer has not; give keep"
    if model.delta_net is not None and model.num_layers - 1 in model.delta_net.layers:
        yield f"{key}: multi-token prediction layers have attention, which the model's last layer has not; give keep"
    if (
        layout is not None
        and not list(pipeline_layout_problems(section, megatron))
        and not parse_layout(layout)[-1]
    ):
        yield (
            f"{key}: the last part of {section}.pipeline_model_parallel_layout={layout!r} has no layer (t), and multi-token prediction layers "
            "are made like its last one; give it one"
        )


def _indexer_problems(config: TrainConfig | TuningConfig | EvalConfig, model: ModelFacts) -> Iterator[str]:
    if isinstance(config, EvalConfig):
        return
    trained = config.model if isinstance(config, TuningConfig) else config.actor_rollout_ref.model
    if trained.indexer == "train" and model.indexer is None:
        key = "model.indexer" if isinstance(config, TuningConfig) else f"{POLICY}.model.indexer"
        yield f"{key}=train: {model.family} has no indexers, which choose the keys of sparse attention; leave it out"


def _positive(section: MegatronConfig | RolloutConfig) -> bool:
    """Whether all parallel sizes are at least 1."""
    sizes = [
        getattr(section, member.name) for member in fields(section) if member.name.endswith("parallel_size")
    ]
    return all(size is None or size >= 1 for size in sizes)


def position_warnings(
    config: TrainConfig | TuningConfig, model: ModelFacts, critic: ModelFacts | None = None
) -> list[str]:
    """Warnings about texts with positions that a model was never trained on.

    Megatron refuses no such texts: every family's positions are rotary, for which there is no table of learnt vectors. (An
    engine does, see `check_models`; a reward model's texts are cut to reward_model.max_length, which is checked where it
    is read.)

    Args:
        critic: facts of critic.model.path; None: the same as the policy's, or there is none.
    """
    if isinstance(config, TuningConfig):
        texts = [("model.path", model, f"data.max_length={config.data.max_length}", config.data.max_length)]
    else:
        texts = []
        data, longest = config.data, config.data.max_prompt_length + config.data.max_response_length
        trajectories = f"{_LENGTHS} = {longest}"
        if config.trainer.train_only is not None:  # no engine
            texts.append(("actor_rollout_ref.model.path", model, trajectories, longest))
        if critic is not None:
            texts.append(("critic.model.path", critic, trajectories, longest))
        if data.ptx is not None:
            name = f"data.ptx.max_length={data.ptx.max_length}"
            texts.append(("actor_rollout_ref.model.path", model, name, data.ptx.max_length))
    return [
        f"{what} is more than the {facts.max_position_embeddings} positions that the model of {key} was made for "
        "(max_position_embeddings in its config.json): it reads longer texts, but was not trained on them"
        for key, facts, what, tokens in texts
        if tokens > facts.max_position_embeddings
    ]


def _context_problems(config: TrainConfig | TuningConfig | EvalConfig, model: ModelFacts) -> Iterator[str]:
    """Prompts with their responses (all turns) must fit into the context that SGLang serves for the model."""
    if isinstance(config, TuningConfig):
        return
    if isinstance(config, TrainConfig) and config.trainer.train_only is not None:
        return
    key = "actor_rollout_ref.model.path" if isinstance(config, TrainConfig) else "model.path"
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    _, rollout = rollout_section(config)
    drafted = drafted_room(rollout.speculative.algorithm, rollout.speculative.num_draft_tokens)
    field, most = model.context_length
    if prompt + response + drafted > most:
        drafts = f", and {drafted} that SGLang keeps free for drafts," if drafted else ""
        yield (
            f"data.max_prompt_length={prompt} + data.max_response_length={response} = {prompt + response} tokens{drafts} do not fit into "
            f"the context of the model in {key}, {most} ({field} in its config.json); lower one of them"
        )


def _megatron_problems(key: str, megatron: MegatronConfig, model: ModelFacts) -> Iterator[str]:
    tp = megatron.tensor_model_parallel_size
    sizes = weight_widths(model)
    if model.mla is None:
        sizes["num_query_groups"] = model.num_query_groups
    needing = (model.mla, model.moe, model.delta_net)
    if tp > 1 and megatron.sequence_parallel is False and any(facts is not None for facts in needing):
        yield (
            f"{key}.sequence_parallel=false with tensor_model_parallel_size={tp}: experts, multi-head latent "
            "attention and gated delta nets need it there; leave it out (null: true where that is over 1)"
        )
    yield from undivided(f"{key}.tensor_model_parallel_size", tp, sizes)
    yield from layer_problems(key, megatron, model.num_layers)
    heads = {"num_attention_heads": model.num_attention_heads}
    if model.mla is None:
        heads["num_query_groups"] = model.num_query_groups
    yield from exchange_problems(key, megatron, heads, sinks=model.family == "gpt_oss")
    if model.delta_net is not None:
        yield from _delta_net_problems(key, megatron, model)
    elif megatron.fp8 is not None:
        yield from _float8_problems(key, megatron, model)
    yield from expert_problems(
        model,
        (f"{key}.expert_model_parallel_size", megatron.expert_model_parallel_size),
        (f"{key}.expert_tensor_parallel_size", megatron.expert_tensor_parallel_size),
    )
    if model.family == "gpt_oss":
        yield from _sink_problems(key, megatron, model)


def _sink_problems(key: str, megatron: MegatronConfig, model: ModelFacts) -> Iterator[str]:
    """Of gpt-oss: experts with biases, and attention with sinks, whose heads context parallelism cuts in Transformer Engine 2.18."""
    etp, cp = megatron.expert_tensor_parallel_size, megatron.context_parallel_size
    if etp > 1:
        yield (
            f"{key}.expert_tensor_parallel_size={etp}: each rank that has a part of an expert would add the bias of its output; set it to 1, "
            "and expert_model_parallel_size higher"
        )
    cut = megatron.tensor_model_parallel_size * cp
    if cp > 1 and model.num_query_groups % cut:
        yield (
            f"{key}.context_parallel_size={cp}: with attention sinks it cuts heads, and num_query_groups={model.num_query_groups} cannot be "
            f"divided by {cut}, it times tensor_model_parallel_size"
        )
    if megatron.fp8 is not None:
        yield f"{key}.fp8={megatron.fp8}: training in float8 was not executed for experts with biases; set it to null"


def _delta_net_problems(key: str, megatron: MegatronConfig, model: ModelFacts) -> Iterator[str]:
    """Each context parallel rank has a part of a delta net's heads (megatron-core 0.19.2)."""
    tp, cp, net = megatron.tensor_model_parallel_size, megatron.context_parallel_size, model.delta_net
    assert net is not None
    if cp > 1 and net.key_heads % tp == 0 and net.key_heads % (tp * cp):
        yield (
            f"{key}.context_parallel_size={cp} x tensor_model_parallel_size={tp} does not divide linear_num_key_heads={net.key_heads}, which both "
            "cut"
        )
    for name in ("fp8", "fsdp"):
        if getattr(megatron, name) is not None:
            yield f"{key}.{name}={getattr(megatron, name)}: not supported with gated delta nets ({model.family}); leave it out"


def _float8_problems(key: str, megatron: MegatronConfig, model: ModelFacts) -> Iterator[str]:
    """cuBLAS's products in float8 take rows of multiples of 16; Megatron-core 0.19.2 has layers in bfloat16 on one stage at each end."""
    tp, etp, moe = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size, model.moe
    widths = [
        (name, size, tp) for name, size in weight_widths(model).items() if name.endswith("ffn_hidden_size")
    ]
    if moe is not None:
        widths.append(("the experts' ffn_hidden_size", moe.ffn_hidden_size, etp))
    for name, size, ranks in widths:
        if size % ranks == 0 and size // ranks % FLOAT8_TOKENS:
            yield (
                f"{key}.fp8={megatron.fp8}: each of {ranks} ranks has {size // ranks} of {name}={size}, no multiple of {FLOAT8_TOKENS}, which products "
                "in float8 need; share it among fewer ranks"
            )
    most = model.num_layers // megatron.pipeline_model_parallel_size
    for end in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if getattr(megatron, end) > most:
            yield f"{key}.{end}={getattr(megatron, end)} is more than the {most} layers of a pipeline stage, which is the most"
    both = megatron.num_layers_at_start_in_bf16 + megatron.num_layers_at_end_in_bf16
    if both >= model.num_layers:
        yield f"{key}.fp8={megatron.fp8}: {both} layers in bfloat16 leave none of num_layers={model.num_layers}; set it to null"
