"""Actions that nobody may make megarl take, and secrets that it must not reveal.

Tests elsewhere: programs of the model and their limits (tests/rewards/sandbox/test_sandbox.py, test_code_tests.py), tensors of
checkpoints with a payload (tests/megatron/checkpoint/test_format.py), ports of a lone engine and of Ray alone
(tests/rollout/sglang/test_engine.py, tests/cluster/test_cluster.py).
"""

import ast
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.tiny_model import make_tiny_model
from megarl.checkpoints.dcp import DCPReader
from megarl.config import EvalConfig, SFTConfig, TrainConfig, check_config, load_config
from megarl.config.schema import walk
from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang.start import server_arguments
from tests.fixtures.runs import PPO, REPOSITORY, command, environment, on
from tests.sources import PACKAGE, Call, Source, modules, source_of
from tests.trainer.test_faults import SMALL

SECRET = "sk-not-for-anybodys-eyes"

# Calls that make objects of bytes, or code of files, and the origin of these.
UNPICKLED = {
    "checkpoints/dcp.py": "pickle.Unpickler",  # a checkpoint's metadata: only names of a list, below
    "rewards/processes/scorer.py": "pickle.loads",  # from a reward worker, over a socket that it inherited
    "rewards/registry.py": "pickle.loads",  # the reward function of this program itself
    "weight_sync/inbox.py": "pickle.loads",  # from a trainer rank, over a Unix socket in a folder that only this user enters
    "weight_sync/receiver.py": "pickle.loads",  # from the engine's parent, in a file in such a folder
    "shadow/peers.py": "pickle.loads",  # from a fork of this process, over a pipe
}
EXECUTED = {
    "cluster/fork_server.py": "run_path",  # Ray's worker program, in a process that is requested in its place
    "util/packages.py": "exec_module",  # the examples that come with the package
    "util/plugins.py": "exec_module",  # the files that the configuration names
    "rewards/sandbox/jail.py": "exec",  # programs of the model, in the jail
}
UNSAFE = {
    "pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "yaml": {"load", "unsafe_load", "full_load", "load_all", "Loader", "UnsafeLoader", "FullLoader"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "joblib": {"load"},
    "dill": {"load", "loads"},
}


def sources() -> Iterator[tuple[str, Source]]:
    """(file in the package, its contents)."""
    for path in modules():
        yield str(path.relative_to(PACKAGE)), source_of(path)


def calls() -> Iterator[tuple[str, Call]]:
    for file, source in sources():
        for call in source.calls:
            yield file, call


def test_nothing_is_unpickled_that_the_program_did_not_make() -> None:
    found = {
        (file, f"{name}.{attribute}")
        for file, source in sources()
        for name, attribute in source.attributes
        if attribute in UNSAFE.get(name, ())
    }
    assert found == set(UNPICKLED.items())
    for file, source in sources():
        for line, module, names in source.taken:
            assert names.isdisjoint(UNSAFE.get(module, ())), (file, line)


def test_files_are_read_as_plain_data() -> None:
    """torch.load reads only tensors and plain types, and numpy reads no objects."""
    loads = 0
    for file, call in calls():
        if call.called == "torch.load":
            loads += 1
            assert call.given_text("weights_only") == "True", (file, call.line)
        if call.called in ("np.load", "numpy.load"):
            assert call.given_text("allow_pickle") in (None, "False"), (file, call.line)
    assert loads > 0  # else this test checks nothing


def test_code_runs_only_where_the_configuration_names_it() -> None:
    found = set()
    for file, call in calls():
        called = call.called
        if called in ("eval", "exec", "os.system", "runpy.run_path") or called.endswith(".exec_module"):
            found.add((file, called.rpartition(".")[2]))
        assert "shell" not in call.given, (file, call.line)
    assert found == set(EXECUTED.items())


class Payload:
    """Unpickled, it calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "function",
    [os.mkdir, Path.touch, eval, torch.serialization._open_file, torch.serialization._open_zipfile_writer_file,
     torch.PyTorchFileWriter, subprocess.Popen, getattr],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_a_checkpoints_metadata_calls_nothing(tmp_path: Path, function: Any) -> None:
    """Some of these functions are classes of torch's own, which empty a file when they are created."""
    victim = tmp_path / "victim"
    victim.write_text("whole")
    arguments = {
        "_open_file": (str(victim), "w"), "eval": ("open('made', 'w')",), "Popen": (["touch", "made"],),
        "getattr": (Path, "touch"), "touch": (tmp_path / "made",), "mkdir": (str(tmp_path / "made"),),
    }.get(function.__name__, (str(victim),))  # fmt: skip
    content = b"\x80\x04c" + f"{function.__module__}\n{function.__qualname__}\n".encode()
    try:
        content = pickle.dumps(Payload(function, *arguments))
    except (pickle.PicklingError, TypeError):  # pickle does not find it under its own name
        content += pickle.dumps(arguments)[2:-1] + b"R."
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="has no place in a checkpoint's metadata"):
        DCPReader(tmp_path)
    assert victim.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "victim"]


