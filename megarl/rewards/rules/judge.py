"""A model behind an OpenAI-compatible HTTP API that grades responses.

One request is `POST <base_url>/chat/completions` with the prompt as the user's only message. Concurrency is limited
by the Scorer (`reward.max_concurrency`).
"""

import asyncio
import email.utils
import functools
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

    import httpx

# Statuses that may pass: no answer in time, a conflict, too many requests; so may all of 500 and above.
_PASSING_STATUS = (408, 409, 429)
_MAX_WAIT_SECONDS = 60.0
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True)
class JudgeSettings:
    """The keys of `reward.judge` (meanings: megarl.config.JudgeConfig)."""

    base_url: str | None
    model: str | None
    api_key_env: str | None
    prompt: str
    pattern: str
    max_score: float
    temperature: float
    max_tokens: int
    timeout: float
    num_retries: int


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt_str: str,
    settings: JudgeSettings,
) -> dict[str, Any]:
    """The number that the judge ends with, over `max_score`; its whole answer is the note `judge`.

    ValueError: settings that are missing, an answer without a number. RuntimeError: the API refuses, or still fails
    after all retries.
    """
    values = {"prompt": prompt_str, "response": solution_str, "ground_truth": ground_truth}
    answer = await ask(fill(settings.prompt, values), settings)
    found = list(re.finditer(settings.pattern, answer))
    if not found:
        raise ValueError(
            f"the judge's answer has no score (reward.judge.pattern={settings.pattern!r}): "
            f"{answer[-_SHOWN_CHARACTERS:]!r}"
        )
    return {"score": float(found[-1].group(1)) / settings.max_score, "judge": answer}


def fill(template: str, values: dict[str, str]) -> str:
    """Replace `{name}` by its value, once: braces in values, and other braces, stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match.group(1), match.group(0)), template)


async def ask(prompt: str, settings: JudgeSettings) -> str:
    """The judge's answer; retried as `num_retries` says."""
    import httpx  # a quarter of a second that other rules need not wait for

    if settings.base_url is None or settings.model is None:
        raise ValueError("the rule llm_judge needs reward.judge.base_url and reward.judge.model")
    body = {
        "model": settings.model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
    }
    url = f"{settings.base_url.rstrip('/')}/chat/completions"
    failure = ""
    async with httpx.AsyncClient(
        timeout=settings.timeout, headers=request_headers(settings), verify=_tls()
    ) as client:
        for attempt in range(settings.num_retries + 1):
            wait = 2.0**attempt
            try:
                # httpx's timeout is of each read; a server that sends a byte now and then would go on for ever.
                response = await asyncio.wait_for(client.post(url, json=body), settings.timeout)
            except (httpx.TransportError, TimeoutError) as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == httpx.codes.OK:
                    return _content(response)
                failure = f"status {response.status_code}: {_shown(response.text, settings)}"
                if response.status_code not in _PASSING_STATUS and response.status_code < 500:
                    raise RuntimeError(f"the judge at {url} refuses: {failure}")
                wait = _asked_wait(response.headers.get("retry-after"), wait)
            if attempt < settings.num_retries:
                await asyncio.sleep(min(wait, _MAX_WAIT_SECONDS))
    raise RuntimeError(
        f"the judge at {url} failed {settings.num_retries + 1} times; the last time with {failure}"
    )


def _shown(answer: str, settings: JudgeSettings) -> str:
    """The beginning of an answer for an error, without the key: some servers say which one they refuse."""
    key = os.environ.get(settings.api_key_env) if settings.api_key_env is not None else None
    return (answer.replace(key, "<the key>") if key else answer)[:_SHOWN_CHARACTERS]


def request_headers(settings: JudgeSettings) -> dict[str, str]:
    """The headers of a request, with the key if one is configured. ValueError: its variable is not set."""
    if settings.api_key_env is None:
        return {}
    key = os.environ.get(settings.api_key_env)
    if not key:
        raise ValueError(f"reward.judge.api_key_env={settings.api_key_env!r}: this variable is not set")
    return {"Authorization": f"Bearer {key}"}


@functools.cache
def _tls() -> "ssl.SSLContext":
    """Certificates, read once: reading them takes longer than a request."""
    import httpx

    return httpx.create_ssl_context()


def _content(response: "httpx.Response") -> str:
    """The text of the first choice."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        shown = response.text[:_SHOWN_CHARACTERS]
        raise RuntimeError(f"the judge's answer is not that of an OpenAI-compatible chat API: {shown}")
    return content


def _asked_wait(header: str | None, otherwise: float) -> float:
    """Seconds of a Retry-After header: a number, or a date (RFC 9110, section 10.2.3)."""
    if header is None:
        return otherwise
    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return otherwise
