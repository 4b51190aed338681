"""`megarl serve` as a user starts it, on the CPU, with the SDKs as clients and Hugging Face's model as the oracle."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.cli.main import main
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.sglang.before_import import sglang_environment

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "Tom has 3 pens and buys 4."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    make_tiny_model(folder, arithmetic_texts(), hidden_size=32, ffn_hidden_size=64, num_layers=2)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[str, str, subprocess.Popen]]:
    """(address, key, process)"""
    command = [
        sys.executable,
        "-m",
        "megarl",
        "serve",
        str(model),
        "--name",
        "tom",
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    line = ""
    while not line.startswith("serving"):
        line = process.stdout.readline()
        assert line, "it has ended"
    found = re.fullmatch(r"serving tom at (\S+) \(OpenAI: /v1\), key (\S+)\n", line)
    yield found[1], found[2], process
    process.kill()
    process.wait()


def greedy(model: Path, count: int) -> str:
    """The greedy answer of Hugging Face's model."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(str(model))
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    given = len(ids)
    for _ in range(count):
        with torch.no_grad():
            ids.append(hf(torch.tensor([ids])).logits[0, -1].argmax().item())
    return tokenizer.decode(ids[given:], skip_special_tokens=True)


def test_a_served_model_answers_as_hugging_faces(model, server):
    url, key, process = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    expected = greedy(model, 12)
    ask = {"model": "tom", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**ask, logprobs=True)
    assert whole.choices[0].message.content == expected
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**{**ask, "max_tokens": 60}, stream=True))
    parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(parts) == greedy(model, 60)
    assert len(parts) > 1, "tokens come as they are computed"
    anthropic = pytest.importorskip("anthropic", reason="requirements/dev.txt has the SDK")
    other = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    said = other.messages.create(model="tom", messages=MESSAGES, max_tokens=12, extra_body={"temperature": 0})
    assert said.content[0].text == expected and said.stop_reason == "max_tokens"

    session = httpx.post(f"{url}/sessions", json={}, headers={"x-api-key": key}).json()
    agent = openai.OpenAI(base_url=f"{url}/v1", api_key=session["key"], max_retries=0)
    first = agent.chat.completions.create(**ask, n=2)
    follow = [*MESSAGES, first.choices[1].message, {"role": "user", "content": "So?"}]
    drawn = agent.chat.completions.create(**{**ask, "messages": follow, "temperature": 1.0})
    ended = httpx.post(f"{url}/session/end", headers={"x-api-key": session["key"]}).json()
    assert [one["num_turns"] for one in ended["trajectories"]] == [1, 2]
    trained = [12, 12 + drawn.usage.completion_tokens]  # the second response may have ended early
    assert [sum(one["response_mask"]) for one in ended["trajectories"]] == trained
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) in (0, -signal.SIGTERM)


def test_what_cannot_be_served_is_told_before_an_engine_starts(model, tmp_path, capsys, monkeypatch):
    for name, value in {**sglang_environment("cpu", 1), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)  # undone after the test
    empty = tmp_path / "key"
    empty.write_text("\n")
    for arguments, text in (
        ([str(tmp_path)], "config.json does not exist"),
        ([str(model), "--key-file", str(empty)], "is empty"),
        ([str(model), "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, found 0"),
        ([str(model), "--requests-per-minute", "-5"], "--requests-per-minute must be at least 1, found -5"),
        ([str(model), "--tensor-parallel-size", "3"], "tensor_model_parallel_size"),
    ):
        assert main(["serve", *arguments, "--device", "cpu"]) == 2
        assert text in capsys.readouterr().err
