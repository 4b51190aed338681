"""Life and death of an engine's processes."""

import glob
import multiprocessing
import os
import tempfile
import time
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from megarl.cluster.guard import NAMES, remove_scratch
from megarl.rollout.engine import EngineConfig, EngineError, SamplingParams
from megarl.rollout.sglang.engine import SGLangEngine, SGLangPart
from tests.rollout.runner import EngineProcess, OwnerDied
from tests.waiting import wait_for

FEW_SECONDS = 30


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def schedulers(owner: psutil.Process) -> list[psutil.Process]:
    """SGLang's processes that the owner has started, from the first moment on."""
    found = []
    for child in owner.children(recursive=True):
        with suppress(
            psutil.NoSuchProcess
        ):  # a helper of the start has just ended, and may still be a zombie
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_serves_a_folder_and_ends_within_seconds_when_a_scheduler_is_killed(model_a, tmp_path):
    config = EngineConfig(str(model_a.path), load_format="auto", max_num_seqs=8, max_total_tokens=1024)
    engine = EngineProcess(config, tmp_path / "log").start()
    try:
        assert engine.call("weight_version") == 0
        (answer,) = engine.call("generate", [[5, 6, 7]], ["a"], SamplingParams(max_new_tokens=4))
        assert answer.weight_version == 0
        (scheduler,) = [psutil.Process(pid) for pid in engine.call("pids")]
        everything = [
            psutil.Process(engine.process.pid),
            *psutil.Process(engine.process.pid).children(recursive=True),
        ]
        scheduler.kill()
        assert gone(everything, FEW_SECONDS)
        with pytest.raises(OwnerDied, match=r"TP rank 0 \(pid \d+\) ended with exit code -9"):
            engine.call("weight_version")
    finally:
        engine.process.kill()


def test_an_owner_killed_during_the_start_leaves_no_process(model_a, tmp_path):
    config = EngineConfig(str(model_a.path), tensor_parallel_size=2)
    engine = EngineProcess(config, tmp_path / "log")
    owner = psutil.Process(engine.process.pid)
    engine.connection.send(("start", ()))
    children = wait_for(lambda: schedulers(owner), 200)
    owner.kill()
    # Schedulers notice the owner's death at their first line, after their imports, which take half a minute on a busy machine.
    assert gone(children, 90)


def begin_in(folder, engine):
    """Start an engine whose temporary files are in a folder, as a rank's are."""
    tempfile.tempdir = folder
    engine.start()


def test_an_owner_killed_during_the_start_leaves_no_shared_memory(model_a, tmp_path):
    """From their first second on SGLang's ranks name their shared memory in the scratch folder, and the memory is removed with the folder."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    engine = EngineProcess(EngineConfig(str(model_a.path), tensor_parallel_size=2), tmp_path / "log")
    owner = psutil.Process(engine.process.pid)
    engine.connection.send((partial(begin_in, str(scratch)), ()))

    def made():
        patterns = [line for file in scratch.glob(f"*{NAMES}") for line in file.read_text().splitlines()]
        return sorted({path for pattern in patterns for path in glob.glob(pattern)})

    try:
        found = wait_for(lambda: len(made()) == 2 and made(), 200)
        processes = [owner, *schedulers(owner)]
    finally:
        owner.kill()
    assert gone(processes, FEW_SECONDS)
    assert [path for path in found if os.path.exists(path)] == found  # nothing else removes it
    remove_scratch(str(scratch))
    assert not scratch.exists() and [path for path in found if os.path.exists(path)] == []


def test_who_removes_scratch_folders_knows_the_files_that_name_shared_memory():
    engine = find_spec(
        "megarl.rollout.sglang.process"
    )  # not imported, because SGLang's own modules would be imported with it
    assert engine is not None and engine.origin is not None
    assert f'\nNAMES = "{NAMES}"' in Path(engine.origin).read_text()


def test_a_start_that_takes_too_long_ends_with_an_error_and_no_process(model_a, tmp_path):
    config = EngineConfig(str(model_a.path), start_timeout=0.2)
    engine = EngineProcess(config, tmp_path / "log")
    try:
        with pytest.raises(EngineError, match=r"did not start: it took longer than start_timeout=0.2 s"):
            engine.start()
        assert "starting it once more" in engine.tail(1000)
        assert not schedulers(psutil.Process(engine.process.pid))
    finally:
        engine.process.kill()


def test_a_failed_start_is_repeated_and_a_killed_owner_leaves_no_process(model_a, tmp_path):
    sizes = {"max_num_seqs": 8, "max_total_tokens": 1024}
    config = EngineConfig(str(model_a.path), tensor_parallel_size=2, load_format="auto", **sizes)
    engine = EngineProcess(config, tmp_path / "log")
    owner = psutil.Process(engine.process.pid)
    try:
        engine.connection.send(("start", ()))
        wait_for(lambda: schedulers(owner), 200)[0].kill()
        assert engine.connection.poll(300), engine.tail()
        assert engine.connection.recv() == (True, None)
        assert "starting it once more" in engine.tail(1000)
        assert len(engine.call("generate", [[5, 6, 7]], ["a"], SamplingParams(max_new_tokens=4))) == 1
        children = schedulers(owner)
        assert len(children) == 2
        owner.kill()
        assert gone(children, FEW_SECONDS)
    finally:
        engine.process.kill()


def test_what_sglang_refuses_is_told_as_it_says_it(model_a, tmp_path):
    engine = EngineProcess(EngineConfig(str(model_a.path), dtype="unheard_of"), tmp_path / "log")
    try:
        with pytest.raises(ValueError, match=r"SGLang refuses .*unheard_of"):
            engine.start()
    finally:
        engine.process.kill()


def test_a_cpu_engine_needs_its_environment(model_a, monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    with pytest.raises(ValueError, match="sglang_environment"):
        SGLangEngine(EngineConfig(str(model_a.path))).start()


class EarlyReturn:
    """SGLang's engine, with a process that ends some time after `shutdown` has returned, as SGLang's processes on a GPU do."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def get_all_child_pids(self) -> list[int]:
        return [self._pid]

    def shutdown(self) -> None:
        pass


def test_a_shutdown_ends_with_the_last_thread_of_every_process(model_a) -> None:
    part = SGLangPart(EngineConfig(str(model_a.path)))
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.5,))
    process.start()
    part._engine = EarlyReturn(process.pid)
    part.shutdown()
    assert process.exitcode == 0