def test_models_bring_no_code_unless_asked_for() -> None:
    keys = 0
    for schema in (TrainConfig, SFTConfig, EvalConfig):
        for key, member, _ in walk(schema):
            if key.endswith("trust_remote_code"):
                keys += 1
                assert member.default is False, key
    assert keys > 3
    for file, call in calls():
        if "trust_remote_code" in call.given:
            assert isinstance(call.given["trust_remote_code"], ast.Name), (
                file,
                call.line,
            )  # the user's own setting
    facts = {"max_position_embeddings": 64, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert "trust_remote_code" not in server_arguments(EngineConfig(model_path="m", device="cpu"), facts)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"reward.judge.base_url=https://me:{SECRET}@judge/v1", r"reward\.judge\.base_url is a URL with a password"),
        (f"data.train_files=[a.parquet,https://me:{SECRET}@host/b.parquet]", r"data\.train_files\[1\] is a URL with"),
        (
            f"custom_reward_function.reward_kwargs.openai_api_key={SECRET}",
            r"reward_kwargs\.openai_api_key is named like a secret",
        ),
    ],
)  # fmt: skip
def test_a_configuration_holds_no_secrets(override: str, words: str) -> None:
    required = ["data.max_prompt_length=8", "data.max_response_length=8", "actor_rollout_ref.model.path=m",
                "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "actor_rollout_ref.actor.optim.lr=1"]  # fmt: skip
    with pytest.raises(ValueError, match=words) as caught:
        check_config(load_config(TrainConfig, None, [*required, override]), data_files=False)
    assert SECRET not in str(caught.value)
    harmless = ["reward.judge.base_url=http://judge:8000/v1", "reward.judge.api_key_env=MY_API_KEY",
                "custom_reward_function.reward_kwargs.stop_token=x"]  # fmt: skip
    with pytest.raises(ValueError) as caught:
        check_config(load_config(TrainConfig, None, [*required, *harmless]), data_files=False)
    assert "would be printed" not in str(caught.value)


@dataclass
class Watched:
    """A run and its judge.

    Attributes:
        keys: the Authorization headers that the judge was sent.
        addresses: the addresses on which processes of the run listened, with the processes' titles.
    """

    folder: Path
    output: str
    code: int
    keys: set[str] = field(default_factory=set)
    addresses: set[tuple[str, str]] = field(default_factory=set)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A real run whose judge is a server that refuses every other request, with a message that has the key it was sent."""
    folder = tmp_path_factory.mktemp("watched")
    write_arithmetic(folder / "data", 16, 16, 16, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=64, ffn_hidden_size=128, num_layers=2)
    seen = Watched(folder, "", 0)
    started: list[subprocess.Popen] = []
    numbers = iter(range(1000))
    lock = threading.Lock()

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                key = self.headers["Authorization"]
                seen.keys.add(key)
                if not seen.addresses:
                    seen.addresses |= listening(started[0].pid)
                refuses = next(numbers) % 2 == 1
            message = {"message": {"role": "assistant", "content": "Score: 0.5"}}
            body = json.dumps(
                {"error": f"{key} is not allowed"} if refuses else {"choices": [message]}
            ).encode()
            self.send_response(401 if refuses else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        arguments = [
            *PPO, *on(folder, folder / "run"), *SMALL, "trainer.total_training_steps=1", "trainer.save_freq=1",
            "reward.rule=llm_judge", f"reward.judge.base_url=http://127.0.0.1:{server.server_port}/v1",
            "reward.judge.model=grader", "reward.judge.api_key_env=TEST_JUDGE_KEY",
        ]  # fmt: skip
        secrets = {"TEST_JUDGE_KEY": SECRET, "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET}
        process = subprocess.Popen(
            command("train", *arguments),
            cwd=REPOSITORY,
            env={**environment(), **secrets},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        try:
            seen.output = process.communicate(timeout=400)[0]
        finally:
            process.kill()
            server.shutdown()
            thread.join()
    seen.code = process.returncode
    return seen


def listening(pid: int) -> set[tuple[str, str]]:
    """(address, title) of every socket that a process or one that it started listens on."""
    found = set()
    family = psutil.Process(pid).children(recursive=True)
    for process in [psutil.Process(pid), *family]:
        try:
            connections, title = process.net_connections("inet"), " ".join(process.cmdline()[:2])
        except psutil.NoSuchProcess:
            continue
        found |= {(one.laddr.ip, title) for one in connections if one.status == psutil.CONN_LISTEN}
    return found


def test_a_run_on_one_machine_listens_on_loopback_only(watched: Watched) -> None:
    titles = {title for _, title in watched.addresses}
    assert any("gcs_server" in title for title in titles) and any("actor" in title for title in titles), (
        titles
    )
    others = {
        place for place in watched.addresses if place[0].removeprefix("::ffff:") not in ("127.0.0.1", "::1")
    }
    assert others == set()


def test_keys_are_nowhere_to_be_read(watched: Watched) -> None:
    """The key is neither in the output, nor in any file of the run: logs, configurations, metrics, TensorBoard, trajectories, checkpoints."""
    assert watched.code == 0, watched.output
    assert watched.keys == {f"Bearer {SECRET}"}
    assert SECRET not in watched.output
    files = [path for path in (watched.folder / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "manifest.json"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    rows = (watched.folder / "run" / "rollouts" / "step-000001.parquet").read_bytes()
    assert b"<the key> is not allowed" in rows or "<the key>" in watched.output
