"""A real SGLang engine, TP2 in float32 on the CPU, against Hugging Face."""

import asyncio
from pathlib import Path

import psutil
import pytest
import torch

from megarl.rollout.engine import EngineError, NoValidWeightsError, SamplingParams, WeightSyncError
from megarl.rollout.sglang.requests import ask, request_seed
from megarl.weight_sync.sync_plan import APART
from tests.rollout.conftest import CONTEXT, EOS, OTHER_EOS, TP
from tests.rollout.manifests import rank_slices
from tests.rollout.sender import Sender, sync_state

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 20, 30, 40, 50], [329, 328, 200], [11] * 20, [2], [100, 150, 191, 192, 193]]
UIDS = [f"p{index}/0" for index in range(len(PROMPTS))]


def hf_log_probs(model, prompt, response, temperature=1.0):
    with torch.no_grad():
        logits = model.hf(torch.tensor([prompt + list(response)])).logits[0]
    log_probs = torch.log_softmax(logits / temperature, -1)
    return [log_probs[len(prompt) - 1 + at, token].item() for at, token in enumerate(response)]


def hf_greedy(model, prompt, num_tokens):
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            tokens.append(model.hf(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


def assert_serves(engine, model, version):
    """The engine's greedy responses and log-probs equal Hugging Face's with the same weights."""
    generations = engine.call("generate", PROMPTS, UIDS, GREEDY)
    assert [g.uid for g in generations] == UIDS
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert list(generation.response_ids) == hf_greedy(model, prompt, 16)
        assert generation.log_probs == pytest.approx(
            hf_log_probs(model, prompt, generation.response_ids), abs=1e-4
        )
        assert generation.finish_reason == "length"
        assert generation.weight_version == version


def test_shared_memory_has_no_name_that_a_killed_engine_would_leave_behind(engine):
    mapped = {
        path
        for pid in engine.call("pids")
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        for path in [line.partition("/dev/shm/")[2]]
        if path.startswith("sgl")
    }
    assert len(mapped) == 2  # the ranks' message queue, and rank 0's reports of its load
    assert [path for path in mapped if not path.endswith(" (deleted)")] == []


def test_serves_the_synced_weights_and_then_others(engine, sync, model_a, model_b):
    report = sync(model_a, 3)
    assert report.version == 3
    num_elements = sum(value.numel() for value in model_a.state.values())
    replicated = sum(value.numel() for name, value in model_a.state.items() if "norm" in name)
    assert sum(report.bytes_written) == 4 * (num_elements + (TP - 1) * replicated)
    assert_serves(engine, model_a, 3)
    sync(model_b, 4)
    assert engine.call("weight_version") == 4
    assert_serves(engine, model_b, 4)


def test_sampled_log_probs_equal_hugging_face(engine, sync, model_a):
    sync(model_a, 5)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=12, seed=3, ignore_eos=True)
    for prompt, generation in zip(PROMPTS, engine.call("generate", PROMPTS, UIDS, sampling), strict=True):
        expected = hf_log_probs(model_a, prompt, generation.response_ids, temperature=0.7)
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)


def test_noise_depends_on_seed_and_uid_only(engine, sync, model_a):
    sync(model_a, 6)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=12, seed=3, ignore_eos=True)

    def sample(prompts, uids, sampling):
        answers = engine.call("generate", prompts, uids, sampling)
        return {g.uid: list(g.response_ids) for g in answers}

    first = sample(PROMPTS, UIDS, sampling)
    assert sample(PROMPTS[::-1], UIDS[::-1], sampling) == first
    assert sample(PROMPTS[:2], UIDS[:2], sampling) == {uid: first[uid] for uid in UIDS[:2]}
    other = SamplingParams(temperature=1.0, max_new_tokens=12, seed=4, ignore_eos=True)
    assert all(other_ids != first[uid] for uid, other_ids in sample(PROMPTS, UIDS, other).items())
    same_prompt = sample([PROMPTS[0]] * 2, ["p/0", "p/1"], sampling)
    assert same_prompt["p/0"] != same_prompt["p/1"]


