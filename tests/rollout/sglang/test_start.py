"""Checks before SGLang is started."""

import logging
import os
import threading
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO

import pytest
import torch
from transformers import Qwen2Config

from megarl.cli.arguments import make_parser
from megarl.config.engine_options import TABLE
from megarl.gateway import serve
from megarl.rollout.engine import EngineConfig, SpeculationConfig
from megarl.rollout.sglang import start as sglang_start
from megarl.rollout.sglang.start import check_version, config_overrides, read_model, server_arguments


@pytest.fixture
def logged():
    """The log messages as a user sees them."""
    handler = logging.StreamHandler(StringIO())
    logging.getLogger().addHandler(handler)
    yield handler.stream
    logging.getLogger().removeHandler(handler)


def test_an_unknown_version_of_sglang_is_refused(monkeypatch, logged):
    check_version(allow_unknown=False)
    monkeypatch.setattr(sglang_start, "version", lambda name: "0.9.9")
    with pytest.raises(
        ValueError, match=r"sglang 0\.9\.9 .*known to work with 0\.5\.21.*allow_unknown_version"
    ):
        check_version(allow_unknown=False)
    check_version(allow_unknown=True)
    assert "sglang 0.9.9 is installed" in logged.getvalue()


GPU = EngineConfig("/model", device="cuda", dtype="bfloat16", context_length=64)
QWEN = {"max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("given", "drafts", "context"),
    [
        (64, None, 71),
        (64, SpeculationConfig("ngram", 4), 71),
        (64, SpeculationConfig("mtp", 4), 76),
        (120, SpeculationConfig("mtp", 4), 128),  # limited by the model's own context
        (128, None, 128),
        (None, None, None),
    ],
)
def test_sglangs_context_has_room_for_tokens_that_it_keeps_free(given, drafts, context):
    config = replace(GPU, context_length=given, speculation=drafts)
    assert server_arguments(config, QWEN)["context_length"] == context


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), None), ((10, 0), "triton"), ((12, 0), "triton")]
)
def test_scales_in_float8_stay_in_float32_on_every_gpu(monkeypatch, capability, backend):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = replace(GPU, fp8_block=(128, 128))
    assert server_arguments(config, QWEN).get("fp8_gemm_runner_backend") == backend
    assert "fp8_gemm_runner_backend" not in server_arguments(GPU, QWEN)


def test_kernels_of_experts_and_the_type_of_the_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert server_arguments(GPU, QWEN)["moe_runner_backend"] == "triton"
    assert not {"kv_cache_dtype", "moe_a2a_backend"} & server_arguments(GPU, QWEN).keys()
    fp8 = replace(GPU, fp8_block=(128, 128), moe_runner_backend="deep_gemm", kv_cache_dtype="fp8_e5m2")
    told = server_arguments(fp8, QWEN)
    assert (told["moe_runner_backend"], told["kv_cache_dtype"]) == ("deep_gemm", "fp8_e5m2")
    told = server_arguments(replace(GPU, moe_a2a_backend="deepep"), QWEN)
    assert (told["moe_runner_backend"], told["moe_a2a_backend"]) == ("deep_gemm", "deepep")


def test_deepgemms_scales_on_blackwell_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    config = replace(GPU, fp8_block=(128, 128))
    assert server_arguments(config, QWEN)["moe_runner_backend"] == "triton"
    for keys in ({"moe_runner_backend": "deep_gemm"}, {"moe_a2a_backend": "deepep"}):
        with pytest.raises(
            ValueError, match=r"on Blackwell DeepGEMM packs the scales of experts into integers \(UE8M0\)"
        ):
            server_arguments(replace(config, **keys), QWEN)
        assert (
            server_arguments(replace(GPU, **keys), QWEN)["moe_runner_backend"] == "deep_gemm"
        )  # bfloat16 has no scales


