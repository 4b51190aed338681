"""Resources servers of NeMo Gym 0.4 over HTTP: a data set of rows of theirs, and an agent that plays one as NeMo Gym's `simple_agent` does.

    python -m examples.agents.nemo_gym_agent example.jsonl train.jsonl --url http://127.0.0.1:8000

writes a row a task. `agent` then seeds a session of the server, has the policy answer by the Responses API, calls the server's tools by name,
and returns the reward that the server's verification gives. Neither needs NeMo Gym's package.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import httpx

MODEL = "policy"


def agent(task: dict[str, Any]) -> float:
    told = task["extra_info"]
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    # The server knows its sessions by a cookie, which the client keeps. The policy answers when it can: a run's models may be learning.
    with (
        httpx.Client(base_url=told["url"], timeout=600.0) as server,
        httpx.Client(
            base_url=os.environ["OPENAI_BASE_URL"], headers=key, timeout=None, trust_env=False
        ) as policy,
    ):
        return play(json.loads(told["row"]), server, policy, told.get("max_steps"))


def play(row: dict[str, Any], server: httpx.Client, policy: httpx.Client, max_steps: int | None) -> float:
    """A row of NeMo Gym's: `responses_create_params`, and what its server's `seed_session` and `verify` ask for."""
    _ask(server, "/seed_session", row)
    parameters = {name: value for name, value in row["responses_create_params"].items() if value is not None}
    items = parameters.pop("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    outputs: list[dict[str, Any]] = []
    for step in range(1, 1 << 30):
        body = {**parameters, "model": MODEL, "input": [*items, *outputs]}
        answer = policy.post("/responses", json=body)
        if outputs and answer.status_code == 400 and "context_length_exceeded" in answer.text:
            break  # the policy has talked for too long: what it has done is verified
        response = _read(answer)
        outputs += response["output"]
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if response.get("incomplete_details") or not calls:
            break
        outputs += [_call(server, call) for call in calls]
        if step == max_steps:
            break
    verified = _ask(server, "/verify", {**row, "response": {**response, "output": outputs, "usage": None}})
    return float(verified["reward"])


def _call(server: httpx.Client, call: dict[str, Any]) -> dict[str, Any]:
    """What a tool answers, also where it refuses: the policy is told."""
    try:
        text = server.post(f"/{call['name']}", json=json.loads(call["arguments"])).text
    except ValueError as error:
        text = json.dumps({"error": f"the arguments are no JSON: {error}"})
    return {"type": "function_call_output", "call_id": call["call_id"], "output": text}


def _ask(server: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return _read(server.post(path, json=body))


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url}: {answer.status_code} {answer.text[:400]}")
    return dict(answer.json())


def write_rows(rows: Path, out: Path, url: str, max_steps: int | None) -> None:
    with out.open("w", encoding="utf-8") as file:
        for line in rows.read_text(encoding="utf-8").splitlines():
            asked = json.loads(line)["responses_create_params"]["input"]
            told = {"url": url, "row": line} | ({} if max_steps is None else {"max_steps": max_steps})
            prompt = asked if isinstance(asked, str) else str(asked[-1].get("content"))
            row = {"data_source": f"nemo_gym/{rows.stem}", "prompt": prompt, "extra_info": told}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="NeMo Gym's file of JSON lines")
    parser.add_argument("out", type=Path, help="file of JSON lines")
    parser.add_argument("--url", required=True, help="of the resources server")
    parser.add_argument(
        "--max-steps", type=int, help="answers of the policy in a session; any number where it is left out"
    )
    options = parser.parse_args()
    write_rows(options.rows, options.out, options.url, options.max_steps)
