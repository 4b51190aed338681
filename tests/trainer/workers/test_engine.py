"""The process that owns an engine ends when the engine hangs, whatever it is called for."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from megarl.cluster.worker import _imported
from megarl.config import RolloutConfig
from megarl.rollout.completions import Gate
from megarl.rollout.engine import EngineHungError
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.trainer.roles import roles


async def never():
    await asyncio.Event().wait()


@pytest.fixture
def engine():
    """An engine with a request, whose processes do not answer."""
    engine, loop = SGLangEngine.__new__(SGLangEngine), asyncio.new_event_loop()
    engine.config, engine._version = SimpleNamespace(request_timeout=0.0), 1
    engine._gate, engine._last_answer = Gate(), 0.0
    engine._gate.inside = 1
    manager = SimpleNamespace(abort_request=lambda abort_all: None)
    heartbeat = SimpleNamespace(last=lambda: 0.0)
    engine._engine = SimpleNamespace(loop=loop, tokenizer_manager=manager, heartbeat=heartbeat)
    yield engine
    loop.close()


@pytest.fixture
def around(monkeypatch):
    """What the calls of engines' processes run in."""
    monkeypatch.setattr(roles, "WorkerGroup", lambda *args, **given: given["around"])
    run = SimpleNamespace(
        start=lambda group: group, log_dir=None, groups=[], watch=None, fork_servers={}, spares=[]
    )
    rollout, engine = RolloutConfig(num_engines=1, nodes_per_engine=1), SimpleNamespace(device="cpu")
    return _imported(roles.start_engines(run, rollout, None, engine, None))


@pytest.mark.parametrize("method", ["interrupt", "judge"])
def test_an_engine_that_hangs_in_a_call_ends_so_that_it_is_restarted(
    engine, around, method, monkeypatch, capsys
):
    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit, match="1"), around(method):
        engine.interrupt() if method == "interrupt" else list(engine.as_completed([never()]))
    assert f"{method}: SGLang " in (told := capsys.readouterr().err) and "request_timeout=0.0 s" in told
    assert engine.weight_version is None


def test_an_engine_that_waits_for_the_trainer_in_vain_reports_it(engine, around):
    with pytest.raises(EngineHungError, match="did not answer update_weights"), around("receive_weights"):
        engine._call(never(), "update_weights_from_tensor")
