"""Models by their id on the Hugging Face Hub."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl.config import EvalConfig, TrainConfig, check_config, resolve
from megarl.config.loading.hub import fetch_models, is_hub_id

Train = Callable[..., TrainConfig]
NAME = "Qwen/Qwen2.5-0.5B-Instruct"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """The requests to a Hub that has every model: (id, patterns of files)."""
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo_id, tuple(allow_patterns)))
        return f"/cache/{repo_id}"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_what_is_an_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "owner" / "name").mkdir(parents=True)
    assert is_hub_id(NAME) and is_hub_id("owner/other")
    for path in ("owner/name", "model", "./owner/name", "/owner/name", "~/name", "a/b/c", "../a"):
        assert not is_hub_id(path), path


def test_each_id_becomes_the_folder_in_the_cache(train: Train, hub: list) -> None:
    config = train(
        f"actor_rollout_ref.model.path={NAME}",
        "critic.model.path=owner/critic",
        "data.return_raw_input_ids=true",
        f"reward_model={{enable: true, model: {{path: owner/reward, input_tokenizer: {NAME}}}}}",
    )
    check_config(config)
    local = fetch_models(resolve(config))
    policy = local.actor_rollout_ref.model
    assert policy.path == policy.tokenizer_path == f"/cache/{NAME}"
    assert local.critic is not None and local.critic.model.path == "/cache/owner/critic"
    assert local.reward_model.model.path == "/cache/owner/reward"
    assert local.reward_model.model.input_tokenizer == f"/cache/{NAME}"
    weights = [name for name, patterns in hub if "*.safetensors" in patterns]
    assert weights == [NAME, "owner/critic", "owner/reward"]  # no weights for tokenizers
    assert not any("*.py" in patterns for _, patterns in hub)


def test_without_weights_and_with_code(evaluation: Callable[..., EvalConfig], hub: list) -> None:
    config = evaluation(f"model.path={NAME}", "model.trust_remote_code=true")
    assert fetch_models(resolve(config), weights=False).model.path == f"/cache/{NAME}"
    assert all("*.safetensors" not in patterns and "*.py" in patterns for _, patterns in hub)


def test_folders_stay_as_they_are(train: Train, hub: list) -> None:
    config = resolve(train())
    assert fetch_models(config) == config and hub == []


FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"other weights",
    "consolidated.safetensors": b"weights in Mistral's format",
    "original/model.safetensors": b"weights in OpenAI's format",
    "modeling.py": b"code",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class SmallHub(BaseHTTPRequestHandler):
    """A Hub with one model, owner/name, that answers the requests of a download."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.partition(f"{COMMIT}/")[2]
        if path.startswith("/api/models/owner/name/tree/"):
            tree = [
                {"type": "file", "path": name, "oid": name, "size": len(body)} for name, body in FILES.items()
            ]
            body = json.dumps(tree).encode()
        elif path.startswith("/api/models/owner/name"):
            siblings = [{"rfilename": file} for file in FILES]
            body = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/owner/name/resolve/") and name in FILES:
            body = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for header, value in (
            ("Content-Length", len(body)),
            ("ETag", f'"{name}"'),
            ("X-Repo-Commit", COMMIT),
        ):
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_a_real_download(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "from megarl.config.loading.hub import _TEXTS, _WEIGHTS, _download\n"
        "print(_download('model.path', 'owner/name', (*_TEXTS, *_WEIGHTS)))"
    )
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path),
                   "PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    try:
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
        )
    finally:
        server.shutdown()
        server.server_close()
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert folder.is_relative_to(tmp_path) and COMMIT in folder.name
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_without_a_way_to_the_hub_it_says_what_to_do(tmp_path: Path) -> None:
    """Runs in a process of its own, because the package reads the Hub's address when it is imported."""
    code = (
        "from megarl.config.loading.hub import _download\n"
        "try: _download('actor_rollout_ref.model.path', 'owner/name', ('*.json',))\n"
        "except ValueError as error: print(error)"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    message = result.stdout
    assert message.startswith("actor_rollout_ref.model.path: owner/name is no folder (working directory ")
    assert "downloading it from the Hugging Face Hub failed: " in message
    assert "run `hf download owner/name --local-dir FOLDER` on a machine that has one" in message
    assert "set actor_rollout_ref.model.path=FOLDER" in message
