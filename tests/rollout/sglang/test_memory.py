"""Memory that an engine releases, on the CPU: it goes back to the operating system, and comes back."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from megarl.rollout.engine import EngineConfig, EngineError, NoValidWeightsError, SamplingParams
from megarl.rollout.sglang import memory as engine_memory
from megarl.rollout.sglang.engine import SGLangEngine
from tests.rollout.conftest import make_qwen2
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import sync_state

VOCAB, HIDDEN, CACHE_TOKENS = 40_000, 256, 20_000
MIB = 1 << 20
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """80 MB of weights, almost all of them the embedding and the head."""
    return make_qwen2(
        tmp_path_factory.mktemp("large"), seed=1, vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    config = EngineConfig(
        str(model.path), max_num_seqs=8, max_total_tokens=CACHE_TOKENS, enable_memory_saver=True
    )
    process = EngineProcess(config, log).start()
    yield process
    process.close()


def sync(engine, model, folder, version):
    sync_state(engine, folder, model.state, model.hf.config, 1, version)


def resident(engine):
    (pid,) = engine.call("pids")
    return psutil.Process(pid).memory_info().rss


def answers(engine):
    prompts = [[5, 6, 7], [9, 8, 20, 30]]
    return [generation.response_ids for generation in engine.call("generate", prompts, ["a", "b"], GREEDY)]


def test_released_memory_is_free_and_serves_again(engine, model, tmp_path):
    weights = 4 * sum(parameter.numel() for parameter in model.hf.parameters())
    cache = 4 * 2 * 2 * (HIDDEN // 4) * CACHE_TOKENS  # keys and values, two groups, float32
    sync(engine, model, tmp_path / "1", 1)
    expected = answers(engine)
    (full,) = engine.call("memory")
    assert weights <= full["weights"] < weights + MIB  # plus the rope cache
    assert cache <= full["kv_cache"] < cache + MIB  # plus the table of requests

    before = resident(engine)
    engine.call("release_memory", ["kv_cache", "weights"])
    (released,) = engine.call("memory")
    assert (released["weights"], released["kv_cache"]) == (0, 0)
    # Only those pages of the cache that were written to had been resident.
    assert before - resident(engine) > weights - 4 * MIB

    with pytest.raises(EngineError, match="resume it first"):
        engine.call("begin_update", 2)
    engine.call("resume_memory", ["weights"])
    assert engine.call("memory")[0] == {**full, "kv_cache": 0}
    with pytest.raises(EngineError, match="KV cache comes after the weights"):
        engine.call("resume_memory", ["kv_cache"])
    sync(engine, model, tmp_path / "2", 2)
    with pytest.raises(EngineError, match="KV cache's memory is released"):
        answers(engine)
    engine.call("resume_memory", ["kv_cache"])
    assert engine.call("memory") == [full]
    assert answers(engine) == expected

    engine.call("release_memory", ["weights"])
    with pytest.raises(NoValidWeightsError):
        answers(engine)
    engine.call("resume_memory", ["weights"])
    sync(engine, model, tmp_path / "3", 3)
    assert answers(engine) == expected


FULL = {"weights": 600 * MIB, "kv_cache": 400 * MIB, "sync_buffers": 0, "device_used": 1500 * MIB}


@pytest.mark.parametrize(("left", "problem"), [(500, None), (900, None), (1100, "released 1,000 MiB of weights and kv_cache"), (1600, "only 0 MiB more")])  # fmt: skip
def test_a_release_is_held_to_what_the_driver_says(monkeypatch, model, left, problem):
    """An engine on a GPU; the scheduler of its second rank may lack the memory saver."""
    empty = {**FULL, "weights": 0, "kv_cache": 0}
    answers = [[FULL, FULL], [{**empty, "device_used": 500 * MIB}, {**empty, "device_used": left * MIB}]]
    engine = SGLangEngine(EngineConfig(str(model.path), device="cuda", enable_memory_saver=True))
    for name in ("interrupt", "flush_cache"):
        monkeypatch.setattr(engine, name, lambda: None)
    monkeypatch.setattr(engine, "_memory", lambda what, tags: None)
    monkeypatch.setattr(engine, "memory", lambda: answers.pop(0))
    if problem is None:
        engine.release_memory(["weights", "kv_cache"])
        return
    with pytest.raises(EngineError, match=rf"TP rank 1 .*{problem}"):
        engine.release_memory(["weights", "kv_cache"])


def test_the_driver_is_asked_for_the_device_and_the_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * MIB, 10 * MIB))
    properties = SimpleNamespace(uuid="ab-cd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert engine_memory._driver_bytes() == {"device_used": 7 * MIB}
    processes = [
        SimpleNamespace(pid=1, usedGpuMemory=5 * MIB),
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=2 * MIB),
    ]
    nvml = SimpleNamespace(
        NVMLError=KeyError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes if handle == "GPU-ab-cd" else [],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert engine_memory._driver_bytes() == {"device_used": 7 * MIB, "process_used": 2 * MIB}
    nvml.nvmlDeviceGetHandleByUUID = {}.__getitem__  # raises
    assert engine_memory._driver_bytes() == {"device_used": 7 * MIB}
