"""NCCL's environment: the same for trainer and engine, and the user's variables where there are any."""

import json
import os
import subprocess
import sys

from megarl.cluster import rank_environment
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.util import nccl

# The changes that SGLang makes to the environment of the process that starts its schedulers, which inherit it.
ENGINE = """
import json, os, sys
from types import SimpleNamespace
from sglang.srt.entrypoints import engine
facts = SimpleNamespace(nnodes=1, enable_symm_mem=False, enable_nccl_nvls=False, dcp_size=1, enable_metrics=False,
    attention_backend="triton", prefill_attention_backend=None, decode_attention_backend=None, dsa_topk_backend=None,
    speculative_dsa_topk_backend=None, custom_sigquit_handler=lambda number, frame: None, mp_start_method="spawn",
    gc_threshold=None, _resolved_overrides=())
engine.resolving_view = engine.resolved_view = lambda arguments: facts
found = []
for given in json.loads(sys.argv[1]):
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        del os.environ[name]
    os.environ.update(given)
    engine._set_envs_and_config(facts)
    found.append({name: value for name, value in os.environ.items() if name.startswith("NCCL_")})
print(json.dumps(found))
"""


def environments(monkeypatch, asked: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The environments of a trainer's rank and of an engine's process, as the cluster gives them on a GPU, without this process's other variables."""
    for name in nccl.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    given = rank_environment(("0",), single_machine=True)
    for name in asked:
        monkeypatch.delenv(name)
    trainer, engine = dict(given), given | sglang_environment("cuda", 1)
    nccl.complete(trainer)
    nccl.complete(engine)
    return trainer, engine


def test_sglang_leaves_an_engine_with_what_the_trainer_has(monkeypatch):
    cases = [{}, {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}]
    given = [environments(monkeypatch, asked) for asked in cases]
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, json.dumps([engine for _, engine in given])],
        env=dict(os.environ) | sglang_environment("cpu", 1), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for asked, (trainer, _), found in zip(
        cases, given, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        assert nccl.settings(found) == nccl.settings(trainer) == {**nccl.DEFAULTS, **asked}


def test_a_nodes_own_values_stay_and_the_rest_is_completed():
    node = {"NCCL_NVLS_ENABLE": "1"}
    nccl.complete(node)
    assert node == {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}


def test_a_disagreement_names_the_variables():
    here, there = {"NCCL_CUMEM_ENABLE": "0"}, {}
    found = nccl.disagreement(nccl.settings(here), nccl.settings(there))
    assert found == "NCCL_CUMEM_ENABLE is unset there and 0 here"
    assert nccl.disagreement(nccl.settings(here), nccl.settings(here)) == ""
