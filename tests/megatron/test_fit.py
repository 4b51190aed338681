"""The checks of layouts before a start accept what megatron-core accepts, and nothing else.

The oracle is megatron-core itself: its groups, and its model's chunks as each stage builds them, on a process group without
communication (torch's "fake" backend), so that one process can take any rank of any layout.
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config import MegatronConfig, SFTConfig, check_model, load_config
from megarl.config.checks.layout import layout_problems
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.megatron import transformer_config
from megarl.megatron.build import _build_chunk
from megarl.megatron.lora.fp8_base import Float8Base
from megarl.megatron.parallel import destroy_parallel
from megarl.models import ModelConfig, padded_vocab_size
from megarl.models.config import MLAConfig, MoEConfig

DENSE = ModelConfig(
    family="qwen2", architecture="Qwen2ForCausalLM", num_layers=8, hidden_size=24, num_attention_heads=12, num_query_groups=6,
    head_dim=8, ffn_hidden_size=40, vocab_size=64, norm_epsilon=1e-6, rope_theta=10000.0, rope_scaling=None, qkv_bias=True,
    qk_norm=False, tie_word_embeddings=False, max_position_embeddings=64, dtype="float32", hf={},
)  # fmt: skip
MOE = replace(
    DENSE,
    family="deepseek_v3",
    qkv_bias=False,
    ffn_hidden_size=48,
    moe=MoEConfig(6, 2, 20, shared_ffn_hidden_size=24, dense_layers=(0,)),
    mla=MLAConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8),
)
SIZES = {
    "tensor_model_parallel_size": (1, 1, 1, 2, 3, 4),
    "pipeline_model_parallel_size": (1, 2, 2, 3, 4),
    "virtual_pipeline_model_parallel_size": (None, None, 2, 2, 3),
    "context_parallel_size": (1, 1, 1, 2),
    "expert_model_parallel_size": (1, 1, 1, 2, 4),
    "expert_tensor_parallel_size": (1, 1, 1, 2, 3),
    "num_layers_in_first_pipeline_stage": (None, None, None, 1, 2, 4, 6),
    "num_layers_in_last_pipeline_stage": (None, None, None, 1, 2, 4, 6),
}


def accepted(megatron: MegatronConfig, model: ModelConfig, world: int) -> bool:
    """Whether the checks before a start accept the layout."""
    keys = [f"megatron.{name}={getattr(megatron, name)}".replace("None", "null") for name in SIZES]
    required = [
        "data.train_files=f",
        "data.max_length=8",
        "data.train_batch_size=8",
        "model.path=m",
        "optim.lr=1",
    ]
    config = load_config(
        SFTConfig, None, [*required, "max_token_len_per_gpu=8", f"trainer.n_gpus_per_node={world}", *keys]
    )
    if list(layout_problems(config)):
        return False
    try:
        check_model(megatron, model)
    except ValueError:
        return False
    return True


def stages_built(megatron: MegatronConfig, model: ModelConfig, world: int) -> list[list[list[int]]]:
    """The layers, from 0, of each chunk of each stage, as Megatron builds them; raises Megatron's errors."""
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    vpp = megatron.virtual_pipeline_model_parallel_size
    layout = SimpleNamespace(  # it refuses nothing, unlike ParallelLayout
        tp=tp, pp=pp, vpp=vpp, cp=megatron.context_parallel_size, sp=tp > 1, ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size, chunk_layers=None, first_layers=megatron.num_layers_in_first_pipeline_stage,
        last_layers=megatron.num_layers_in_last_pipeline_stage,
    )  # fmt: skip
    stages = []
    for stage in range(pp):
        rank = stage * world // pp
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            parallel_state.initialize_model_parallel(
                tp,
                pp,
                vpp,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            settings = transformer_config.transformer_config(model, layout, torch.float32, None)
            chunks = []
            for chunk in range(vpp or 1):
                built = _build_chunk(
                    model,
                    settings,
                    held=Float8Base({}, (1, 1)),
                    layers=[],  # the layers with indexers; the model has none
                    vocab_size=padded_vocab_size(model, tp),
                    first=stage == chunk == 0,
                    last=(stage, chunk) == (pp - 1, (vpp or 1) - 1),
                    vp_stage=chunk if vpp else None,
                    head="lm",
                )
                chunks.append([layer.layer_number - 1 for layer in built.decoder.layers])
            stages.append(chunks)
        finally:
            destroy_parallel()
    return stages


def has_ends(megatron: MegatronConfig, stages: list[list[list[int]]]) -> bool:
    """Whether the first and the last stage have the configured numbers of layers."""
    first, last = (sum(map(len, stages[at])) for at in (0, -1))
    wanted = (megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage)
    return all(most in (None, found) for most, found in zip(wanted, (first, last), strict=True))


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_a_layout_is_accepted_where_megatron_builds_it(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer_config, "check_layout", lambda config, layout: None)
    draw, outcomes = random.Random(7), {True: 0, False: 0}
    for _ in range(120):
        sizes = {name: draw.choice(choices) for name, choices in SIZES.items()}
        # megarl refuses keys that Megatron ignores; that is not tested here.
        if sizes["pipeline_model_parallel_size"] == 1:
            sizes |= dict.fromkeys(name for name in SIZES if name.startswith("num_layers"))
        if model.moe is None:
            sizes["expert_tensor_parallel_size"] = 1
            sizes["expert_model_parallel_size"] = draw.choice((1,) * 9 + (2,))
        megatron, world = MegatronConfig(**sizes), draw.choice((4, 6, 8, 12, 16, 24))
        ours = accepted(megatron, model, world)
        try:
            built = stages_built(megatron, model, world)
        except (AssertionError, RuntimeError, ValueError, ZeroDivisionError):
            built = None
        # megarl is stricter than Megatron: no rank without a layer, no key/value head on several ranks.
        theirs = built is not None and all(all(chunks) for chunks in built) and has_ends(megatron, built)
        heads = model.mla is not None or model.num_query_groups % megatron.tensor_model_parallel_size == 0
        assert ours == (theirs and heads), f"{sizes} {world} {built}"
        if ours:
            layout = ParallelLayout.from_config(megatron, world)
            assert built == [layers_of(layout, model.num_layers, stage) for stage in range(layout.pp)]
        outcomes[ours] += 1
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.parametrize(("first", "last"), [(2, 6), (2, None), (None, 6), (4, 4)])
def test_uneven_stages_of_an_interleaved_schedule_with_two_stages(
    first: int | None, last: int | None
) -> None:
    """If both numbers are given, megatron-core 0.19.2 divides by the number of stages between the two, which is 0."""
    megatron = MegatronConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    assert accepted(megatron, DENSE, 2)
    built = stages_built(megatron, DENSE, 2)
    layout = ParallelLayout.from_config(megatron, 2)
    assert built == [layers_of(layout, DENSE.num_layers, stage) for stage in range(2)]
