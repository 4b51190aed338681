"""An engine on a GPU: it starts and answers, and the memory saver gives its memory back."""

from collections.abc import Iterator

import pytest
import torch

from megarl.rollout.engine import EngineConfig, SamplingParams
from tests.rollout.conftest import CONTEXT, Model, make_qwen2
from tests.rollout.runner import EngineProcess

START_SECONDS = 280  # a first start compiles kernels and captures graphs
TAGS = ["kv_cache", "weights"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(START_SECONDS + 120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    """A model with heads of 64: attention kernels do not support the heads of the other tests' models."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
    return make_qwen2(tmp_path_factory.mktemp("qwen2-gpu"), seed=1, **sizes)


@pytest.fixture(scope="module")
def gpu_engine(model, tmp_path_factory) -> Iterator[EngineProcess]:
    config = EngineConfig(
        str(model.path), device="cuda", dtype="bfloat16", load_format="auto", context_length=CONTEXT,
        max_num_seqs=16, gpu_memory_utilization=0.3, enable_memory_saver=True, start_timeout=START_SECONDS,
    )  # fmt: skip
    process = EngineProcess(config, tmp_path_factory.mktemp("gpu-engine") / "engine.log")
    process.call("start", timeout=2 * START_SECONDS)
    yield process
    process.close()


def test_an_engine_answers_as_transformers_does(gpu_engine, model) -> None:
    prompt = [5, 6, 7, 8]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    (answer,) = gpu_engine.call("generate", [prompt], ["one"], greedy)
    tokens = list(answer.response_ids)
    with torch.no_grad():
        logits = model.hf.float()(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    expected = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=0.1, rtol=0)


def test_released_memory_is_free_for_other_processes(gpu_engine) -> None:
    """By CUDA's count of free memory, which is independent of what SGLang reports."""
    (held,) = gpu_engine.call("memory")
    before, _ = torch.cuda.mem_get_info()
    gpu_engine.call("release_memory", TAGS)
    freed = torch.cuda.mem_get_info()[0] - before
    assert held["kv_cache"] > 1 << 30 and freed > 0.95 * sum(held[tag] for tag in TAGS)
    gpu_engine.call("resume_memory", ["weights"])
    assert torch.cuda.mem_get_info()[0] < before + freed
    assert gpu_engine.call("memory")[0]["weights"] == held["weights"]
