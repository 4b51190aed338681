"""`rollout.engine_kwargs` against SGLang's own server arguments."""

import re
from collections.abc import Callable

import pytest

from megarl.config import TrainConfig
from megarl.config.checks import check_config
from megarl.config.engine_options import TABLE, engine_fields, engine_option_problems
from megarl.config.options import unknown_options

Train = Callable[..., TrainConfig]
ROLLOUT = "actor_rollout_ref.rollout"


def problems(**given: object) -> list[str]:
    return list(engine_option_problems("rollout.engine_kwargs", given))


def test_what_is_known_exists_and_is_taken() -> None:
    fields = engine_fields()
    assert len(fields) > 400
    assert [name for name in TABLE.known if name not in fields or TABLE.why_refused(name)] == []


def test_each_pattern_refuses_arguments_of_sglangs() -> None:
    """The exceptions are verl's names of engines, which stand one level higher in verl's configuration."""
    parts = [part for pattern in TABLE.refused for part in pattern.split("|")]
    idle = [part for part in parts if not any(re.fullmatch(part, name) for name in engine_fields())]
    assert idle == ["sglang", "vllm", "trtllm"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tp_size", 2, "use rollout.tensor_model_parallel_size"),
        ("mem_fraction_static", 0.5, "use rollout.gpu_memory_utilization"),
        ("kv_cache_dtype", "fp8_e5m2", "use rollout.kv_cache_dtype, which the memory plan reads"),
        ("moe_runner_backend", "triton", "use rollout.moe_runner_backend"),
        ("enable_dp_attention", True, "use rollout.attention_data_parallel_size"),
        ("enable_dp_lm_head", True, "use rollout.data_parallel_lm_head"),
        ("load_balance_method", "round_robin", "the engine's owner chooses the group"),
        ("moe_dense_tp_size", 1, "which rank of an engine holds which part of the weights"),
        ("load_format", "auto", "verifies them there"),
        ("sampling_backend", "flashinfer", "sampled with its own seed"),
        ("speculative_algorithm", "EAGLE", "use rollout.speculative"),
        (
            "speculative_accept_threshold_single",
            0.5,
            "each against the one that the request's own noise draws",
        ),
        ("enable_hierarchical_cache", True, "would go on serving those of earlier weights"),
        ("enable_symm_mem", True, "NCCL_CUMEM_ENABLE"),
        ("cpu_offload_gb", 4, "parameters must stay where the receiver"),
        ("enable_eplb", True, "experts would be on other ranks"),
        ("tokenizer_mode", "slow", "token ids"),
        ("lora_backend", "triton", "actor_rollout_ref.model.lora"),
        ("sglang", {"tp_size": 2}, "engine_kwargs.<argument>"),
        ("chunked_prefil_size", 1, "has no such option; did you mean chunked_prefill_size?"),
        ("chunked_prefill_size", "8k", "SGLang 0.5.21 takes Optional[int]"),
        ("schedule_policy", "fifo", "takes one of lpm, random, fcfs"),
        ("cuda_graph_bs_decode", 8, "takes Optional[List[int]]"),
    ],
)
def test_refusals(name: str, value: object, words: str) -> None:
    (line,) = problems(**{name: value})
    assert line.startswith(f"rollout.engine_kwargs.{name}") and words in line


def test_what_is_right_is_taken() -> None:
    given = {
        "chunked_prefill_size": 8192,
        "schedule_policy": "lpm",
        "cuda_graph_bs_decode": [1, 2, 4],
        "attention_backend": "fa3",
    }
    assert problems(**given) == []
    assert unknown_options(given, TABLE) == []
    assert unknown_options({"gc_threshold": [1], "tp_size": 2}, TABLE) == ["gc_threshold"]


def test_without_sglang_names_that_megarl_refuses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.config.engine_options.engine_fields", dict)
    assert problems(no_such_argument=1) == []
    assert len(problems(tp_size=2)) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["engine_kwargs.tp_size=2"], f"{ROLLOUT}.engine_kwargs.tp_size: use rollout.tensor_model_parallel_size"),
        (["moe_runner_backend=deep_gemm"], f"{ROLLOUT}.moe_runner_backend=deep_gemm needs {ROLLOUT}.quantization=fp8"),
        (["moe_a2a_backend=deepep"], f"{ROLLOUT}.expert_parallel_size=1 must be {ROLLOUT}.tensor_model_parallel_size=2, and more than 1"),
        (["attention_data_parallel_size=4"], f"{ROLLOUT}.attention_data_parallel_size=4 does not divide {ROLLOUT}.tensor_model_parallel_size=2"),
        (["data_parallel_lm_head=true"], f"data_parallel_lm_head=true is of several groups: give {ROLLOUT}.attention_data_parallel_size"),
        (["attention_data_parallel_size=2", "max_num_seqs=1"], f"{ROLLOUT}.max_num_seqs=1 is less than {ROLLOUT}.attention_data_parallel_size=2"),
        (["attention_data_parallel_size=2", "max_total_tokens=2"], f"{ROLLOUT}.max_total_tokens / attention_data_parallel_size=1 is less than"),
        (["moe_a2a_backend=deepep", "moe_runner_backend=triton"], f"leave {ROLLOUT}.moe_runner_backend=triton out"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_each_other(train: Train, given: list[str], words: str) -> None:
    config = train(*(f"{ROLLOUT}.{text}" for text in given))
    with pytest.raises(ValueError, match="configuration:") as error:
        check_config(config, data_files=False)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [("flashinfer_cutlass", "up projection before its gate"), ("triton_kernel", "repacks"), ("auto", "leave the key out")],
)  # fmt: skip
def test_kernels_of_experts_that_no_sync_could_fill(train: Train, value: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(f"{ROLLOUT}.moe_runner_backend={value}")