def test_sampling_follows_the_distribution(engine, sync, model_a):
    """Chi-squared of 4000 first tokens against the model's own probabilities."""
    sync(model_a, 7)
    prompt, num = [5, 6, 7], 4000
    sampling = SamplingParams(temperature=0.5, max_new_tokens=1, ignore_eos=True)
    answers = engine.call("generate", [prompt] * num, [f"p/{k}" for k in range(num)], sampling)
    counts = torch.bincount(torch.tensor([g.response_ids[0] for g in answers]), minlength=330)
    with torch.no_grad():
        expected = torch.softmax(model_a.hf(torch.tensor([prompt])).logits[0, -1] / 0.5, -1) * num
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    chi_squared = ((observed - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert freedom >= 5
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_end_token_is_part_of_the_response(engine, sync, model_a):
    sync(model_a, 8)
    num = 64
    sampling = SamplingParams(temperature=1.5, max_new_tokens=100, seed=1)
    answers = engine.call("generate", [[5, 6, 7]] * num, [f"p/{k}" for k in range(num)], sampling)
    stopped = [g for g in answers if g.finish_reason == "stop"]
    assert {g.response_ids[-1] for g in stopped} == {EOS, OTHER_EOS}
    for generation in stopped:
        assert not {EOS, OTHER_EOS} & set(generation.response_ids[:-1])
        assert len(generation.response_ids) == len(generation.log_probs)
    last = stopped[0]
    assert last.log_probs == pytest.approx(hf_log_probs(model_a, [5, 6, 7], last.response_ids, 1.5), abs=1e-4)
    assert all(len(g.response_ids) == 100 for g in answers if g.finish_reason == "length")


@pytest.mark.parametrize(
    ("prompts", "uids", "message"),
    [
        ([[]], ["a"], "a: the prompt is empty"),
        ([[5], [5] * (CONTEXT - 15)], ["a", "b"], f"b: 113 prompt tokens.*context of {CONTEXT}"),
        ([[330]], ["a"], "vocabulary has 330"),
        ([[-1]], ["a"], "token ids -1"),
        ([[5], [5]], ["a", "a"], "different uids"),
    ],
)
def test_refuses_what_would_kill_sglang(engine, sync, model_a, prompts, uids, message):
    if engine.call("weight_version") is None:
        sync(model_a, 9)
    with pytest.raises(ValueError, match=message):
        engine.call("generate", prompts, uids, GREEDY)
    assert len(engine.call("generate", PROMPTS[:1], UIDS[:1], GREEDY)) == 1


@pytest.fixture
def sender(engine, model_a, tmp_path):
    """A trainer rank that the engine is connected to."""
    slices = [rank_slices(model_a.state, model_a.hf.config, TP, rank) for rank in range(TP)]
    sender = Sender(tmp_path / "sender", slices, skip_unchanged=True)
    engine.call("connect", sender.inboxes)
    yield sender
    sender.close()


def test_a_flipped_bit_names_tensor_and_rank_and_is_not_served(engine, sync, sender, model_a):
    sync(model_a, 10)
    engine.call("connect", sender.inboxes)
    tensors = []

    def flip(token, packet):
        if token[1] == 1 and packet.targets == (1,):
            item, values = next(packet.places())
            values.view(torch.int32).view(-1)[-1] ^= 1
            tensors.append(item.tensor)

    sender.outbox.tamper = flip
    assert engine.call("begin_update", 11) == 10
    with pytest.raises(NoValidWeightsError):
        engine.call("generate", PROMPTS, UIDS, GREEDY)
    sent = sender.send(11)
    with pytest.raises(WeightSyncError, match=r"version 11.*: checksum .*\(TP rank 1\)") as caught:
        engine.call("receive_weights")
    assert f"{tensors[0]}: checksum" in str(caught.value)
    assert "TP rank 0" not in str(caught.value)
    assert sent.result().bytes_sent > 0  # the version was received to the end
    assert engine.call("weight_version") is None
    with pytest.raises(NoValidWeightsError):
        engine.call("generate", PROMPTS, UIDS, GREEDY)
    with pytest.raises(EngineError, match="begin_update first"):
        engine.call("finish_update")
    sync(model_a, 12)
    assert_serves(engine, model_a, 12)


def test_an_unknown_parameter_is_an_error(engine, sync, model_a, tmp_path):
    slices = [rank_slices(model_a.state, model_a.hf.config, TP, rank) for rank in range(TP)]
    for of_rank in slices:
        tensor, _, start, value = of_rank.entries[0]
        of_rank.entries[0] = (tensor, "model.embed.weight", start, value)
    sender = Sender(tmp_path / "sender", slices, skip_unchanged=True)
    engine.call("connect", sender.inboxes)
    engine.call("begin_update", 13)
    sender.send(13)
    with pytest.raises(WeightSyncError, match=r"no parameter 'model.embed.weight' \(TP rank 0\).*rank 1"):
        engine.call("receive_weights")
    sender.close()
    assert engine.call("weight_version") is None
    sync(model_a, 14)


def test_a_version_that_did_not_come_is_not_served(engine, sync, model_a):
    sync(model_a, 15)
    engine.call("begin_update", 16)
    with pytest.raises(WeightSyncError, match="version 16 did not come"):
        engine.call("finish_update")
    assert engine.call("weight_version") is None


def test_a_lost_packet_is_an_error(engine, sync, sender, model_a):
    sender.outbox.tamper = lambda token, packet: token[1] > 0
    engine.call("begin_update", 17)
    sender.send(17)
    with pytest.raises(
        WeightSyncError, match=r"trainer rank 0 is at bucket 1 of version 17 where bucket 0 .*was due"
    ):
        engine.call("receive_weights")
    sync(model_a, 18)
    assert_serves(engine, model_a, 18)


def test_an_engine_that_is_behind_takes_no_other_version(engine, sync, sender, model_a):
    engine.call("begin_update", 19)
    sender.send(20)
    with pytest.raises(
        WeightSyncError, match=r"trainer rank 0 is at bucket 0 of version 20 where .* 19 was due"
    ):
        engine.call("receive_weights")
    sync(model_a, 21)


def test_a_trainer_that_dies_is_named(engine, sync, sender, model_a):
    def die(token, packet):
        if token[1] == 1:
            raise RuntimeError("the trainer's rank ends here")

    sender.outbox.tamper = die
    engine.call("begin_update", 22)
    sent = sender.send(22)
    with pytest.raises(WeightSyncError, match=r"trainer rank 0 closed its connection"):
        engine.call("receive_weights")
    with pytest.raises(RuntimeError, match="ends here"):
        sent.result()
    sync(model_a, 23)


def test_what_did_not_change_is_not_sent_but_verified(engine, sync, sender, model_a):
    def update(version, held):
        assert engine.call("begin_update", version) == held
        sent = sender.send(version, dict.fromkeys(range(TP), held))
        engine.call("receive_weights")
        return sent.result(), engine.call("finish_update")

    engine.call("begin_update", 30)  # the engine gives up its version: none of the tensors may be kept
    sender_first = sender.send(30, dict.fromkeys(range(TP)))
    engine.call("receive_weights")
    total = sender_first.result().bytes_sent
    engine.call("finish_update")
    sent, report = update(31, 30)
    assert (sent.bytes_sent, sent.bytes_unchanged) == (0, total) and sum(report.bytes_kept) == total
    assert_serves(engine, model_a, 31)
    name = next(iter(sender.parameters))
    sender.parameters[name] = sender.parameters[name] + 1
    sent, report = update(32, 31)
    assert sent.bytes_sent == sender.parameters[name].nbytes == sum(report.bytes_written)
    assert sent.bytes_unchanged == total - sent.bytes_sent


def test_packets_of_another_machine_come_over_gloo(engine, model_a, tmp_path):
    state, config = model_a.state, model_a.hf.config
    report = sync_state(engine, tmp_path / "s", state, config, TP, 40, num_buckets=6, way=APART)
    for room, written in zip(report.buffer_bytes, report.bytes_written, strict=True):
        assert 0 < room < written
    assert_serves(engine, model_a, 40)


def test_released_weights_have_to_be_synced_again(engine, sync, model_a):
    sync(model_a, 50)
    engine.call("release_memory", ["kv_cache", "weights"])
    engine.call("resume_memory", ["weights"])
    with pytest.raises(NoValidWeightsError):
        engine.call("generate", PROMPTS, UIDS, GREEDY)
    sync(model_a, 51)
    engine.call("resume_memory", ["kv_cache"])
    assert_serves(engine, model_a, 51)


def cached_tokens(engine, prompts):
    """The number of tokens of each request that SGLang's cache had; runs in the engine's process."""
    engine.flush_cache()
    manager, sampling = engine._engine.tokenizer_manager, SamplingParams(max_new_tokens=4, ignore_eos=True)

    async def all_at_once():
        asked = (ask(manager, ids, sampling, f"p/{row}", ()) for row, ids in enumerate(prompts))
        return await asyncio.gather(*asked)

    answers = engine._engine.loop.run_until_complete(all_at_once())
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


def test_each_prompt_is_computed_once(engine, sync, model_a):
    sync(model_a, 52)
    prompts = [[first, *range(5, 45)] for first in (101, 102, 103)]
    found = engine.call(cached_tokens, [ids for ids in prompts for _ in range(5)])
    for first in range(0, 15, 5):
        assert sorted(found[first : first + 5]) == [0, 40, 40, 40, 40]


def test_listens_on_loopback_only(engine):
    addresses = {
        connection.laddr.ip
        for pid in [*engine.call("pids"), engine.process.pid]
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses <= {"127.0.0.1"}


def test_request_seeds_differ():
    seeds = {request_seed(seed, uid) for seed in range(10) for uid in ("a", "b", "a/0")}
    assert len(seeds) == 30
    assert all(0 <= seed < 2**63 for seed in seeds)
