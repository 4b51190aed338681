"""`override_transformer_config` and `override_ddp_config` against Megatron-core's own data classes."""

import re
from collections.abc import Callable

import pytest

from megarl.config import TrainConfig, check_config
from megarl.config.checks.layout import _megatron_problems
from megarl.config.megatron_options import (
    DDP,
    TRANSFORMER,
    ddp_fields,
    exchange_problems,
    megatron_option_problems,
    transformer_fields,
)
from megarl.config.model_fit import check_model
from megarl.config.schema.models import MegatronConfig
from megarl.models import read_model_config
from megarl.util.packages import shipped


def problems(transformer: dict | None = None, ddp: dict | None = None) -> list[str]:
    config = MegatronConfig(override_transformer_config=transformer, override_ddp_config=ddp)
    return list(megatron_option_problems("megatron", config))


@pytest.mark.parametrize(
    ("table", "fields", "count"), [(TRANSFORMER, transformer_fields, 300), (DDP, ddp_fields, 30)]
)
def test_tables_are_of_fields_that_there_are(table, fields, count: int) -> None:
    found = fields()
    assert len(found) > count
    assert [name for name in table.known if name not in found or table.why_refused(name)] == []
    for pattern in table.refused:
        assert any(re.fullmatch(pattern, name) for name in found), pattern


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_size", 8, "a fact of the model"),
        ("moe_aux_loss_coeff", 0.1, "losses are sums"),
        ("attention_dropout", 0.1, "drops nothing"),
        ("fp8", "hybrid", "use megatron.fp8"),
        ("fp8_param", True, "which weight syncs, checkpoints and exports read"),
        ("moe_router_padding_for_fp8", True, "that their router has not chosen"),
        ("fp8_dot_product_attention", True, "of float8 megarl has linear layers in blocks"),
        ("bf16", True, "use megatron.dtype"),
        ("recompute_granularity", "full", "use the key of this name in megatron"),
        ("sequence_parallel", True, "use the key of this name in megatron"),
        ("tp_comm_overlap", True, "user buffers"),
        ("cuda_graph_impl", "local", "differ in shape from step to step"),
        ("overlap_moe_expert_parallel_comm", True, "Megatron's own schedule"),
        ("no_sync_func", None, "a function"),
        ("moe_permute_fusio", True, "did you mean moe_permute_fusion?"),
        ("moe_permute_fusion", 1, "takes bool"),
        ("attention_backend", "fa3", "one of flash, fused, unfused, auto"),
        ("moe_token_dispatcher_type", "allgather", "one of alltoall, flex"),
        ("flash_attention_version", 5, "takes Optional[Literal[2, 3, 4]]"),
        ("flash_attention_version", 4, "flash-attn-4 turned off"),
        ("cp_comm_type", "a2a+p2p", "megarl packs texts; give p2p, all_gather or a2a"),
        ("cp_comm_type", ["a2a", "a2a+p2p"], "megarl packs texts"),
        ("cp_comm_type", "ring", "one of p2p, all_gather, a2a"),
        ("microbatch_group_size_per_vp_stage", 4, "a multiple of pipeline_model_parallel_size"),
        ("batch_invariant_mode", True, "set_batch_invariant_mode(), which megarl does not call"),
    ],
)
def test_refused_settings(name: str, value: object, words: str) -> None:
    (line,) = problems({name: value})
    assert line.startswith(f"megatron.override_transformer_config.{name}") and words in line


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("overlap_grad_reduce", True, "use the key of this name"),
        ("average_in_collective", True, "divided by nothing"),
        ("use_megatron_fsdp", True, "tensor, pipeline and expert parallelism"),
        ("bucket_size", "many", "takes Optional[int]"),
    ],
)
def test_refused_settings_of_data_parallelism(name: str, value: object, words: str) -> None:
    (line,) = problems(ddp={name: value})
    assert line.startswith(f"megatron.override_ddp_config.{name}") and words in line


def test_what_is_right_is_taken() -> None:
    assert (
        problems(
            {
                "moe_token_dispatcher_type": "flex",
                "attention_backend": "fused",
                "cp_comm_type": "a2a",
                "flash_attention_version": 3,
                "deterministic_mode": True,
            },
            {"bucket_size": 8},
        )
        == []
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recompute_modules": ("mlp",)}, "are of megatron.recompute_granularity=selective, which is null"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": False}, "no rank has weights to gather"),
        ({"overlap_param_gather": True, "overlap_grad_reduce": False}, "needs megatron.overlap_grad_reduce=true"),
        ({"pipeline_model_parallel_layout": "Ett"}, "ends with L"),
        ({"pipeline_model_parallel_layout": "Ett|mL"}, "model.mtp"),
        ({"pipeline_model_parallel_layout": "Et|tL"}, "has 2 parts between bars"),
        (
            {"pipeline_model_parallel_layout": "Et|tL", "pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
            "give one of them",
        ),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_each_other(keys: dict, words: str) -> None:
    (line,) = _megatron_problems("megatron", MegatronConfig(**keys))
    assert words in line


def test_routers_that_are_given_their_choice_are_not_fused(train: Callable[..., TrainConfig]) -> None:
    actor = "actor_rollout_ref.actor"
    config = train(
        f"{actor}.router_replay=rollout",
        f"{actor}.megatron.override_transformer_config.moe_router_fusion=true",
    )
    with pytest.raises(ValueError, match="Transformer Engine's kernel makes its own"):
        check_config(config, data_files=False)


HEADS = {"num_attention_heads": 8, "num_query_groups": 2}


@pytest.mark.parametrize(
    ("heads", "sinks", "kind", "tp", "cp", "words"),
    [
        ({"num_attention_heads": 8}, False, "a2a", 2, 4, ""),
        ({"num_attention_heads": 8}, False, "a2a", 1, 16, "num_attention_heads=8 cannot be divided by 16"),
        (HEADS, False, "a2a", 2, 2, "num_query_groups=2 cannot be divided by 4"),
        (HEADS, False, ["p2p", "p2p", "p2p", "a2a"], 2, 2, "num_query_groups=2 cannot be"),
        (HEADS, False, "all_gather", 2, 2, ""),
        (HEADS, False, "a2a", 2, 1, ""),
        (HEADS, True, "a2a", 2, 2, ""),
        (HEADS, True, "p2p", 2, 2, "has attention sinks with a2a alone; leave it out"),
    ],
)
def test_context_parallel_ranks_that_exchange_heads_have_as_many(
    heads: dict[str, int], sinks: bool, kind: str | list[str], tp: int, cp: int, words: str
) -> None:
    """Transformer Engine's AttnFuncWithCPAndQKVOA2A divides the heads of a tensor parallel rank among context parallel ranks."""
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    megatron = MegatronConfig(**sizes, override_transformer_config={"cp_comm_type": kind})
    found = list(exchange_problems("megatron", megatron, heads, sinks))
    assert bool(found) is bool(words)
    assert all(
        line.startswith("megatron.override_transformer_config.cp_comm_type=") and words in line
        for line in found
    )


def test_the_models_heads_are_given_to_the_check() -> None:
    """Latent attention has no key/value heads that could be cut."""
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 256}
    megatron = MegatronConfig(**sizes, override_transformer_config={"cp_comm_type": "a2a"})
    for model, counts in (("qwen2.5-7b", 2), ("deepseek-v3", 1)):
        facts = read_model_config(str(shipped() / "recipes" / "models" / model))
        with pytest.raises(ValueError, match="cuts heads") as caught:
            check_model(megatron, facts)
        assert str(caught.value).count("cuts heads") == counts
