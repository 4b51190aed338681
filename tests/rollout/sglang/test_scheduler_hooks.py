"""Requests with the same prompt wait for the first of them; the time of the last step is read by another process."""

import time
from types import SimpleNamespace

import pytest
import torch

from megarl.rollout.sglang.scheduler_hooks import Heartbeat, divided_by, waits_for_another

PROMPT = list(range(5, 45))
OTHER = [*PROMPT[:-1], 100]


def request(prompt, cached=0):
    return SimpleNamespace(
        origin_input_ids=prompt, full_untruncated_fill_ids=prompt, prefix_indices=range(cached)
    )


def adder(*requests, page_size=1, disable=False, states=False):
    return SimpleNamespace(
        can_run_list=list(requests),
        page_size=page_size,
        tree_cache=SimpleNamespace(disable=disable),
        is_hybrid_ssm_cache=states,
    )


@pytest.mark.parametrize(
    ("batch", "asked", "waits"),
    [
        (adder(), request(PROMPT), False),
        (adder(request(PROMPT)), request(PROMPT), True),
        (adder(request(OTHER), request(PROMPT)), request(PROMPT), True),
        (adder(request(OTHER)), request(PROMPT), False),
        (adder(request(PROMPT)), request(PROMPT, cached=39), False),
        (adder(request(PROMPT)), request(PROMPT, cached=23), True),  # 17 tokens are left
        (adder(request(PROMPT)), request(PROMPT, cached=24), False),
        (adder(request(PROMPT), page_size=64), request(PROMPT), False),
        (adder(request(PROMPT), disable=True), request(PROMPT), False),
        (adder(request(PROMPT), states=True), request(PROMPT), False),
    ],
)
def test_a_request_waits_only_for_one_of_the_batch_with_its_prompt(batch, asked, waits):
    assert waits_for_another(batch, asked) is waits


def test_a_time_and_a_number_that_another_process_reads(tmp_path):
    writer = Heartbeat.make(tmp_path / "heartbeat")
    reader = Heartbeat(tmp_path / "heartbeat")
    assert (reader.last(), reader.running()) == (0.0, 0)
    begun = time.monotonic()
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=["a", "b", "c"]))
    batch = SimpleNamespace(global_num_tokens=None)
    assert writer.beat_after("result", scheduler, batch) == "result"
    assert begun <= reader.last() <= time.monotonic() and reader.running() == 3


def test_requests_of_all_groups_are_counted_where_none_computes_a_prompt(tmp_path):
    """Where a group computes a prompt, the numbers count tokens, and the last count of requests stays."""
    heartbeat = Heartbeat.make(tmp_path / "heartbeat")
    scheduler = SimpleNamespace(running_batch=SimpleNamespace(reqs=["a"]))
    for counts, prompts, running in (([1, 4], False, 5), ([1, 700], True, 5), ([0, 2], False, 2)):
        batch = SimpleNamespace(global_num_tokens=counts, is_extend_in_batch=prompts)
        heartbeat.beat_after("result", scheduler, batch)
        assert heartbeat.running() == running


def test_logits_are_divided_in_float32():
    logits = torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)
    found = divided_by(0.7)(logits, "processor", "hidden states", metadata=None)
    torch.testing.assert_close(found, torch.tensor([[1.0, -3.0]]) / 0.7)