def test_further_arguments_are_sglangs(logged):
    given = {"chunked_prefill_size": 512, "schedule_policy": "lpm", "gc_threshold": [1, 2]}
    told = server_arguments(replace(GPU, arguments=given), QWEN)
    assert {name: told[name] for name in given} == given
    assert "rollout.engine_kwargs: gc_threshold: passed on" in logged.getvalue()
    assert "chunked" not in logged.getvalue()
    with pytest.raises(
        ValueError, match=r"rollout\.engine_kwargs\.tp_size: use rollout\.tensor_model_parallel_size"
    ):
        server_arguments(replace(GPU, arguments={"tp_size": 2}), QWEN)


def test_what_megarl_sets_is_in_the_table_of_what_is_refused(monkeypatch):
    """Except for arguments that megarl sets only on a CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    config = replace(
        GPU, fp8_block=(128, 128), kv_cache_dtype="fp8_e4m3", nodes=2, tensor_parallel_size=2, address="a:1"
    )
    told = server_arguments(config, QWEN)
    assert [name for name in told if TABLE.why_refused(name) is None] == []
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    with pytest.raises(
        ValueError, match="megarl itself sets attention_backend on a cpu device; leave it out"
    ):
        server_arguments(
            EngineConfig("/model", arguments={"attention_backend": "triton"}), {"max_position_embeddings": 8}
        )


@pytest.mark.parametrize(
    "key", [{"kv_cache_dtype": "fp8_e4m3"}, {"moe_runner_backend": "triton"}, {"moe_a2a_backend": "deepep"}]
)
def test_options_of_gpus_are_refused_on_a_cpu(key):
    with pytest.raises(ValueError, match=rf"rollout\.{next(iter(key))}=.*: for engines on GPUs"):
        server_arguments(EngineConfig("/model", **key), {"max_position_embeddings": 8})


GPT_OSS = {"model_type": "gpt_oss", "max_position_embeddings": 8}


def test_engines_of_gpt_oss_have_one_cache_and_kernels_with_sinks_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    told = server_arguments(GPU, GPT_OSS)
    assert told["disable_hybrid_swa_memory"] and "attention_backend" not in told
    assert config_overrides(GPU, GPT_OSS) == {"dtype": None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert server_arguments(GPU, GPT_OSS)["attention_backend"] == "triton"
    assert not {"disable_hybrid_swa_memory", "attention_backend"} & server_arguments(GPU, QWEN).keys()
    with pytest.raises(ValueError, match=r"engine_kwargs: trtllm_mha has gpt-oss's sinks in float32"):
        server_arguments(replace(GPU, arguments={"decode_attention_backend": "trtllm_mha"}), GPT_OSS)
    with pytest.raises(ValueError, match=r"rollout\.dtype=float32: SGLang has gpt-oss's sinks in bfloat16"):
        server_arguments(replace(GPU, dtype="float32"), GPT_OSS)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert server_arguments(EngineConfig("/model"), GPT_OSS)["attention_backend"] == "intel_amx"


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), None), ((10, 0), "triton"), ((12, 0), "triton")]
)
def test_deterministic_engines_of_latent_attention_have_tritons_on_blackwell(
    monkeypatch, capability, backend
):
    """SGLang refuses its own choice for DeepSeek-V3 there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config, model = replace(GPU, deterministic=True), {**QWEN, "model_type": "deepseek_v3"}
    assert server_arguments(config, model).get("attention_backend") == backend
    assert "attention_backend" not in server_arguments(GPU, model)
    assert "attention_backend" not in server_arguments(config, QWEN)
    given = {"attention_backend": "fa4"}
    assert server_arguments(replace(config, arguments=given), model)["attention_backend"] == "fa4"


