"""NCCL's environment: the same for trainer and engine, and the user's variables where there are any."""

import json
import os
import subprocess
import sys

from megarl.cluster import rank_environment
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.util import nccl

# What SGLang makes of NCCL's variables, for each of several environments.
PROGRAM = """
import json, os, sys
from types import SimpleNamespace
{facts}
found = []
for given in json.loads(sys.argv[1]):
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        del os.environ[name]
    os.environ.update(given)
    {call}
    found.append({{name: value for name, value in os.environ.items() if name.startswith("NCCL_")}})
print(json.dumps(found))
"""

# The changes that it makes to the environment of the process that starts its schedulers, which inherit it.
ENGINE = PROGRAM.format(
    facts="""
from sglang.srt.entrypoints import engine
facts = SimpleNamespace(nnodes=1, enable_symm_mem=False, enable_nccl_nvls=False, dcp_size=1, enable_metrics=False,
    attention_backend="triton", prefill_attention_backend=None, decode_attention_backend=None, dsa_topk_backend=None,
    speculative_dsa_topk_backend=None, custom_sigquit_handler=lambda number, frame: None, mp_start_method="spawn",
    gc_threshold=None, _resolved_overrides=())
engine.resolving_view = engine.resolved_view = lambda arguments: facts
""",
    call="engine._set_envs_and_config(facts)",
)

# How it resolves the arguments of a deterministic engine of two ranks.
DETERMINISTIC = PROGRAM.format(
    facts="""
from sglang.srt.arg_groups import attention_hook
facts = SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=True, enable_aiter_allreduce_fusion=False,
    model_path="model", attention_backend="fa3", tp_size=2)
attention_hook.resolving_view = attention_hook.resolved_view = lambda arguments: facts
attention_hook.run_post_process_pass = attention_hook.declare_resolution = lambda *args, **fields: None
""",
    call="attention_hook.handle_deterministic_inference(facts)",
)
UNSET = {"NCCL_MIN_NCHANNELS": "unset", "NCCL_MAX_NCHANNELS": "unset"}


def environments(monkeypatch, asked: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The environments of a trainer's rank and of an engine's process, as the cluster gives them on a GPU, without this process's other variables."""
    for name in nccl.NAMES:
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
        env=dict(os.environ) | sglang_environment("cpu", 1), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for asked, (trainer, _), found in zip(
        cases, given, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        assert nccl.settings(found) == nccl.settings(trainer) == {**UNSET, **nccl.DEFAULTS, **asked}


def test_a_deterministic_engine_needs_its_number_of_channels_in_trainers(monkeypatch):
    """SGLang sets it in engines of several ranks, whatever it was; ranks of a communicator that differ in it cannot connect."""
    asked = dict.fromkeys(UNSET, "8")
    given = [environments(monkeypatch, case) for case in ({}, asked)]
    done = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC, json.dumps([engine for _, engine in given])],
        env=dict(os.environ) | sglang_environment("cpu", 1), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (alone, for_the_job) = [
        nccl.disagreement(nccl.settings(engine), nccl.settings(trainer))
        for engine, (trainer, _) in zip(json.loads(done.stdout.splitlines()[-1]), given, strict=True)
    ]
    assert (
        alone == "NCCL_MIN_NCHANNELS is unset there and 8 here, NCCL_MAX_NCHANNELS is unset there and 8 here"
    )
    assert for_the_job == ""


def test_a_nodes_own_values_stay_and_the_rest_is_completed():
    node = {"NCCL_NVLS_ENABLE": "1"}
    nccl.complete(node)
    assert node == {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0"}


def test_a_disagreement_names_the_variables():
    here, there = {"NCCL_CUMEM_ENABLE": "0"}, {}
    found = nccl.disagreement(nccl.settings(here), nccl.settings(there))
    assert found == "NCCL_CUMEM_ENABLE is unset there and 0 here"
    assert nccl.disagreement(nccl.settings(here), nccl.settings(here)) == ""
