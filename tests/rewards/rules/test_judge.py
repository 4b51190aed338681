"""The judge against a real HTTP server."""

import asyncio
import json
import re
import threading
import time
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarl.config import JudgeConfig
from megarl.rewards.processes.scorer import Scorer
from megarl.rewards.registry import RewardSpec
from megarl.rewards.rules import judge
from megarl.rewards.sample import Sample
from tests.waiting import wait_for

SETTINGS = judge.JudgeSettings(
    **asdict(JudgeConfig(model="grader", prompt="{prompt}|{ground_truth}|{response}"))
)


class Handler(BaseHTTPRequestHandler):
    """Answers as the last part of the prompt says."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, dict(self.headers), body))
            number = len(server.requests)
            server.running += 1
            server.most = max(server.most, server.running)
        self.answer(body["messages"][0]["content"].split("|")[-1], number)

    def answer(self, wish, number):
        if wish == "busy twice" and number < 3:
            return self.send(429 if number == 1 else 503, {"error": "busy"})
        if wish == "asked to wait" and number == 1:
            return self.send(429, {}, {"Retry-After": "0"})
        if wish == "refused":
            return self.send(401, {"error": "wrong key"})
        if wish == "tells":
            return self.send(401, {"error": "x" * 280 + self.headers["Authorization"]})
        if wish == "broken":
            return self.send(500, {"error": "broken"})
        if wish == "hangs once" and number == 1:
            time.sleep(20)  # in a daemon thread, for which no test waits
        if wish == "slow":
            wait_for(lambda: self.server.most >= 4, 10)
            time.sleep(0.2)  # so that other requests arrive, too
        if wish == "odd":
            return self.send(200, {"result": 1})
        text = "I cannot say." if wish == "mute" else "It is good: Score: 0.2, or rather\nScore: **0.75**"
        return self.send(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def send(self, status, body, headers=None):
        with self.server.lock:  # before the client gets the answer and asks again
            self.server.running -= 1
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError):  # the client has stopped waiting
            self.close_connection = True


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.lock, server.running, server.most = [], threading.Lock(), 0, 0
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def no_waiting(monkeypatch):
    """Records the waits between attempts instead of waiting."""
    waits, sleep = [], asyncio.sleep

    async def note(seconds):
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(judge.asyncio, "sleep", note)
    return waits


def score(server, response, **changes):
    settings = replace(SETTINGS, base_url=server.url, **changes)
    return asyncio.run(
        judge.compute_score("d", response, "42", prompt_str="6 x 7 {response}?", settings=settings)
    )


def test_a_refusal_does_not_tell_the_key(server, monkeypatch):
    """Some servers repeat the key that they refuse; the key is hidden even where the rest of their answer is left out."""
    monkeypatch.setenv("TEST_JUDGE_KEY", "secret-of-mine")
    with pytest.raises(RuntimeError, match=r"refuses: status 401: .*Bearer <") as caught:
        score(server, "tells", api_key_env="TEST_JUDGE_KEY")
    assert "secret" not in str(caught.value)


def test_request_and_score(server, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", "secret")
    result = score(server, "forty-two", api_key_env="TEST_JUDGE_KEY", max_score=3.0)
    assert result["score"] == 0.25  # the last number, 0.75, of 3
    assert result["judge"].startswith("It is good")
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    # Text that is filled in is not searched for further placeholders.
    assert body["messages"] == [{"role": "user", "content": "6 x 7 {response}?|42|forty-two"}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("grader", 0.0, 512)


def test_the_default_prompt_has_all_three_and_asks_for_what_the_pattern_finds():
    prompt = JudgeConfig().prompt
    assert judge.fill(prompt, {"prompt": "P?", "response": "R!", "ground_truth": "G."}).count("{") == 0
    assert "Score: x" in prompt


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("Score: .75", 0.75),
        ("Score: 0.75.", 0.75),
        ("**Score:** 1", 1.0),
        ("score = 1.", 1.0),
        ("Score: -.5", -0.5),
        ("Score: 3\nor rather\nScore - `12.5`", 12.5),
    ],
)
def test_the_default_pattern_finds_the_number_that_is_written(answer, number):
    assert float(re.findall(JudgeConfig().pattern, answer)[-1]) == number


def test_retries_wait_longer_each_time(server, no_waiting):
    assert score(server, "busy twice")["score"] == 0.75
    assert len(server.requests) == 3
    assert no_waiting == [1.0, 2.0]


def test_the_server_may_say_how_long_to_wait(server, no_waiting):
    assert score(server, "asked to wait")["score"] == 0.75
    assert no_waiting == [0.0]


def test_no_answer_in_time_is_retried(server, no_waiting):
    begun = time.perf_counter()
    assert score(server, "hangs once", timeout=1.5)["score"] == 0.75
    assert time.perf_counter() - begun < 15
    assert len(server.requests) == 2


def test_what_still_fails_after_all_retries(server, no_waiting):
    with pytest.raises(RuntimeError, match=r"failed 3 times; the last time with status 500: .*broken"):
        score(server, "broken", num_retries=2)
    assert len(server.requests) == 3


def test_no_server(no_waiting, server):
    with pytest.raises(RuntimeError, match="failed 2 times; the last time with ConnectError"):
        asyncio.run(judge.ask("x", replace(SETTINGS, base_url="http://127.0.0.1:9/v1", num_retries=1)))


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        ("refused", RuntimeError, "refuses: status 401: .*wrong key"),
        ("odd", RuntimeError, "not that of an OpenAI-compatible chat API"),
        ("mute", ValueError, r"answer has no score \(reward.judge.pattern=.*I cannot say"),
    ],
)
def test_what_no_retry_helps_against(server, no_waiting, response, error, message):
    with pytest.raises(error, match=message):
        score(server, response)
    assert len(server.requests) == 1


def test_a_key_that_is_not_set(monkeypatch, server):
    monkeypatch.delenv("TEST_JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key_env='TEST_JUDGE_KEY': this variable is not set"):
        score(server, "x", api_key_env="TEST_JUDGE_KEY")


def test_concurrency_has_a_limit(server):
    settings = replace(SETTINGS, base_url=server.url)
    spec = RewardSpec(rule="llm_judge", rule_options={"llm_judge": {"settings": settings}})
    with Scorer(spec, num_workers=2, timeout=20.0, max_concurrency=4) as scorer:
        scorer.submit([Sample(str(i), "d", "p", "slow", "42", None) for i in range(16)])
        scores = scorer.collect()
    assert {score.score for score in scores.values()} == {0.75}
    assert server.most == 4