def test_engines_do_not_load_what_sglang_cannot_load(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    packed = {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4"}}
    assert config_overrides(replace(GPU, load_format="dummy"), packed)["quantization_config"] is None
    with pytest.raises(ValueError, match=r"would serve it in MXFP4.*megarl convert writes it in bfloat16"):
        server_arguments(replace(GPU, load_format="auto"), packed)
    shared = replace(GPU, load_format="auto", expert_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"rollout\.expert_parallel_size=2: SGLang .* cannot load gpt-oss's files"
    ):
        server_arguments(shared, GPT_OSS)


def told_of_drafting(config, **keys):
    told = server_arguments(
        replace(config, speculation=SpeculationConfig(**keys)), {"max_position_embeddings": 8}
    )
    return {
        name: value
        for name, value in told.items()
        if name.startswith("speculative") or name.startswith("enable_draft")
    }


def test_arguments_of_drafting(tmp_path, monkeypatch):
    """Drafts are chains of tokens; a draft model's weights come from a folder, and are kept while memory is released."""
    monkeypatch.setattr(sglang_start.shutil, "which", lambda name: name)
    assert not [name for name in server_arguments(GPU, QWEN) if name.startswith("speculative")]
    chains = {"speculative_ngram_min_bfs_breadth": 1, "speculative_ngram_max_bfs_breadth": 1}
    ngram = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, **chains}
    assert told_of_drafting(GPU, algorithm="ngram", num_draft_tokens=3) == ngram
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    cpu = EngineConfig("/model", max_num_seqs=4)
    nodes = {"speculative_ngram_capacity": sglang_start.CPU_NGRAM_NODES}
    assert told_of_drafting(cpu, algorithm="ngram", num_draft_tokens=3) == ngram | nodes
    given = {"speculative_ngram_capacity": 7}
    assert (
        told_of_drafting(replace(cpu, arguments=given), algorithm="ngram", num_draft_tokens=3)
        == ngram | given
    )
    drafting = SpeculationConfig("ngram", 3)
    told = server_arguments(replace(cpu, speculation=drafting), {"max_position_embeddings": 8})
    assert told["max_total_tokens"] == 4 * (8 + 2 * 4)  # room for two passes of each request

    steps = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_draft_load_format": "auto"}
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4, **steps}
    keeps = {"enable_draft_weights_cpu_backup": True}
    released = replace(GPU, enable_memory_saver=True)
    own = {"speculative_draft_model_path": GPU.model_path}
    assert told_of_drafting(released, algorithm="mtp", num_draft_tokens=3) == eagle | own | keeps
    keys = {"algorithm": "eagle3", "num_draft_tokens": 3, "draft_path": str(tmp_path)}
    with pytest.raises(ValueError, match=r"draft_path: .*config\.json does not exist"):
        told_of_drafting(GPU, **keys)
    (tmp_path / "config.json").write_text("{}")
    found = told_of_drafting(GPU, **keys)
    expected = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(tmp_path)}
    assert found == eagle | expected | {"enable_draft_weights_cpu_backup": False}
    for names in (ngram, found):
        assert [name for name in names if TABLE.why_refused(name) is None] == []


def test_without_a_compiler_there_are_no_n_grams(monkeypatch):
    monkeypatch.setattr(
        sglang_start.shutil, "which", lambda name: None if name == "ninja" else f"/usr/bin/{name}"
    )
    with pytest.raises(
        ValueError, match=r"algorithm=ngram: SGLang compiles its tree of n-grams, and there is no ninja here"
    ):
        told_of_drafting(GPU, algorithm="ngram", num_draft_tokens=3)
    told_of_drafting(GPU, algorithm="mtp", num_draft_tokens=3)


def test_drafts_with_weights_are_refused_on_a_cpu():
    for algorithm in ("mtp", "eagle3"):
        with pytest.raises(
            ValueError, match=rf"rollout\.speculative\.algorithm={algorithm}: for engines on GPUs"
        ):
            told_of_drafting(EngineConfig("/model"), algorithm=algorithm, num_draft_tokens=3)


def test_what_a_start_on_gpus_is_busy_with_is_in_the_log():
    assert server_arguments(GPU, QWEN)["log_level"] == "warning"


