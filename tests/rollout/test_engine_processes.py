"""Life and death of an engine's processes."""

import time

import psutil
import pytest

from megarl.rollout.engine import EngineConfig, EngineError, SamplingParams
from tests.rollout.runner import EngineProcess, OwnerDied

FEW_SECONDS = 10


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition, seconds: float):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError(f"{condition} not within {seconds} s")


def schedulers(owner: psutil.Process) -> list[psutil.Process]:
    """SGLang's processes, from the first moment on."""
    children = owner.children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def test_serves_a_folder_and_ends_within_seconds_when_a_scheduler_is_killed(model_a, tmp_path):
    config = EngineConfig(str(model_a.path), load_format="auto", max_num_seqs=8, max_total_tokens=1024)
    engine = EngineProcess(config, tmp_path / "log").start()
    try:
        assert engine.call("weight_version") == 0
        (answer,) = engine.call("generate", [[5, 6, 7]], ["a"], SamplingParams(max_new_tokens=4))
        assert answer.weight_version == 0
        (scheduler,) = [psutil.Process(pid) for pid in engine.call("pids")]
        everything = [psutil.Process(engine.process.pid), *psutil.Process(engine.process.pid).children(recursive=True)]
        scheduler.kill()
        assert gone(everything, FEW_SECONDS)
        with pytest.raises(OwnerDied, match=r"TP rank 0 \(pid \d+\) ended with exit code -9"):
            engine.call("weight_version")
    finally:
        engine.process.kill()


@pytest.mark.parametrize("when", ["starting", "serving"])
def test_a_killed_owner_leaves_no_process(model_a, tmp_path, when):
    config = EngineConfig(str(model_a.path), tensor_parallel_size=2, max_num_seqs=8, max_total_tokens=1024)
    engine = EngineProcess(config, tmp_path / "log")
    owner = psutil.Process(engine.process.pid)
    if when == "serving":
        engine.start()
    else:
        engine._connection.send(("start", ()))
    children = wait_for(lambda: schedulers(owner), 60)
    owner.kill()
    assert gone(children, 30 if when == "starting" else FEW_SECONDS)


def test_a_start_that_takes_too_long_ends_with_an_error_and_no_process(model_a, tmp_path):
    config = EngineConfig(str(model_a.path), start_timeout=2.0)
    engine = EngineProcess(config, tmp_path / "log")
    try:
        with pytest.raises(EngineError, match=r"did not start: it took longer than start_timeout=2.0 s"):
            engine.start()
        assert "starting it once more" in engine.tail()
        assert not schedulers(psutil.Process(engine.process.pid))
    finally:
        engine.process.kill()


def test_a_start_that_fails_once_is_repeated(model_a, tmp_path):
    config = EngineConfig(str(model_a.path), load_format="auto", max_num_seqs=8, max_total_tokens=1024)
    engine = EngineProcess(config, tmp_path / "log")
    try:
        engine._connection.send(("start", ()))
        (scheduler,) = wait_for(lambda: schedulers(psutil.Process(engine.process.pid)), 60)
        scheduler.kill()
        assert engine._connection.poll(120), engine.tail()
        assert engine._connection.recv() == (True, None)
        assert "died during initialization" in engine.tail()
        assert len(engine.call("generate", [[5, 6, 7]], ["a"], SamplingParams(max_new_tokens=4))) == 1
    finally:
        engine.close()


def test_a_start_that_fails_ends_with_an_error(model_a, tmp_path):
    (tmp_path / "model").mkdir()
    config = (model_a.path / "config.json").read_text().replace("Qwen2ForCausalLM", "UnheardOfForCausalLM")
    (tmp_path / "model" / "config.json").write_text(config.replace('"qwen2"', '"unheard_of"'))
    engine = EngineProcess(EngineConfig(str(tmp_path / "model")), tmp_path / "log")
    try:
        with pytest.raises(EngineError, match="did not start: .*unheard_of"):
            engine.start()
    finally:
        engine.process.kill()


@pytest.mark.parametrize(
    ("tp", "message"),
    [(3, "tensor_parallel_size=3 does not divide num_attention_heads=4"), (8, "does not divide num_attention_heads=4")],
)
def test_a_model_that_does_not_divide_is_refused_at_once(model_a, tmp_path, tp, message):
    engine = EngineProcess(EngineConfig(str(model_a.path), tensor_parallel_size=tp), tmp_path / "log")
    try:
        with pytest.raises(OwnerDied, match=message):
            engine.call("weight_version")
    finally:
        engine.process.kill()