def test_a_start_on_gpus_changes_the_environment_that_schedulers_inherit(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    seen = []

    def start(arguments, timeout):
        seen.append((dict(os.environ), timeout))
        raise ValueError("not here")

    monkeypatch.setattr(sglang_start, "start_sglang", start)
    with pytest.raises(ValueError, match="not here"):
        sglang_start.start_owned(replace(GPU, start_timeout=7.0), QWEN, threading.Event())
    ((environment, timeout),) = seen
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment and timeout == 7.0


@pytest.mark.parametrize(("tp", "fits"), [(2, True), (4, False)])
def test_an_engine_that_loads_a_folder_in_float8_does_not_cut_its_blocks(tmp_path, tp, fits):
    """`megarl serve` starts such an engine. An engine that is sent weights holds them in its own type."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = Qwen2Config(**sizes, head_dim=64, architectures=["Qwen2ForCausalLM"])
    model.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model.save_pretrained(tmp_path)
    arguments = ["serve", str(tmp_path), "--tensor-parallel-size", str(tp), "--device", "cuda"]
    served = serve._engine_config(make_parser("0", defaultdict(lambda: print)).parse_args(arguments))
    with (
        nullcontext()
        if fits
        else pytest.raises(
            ValueError,
            match=r"parallel_size=4: each of 4 ranks has 64 of ffn_hidden_size=256, which cuts the blocks of 128,128",
        )
    ):
        read_model(served)
    read_model(replace(served, load_format="dummy"))


def test_layouts_that_do_not_fit_the_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist; give a Hugging Face model folder"):
        read_model(EngineConfig(str(tmp_path)))
    sizes = {"hidden_size": 96, "intermediate_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
    Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    assert read_model(EngineConfig(str(tmp_path), tensor_parallel_size=6))["num_key_value_heads"] == 3
    for tp, ep, message in (
        (2, 2, "rollout.expert_parallel_size=2: the model has no experts"),
        (
            4,
            1,
            "rollout.tensor_model_parallel_size=4 neither divides num_query_groups=3 nor is a multiple of it",
        ),
        (8, 1, "rollout.tensor_model_parallel_size=8 does not divide num_attention_heads=12"),
    ):
        with pytest.raises(ValueError, match=message):
            read_model(EngineConfig(str(tmp_path), tensor_parallel_size=tp, expert_parallel_size=ep))


def test_sglang_is_told_what_transformers_does_not_write():
    engine = EngineConfig("folder")
    told = config_overrides(engine, {"model_type": "deepseek_v3", "topk_method": "noaux_tc"})
    assert told == {"moe_layer_freq": 1, "scoring_func": "sigmoid"}
    assert config_overrides(engine, {"model_type": "qwen3"}) == {}


def test_engines_of_sparse_attention(monkeypatch):
    """Without a GPU SGLang gets DeepSeek-V2 as the architecture; no tokens are drafted for texts so long that indexers choose among their tokens."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    model = {"model_type": "glm_moe_dsa", "index_topk": 128, "max_position_embeddings": 129}
    (architecture,) = config_overrides(EngineConfig("folder"), model)["architectures"]
    assert architecture == "DeepseekV2ForCausalLM"
    assert "architectures" not in config_overrides(GPU, model)
    drafting = EngineConfig("folder", speculation=SpeculationConfig("ngram", 2))
    with pytest.raises(ValueError, match="129 tokens are more than index_topk=128"):
        sglang_start._sparse_arguments(drafting, model)
    assert sglang_start._sparse_arguments(replace(drafting, context_length=128), model) == {}
    gpu = replace(GPU, dtype="bfloat16", deterministic=False)
    assert server_arguments(gpu, model)["kv_cache_dtype"] == "bfloat16"
    for keys, message in (
        ({"dtype": "float16"}, "rollout.dtype=float16"),
        ({"deterministic": True}, "deterministic=true"),
    ):
        with pytest.raises(ValueError, match=message):
            server_arguments(replace(gpu, **keys), model)


def test_the_engine_says_whether_weights_are_quantised():
    """A float8 checkpoint is served as it is; synced weights are quantised if the engine's config says so."""
    fp8, plain = {"quantization_config": {"quant_method": "fp8"}}, {"model_type": "qwen3"}
    assert config_overrides(EngineConfig("folder", load_format="auto"), fp8) == {}
    assert config_overrides(EngineConfig("folder"), fp8) == {"quantization_config": None}
    told = config_overrides(EngineConfig("folder", fp8_block=(128, 64)), plain)["quantization_config"]
    assert (told["quant_method"], told["weight_block_size"]) == ("fp8", [128, 64])
